"""HadaQuant: keys and values alike under a Hadamard rotation, in code planes, with one fp16 scale a side. Our own.

side   `rotated.py`, 2 to 4 bits: b * D / 8 + 2 bytes

TurboQuant keeps values as they are, on even steps between the least and the greatest channel; rotated, they take two bytes less and err
less: the inverse rotation costs nothing at each token, since it is done once on the output.

Bytes of a token and head: k4v4 132, k4v3 116, k3v3 100, k2v2 68 at head_dim 128; 68, 60, 52, 36 at 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .base import Codec, Format, check_option
from .rotated import LloydMax, Quantizer, Rotated
from .trellis import Trellis

Bits = Literal[2, 3, 4]


@dataclass(frozen=True)
class HadaQuant(Format):
    """Rotated keys of `key_bits` and rotated values of `value_bits`."""

    key_bits: Bits = 4
    value_bits: Bits = 4
    quantizer: Literal["lloyd_max", "trellis"] = "lloyd_max"

    def __post_init__(self) -> None:
        check_option("key_bits", self.key_bits, (2, 3, 4))
        check_option("value_bits", self.value_bits, (2, 3, 4))
        check_option("quantizer", self.quantizer, ("lloyd_max", "trellis"))
        if self.quantizer == "trellis" and min(self.key_bits, self.value_bits) == 4:
            raise ValueError("quantizer='trellis': of no use where keys and values have 4 bits, which stay Lloyd-Max; give one of them fewer")

    @property
    def name(self) -> str:
        return f"hadaquant_k{self.key_bits}v{self.value_bits}" + ("_trellis" if self.quantizer == "trellis" else "")

    def codecs(self) -> tuple[Codec, Codec]:
        return Rotated(self._quantizer(self.key_bits)), Rotated(self._quantizer(self.value_bits))

    def _quantizer(self, bits: Bits) -> Quantizer:
        return LloydMax(bits) if self.quantizer == "lloyd_max" or bits == 4 else Trellis(bits)
