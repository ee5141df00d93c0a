"""Storing new tokens in one launch that needs no number from the host: what `counted.step` computes for storage that counts on the device,
for rows of any lengths and regions of many chunks, and `pages.append_tokens` for pages.

A program takes a tile of new tokens (times heads) of keys or of values. Each takes its slot in the ring, and the token that was there is
quantized into the region, or the row's pages, by the same program. The last program to finish updates the counts: by then all have read
them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.base import Codec, Codes
from .pages import PagedInputs
from .segments import Buffers, Pair
from .triton_dequantize import padded, vectors
from .triton_quantize import contiguous, launched, store_tile

ROWS = tl.constexpr(128)
"""Rows whose counts are updated at once."""


def launch_of_step(buffers: Buffers, x: Pair) -> Callable[[Pair], None]:
    """`counted.step` for tokens like `x`, `[B, H, T, D]`; `T` is 1 where the region may have many chunks."""
    counts = buffers.lengths, buffers.lengths, buffers.region.table, 0, buffers.state
    return _launch(buffers.codecs, x, buffers.region.chunks[0], buffers.residual, buffers.sinks, counts, (0, buffers.grows))


def launch_of_append(inputs: PagedInputs, x: Pair, state: Tensor) -> Callable[[Pair], None]:
    """`pages.append_tokens` for tokens like `x`, `[B, H, T, D]`."""
    pages = inputs.pages
    planes = pages.planes[0] | pages.statistics[0], pages.planes[1] | pages.statistics[1]
    counts = inputs.rows, pages.lengths, pages.table, pages.table.stride(0), state
    return _launch(pages.codecs, x, planes, inputs.ring, inputs.sinks, counts, (pages.page_size, False))


def _launch(
    codecs: tuple[Codec, Codec],
    x: Pair,
    planes: tuple[Codes, Codes],
    ring: Pair,
    sinks: Pair,
    counts: tuple[object, ...],
    places: tuple[int, bool],
) -> Callable[[Pair], None]:
    """A launch of `_append_kernel` with all arguments but the tokens prepared. `counts`: those up to `state`; `places`: PAGE, GROWS."""
    batch, heads, tokens, _ = x[0].shape
    *stored, constants, grid, warps = launched(codecs, contiguous(x), planes)
    zones = [[(zone[side], *zone[side].stride()[:3]) for zone in (ring, sinks)] for side in range(2)]
    sizes = sinks[0].shape[2], ring[0].shape[2], tokens, heads, batch

    def launch(x: Pair) -> None:
        key, value = ((side, *side.stride()[:3]) for side in contiguous(x))
        with torch.cuda.device_of(x[0]):
            _append_kernel[grid](
                key, *zones[0], stored[0], value, *zones[1], stored[1], *counts, *sizes, *constants, *places, num_warps=warps
            )  # fmt: skip

    return launch


@triton.jit
def _counts(
    counts, lengths, b, inside, sink_slots, ring_slots, tokens, room, PAGE: tl.constexpr
):  # fmt: skip
    """Of rows `b`, int of any shape, where `inside`: sinks, the slot of the ring's oldest token, tokens in the ring, quantized tokens, how
    many of the new tokens become sinks, how many tokens leave the ring, and whether there is room. Arguments as of `_append_kernel`."""
    if PAGE > 0:
        n_sinks = tl.load(counts + b * 6 + 2, mask=inside, other=0)
        start = tl.load(counts + b * 6 + 4, mask=inside, other=0)
        in_ring = tl.load(counts + b * 6 + 5, mask=inside, other=0)
        length = tl.load(lengths + b, mask=inside, other=0)
    else:
        seq_length = tl.load(counts + b * 2, mask=inside, other=0)
        length = tl.load(counts + b * 2 + 1, mask=inside, other=0)
        n_sinks = tl.minimum(seq_length, sink_slots)
        start = length % ring_slots
        in_ring = seq_length - n_sinks - length
    opening = tl.minimum(tl.maximum(sink_slots - n_sinks, 0), tokens)
    leaving = tl.maximum(in_ring + tokens - opening - ring_slots, 0)
    fits = (length + leaving if PAGE > 0 else n_sinks + length + in_ring + tokens) <= room
    return n_sinks, start, in_ring, length, opening, leaving, fits & inside


@triton.jit
def _append_side(
    x, ring, sinks, planes, counts, lengths, table, table_b, state, sink_slots, ring_slots, tokens, heads,
    L: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, PAGE: tl.constexpr, GROWS: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """A program of `_append_kernel`, for keys (SIDE 0) or for values (1); arguments as there."""
    x, xb, xh, xt = x
    ring, rb, rh, rt = ring
    sinks, fb, fh, ft = sinks
    b, h0, h, t, live = vectors(tokens, heads, ACROSS, ALONG)
    ring_row, sink_row = b, b
    if PAGE > 0:
        sink_row, ring_row = tl.load(counts + b * 6 + 1).to(tl.int64), tl.load(counts + b * 6 + 3).to(tl.int64)
    n_sinks, start, in_ring, length, opening, _, fits = _counts(
        counts, lengths, b, True, sink_slots, ring_slots, tokens, tl.load(state + 2), PAGE
    )  # fmt: skip
    c = tl.arange(0, padded(D))[None, :]
    live = live & fits
    rank = in_ring + t - opening  # in the ring, the oldest being 0
    leaves = live & (rank >= ring_slots)
    place = ring + ring_row * rb + h * rh + (start + tl.maximum(rank, 0)) % ring_slots * rt
    old = tl.load(place[:, None] + c, mask=leaves[:, None] & (c < D), other=0.0)
    slot = length + rank - ring_slots
    if PAGE > 0:
        slot = tl.maximum(slot, 0)
        page = tl.load(table + b * table_b + slot // PAGE, mask=leaves, other=0).to(tl.int64)
        store_tile(old, leaves, page, b, h0, slot % PAGE, planes, L, D, ACROSS)
    elif GROWS:  # the chunk that holds the slot, nearly always the last; its planes are as far from the first one's as the table says
        rotation, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh = planes
        only = length + in_ring - opening - ring_slots  # of the one token
        first = tl.load(table + 1)
        row = table + (tl.load(state + 3) - 1) * 8
        begin = tl.load(row)
        while begin > tl.maximum(only, 0):
            row -= 8
            begin = tl.load(row)
        capacity = tl.load(row + 1)
        UNIT: tl.constexpr = 2 if codes.dtype.element_ty.primitive_bitwidth == 8 else 1  # the table counts words of 16 bits
        codes += tl.multiple_of(tl.load(row + 2 + 3 * SIDE), 16) * UNIT
        high += tl.multiple_of(tl.load(row + 3 + 3 * SIDE), 16) * 2
        cb, ch, hb, hh = cb // first * capacity, ch // first * capacity, hb // first * capacity, hh // first * capacity
        if L.span != "once":
            scales += tl.multiple_of(tl.load(row + 4 + 3 * SIDE), 16)
            sb, sh = sb // first * capacity, sh // first * capacity
        planes = rotation, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh
        store_tile(old, leaves, b, b, h0, slot - begin, planes, L, D, ACROSS)
    else:
        store_tile(old, leaves, b, b, h0, slot, planes, L, D, ACROSS)
    new = tl.load(x + (b * xb + h * xh + t * xt)[:, None] + c, mask=live[:, None] & (c < D), other=0.0)
    tl.debug_barrier()  # before what others of this program have read is overwritten
    tl.store(place[:, None] + c, new, mask=(live & (t >= opening))[:, None] & (c < D))
    sink = sinks + sink_row * fb + h * fh + (n_sinks + t) * ft
    tl.store(sink[:, None] + c, new, mask=(live & (t < opening))[:, None] & (c < D))


@triton.jit(do_not_specialize=["table_b", "sink_slots", "ring_slots", "tokens", "heads", "batch"])
def _append_kernel(
    key, k_ring, k_sinks, k_planes, value, v_ring, v_sinks, v_planes, counts, lengths, table, table_b, state,
    sink_slots, ring_slots, tokens, heads, batch,
    K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DV: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, PAGE: tl.constexpr,
    GROWS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of ALONG tokens and ACROSS heads, B, 2): keys, values. PAGE: tokens of a page; 0: storage that counts on the device,
    which may have many chunks if it GROWS. Strides are in elements, of packed codes and high bits in words of 16 bits.

    key       [B, H, tokens, D] model dtype, channels contiguous; `tokens` <= `ring_slots`, 1 if GROWS
    k_ring    [F, H, ring_slots, D] model dtype                k_sinks   [E, H, sink_slots, D] model dtype; F and E are B without pages
              each with its strides over the first three dimensions
    k_planes  `plane_arguments`, as of `triton_quantize._quantize_kernel`; without pages, planes of the first chunk
    value, v_ring, v_sinks, v_planes   the same of values, [.., DV]
    counts    int32 [B, 6]: `pages.COLUMNS`, contiguous; without pages [B, 2]: `Buffers.lengths`
    lengths   int32 [B], read with pages
    table     int32 [B, P]: table_b; if it GROWS, int64 [chunks, 8]: `QuantizedRegion.table`
    state     int32 [3 or more]: `pages.STATE`, or `segments.Buffers`
    heads     H                                                batch     B
    """
    if tl.program_id(2) == 0:
        _append_side(
            key, k_ring, k_sinks, k_planes, counts, lengths, table, table_b, state, sink_slots, ring_slots, tokens, heads,
            K, D, ACROSS, ALONG, PAGE, GROWS, 0,
        )  # fmt: skip
    else:
        _append_side(
            value, v_ring, v_sinks, v_planes, counts, lengths, table, table_b, state, sink_slots, ring_slots, tokens, heads,
            V, DV, ACROSS, ALONG, PAGE, GROWS, 1,
        )  # fmt: skip
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    if tl.atomic_add(state, 1, sem="acq_rel") == programs - 1:
        room = tl.load(state + 2)
        dropped = 0
        for begin in range(0, batch, ROWS):
            b = begin + tl.arange(0, ROWS)
            n_sinks, start, in_ring, length, opening, leaving, fits = _counts(
                counts, lengths, b, b < batch, sink_slots, ring_slots, tokens, room, PAGE
            )  # fmt: skip
            if PAGE > 0:
                tl.store(counts + b * 6 + 2, n_sinks + opening, mask=fits)
                tl.store(counts + b * 6 + 4, (start + leaving) % ring_slots, mask=fits)
                tl.store(counts + b * 6 + 5, tl.minimum(in_ring + tokens - opening, ring_slots), mask=fits)
                tl.store(lengths + b, length + leaving, mask=fits)
            else:
                tl.store(counts + b * 2, n_sinks + length + in_ring + tokens, mask=fits)
                tl.store(counts + b * 2 + 1, length + leaving, mask=fits)
            dropped = tl.maximum(dropped, tl.max(tl.where(fits | (b >= batch), 0, tokens), 0))
        tl.store(state + 1, tl.load(state + 1) + dropped)
        tl.store(state, 0)
