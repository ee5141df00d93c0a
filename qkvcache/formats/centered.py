"""A codec around the mean of its first block: codes are of `x - mean`, and the mean is kept once for each row and head.

Where channels have a mean, as keys do in models with a bias on them, most of a scale serves a constant. Attention on codes needs little to
put it back: `q . mean` joins the scores of the compressed tokens, and the mean of values joins the output as often as these tokens weigh,
so that exact tokens, softcap, attention sinks and masks stay what they are.

center   the mean where vectors are stored: rotated like them          fp32, D channels, once a row and head
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .base import Buffer, Codec, Codes, Levels
from .rotation import Hadamard, exact_dtype

FEW = 128
"""Tokens of zeros that the mean is taken with. Keys turn with their position, so that the mean of a short block is that of a place in the
text; a first block of one token, left alone, would err more than no mean at all."""


@dataclass(frozen=True)
class Centered(Codec):
    """`codec`, which rotates nothing itself and keeps nothing once, of what lies around the mean under `rotation`."""

    codec: Codec
    rotation: Hadamard | None = None

    @staticmethod
    def of(codec: Codec) -> Centered:
        """`codec` with a mean, whether it rotates or not."""
        return Centered(codec if codec.rotation is None else replace(codec, rotation=None), codec.rotation)  # type: ignore[type-var]

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (*self.codec.buffers(head_dim), Buffer("center", torch.float32, head_dim, "scales", tokens="once"))

    def fit(self, x: Tensor, real: Tensor | None = None) -> Codes:
        return {"center": self.rotate(_mean(x, real))}

    def encode(self, x: Tensor, once: Codes) -> Codes:
        return self.codec.encode(self.rotate(x).float() - once["center"], once)

    def unpack(self, codes: Codes, head_dim: int) -> Levels:
        return self.codec.unpack(codes, head_dim)._replace(center=codes["center"])

    def refuses(self, head_dim: int) -> str | None:
        return self.codec.refuses(head_dim)


def _mean(x: Tensor, real: Tensor | None) -> Tensor:
    """Over the tokens that are `real`, fp32 `[B, H, 1, D]`; 0 where there is no finite one."""
    count: int | Tensor = x.shape[2]
    if real is not None:
        shown = real[:, None, :, None]
        x, count = x.masked_fill(~shown, 0), shown.sum(2, keepdim=True)
    mean = x.sum(2, keepdim=True, dtype=exact_dtype(x.device)) / (count + FEW)
    return mean.where(mean.isfinite().all(-1, keepdim=True), 0).float()
