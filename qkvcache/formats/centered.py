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


@dataclass(frozen=True)
class Centered(Codec):
    """`codec`, which rotates nothing itself, of what lies around the mean under `rotation`."""

    codec: Codec
    rotation: Hadamard | None = None

    @staticmethod
    def of(codec: Codec) -> Centered:
        """`codec` with a mean, whether it rotates or not."""
        return Centered(codec if codec.rotation is None else replace(codec, rotation=None), codec.rotation)  # type: ignore[type-var]

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (*self.codec.buffers(head_dim), Buffer("center", torch.float32, head_dim, "scales", tokens="once"))

    def fit(self, x: Tensor, real: Tensor | None = None) -> Codes:
        center = self.rotate(_mean(x, real))
        return self.codec.fit(self.rotate(x) - center, real) | {"center": center}

    def encode(self, x: Tensor, once: Codes) -> Codes:
        return self.codec.encode(self.rotate(x).float() - once["center"], once)

    def unpack(self, codes: Codes, head_dim: int) -> Levels:
        return self.codec.unpack(codes, head_dim)._replace(center=codes["center"])

    def refuses(self, head_dim: int) -> str | None:
        return self.codec.refuses(head_dim)


def _mean(x: Tensor, real: Tensor | None) -> Tensor:
    """Over the tokens that are `real`, fp32 `[B, H, 1, D]`; 0 where there is none, or no finite mean."""
    x = x.to(exact_dtype(x.device))
    if real is None:
        mean = x.mean(2, keepdim=True)
    else:
        shown = real[:, None, :, None]
        mean = x.masked_fill(~shown, 0).sum(2, keepdim=True) / shown.sum(2, keepdim=True).clamp_min(1)
    return mean.where(mean.isfinite().all(-1, keepdim=True), 0).float()
