"""HadaQuant: Hadamard-rotated keys and values on Lloyd-Max levels, with one fp16 scale for each token and head. Specific to qkvcache.

side   `rotated.py`, 2 to 4 bits: b * D / 8 + 2 bytes
mean   of keys and of values, `centered.py`: 4 D bytes for each side, row and head, once

TurboQuant stores values unrotated, on even steps between their minimum and maximum. Rotated values take two
bytes less and have less error; the inverse rotation is applied once to the output, not to each token.

Bytes of a token and head: k4v4 132, k4v3 116, k3v3 100, k3v2 84, k2v2 68 at head_dim 128; 68, 60, 52, 44, 36 at 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .base import Codec, Format, check_option
from .centered import Centered
from .rotated import Rotated

Bits = Literal[2, 3, 4]
BITS: tuple[Bits, ...] = (2, 3, 4)


@dataclass(frozen=True)
class HadaQuant(Format):
    """Hadamard-rotated keys of `key_bits` and values of `value_bits` (2, 3 or 4); both are quantized around
    their mean unless `center=False`. Raises ValueError for other bits."""

    key_bits: Bits = 4
    value_bits: Bits = 3
    center: bool = True

    def __post_init__(self) -> None:
        check_option("key_bits", self.key_bits, (2, 3, 4))
        check_option("value_bits", self.value_bits, (2, 3, 4))

    @property
    def name(self) -> str:
        return f"hadaquant_k{self.key_bits}v{self.value_bits}{'' if self.center else '_uncentered'}"

    def codecs(self) -> tuple[Codec, Codec]:
        key, value = Rotated(self.key_bits), Rotated(self.value_bits)
        return (Centered.of(key), Centered.of(value)) if self.center else (key, value)
