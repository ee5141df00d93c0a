"""The inputs of attention: the keys or the values of a layer as a sequence of segments, exact or packed, in token order.

The two halves of attention in plain torch: `qk` (q . k) and `pv` (p . v). Packed segments are blocks of a
bounded number of tokens, and only one block at a time exists in floating point. This is the reference that
fused kernels are tested against, and what CPU users run.

Shapes: `q` `[B, H, R, D]` with `R` = query heads of the group times queries, in fp32; scores and probabilities `[B, H, R, T]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from ..formats.base import Codec, Codes, PackedLayout, QuantizedValues, affine

Pair = tuple[Tensor, Tensor]
"""Keys and values."""
T = TypeVar("T")
S = TypeVar("S")
BLOCK_ELEMENTS = 2**20
"""Elements that torch quantizes or dequantizes at a time. It bounds temporaries (4 MiB in fp32); on a CPU,
smaller blocks cost more in calls than they save in cache misses."""


def block_of(like: Tensor) -> int:
    """Tokens of a block of keys or values like `like` `[B, H, T, D]`: a multiple of 64."""
    batch, heads, _, dim = like.shape
    return max(BLOCK_ELEMENTS // max(batch * heads * dim, 1) // 64, 1) * 64


def both(change: Callable[[T], S], sides: tuple[T, T]) -> tuple[S, S]:
    """Apply `change` to each of two sides, keys and values."""
    return change(sides[0]), change(sides[1])


def differ(stored: Tensor, given: Tensor) -> bool:
    """Whether two tensors `[B, H, T, D]` differ in batch, heads, head_dim or dtype."""
    return (*stored.shape[:2], stored.shape[3], stored.dtype) != (*given.shape[:2], given.shape[3], given.dtype)


@dataclass(frozen=True)
class Exact:
    """Tokens in the model's dtype, `x` `[B, H, T, D]`."""

    x: Tensor

    @property
    def tokens(self) -> int:
        return self.x.shape[2]


@dataclass(frozen=True)
class Packed:
    """A block of `tokens` tokens as `codec` stores them: planes `[B, H or 1, tokens or 1, width]`."""

    codec: Codec
    codes: Codes
    tokens: int
    head_dim: int

    def levels(self, upper: bool = False) -> QuantizedValues:
        """Quantized values with at most one scale and offset for each token: finer ones are multiplied out.
        `upper`: of the upper halves of codes, where these are kept apart."""
        unpack = self.codec.unpack_upper if upper else self.codec.unpack
        levels, scale, offset, center = unpack(self.codes, self.head_dim)
        if any(factor is not None and factor.shape[-1] > 1 for factor in (scale, offset)):
            return QuantizedValues(affine(levels, scale, offset), center=center)
        return QuantizedValues(levels, scale, offset, center)


Segment = Exact | Packed


@dataclass(eq=False)
class KeysOrValues:
    """The keys or the values of one attention call, of shape `[B, H, T, D]`. `build` makes the segments at
    first use: kernels do not need them."""

    build: Callable[[], tuple[Segment, ...]]
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(segments: Sequence[Segment], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> KeysOrValues:
        """The keys or the values in these segments; segments without tokens are dropped."""
        kept = tuple(segment for segment in segments if segment.tokens)
        return KeysOrValues(partial(tuple, kept), tuple(shape), dtype, device)  # type: ignore[arg-type]  # deepcopy does not copy what a lambda refers to

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return self.build()

    def dense(self) -> Tensor:
        """All tokens in the model's dtype, `[B, H, T, D]`."""
        parts = [s.x if isinstance(s, Exact) else s.codec.dequantize(s.codes, s.head_dim, self.dtype) for s in self.segments]
        return torch.cat(parts, dim=2)


@functools.cache
def names(codec: Codec, head_dim: int, tokens: str) -> tuple[str, ...]:
    """Its buffers that are kept for "each" token, or "once"."""
    return tuple(buffer.name for buffer in codec.buffers(head_dim) if buffer.tokens == tokens)


@functools.cache
def layout_of(codec: Codec) -> PackedLayout | None:
    """The layout that kernels read and write; None if they cannot."""
    return codec.packed_layout


def planes_of(layout: PackedLayout | None, codes: Codes) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, high bits and scales; missing ones are empty tensors. Codes of less than 16 bits are viewed as words of 16."""
    none = next(iter(codes.values())).new_empty(0)
    if layout is None:
        return none, none, none
    main, high, scales = (codes[name] if name else none for name in layout.planes)
    return main if main.itemsize > 1 else main.view(torch.int16), high.view(torch.int16), scales


def join_tokens(parts: Sequence[Tensor]) -> Tensor:
    """`parts` `[B, H, T, width]` in a row; where one alone has tokens, it."""
    parts = [x for x in parts if x.shape[2]]
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def qk(q: Tensor, side: KeysOrValues) -> Tensor:
    """Scores of queries against all keys: `q` `[B, H, R, D]` to `[B, H, R, T]`, in the dtype of `q`."""
    rotated: dict[Codec, Tensor] = {}
    parts = []
    for segment in side.segments:
        if isinstance(segment, Exact):
            parts.append(q @ segment.x.to(q.dtype).mT)
            continue
        if segment.codec not in rotated:
            rotated[segment.codec] = segment.codec.rotate(q)
        parts.append(scores_of_levels(rotated[segment.codec], segment.levels()))
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def scores_of_levels(q: Tensor, values: QuantizedValues) -> Tensor:
    """`qk` of rotated queries and quantized values as `Packed.levels` returns them."""
    levels, scale, offset, center = values
    part = q @ levels.to(q.dtype).mT
    if scale is not None:
        part *= scale.mT
    if offset is not None:
        part += q.sum(-1, keepdim=True) * offset.mT
    if center is not None:
        part += q @ center.mT
    return part


def pv(p: Tensor, side: KeysOrValues) -> Tensor:
    """Weighted sums of values: `p` `[B, H, R, T]` to `[B, H, R, D]`, in the dtype of `p`. Packed values are
    summed rotated, and rotated back once."""
    sums: dict[Codec | None, Tensor] = {}
    start = 0
    for segment in side.segments:
        part = p[..., start : start + segment.tokens]
        start += segment.tokens
        if isinstance(segment, Exact):
            codec, out = None, part @ segment.x.to(p.dtype)
        else:
            codec, out = segment.codec, sum_of_levels(part, segment.levels())
        sums[codec] = sums[codec] + out if codec in sums else out
    return unrotated_sum(sums)


def sum_of_levels(p: Tensor, values: QuantizedValues) -> Tensor:
    """`pv` of quantized values as `Packed.levels` returns them, rotated as they are stored."""
    levels, scale, offset, center = values
    out = (p if scale is None else p * scale.mT) @ levels.to(p.dtype)
    if offset is not None:
        out += p @ offset.expand(*p.shape[:2], p.shape[3], 1)
    if center is not None:
        out += p.sum(-1, keepdim=True) * center
    return out


def unrotated_sum(sums: dict[Codec | None, Tensor]) -> Tensor:
    """The sum of vectors `[B, H, R, D]` that are rotated as each codec stores them; None: not rotated."""
    return torch.stack([out if codec is None else codec.unrotate(out) for codec, out in sums.items()]).sum(0)
