"""Which tokens new ones replace, once the pages of a layer that evicts are full: the last ones in the order of retention.

Tokens are ordered by priority, with protected ones before all others, and at equal priority by position. Columns without a token come last;
among them, later columns come before earlier ones, so that they are replaced alike in all heads. No two columns are equal."""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 64
"""The most new tokens for which there is a kernel: intervals between evictions are no longer by default."""


def ranked(priority: Tensor, positions: Tensor, num_sinks: int, first_recent: int | Tensor) -> Tensor:
    """Priorities `[B, H, T]` in fp32, with the protected tokens at inf and columns without a token (position -1) at -inf.

    Args:
        priority: of any dtype; nan comes last.
        num_sinks: tokens of lower positions are protected.
        first_recent: tokens from this position on are protected, an int or `[B, 1, 1]`.
    """
    rank = priority.float()
    rank = rank.nan_to_num(nan=torch.finfo(rank.dtype).min)
    protected = (positions < num_sinks) | (positions >= first_recent)
    return rank.masked_fill(protected, torch.inf).masked_fill(positions < 0, -torch.inf)


def total_order(rank: Tensor, positions: Tensor) -> Tensor:
    """An order of tokens, int64 `[B, H, T]`: by `rank`, fp32 without nan, and at equal rank by `positions`, int32."""
    bits = (rank + 0.0).contiguous().view(torch.int32)  # -0.0 equals 0.0
    return (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32) + positions  # floats compare as these integers do


def replace_lowest(
    priority: Tensor, union: dict[str, Tensor], region: dict[str, Tensor], num_sinks: int, first_recent: int | Tensor
) -> Tensor:
    """Replaces the last tokens in the order of retention by new ones, as many as there are new tokens; new tokens that are among the last
    themselves are not stored.

    Args:
        priority: `[B, H, S + N]`, of `S` slots and of `N` new tokens.
        union: fields of the same columns, `[B, H, S + N]` each: `positions` int32 (-1: no token), and others in fp32.
        region: the fields of the slots, `[B, H, S]` each, which are replaced.
        num_sinks, first_recent: as for `ranked`.

    Returns the slot of each new token, int64 `[B, H, N]`; -1 for a token that is not stored.
    """
    positions, stored = union["positions"], region["positions"].shape[-1]
    place = torch.arange(positions.shape[-1], device=positions.device)
    order = total_order(ranked(priority, positions, num_sinks, first_recent), torch.where(positions < 0, -1 - place, positions))
    lowest = order.topk(len(place) - stored, dim=-1, largest=False, sorted=False).indices.sort(-1).values
    accepted = (lowest[..., None] != place[stored:]).all(-2)
    into = torch.where(accepted, lowest.gather(-1, (accepted.cumsum(-1) - 1).clamp_min(0)), stored)
    source = place[: stored + 1].expand(*order.shape[:2], -1).scatter(-1, into, place[stored:].expand_as(into))[..., :stored]
    for name, x in union.items():
        region[name] = x.gather(-1, source)
    return into.masked_fill(~accepted, -1)
