"""INT8, one scale a token: symmetric (vLLM #38378, RFC #37319) and asymmetric (the KV compression article).

symmetric    scale = absmax / 127                       codes D x int8,  fp32 scale            D + 4 bytes a side
             scale="token": one absmax over all heads (RFC #37319), the scale shared by them   D + 4 / H bytes
             halves: code + 128 in two planes, so that the upper four bits can be read alone   D / 2 and D / 2 bytes
asymmetric   `uniform.py` with 8 bits                   codes D x uint8, fp16 scale, fp16 min  D + 4 bytes
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .base import TINY, Buffer, Codec, Codes, Format, PackedLayout, QuantizedValues, Sharing, check_option
from .centered import Centered
from .packing import lookup, pack4
from .uniform import Uniform

NIBBLES = tuple(range(16))


@dataclass(frozen=True)
class SymmetricInt8(Codec):
    """`x = code * scale`. A scale of fp16 that overflows decodes to inf or nan, one that underflows to zeros.
    With `halves`, codes lie in two planes."""

    scale: Literal["token_head", "token"] = "token_head"
    scale_dtype: torch.dtype = torch.float32
    halves: bool = False

    @property
    def packed_layout(self) -> PackedLayout:
        scale = "fp16" if self.scale_dtype == torch.float16 else "fp32"
        span: Literal["each", "shared"] = "each" if self.scale == "token_head" else "shared"
        if self.halves:
            return PackedLayout("int8_halves", scale, span=span, planes=("low", "high", "scale"))
        return PackedLayout("int8", scale, span=span)

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        heads: Sharing = "each" if self.scale == "token_head" else "shared"
        codes = [Buffer("codes", torch.int8, head_dim)]
        if self.halves:
            codes = [Buffer(name, torch.uint8, head_dim // 2) for name in ("low", "high")]
        return (*codes, Buffer("scale", self.scale_dtype, 1, "scales", heads))

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        x = x.float()
        absmax = x.abs().amax(dim=-1 if self.scale == "token_head" else (1, -1), keepdim=True)
        # Codes are chosen for the scale that is really stored. Half away from zero, as vLLM rounds.
        scale = (absmax / 127).to(self.scale_dtype)
        codes = torch.trunc(x / scale.float().clamp_min(TINY) + 0.5 * x.sign()).clamp(-127, 127)
        if self.halves:
            positive = (codes + 128).to(torch.uint8)
            return {"low": pack4(positive & 15), "high": pack4(positive >> 4), "scale": scale}
        return {"codes": codes.to(torch.int8), "scale": scale}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        if not self.halves:
            return QuantizedValues(codes["codes"], codes["scale"].float())
        high, low = (lookup({"codes": codes[name]}, 4, NIBBLES) for name in ("high", "low"))
        return QuantizedValues((high - 8).mul_(16).add_(low), codes["scale"].float())

    def unpack_upper(self, codes: Codes, head_dim: int) -> QuantizedValues:
        """`unpack` of the upper halves, to the middle of the sixteen codes of each."""
        if not self.halves:
            return self.unpack(codes, head_dim)
        scale = codes["scale"].float()
        return QuantizedValues(lookup({"codes": codes["high"]}, 4, NIBBLES), 16 * scale, -120.5 * scale)


@dataclass(frozen=True)
class Int8(Format):
    """INT8 with a scale for each token and head, or for each token over all heads.

    `scale="token"` crosses heads, so tensor parallelism changes its results; it is the RFC's rule, not the
    default. Keys are quantized around their mean, each head around its own, unless `center=False`, the
    authors' form. With `halves`, the codes of keys lie in two planes, and the upper four bits can be read
    alone; what they stand for is the same.
    """

    scale: Literal["token_head", "token"] = "token_head"
    symmetric: bool = True
    center: bool = True
    halves: bool = False

    def __post_init__(self) -> None:
        check_option("scale", self.scale, ("token_head", "token"))
        if not self.symmetric and self.scale == "token":
            raise ValueError("scale='token' with symmetric=False: a minimum is kept for each head; use scale='token_head'")
        if not self.symmetric and self.halves:
            raise ValueError("halves=True with symmetric=False: asymmetric codes have one plane; leave one out")

    @property
    def name(self) -> str:
        options = {"_token": self.scale == "token", "_asymmetric": not self.symmetric, "_halves": self.halves}
        return "int8" + "".join(option for option, chosen in options.items() if chosen) + "_uncentered" * (not self.center)

    def codecs(self) -> tuple[Codec, Codec]:
        value = SymmetricInt8(self.scale) if self.symmetric else Uniform(bits=8)
        key = SymmetricInt8(self.scale, halves=True) if self.halves else value
        return Centered.of(key) if self.center else key, value

    def in_halves(self) -> Format:
        return replace(self, halves=True) if self.symmetric else self
