# mypy: ignore-errors
"""Accumulated attention of a decode step: the weights that `triton_attend.py` leaves behind, summed when the normaliser is known.

A weight is relative to the running maximum of its tile, `top`. Scratch of a block of rows: weights `[slots, WIDTH]`, maxima
`[grains, WIDTH]`; slots hold the body, the first zone and the recent one, each from a grain's beginning on. A grain has one maximum: it is
as long as what tiles are multiples of, 32 slots of the body (chunks begin at any multiple of 32) and 16 of an exact zone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_math import exp2

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


@triton.jit(
    do_not_specialize=[
        "slots", "grains", "n_first", "n_body", "n_recent", "hidden", "blocks", "heads", "queries", "lengths_b", "lengths_h", "window",
    ]
)  # fmt: skip
def sum_splits_kernel(
    weights, tops, lse, observed, attention_sums, rows, lengths, lengths_b, lengths_h, window,
    slots, grains, n_first, n_body, n_recent, hidden, blocks, heads, queries,
    G: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, ARCH: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """One program for `N` tokens of one zone of one (sequence, KV head): body, first or recent, in this order. The first `hidden` tokens
    lie before every window.

    weights   [B * H, blocks, slots, WIDTH] fp32 or bf16, tops fp32 [B * H, blocks, grains, WIDTH]
    lse       fp32 [B, H * G, queries]          observed        fp32 or bool [B, queries]
    rows, lengths, window (0: none)             read if RAGGED: zones are the slots of sinks, pages and ring, as of `attend_pages_kernel`
    attention_sums  fp32 [B, H, n_first + n_body + n_recent]
    """
    program = tl.program_id(0)
    bh = tl.program_id(1)
    body_slots = tl.cdiv(n_body, BODY_GRAIN) * BODY_GRAIN
    first_slots = tl.cdiv(n_first, EXACT_GRAIN) * EXACT_GRAIN
    slot, column, grain, held, shift = 0, n_first, 0, n_body, 5
    if program >= tl.cdiv(n_body, N):
        program -= tl.cdiv(n_body, N)
        slot, column, grain, held, shift = body_slots, 0, body_slots // BODY_GRAIN, n_first, 4
        if program >= tl.cdiv(n_first, N):
            program -= tl.cdiv(n_first, N)
            slot, column, grain, held = slot + first_slots, n_first + n_body, grain + first_slots // EXACT_GRAIN, n_recent
    t = program * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    r = tl.arange(0, WIDTH)
    for block in range(blocks):
        row = block * R + r
        count = tl.load(observed + bh // heads * queries + row % queries, mask=row < G * queries, other=0).to(tl.float32)
        level = tl.load(lse + bh * G * queries + row, mask=row < G * queries, other=0.0) * 1.4426950408889634
        level = tl.where((count != 0.0) & (level > UNSEEN), level - tl.log2(count), float("inf"))  # whose weights are all 0
        panel = (bh * blocks + block).to(tl.int64)
        # What lies beyond the zone may be read, and is not stored.
        top = tl.load(tops + panel * grains * WIDTH + ((grain + (t >> shift)) * WIDTH)[:, None] + r[None, :])
        w = tl.load(weights + panel * slots * WIDTH + ((slot + t) * WIDTH)[:, None] + r[None, :]).to(tl.float32)
        w = w * exp2(top - level[None, :], ARCH)
        total += tl.sum(tl.where((count != 0.0)[None, :], w, 0.0), 1)  # of rows that do not exist, or of padding, it may be nan
    if RAGGED:
        row = rows + bh // heads * 6
        begin = tl.load(row)
        n_sinks = tl.load(row + 2)
        in_ring = tl.load(row + 5)
        length = tl.load(lengths + bh // heads * lengths_b + bh % heads * lengths_h)
        quantized = tl.maximum(length - begin, 0)
        if column == 0 and slot > 0:
            place, count = t, n_sinks
        elif slot == 0:
            place, count = tl.where(t < begin, length, t - begin) + n_sinks, n_sinks + quantized
        else:
            place = (t - tl.load(row + 4) + n_recent) % n_recent + n_sinks + quantized
            count = n_sinks + quantized + in_ring
        oldest = tl.where(window > 0, n_sinks + quantized + in_ring - queries - window + 1, 0)
        total = tl.where((place < count) & (place >= oldest), total, 0.0)
    else:
        total = tl.where(column + t >= hidden, total, 0.0)
    tl.store(attention_sums + bh.to(tl.int64) * (n_first + n_body + n_recent) + column + t, total, mask=t < held)
