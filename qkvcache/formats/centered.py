"""A codec around the mean of its first block: codes are of `x - mean`, and the mean is kept once for each row and head.

Where channels have a mean, as keys do in models with a bias on them (Qwen2 and its family: some channels' means are 20 to 100 times their
spread), most of a scale serves a constant. Attention on codes needs little to put it back: `q . mean` joins the scores of the compressed
tokens, and the mean of values joins the output as often as these tokens weigh, so that exact tokens, softcap, attention sinks and masks
stay what they are.

center   the mean where vectors are stored: rotated like them          fp32, D channels, once a row and head

Keys turn with their position, so that the mean of a short block is partly that of a place in the text. Each channel's mean m is therefore
shrunk towards zero, by as many tokens of zeros as it is in doubt: `FEW * min(1, s^2 / m^2)`, with s the spread of the channel, to which one
token is added that is as large as the median channel of the head. A channel that is much larger than it varies, or than the others of a
single token, keeps its mean; others begin at `1 / (1 + FEW)` of it. From one token on this errs no more than no mean
(KL of attention, int4, first blocks of 1 / 16 / 200 / 1,000 tokens: .0059 / .0055 / .0054 / .0042 for .0067 without a mean on the embedded
model, and .011 / .011 / .0096 / .0068 for .43 on the same with biased keys).

What a mean cannot carry: it is that of the first block for good, so that a text whose keys lie elsewhere is quantized around the wrong
place, at most twice as far from it as from zero; and a bias on channels that turn within the text averages out of a long first block, and
is that of a place in a short one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .base import Buffer, Codec, Codes, PackedLayout, QuantizedValues
from .rotation import Hadamard, exact_dtype, number_of

FEW = 64
"""Tokens of zeros that the mean of a channel is taken with which varies as much as it is large. 32 and 128 measure alike."""
BLOCK = 2**20
"""Elements that are summed at a time: the bound on temporaries (8 MiB)."""


@dataclass(frozen=True)
class Centered(Codec):
    """`codec`, which rotates nothing itself, of what lies around the mean under `rotation`. A scale that heads or tokens share is that of
    what lies around their means, each head's around its own; one that is kept once is that of the first block as it is, which leaves room
    for tokens that lie further from the mean than those that it was taken from."""

    codec: Codec
    rotation: Hadamard | None = None

    @staticmethod
    def of(codec: Codec) -> Centered:
        """`codec` with a mean, whether it rotates or not."""
        return Centered(codec if codec.rotation is None else replace(codec, rotation=None), codec.rotation)  # type: ignore[type-var]

    @property
    def packed_layout(self) -> PackedLayout | None:
        layout = self.codec.packed_layout
        return layout and replace(layout, rotation=number_of(self.rotation), centered=True)

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (*self.codec.buffers(head_dim), Buffer("center", torch.float32, head_dim, "scales", tokens="once"))

    def calibrate(self, x: Tensor, is_valid: Tensor | None = None) -> Codes:
        statistics = {"center": self.rotate(_mean(x, is_valid))}
        return statistics | self.codec.calibrate(self.rotate(x), is_valid) if self.codec.keeps(x.shape[3]) else statistics

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        return self.codec.quantize(self._around(x, statistics), statistics)

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return self.codec.unpack(codes, head_dim)._replace(center=codes["center"])

    def refuses(self, head_dim: int) -> str | None:
        return self.codec.refuses(head_dim)

    def _around(self, x: Tensor, statistics: Codes) -> Tensor:
        return self.rotate(x).float() - statistics["center"]


def _mean(x: Tensor, is_valid: Tensor | None) -> Tensor:
    """Over the tokens that are `is_valid`, fp32 `[B, H, 1, D]`, shrunk as said above; 0 where there is no finite one."""
    mean, square, count = _moments(x, is_valid)
    typical = square.sort(-1).values[..., x.shape[3] // 2, None]
    doubt = torch.minimum(square - mean.square() + typical / count, mean.square())
    weight = count * mean.square()
    mean = mean * (weight / (weight + FEW * doubt).clamp_min(torch.finfo(mean.dtype).tiny))
    return mean.where(mean.isfinite().all(-1, keepdim=True), 0).float()


def mean_energy(x: Tensor) -> Tensor:
    """Energy of the means of channels, over that of what varies around them: fp32 `[B, H]` of keys `[B, H, T, D]`."""
    mean, square, _ = _moments(x, None)
    mean, square = (energy.sum(-1).squeeze(-1) for energy in (mean.square(), square))
    return (mean / (square - mean).clamp_min(torch.finfo(mean.dtype).tiny)).float()


def _moments(x: Tensor, is_valid: Tensor | None) -> tuple[Tensor, Tensor, int | Tensor]:
    """Means of channels and of their squares over the tokens that are `is_valid`, `[B, H, 1, D]`, and how many these are, at least 1."""
    count: int | Tensor = x.shape[2]
    if is_valid is not None:
        shown = is_valid[:, None, :, None]
        x, count = x.masked_fill(~shown, 0), shown.sum(2, keepdim=True).clamp_min(1)
    exact = exact_dtype(x.device)
    tokens = x.shape[2] if torch.compiler.is_compiling() else max(BLOCK * x.shape[2] // max(x.numel(), 1), 1)
    mean, square = (x.new_zeros(*x.shape[:2], 1, x.shape[3], dtype=exact) for _ in range(2))
    for part in x.split(tokens, dim=2):
        part = part.to(exact)
        mean += part.sum(2, keepdim=True)
        square += part.square().sum(2, keepdim=True)
    return mean / count, square / count, count
