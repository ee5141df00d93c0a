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


def store_exact(
    x: Pair, ring: Pair, sinks: Pair, rows: Tensor, new_sinks: tuple[int, int], begin: int, slot: int, counts: tuple[int, ...]
) -> None:
    """Run `pages.store_exact` in one launch."""
    batch, heads, tokens, _ = x[0].shape
    sides, dims = _sides(x, ring, sinks)
    grid = (-(-max(new_sinks[1] - new_sinks[0] + tokens - begin, 1) // TILE), batch * heads, 2)
    with torch.cuda.device_of(rows):
        _store_exact_kernel[grid](
            *sides, rows, rows.stride(0), *new_sinks, begin, slot, ring[0].shape[2], tokens, heads, *counts, *dims, TILE, num_warps=4
        )


@triton.jit
def _store_exact(side, b, h, token, live, sink, place, D: tl.constexpr):
    """Copies tokens `token` of row `b` and head `h` into slot `token` of the sinks where `sink`, else into slot `place` of the ring; those
    that are not `live` nowhere. `token`, `live`, `sink`, `place`: [N]."""
    x, xb, xh, xt, ring, rb, rh, rt, sinks, fb, fh, ft = side
    new = load_vectors(x + (b * xb + h * xh + token.to(tl.int64) * xt), live, D)
    store_vectors(sinks + (b * fb + h * fh + token * ft), new, live & sink, D)
    store_vectors(ring + (b * rb + h * rh + place * rt), new, live & ~sink, D)


@triton.jit(
    do_not_specialize=[
        "rows_b", "sink_begin", "sink_end", "begin", "slot", "ring_slots", "tokens", "heads", "n_sinks", "start", "in_ring", "length",
        "seen",
    ]
)  # fmt: skip
def _store_exact_kernel(
    key, value, rows, rows_b, sink_begin, sink_end, begin, slot, ring_slots, tokens, heads, n_sinks, start, in_ring, length, seen,
    D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N tokens, B * H, 2): keys, values. Strides are in elements.

    key        [B, H, tokens, D] model dtype, channels contiguous; the ring [B, H, ring_slots, D] and the sinks [B, H, S, D] likewise: each
               with its strides over the first three dimensions
    value      the same of values, [.., DV]
    rows       int32 [B, 8], `pages.COLUMNS`: rows_b
    sink_begin, sink_end   which tokens are new sinks        begin, slot   the first token for the ring, and its slot
    n_sinks, start, in_ring, length, seen   the counts that all rows have afterwards
    """
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    i = tl.program_id(0) * N + tl.arange(0, N)
    rank = i - (sink_end - sink_begin)  # among those for the ring; less than 0: a sink
    token = tl.where(rank < 0, sink_begin + i, begin + rank)
    live = token < tokens
    place = (slot + tl.maximum(rank, 0)) % ring_slots
    if tl.program_id(2) == 0:
        _store_exact(key, b, h, token, live, rank < 0, place, D)
        if (h == 0) & (tl.program_id(0) == 0):
            row = rows + b * rows_b
            tl.store(row + 3, n_sinks)
            tl.store(row + 4, start)
            tl.store(row + 5, in_ring)
            tl.store(row + 6, length)
            tl.store(row + 7, seen)
    else:
        _store_exact(value, b, h, token, live, rank < 0, place, DV)


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
