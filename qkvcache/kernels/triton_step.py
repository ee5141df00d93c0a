"""Storing the tokens of a decode step in storage that counts on the device, in one launch that needs no number from the host: what
`counted.step` computes, for rows of any lengths and regions of many chunks.

A program stores a tile of new tokens (times heads) of keys or of values. Each token takes a slot of the ring, and the token that was there
is quantized into the region by the same program. The last program to finish updates the counts: by then all have read them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .segments import Pair, StorageTensors
from .triton_dequantize import load_vectors, planes_of_chunk, store_vectors, vectors
from .triton_quantize import contiguous, launched, store_tile

ROWS = tl.constexpr(128)
"""Rows whose counts are updated at once."""


def launch_of_step(buffers: StorageTensors, x: Pair) -> Callable[[Pair], None]:
    """`counted.step` for tokens like `x`, `[B, H, T, D]`, with all other arguments prepared; `T` is 1 where the region may have many
    chunks."""
    batch, heads, tokens, _ = x[0].shape
    *planes, constants, grid, warps = launched(buffers.codecs, contiguous(x), buffers.region.chunks[0])
    zones = [(ring, *ring.stride()[:2], sinks, *sinks.stride()[:2]) for ring, sinks in zip(buffers.residual, buffers.sinks, strict=True)]
    sizes = buffers.sinks[0].shape[2], buffers.residual[0].shape[2], tokens, heads, batch

    def launch(x: Pair) -> None:
        key, value = ((new, *new.stride()[:3], *zones[side], planes[side]) for side, new in enumerate(contiguous(x)))
        with torch.cuda.device_of(x[0]):
            _step_kernel[grid](key, value, buffers.state, buffers.region.table, *sizes, *constants, buffers.grows, num_warps=warps)

    return launch


@triton.jit
def _step_side(
    side, state, chunks, sink_slots, ring_slots, tokens, heads,
    L: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, GROWS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """A program of `_step_kernel`, for keys (SIDE 0) or for values (1); arguments as there."""
    x, xb, xh, xt, ring, rb, rh, sinks, fb, fh, planes = side
    b, h0, h, t, live = vectors(tokens, heads, ACROSS, ALONG)
    seq_length = tl.load(state + 4 + 2 * b)
    quantized = tl.load(state + 5 + 2 * b)
    live = live & (seq_length + tokens <= tl.load(state + 2))
    opening = tl.minimum(tl.maximum(sink_slots - seq_length, 0), tokens)  # of the new tokens, the sinks
    in_ring = seq_length - tl.minimum(seq_length, sink_slots) - quantized
    rank = t - opening
    leaves = live & (rank + in_ring >= ring_slots)
    place = ring + b * rb + h * rh + (quantized + in_ring + tl.maximum(rank, 0)) % ring_slots * D
    old = load_vectors(place, leaves, D)
    first_slot = quantized + in_ring - opening - ring_slots  # of token 0
    if GROWS:  # the chunk that holds the slot, nearly always the last
        row = chunks + (tl.load(state + 3) - 1) * 8
        start = tl.load(row)
        while start > tl.maximum(first_slot, 0):
            row -= 8
            start = tl.load(row)
        first_slot = (first_slot - start).to(tl.int32)
        planes = planes_of_chunk(planes, chunks, row, L, SIDE)
    store_tile(old, leaves, b, b, h0, first_slot + t, planes, L, D, ACROSS)
    new = load_vectors(x + (b * xb + h * xh + t * xt), live, D)
    tl.debug_barrier()  # before what others of this program have read is overwritten
    store_vectors(place, new, live & (rank >= 0), D)
    store_vectors(sinks + b * fb + h * fh + (seq_length + t) * D, new, live & (rank < 0), D)


@triton.jit(do_not_specialize=["sink_slots", "ring_slots", "tokens", "heads", "rows"])
def _step_kernel(
    key, value, state, chunks, sink_slots, ring_slots, tokens, heads, rows,
    K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DV: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, GROWS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of ALONG tokens and ACROSS heads, B, 2): keys, values. Tensors of vectors come with their strides, in elements, of packed
    codes and high bits in words of 16 bits.

    key       new keys [B, H, tokens, D] model dtype, channels contiguous: over the first three dimensions; `tokens` <= `ring_slots`, 1 if
              GROWS; the ring [B, H, ring_slots, D] model dtype, tokens contiguous: over rows and heads; the sinks [B, H, sink_slots, D]
              likewise; planes of the first chunk, as of `triton_quantize._quantize_kernel`, as is K
    value, V  the same of values, [.., DV]
    state     int32 [4 + 2 B]: `segments.StorageTensors`
    chunks    int64 [chunks, 8]: `QuantizedRegion.table`, read if GROWS
    heads     H                        rows   B                     GROWS   whether there may be more chunks than one
    """
    if tl.program_id(2) == 0:
        _step_side(key, state, chunks, sink_slots, ring_slots, tokens, heads, K, D, ACROSS, ALONG, GROWS, 0)
    else:
        _step_side(value, state, chunks, sink_slots, ring_slots, tokens, heads, V, DV, ACROSS, ALONG, GROWS, 1)
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    if tl.atomic_add(state, 1, sem="acq_rel") == programs - 1:
        room = tl.load(state + 2)
        dropped = 0
        for begin in range(0, rows, ROWS):
            row = begin + tl.arange(0, ROWS)
            lengths = state + 4 + 2 * row
            seq_length = tl.load(lengths, mask=row < rows, other=0)
            quantized = tl.load(lengths + 1, mask=row < rows, other=0)
            fits = seq_length + tokens <= room
            leaving = tl.maximum(seq_length + tokens - sink_slots - quantized - ring_slots, 0)
            tl.store(lengths, tl.where(fits, seq_length + tokens, seq_length), mask=row < rows)
            tl.store(lengths + 1, tl.where(fits, quantized + leaving, quantized), mask=row < rows)
            dropped = tl.maximum(dropped, tl.max(tl.where(fits | (row >= rows), 0, tokens), 0))
        tl.store(state + 1, tl.load(state + 1) + dropped)
        tl.store(state, 0)
