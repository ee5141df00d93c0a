"""Copying new exact tokens into sinks and rings in one launch: what `pages.store_rows` and `pages.store_exact` compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .segments import Pair
from .triton_dequantize import load_vectors, store_vectors
from .triton_quantize import contiguous

TILE = 16
"""Tokens of a program."""


def _sides(x: Pair, ring: Pair, sinks: Pair) -> tuple[list[tuple], list[int]]:
    """Kernel arguments of keys and of values: new tokens, ring and sinks, each with its strides over rows, heads and
    tokens; then channels."""
    parts = zip(contiguous(x), ring, sinks, strict=True)
    return [tuple(n for side in sides for n in (side, *side.stride()[:3])) for sides in parts], [side.shape[3] for side in x]


def store_rows(x: Pair, ring: Pair, ring_slots: Tensor, sinks: Pair, sink_slots: Tensor) -> None:
    """Run `pages.store_rows` in one launch."""
    batch, heads, tokens, _ = x[0].shape
    sides, dims = _sides(x, ring, sinks)
    places = ((slots, *slots.stride()) for slots in (ring_slots, sink_slots))
    with torch.cuda.device_of(x[0]):
        _store_rows_kernel[(triton.cdiv(tokens, TILE), batch * heads, 2)](
            *sides, *places, max(ring[0].shape[2], 1), max(sinks[0].shape[2], 1), tokens, heads, *dims, TILE,
            SINKS=sinks[0].shape[2] > 0, num_warps=4,
        )  # fmt: skip


def store_exact(x: Pair, ring: Pair, slot: int, sinks: Pair, begin: int, count: int) -> None:
    """Run `pages.store_exact` in one launch."""
    batch, _, tokens, _ = x[0].shape
    slots, first = ring[0].shape[2], sinks[0].shape[2]
    row = torch.arange(batch, device=x[0].device)[:, None]
    token = torch.arange(-count, tokens - count, device=row.device)
    ring_slots = torch.where(token < 0, -1, row * slots + (slot + token) % max(slots, 1))
    sink_slots = torch.where(token < 0, row * first + (begin + count + token), -1)
    store_rows(x, ring, ring_slots, sinks, sink_slots)


@triton.jit
def _store_rows(
    side, ring_at, sink_at, ring_slots, sink_slots, tokens, heads, D: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr
):  # fmt: skip
    """A program of `_store_rows_kernel`, for keys or for values; arguments as there."""
    x, xb, xh, xt, ring, rb, rh, rt, sinks, fb, fh, ft = side
    t = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    live = t < tokens
    last = tl.load(ring_at[0] + b * ring_at[1] + t * ring_at[2], mask=live, other=-1)
    stored = last >= 0
    if SINKS:
        first = tl.load(sink_at[0] + b * sink_at[1] + t * sink_at[2], mask=live, other=-1)
        stored = stored | (first >= 0)
    new = load_vectors(x + (b * xb + h * xh + t * xt), stored, D)
    store_vectors(ring + (last // ring_slots * rb + h * rh + last % ring_slots * rt), new, last >= 0, D)
    if SINKS:
        store_vectors(sinks + (first // sink_slots * fb + h * fh + first % sink_slots * ft), new, first >= 0, D)


@triton.jit(do_not_specialize=["ring_slots", "sink_slots", "tokens", "heads"])
def _store_rows_kernel(
    key, value, ring_at, sink_at, ring_slots, sink_slots, tokens, heads,
    D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N tokens, B * H, 2): keys, values. Strides are in elements.

    key        [B, H, tokens, D] model dtype, channels contiguous; rings [F, H, ring_slots, D], and sinks [E, H, sink_slots, D], read if
               SINKS: each with its strides over the first three dimensions
    value      the same of values, [.., DV]
    ring_at, sink_at   int64 [B, tokens], the slot of each token in the rings and in the sinks, counted over their rows; negative: none;
               with their strides
    heads      H
    """
    if tl.program_id(2) == 0:
        _store_rows(key, ring_at, sink_at, ring_slots, sink_slots, tokens, heads, D, N, SINKS)
    else:
        _store_rows(value, ring_at, sink_at, ring_slots, sink_slots, tokens, heads, DV, N, SINKS)
