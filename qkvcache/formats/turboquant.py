"""TurboQuant (arXiv 2504.19874) as vLLM #38479 has it: Lloyd-Max keys under a Hadamard rotation, uniform values, no calibration data.

keys, 3 or 4 bits   n = |x|, y = H x / (n + 1e-8), H without signs; code = the Lloyd-Max level nearest to sqrt(D) y, a midpoint going up
                    scale = n / |levels|, fp16;  x = H levels * scale         3 bits: D / 4 + D / 8 bytes;  4 bits: D / 2;  and 2
values              not rotated, `uniform.py`                                 the same, and 4
keys of k8v4        scale = absmax / 127, fp16, and int8 codes                D + 2

vLLM stores n, and divides by |levels| wherever it reads (its "norm correction", nc). Here that division
happens once, when storing: the same two bytes and the same result, without work for readers.

For k8v4 vLLM stores keys as E4M3 without any scale: what exceeds 448 (1.875 on GPUs before Ada, where it
takes another FP8) is clipped, and every channel has three mantissa bits. Int8 with a scale takes two bytes
more, cannot clip, and on normal data has a quarter of the error.

Bytes of a token and head: k8v4 198, 4bit_nc 134, k3v4_nc 118, 3bit_nc 102 at head_dim 128; 102, 70, 62, 54 at 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .base import Codec, Format, check_option
from .centered import Centered
from .int8 import SymmetricInt8
from .rotated import Rotated
from .uniform import Uniform

Preset = Literal["k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"]
PRESETS: dict[Preset, tuple[Literal[3, 4, 8], Literal[3, 4]]] = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}
"""Bits of keys and of values."""


@dataclass(frozen=True)
class TurboQuant(Format):
    """TurboQuant: `preset` ("k8v4", "4bit_nc", "k3v4_nc" or "3bit_nc") chooses the bits of keys and values. Keys are quantized around
    their mean unless `center=False`, the authors' form. Raises ValueError for another preset."""

    preset: Preset = "4bit_nc"
    center: bool = True

    def __post_init__(self) -> None:
        check_option("preset", self.preset, PRESETS)

    @property
    def name(self) -> str:
        return f"turboquant_{self.preset}" + ("" if self.center else "_uncentered")

    def codecs(self) -> tuple[Codec, Codec]:
        key_bits, value_bits = PRESETS[self.preset]
        key = SymmetricInt8(scale_dtype=torch.float16) if key_bits == 8 else Rotated(key_bits)
        return Centered.of(key) if self.center else key, Uniform(value_bits)
