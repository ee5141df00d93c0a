"""Even steps between the minimum and the maximum of the channels of a token and head: asymmetric INT8 and the values of TurboQuant.

zero  = min                    fp16
scale = (max - zero) / (2^b-1) fp16, at least its smallest number
code  = int((x - zero) / scale + .5)         b = 8: D bytes;  4: D / 2;  3: D / 4 + D / 8
                               and 4 bytes of (scale, zero)
x     = code * scale + zero

vLLM and the article choose codes for the fp32 scale and minimum, and store both in fp16; here codes are chosen for what is stored, which
costs nothing and has less error. A minimum or a scale beyond fp16 dequantizes to inf or nan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import Buffer, Codec, Codes, PackedLayout, QuantizedValues
from .packing import code_buffers, lookup, pack, plane_names

LEAST_SCALE = 2.0**-24  # of fp16: with a scale of zero all channels would dequantize to the minimum


@dataclass(frozen=True)
class Uniform(Codec):
    """Codes of `bits` on even steps between the minimum and the maximum of each token and head."""

    bits: Literal[3, 4, 8]

    @property
    def packed_layout(self) -> PackedLayout:
        kind = {8: "uint8", 4: "int4", 3: "int3"}[self.bits]
        return PackedLayout(kind, "pair", planes=(*plane_names(self.bits), "scale_zero"))

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (*code_buffers(self.bits, head_dim), Buffer("scale_zero", torch.float16, 2, "scales"))

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        x = x.float()
        top = 2**self.bits - 1
        low, high = x.aminmax(dim=-1, keepdim=True)
        zero = low.half()
        x, high = x - zero.float(), high - zero.float()
        scale = (high / top).clamp_min(LEAST_SCALE).half()
        codes = (x / scale.float() + 0.5).clamp(0, top)
        return pack(codes.to(torch.uint8), self.bits) | {"scale_zero": torch.cat([scale, zero], dim=-1)}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        levels = codes["codes"].float() if self.bits == 8 else lookup(codes, self.bits, tuple(range(2**self.bits)))
        scale, zero = codes["scale_zero"].float().split(1, dim=-1)
        return QuantizedValues(levels, scale, zero)
