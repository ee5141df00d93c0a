"""Selecting tokens, without a sort of each head where that is possible: on a GPU, a sort passes many times over tokens of few heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SORTED_IN_A_BLOCK = 4096
"""The longest rows that a kernel of torch sorts in one block of threads each."""


def ascending(positions: Tensor) -> Tensor:
    """The indices that sort each row of int32 `[B, H, T]`, stably. Long rows are sorted all at once: a GPU sorts a few of them one after
    another, and short ones together, each in one block of threads."""
    batch, heads, tokens = positions.shape
    if tokens <= SORTED_IN_A_BLOCK:
        return positions.argsort(dim=-1, stable=True)
    row = torch.arange(batch * heads, device=positions.device).view(batch, heads, 1)
    return ((row << 32) + positions).flatten().argsort(stable=True).view_as(positions) - row * tokens


def highest(order: Tensor, count: int | Tensor) -> Tensor:
    """Mark the `count` highest of `order` int64 `[B, H, T]`, bool. `count`: an int, or a tensor `[1 or B, 1 or H, 1]`, for which tokens are
    sorted. Tokens that equal the lowest of these are all marked."""
    if isinstance(count, Tensor):
        return (order >= at_rank(order, count)) & (count > 0)
    if not 0 < count < order.shape[-1]:
        return torch.full_like(order, count > 0, dtype=torch.bool)
    return order >= at_rank(order, count)


def at_rank(x: Tensor, count: int | Tensor) -> Tensor:
    """The lowest, `[B, H, 1]`, of the `count` highest of `x` `[B, H, T]`. `count`: as for `highest`, clamped to 1 to
    T."""
    tokens = x.shape[-1]
    if isinstance(count, Tensor):
        return _descending(x).gather(-1, (count - 1).clamp(0, tokens - 1).expand(*x.shape[:2], 1))
    return x.topk(min(max(count, 1), tokens), dim=-1, sorted=False).values.amin(-1, keepdim=True)


def _descending(x: Tensor) -> Tensor:
    """Sorts each row of `[B, H, T]` in descending order: all rows in one sort, and then by row."""
    best = x.flatten().sort(descending=True)
    row = best.indices.div(x.shape[-1], rounding_mode="floor").int()
    return best.values[row.argsort(stable=True)].view_as(x)


def first_of(masks: Sequence[Tensor], count: int) -> Tensor:
    """The first `count` indices `[B, H, count]` where the first of `masks` is true, then those where the second is, and so on, ascending in
    each. Masks are bool `[B, H, T]`; each index is in exactly one of them."""
    chosen = torch.cat(list(masks), dim=-1)
    rows = torch.arange(chosen[..., 0].numel(), device=chosen.device).view(*chosen.shape[:2], 1)
    tokens = chosen.shape[-1] // len(masks)
    # One scan over all rows, which is faster than one for each: a row has `tokens` true entries.
    place = chosen.flatten().cumsum(0).view_as(chosen) - (rows * tokens + 1)
    place = place.masked_fill(~chosen, count).clamp_max(count)
    index = torch.arange(tokens, device=chosen.device).repeat(len(masks)).expand_as(chosen)
    return index.new_empty(*chosen.shape[:2], count + 1).scatter_(-1, place, index)[..., :count]
