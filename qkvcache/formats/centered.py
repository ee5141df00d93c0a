"""A codec around the mean of its first block: `x - mean` is quantized, and the mean is stored once for each row and head.

Where channels have a mean, as keys do in models with a bias on them (Qwen2 and its family: the means of some
channels are 20 to 100 times their spread), most of the quantization range is spent on a constant. Attention
on codes adds the mean back at little cost: `q . mean` is added to the scores of the quantized tokens, and the
mean of values, times the weight of these tokens, to the output. Exact tokens, softcap, attention sinks and
masks are not affected.

center   the mean, rotated like the stored vectors                     fp32, D channels, once for each row and head

RoPE rotates keys by their position, so that the mean of a short block depends on its place in the text. The
mean m of each channel is therefore shrunk towards zero, as if tokens of zeros were added: `FEW * min(1, s^2 /
m^2)` of them, with s the spread of the channel, computed with one more token as large as the median channel
of the head. A channel whose mean is far above its spread, or above the other channels of a single token,
keeps its mean; others begin at `1 / (1 + FEW)` of it. From one token on the error is no larger than without a
mean (KL of attention, int4, first blocks of 1 / 16 / 200 / 1,000 tokens: .0059 / .0055 / .0054 / .0042 for
.0067 without a mean on the embedded model, and .011 / .011 / .0096 / .0068 for .43 on the same with biased
keys).

Limits: the mean of the first block is never updated, so that a text whose keys have another mean is quantized
around the wrong point, at most twice as far from it as from zero; and a bias on channels that RoPE rotates
fast averages out over a long first block, and depends on its place in a short one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .base import Buffer, Codec, Codes, PackedLayout, QuantizedValues
from .rotation import Hadamard, exact_dtype, number_of

FEW = 64
"""The number of zero vectors that the mean of a channel includes if its spread equals its mean. 32 and 128
have the same errors."""
BLOCK = 2**20
"""Elements that are summed at a time: the bound on temporaries, 8 MiB. Sums in fp64 convert what they sum beforehand, on GPUs too."""


@dataclass(frozen=True)
class Centered(Codec):
    """`codec`, which has no rotation, applied to vectors under `rotation` minus their mean. A scale that
    heads or tokens share is the scale of the differences from each head's mean. A scale that is kept once is
    the scale of the first block with its mean, which leaves range for tokens that are further from the mean
    than the first block's tokens."""

    codec: Codec
    rotation: Hadamard | None = None

    @staticmethod
    def of(codec: Codec) -> Centered:
        """`codec` with a mean; its rotation, if any, is applied first."""
        return Centered(codec if codec.rotation is None else replace(codec, rotation=None), codec.rotation)  # type: ignore[type-var]

    @property
    def packed_layout(self) -> PackedLayout | None:
        layout = self.codec.packed_layout
        return layout and replace(layout, rotation=number_of(self.rotation), centered=True)

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (*self.codec.buffers(head_dim), Buffer("center", torch.float32, head_dim, "scales", tokens="once"))

    def calibrate(self, x: Tensor, is_valid: Tensor | None = None) -> Codes:
        statistics = {"center": self.rotate(_shrunk(*_moments(x, is_valid)))}
        return statistics | self.codec.calibrate(self.rotate(x), is_valid) if self.codec.keeps(x.shape[3]) else statistics

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        return self.codec.quantize(self.rotate(x).float() - statistics["center"], statistics)

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return self.codec.unpack(codes, head_dim)._replace(center=codes["center"])

    def unpack_upper(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return self.codec.unpack_upper(codes, head_dim)._replace(center=codes["center"])

    def refuses(self, head_dim: int) -> str | None:
        return self.codec.refuses(head_dim)


def _shrunk(mean: Tensor, square: Tensor, count: int | Tensor) -> Tensor:
    """The mean that is subtracted, fp32 `[B, H, 1, D]`, from the result of `_moments`: shrunk as above; 0 where no token is finite."""
    typical = square.sort(-1).values[..., square.shape[3] // 2, None]
    doubt = torch.minimum(square - mean.square() + typical / count, mean.square())
    weight = count * mean.square()
    mean = mean * (weight / (weight + FEW * doubt).clamp_min(torch.finfo(mean.dtype).tiny))
    return mean.where(mean.isfinite().all(-1, keepdim=True), 0).float()


def spread(x: Tensor, is_valid: Tensor | None) -> Tensor:
    """The mean square of each channel around the mean that is subtracted, fp32 `[B, H, 1, D]`, over the
    tokens of `x` `[B, H, T, D]` that are `is_valid` (bool `[B, T]`; None: all)."""
    mean, square, count = _moments(x, is_valid)
    center = _shrunk(mean, square, count)
    return (square - 2 * center * mean + center.square()).clamp_min(0).float()


def mean_energy(x: Tensor, is_valid: Tensor | None = None) -> Tensor:
    """The energy of the means of channels over the energy of their variation, fp32 `[B, H]`, of keys `[B, H,
    T, D]`. `is_valid`: as in `Codec.calibrate`."""
    mean, square, _ = _moments(x, is_valid)
    mean, square = (energy.sum(-1).squeeze(-1) for energy in (mean.square(), square))
    return (mean / (square - mean).clamp_min(torch.finfo(mean.dtype).tiny)).float()


def _moments(x: Tensor, is_valid: Tensor | None) -> tuple[Tensor, Tensor, int | Tensor]:
    """Means of channels and of their squares over the tokens that are `is_valid`, `[B, H, 1, D]` each, and
    the number of these tokens, at least 1."""
    count: int | Tensor = x.shape[2]
    if is_valid is not None:
        shown = is_valid[:, None, :, None]
        x, count = x.masked_fill(~shown, 0), shown.sum(2, keepdim=True).clamp_min(1)
    exact = exact_dtype(x.device)
    tokens = x.shape[2] if torch.compiler.is_compiling() else max(BLOCK * x.shape[2] // max(x.numel(), 1), 1)
    mean, square = (x.new_zeros(*x.shape[:2], 1, x.shape[3], dtype=exact) for _ in range(2))
    for part in x.split(tokens, dim=2):
        part = part.to(exact, copy=True)
        mean += part.sum(2, keepdim=True)
        square += part.square_().sum(2, keepdim=True)
    return mean / count, square / count, count
