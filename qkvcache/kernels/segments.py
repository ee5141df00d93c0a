"""What attention reads: one side (keys or values) of a layer as a row of segments, exact or packed, in token order.

The two halves of attention in plain torch: `scores` (q . k) and `mix` (p . v). Packed segments are blocks of a bounded number of tokens,
and only one block at a time exists in floating point. This is the reference that fused kernels are tested against, and what CPU users run.

Shapes: `q` `[B, H, R, D]` with `R` = query heads of the group times queries, in fp32; scores and probabilities `[B, H, R, T]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.base import Codec, Codes, Levels, affine


@dataclass(frozen=True)
class Exact:
    """Tokens in the model's dtype, `x` `[B, H, T, D]`."""

    x: Tensor

    @property
    def tokens(self) -> int:
        return self.x.shape[2]


@dataclass(frozen=True)
class Packed:
    """A block of `tokens` tokens as `codec` stores them."""

    codec: Codec
    codes: Codes
    tokens: int
    head_dim: int

    def levels(self) -> Levels:
        """Levels with at most one scale and offset a token: finer ones are multiplied out."""
        levels, scale, offset = self.codec.unpack(self.codes, self.head_dim)
        if any(factor is not None and factor.shape[-1] > 1 for factor in (scale, offset)):
            return Levels(affine(levels, scale, offset))
        return Levels(levels, scale, offset)


Segment = Exact | Packed


@dataclass(frozen=True)
class Side:
    """The keys or the values that one attention call sees: `[B, H, T, D]` in effect."""

    segments: tuple[Segment, ...]
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device

    def dense(self) -> Tensor:
        """All tokens in the model's dtype: the only place where a whole history is decoded."""
        parts = [s.x if isinstance(s, Exact) else s.codec.decode(s.codes, s.head_dim, self.dtype) for s in self.segments]
        return torch.cat(parts, dim=2)


@dataclass(frozen=True)
class Payload:
    """Keys and values of one layer for one step."""

    key: Side
    value: Side


def scores(q: Tensor, side: Side) -> Tensor:
    """`q . k` for every token: `[B, H, R, D]` -> `[B, H, R, T]`."""
    rotated: dict[Codec, Tensor] = {}
    parts = []
    for segment in side.segments:
        if isinstance(segment, Exact):
            parts.append(q @ segment.x.to(q.dtype).mT)
            continue
        if segment.codec not in rotated:
            rotated[segment.codec] = segment.codec.rotate(q)
        turned = rotated[segment.codec]
        levels, scale, offset = segment.levels()
        part = turned @ levels.mT
        if scale is not None:
            part *= scale.mT
        if offset is not None:
            part += turned.sum(-1, keepdim=True) * offset.mT
        parts.append(part)
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def mix(p: Tensor, side: Side) -> Tensor:
    """`p . v`: `[B, H, R, T]` -> `[B, H, R, D]`. Packed values are summed rotated, and turned back once."""
    sums: dict[Codec | None, Tensor] = {}
    start = 0
    for segment in side.segments:
        part = p[..., start : start + segment.tokens]
        start += segment.tokens
        if isinstance(segment, Exact):
            codec, out = None, part @ segment.x.to(p.dtype)
        else:
            codec = segment.codec
            levels, scale, offset = segment.levels()
            out = (part if scale is None else part * scale.mT) @ levels
            if offset is not None:
                out += part @ offset.expand(*part.shape[:2], segment.tokens, 1)
        sums[codec] = sums[codec] + out if codec in sums else out
    return torch.stack([out if codec is None else codec.unrotate(out) for codec, out in sums.items()]).sum(0)
