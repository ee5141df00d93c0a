"""INT8, one scale a token: symmetric (vLLM #38378, RFC #37319) and asymmetric (the KV compression article).

symmetric    scale = absmax / 127                       codes D x int8,  fp32 scale            D + 4 bytes a side
             scale="token": one absmax over all heads (RFC #37319), the scale shared by them   D + 4 / H bytes
asymmetric   `uniform.py` with 8 bits                   codes D x uint8, fp16 scale, fp16 min  D + 4 bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import TINY, Buffer, Codec, Codes, Format, PackedLayout, QuantizedValues, Sharing, check_option
from .centered import Centered
from .uniform import Uniform


@dataclass(frozen=True)
class SymmetricInt8(Codec):
    """`x = code * scale`. A scale of fp16 that overflows decodes to inf or nan, one that underflows to zeros."""

    scale: Literal["token_head", "token"] = "token_head"
    scale_dtype: torch.dtype = torch.float32

    @property
    def packed_layout(self) -> PackedLayout:
        scale = "fp16" if self.scale_dtype == torch.float16 else "fp32"
        return PackedLayout("int8", scale, span="each" if self.scale == "token_head" else "shared")

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        heads: Sharing = "each" if self.scale == "token_head" else "shared"
        return (Buffer("codes", torch.int8, head_dim), Buffer("scale", self.scale_dtype, 1, "scales", heads))

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        x = x.float()
        absmax = x.abs().amax(dim=-1 if self.scale == "token_head" else (1, -1), keepdim=True)
        # Codes are chosen for the scale that is really stored. Half away from zero, as vLLM rounds.
        scale = (absmax / 127).to(self.scale_dtype)
        codes = torch.trunc(x / scale.float().clamp_min(TINY) + 0.5 * x.sign()).clamp(-127, 127)
        return {"codes": codes.to(torch.int8), "scale": scale}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return QuantizedValues(codes["codes"], codes["scale"].float())


@dataclass(frozen=True)
class Int8(Format):
    """INT8 with a scale for each token and head, or for each token over all heads.

    `scale="token"` crosses heads, so tensor parallelism changes its results; it is the RFC's rule, not the default. Keys are quantized
    around their mean, each head around its own, unless `center=False`, the authors' form.
    """

    scale: Literal["token_head", "token"] = "token_head"
    symmetric: bool = True
    center: bool = True

    def __post_init__(self) -> None:
        check_option("scale", self.scale, ("token_head", "token"))
        if not self.symmetric and self.scale == "token":
            raise ValueError("scale='token' with symmetric=False: a minimum is kept for each head; use scale='token_head'")

    @property
    def name(self) -> str:
        options = ("_token", self.scale == "token"), ("_asymmetric", not self.symmetric), ("_uncentered", not self.center)
        return "int8" + "".join(option for option, chosen in options if chosen)

    def codecs(self) -> tuple[Codec, Codec]:
        codec = SymmetricInt8(self.scale) if self.symmetric else Uniform(bits=8)
        return Centered.of(codec) if self.center else codec, codec
