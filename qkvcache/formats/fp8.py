"""FP8: bytes of E4M3 or E5M2 under a dynamic scale (vLLM #38378, RFC #37319; per tensor: the KV compression article).

scale = absmax / 448 (57344 for E5M2), fp32;  code = x / scale, rounded to nearest even and saturating;  codes D bytes

token_head   absmax over the channels of one token and head             D + 4 bytes a side
token        over all heads of a token, the scale shared by them        D + 4 / H bytes
tensor       over the heads and tokens of a row's first block, stored once; larger numbers saturate     D bytes

E5M2 has two mantissa bits where E4M3 has three, and twice the error. Under a dynamic scale its range has no use; it is for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import TINY, Buffer, Codec, Codes, Format, PackedLayout, QuantizedValues, Sharing, check_option
from .centered import Centered
from .packing import code_buffers, lookup

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_BYTES = torch.arange(256, dtype=torch.uint8, device="cpu")
VALUES = {name: tuple(_BYTES.view(dtype).tolist()) for name, dtype in DTYPES.items()}
"""The value of each byte: on a CPU a table is three times as fast as the cast."""

SPANS: dict[str, Literal["each", "shared", "once"]] = {"token_head": "each", "token": "shared", "tensor": "once"}
"""`PackedLayout.span` by scale."""


@dataclass(frozen=True)
class ScaledFloat8(Codec):
    """FP8 codes under a scale. They are stored as uint8, since torch lacks gather and scatter on float8."""

    dtype: Literal["e4m3", "e5m2"] = "e4m3"
    scale: Literal["token_head", "token", "tensor"] = "token_head"

    @property
    def packed_layout(self) -> PackedLayout:
        return PackedLayout(self.dtype, "fp32", span=SPANS[self.scale])

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        heads: Sharing = "each" if self.scale == "token_head" else "shared"
        scale = Buffer("scale", torch.float32, 1, "scales", heads, "once" if self.scale == "tensor" else "each")
        return (*code_buffers(8, head_dim), scale)

    def calibrate(self, x: Tensor, is_valid: Tensor | None = None) -> Codes:
        if self.scale != "tensor":
            return {}
        scale = self._scale(x if is_valid is None else x.masked_fill(~is_valid[:, None, :, None], 0))
        return {"scale": torch.where(scale == 0, 1, scale)}  # a block of zeros is no measure for later ones

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        x = x.float()
        once = self.scale == "tensor"
        scale = statistics["scale"] if once else self._scale(x)
        top = torch.finfo(DTYPES[self.dtype]).max
        scaled = (x / scale.clamp_min(TINY)).clamp(-top, top)
        scaled = scaled.masked_fill(~x.isfinite(), torch.nan)  # saturation is for numbers
        codes = {"codes": scaled.to(DTYPES[self.dtype]).view(torch.uint8)}
        return codes if once else codes | {"scale": scale}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return QuantizedValues(lookup(codes, 8, VALUES[self.dtype]), codes["scale"])

    def _scale(self, x: Tensor) -> Tensor:
        spans = {"token_head": (-1,), "token": (1, -1), "tensor": (1, 2, -1)}
        return x.abs().amax(dim=spans[self.scale], keepdim=True).float() / torch.finfo(DTYPES[self.dtype]).max


@dataclass(frozen=True)
class FP8(Format):
    """FP8 with a scale for each token and head, for each token over all heads, or for all tokens.

    `scale="tensor"` keeps the scale of the first block, as transformers' Fp8QuantizedLayer does, and
    saturates larger values: after a first block with a maximum of 0.25, a later 26.8 is stored as 0.25.

    Keys are quantized around their mean, each head around its own, unless `center=False`, the authors' form.
    Scales are then scales of the differences from the mean. Only the scale of all tokens is the scale of the
    first block with its mean.
    """

    dtype: Literal["e4m3", "e5m2"] = "e4m3"
    scale: Literal["token_head", "token", "tensor"] = "token_head"
    center: bool = True

    def __post_init__(self) -> None:
        check_option("dtype", self.dtype, DTYPES)
        check_option("scale", self.scale, SPANS)

    @property
    def name(self) -> str:
        dtype = "" if self.dtype == "e4m3" else "_e5m2"
        scale = "" if self.scale == "token_head" else f"_{self.scale}"
        return f"fp8{dtype}{scale}{'' if self.center else '_uncentered'}"

    def codecs(self) -> tuple[Codec, Codec]:
        codec = ScaledFloat8(self.dtype, self.scale)
        return Centered.of(codec) if self.center else codec, codec
