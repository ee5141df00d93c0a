# mypy: ignore-errors
"""Attention mass of a decode step: the weights that `triton_attend.py` leaves behind, summed when the normaliser is known.

A weight is relative to the running maximum of its tile, `top`. Scratch of a block of rows: weights `[slots, WIDTH]`, maxima
`[grains, WIDTH]`; slots hold the body, the first zone and the recent one, each from a grain's beginning on. A grain has one maximum: it is
as long as what tiles are multiples of, 32 slots of the body (slabs begin at any multiple of 32) and 16 of an exact zone.
"""

from __future__ import annotations

import triton
import triton.language as tl

BODY_GRAIN = tl.constexpr(32)
EXACT_GRAIN = tl.constexpr(16)
UNSEEN = tl.constexpr(-1e29)  # under it lies what a mask hides


@triton.jit
def keep(weights, tops, w, top, slot, count, GRAIN: tl.constexpr, WIDTH: tl.constexpr):
    """Stores weights `[T, R]` of `count` tokens from `slot` on, and the maximum `[R]`; of `R` rows, `WIDTH`."""
    T: tl.constexpr = w.shape[0]
    R: tl.constexpr = w.shape[1]
    t = tl.arange(0, T)[:, None]
    r = tl.arange(0, R)[None, :]
    tl.store(weights + slot * WIDTH + (t * WIDTH + r), w.to(weights.dtype.element_ty), mask=(t < count) & (r < WIDTH))
    g = tl.arange(0, T // GRAIN)[:, None]
    many = tl.broadcast_to(top[None, :], [T // GRAIN, R])
    tl.store(tops + slot // GRAIN * WIDTH + (g * WIDTH + r), many, mask=(g * GRAIN < count) & (r < WIDTH))


@triton.jit(do_not_specialize=["slots", "grains", "n_first", "n_body", "n_recent", "hidden", "blocks", "heads", "queries"])
def mass_kernel(
    weights, tops, lse, observed, mass, slots, grains, n_first, n_body, n_recent, hidden, blocks, heads, queries,
    G: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program for `N` slots of one (sequence, KV head); `mass` `[B, H, T]`. The first `hidden` tokens lie before every window."""
    bh = tl.program_id(1)
    body_slots = tl.cdiv(n_body, BODY_GRAIN) * BODY_GRAIN
    first_slots = tl.cdiv(n_first, EXACT_GRAIN) * EXACT_GRAIN
    # In sixteens, each of which is of one zone and one grain, so that factors are few.
    start = tl.program_id(0) * N + tl.arange(0, N // EXACT_GRAIN) * EXACT_GRAIN
    exact = start - body_slots
    recent = exact - first_slots
    grain = tl.where(exact < 0, start // BODY_GRAIN, body_slots // BODY_GRAIN + exact // EXACT_GRAIN)
    inside = tl.where(exact < 0, start, tl.where(recent < 0, exact, recent))
    held = tl.where(exact < 0, n_body, tl.where(recent < 0, n_first, n_recent)) - inside
    column = inside + tl.where(exact < 0, n_first, tl.where(recent < 0, 0, n_first + n_body))
    i = tl.arange(0, EXACT_GRAIN)[None, :]
    held = i < held[:, None]
    column = column[:, None] + i
    there = held & (column >= hidden)
    total = tl.zeros([N // EXACT_GRAIN, EXACT_GRAIN], tl.float32)
    r = tl.arange(0, WIDTH)
    for block in range(blocks):
        row = block * R + r
        live = row < G * queries
        count = tl.load(observed + bh // heads * queries + row % queries, mask=live, other=0.0)
        level = tl.load(lse + bh * G * queries + row, mask=live, other=0.0) * 1.4426950408889634
        panel = (bh * blocks + block).to(tl.int64)
        top = tl.load(tops + panel * grains * WIDTH + grain[:, None] * WIDTH + r[None, :], mask=grain[:, None] < grains, other=0.0)
        share = tl.where((count != 0.0)[None, :] & (top > UNSEEN), count[None, :] * tl.exp2(top - level[None, :]), 0.0)
        at = (start[:, None] + i)[:, :, None] * WIDTH + r[None, None, :]
        w = tl.load(weights + panel * slots * WIDTH + at, mask=there[:, :, None], other=0.0).to(tl.float32)
        w = tl.where(share[:, None, :] != 0.0, w * share[:, None, :], 0.0)  # other weights may be nan
        total += tl.sum(w, 2)
    tl.store(mass + bh.to(tl.int64) * (n_first + n_body + n_recent) + column, total, mask=held)
