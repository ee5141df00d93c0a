# mypy: ignore-errors
"""Accumulated attention of a decode step: the weights that `triton_attend.py` stores, summed once the normaliser is known.

A weight is relative to the running maximum of its tile. Scratch of a block of query rows: weights `[slots, WIDTH]`, maxima (`tops`)
`[grains, WIDTH]`; slots are those of the quantized tokens, the sinks and the residual, each zone padded to whole grains. A grain has one
maximum: it is as long as what tiles are multiples of, 32 quantized tokens or 16 exact ones."""

from __future__ import annotations

import triton
import triton.language as tl

from .device.math import MASKED_BELOW, exp2

REGION_GRAIN = tl.constexpr(32)
EXACT_GRAIN = tl.constexpr(16)


@triton.jit
def keep(weights, tops, w, top, slot, count, GRAIN: tl.constexpr, WIDTH: tl.constexpr):
    """Stores the weights `w`, fp32 [T, R], of `count` tokens into slots from `slot` on of `weights` [slots, WIDTH], and their maxima `top`,
    fp32 [R], into `tops` [grains, WIDTH]: the first WIDTH of R rows. GRAIN: tokens that share a maximum; it divides `slot` and T."""
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
        "slots", "grains", "n_sinks", "n_quantized", "n_residual", "blocks", "heads", "queries", "rows_b", "lengths_b", "lengths_h",
    ]
)  # fmt: skip
def sum_splits_kernel(
    weights, tops, lse, observed, attention_sums, rows, rows_b, lengths, lengths_b, lengths_h,
    slots, grains, n_sinks, n_quantized, n_residual, blocks, heads, queries,
    G: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, ARCH: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Sums weights over the query heads of a group, and over queries. Grid (tiles of N tokens: of the quantized region, then of the sinks,
    then of the residual; B * H).

    weights         [B * H, blocks, slots, WIDTH] fp32 or bf16; tops fp32 [B * H, blocks, grains, WIDTH]
    lse             fp32 [B, H * G, queries], contiguous: logs of the normalisers, to base e
    observed        fp32 or bool [B, queries], contiguous: how often each query counts
    attention_sums  fp32 [B, H, n_sinks + n_quantized + n_residual], contiguous: sinks, quantized tokens, residual
    n_sinks, n_quantized, n_residual   tokens of each zone; COUNTED: slots of sinks, of pages and of the ring
    blocks          blocks of R query rows
    rows            int32 [B, 8], `pages.COLUMNS`: rows_b; read if COUNTED, as are `lengths`
    lengths         int32 [B] or [B, H], tokens in the pages: lengths_b, lengths_h (0: all heads share)
    ARCH            compute capability, 0 without NVIDIA assembly
    """
    program = tl.program_id(0)
    bh = tl.program_id(1)
    region_slots = tl.cdiv(n_quantized, REGION_GRAIN) * REGION_GRAIN
    padded_sinks = tl.cdiv(n_sinks, EXACT_GRAIN) * EXACT_GRAIN
    slot, column, grain, tokens, shift = 0, n_sinks, 0, n_quantized, 5
    if program >= tl.cdiv(n_quantized, N):
        program -= tl.cdiv(n_quantized, N)
        slot, column, grain, tokens, shift = region_slots, 0, region_slots // REGION_GRAIN, n_sinks, 4
        if program >= tl.cdiv(n_sinks, N):
            program -= tl.cdiv(n_sinks, N)
            slot, column, grain, tokens = slot + padded_sinks, n_sinks + n_quantized, grain + padded_sinks // EXACT_GRAIN, n_residual
    t = program * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    r = tl.arange(0, WIDTH)
    for block in range(blocks):
        row = block * R + r
        count = tl.load(observed + bh // heads * queries + row % queries, mask=row < G * queries, other=0).to(tl.float32)
        level = tl.load(lse + bh * G * queries + row, mask=row < G * queries, other=0.0) * 1.4426950408889634
        level = tl.where((count != 0.0) & (level > MASKED_BELOW), level - tl.log2(count), float("inf"))  # whose weights are all 0
        panel = (bh * blocks + block).to(tl.int64)
        # What lies beyond the zone may be read, and is not stored.
        top = tl.load(tops + panel * grains * WIDTH + ((grain + (t >> shift)) * WIDTH)[:, None] + r[None, :])
        w = tl.load(weights + panel * slots * WIDTH + ((slot + t) * WIDTH)[:, None] + r[None, :]).to(tl.float32)
        w = w * exp2(top - level[None, :], ARCH)
        total += tl.sum(tl.where((count != 0.0)[None, :], w, 0.0), 1)  # of rows that do not exist, or of padding, it may be nan
    if COUNTED:
        row = rows + bh // heads * rows_b
        begin = tl.load(row)
        row_sinks = tl.load(row + 3)
        in_ring = tl.load(row + 5)
        length = tl.load(lengths + bh // heads * lengths_b + bh % heads * lengths_h)
        quantized = tl.maximum(length - begin, 0)
        if column == 0 and slot > 0:
            place, count = t, row_sinks
        elif slot == 0:
            place, count = tl.where(t < begin, length, t - begin) + row_sinks, row_sinks + quantized
        else:
            place = (t - tl.load(row + 4) + n_residual) % n_residual + row_sinks + quantized
            count = row_sinks + quantized + in_ring
        total = tl.where(place < count, total, 0.0)
    tl.store(attention_sums + bh.to(tl.int64) * (n_sinks + n_quantized + n_residual) + column + t, total, mask=t < tokens)
