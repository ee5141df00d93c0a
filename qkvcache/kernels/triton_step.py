"""Storing the tokens of a decode step in one launch that needs no number from the host: what `pages.step` computes, for
rows of any lengths.

A program stores a tile of new tokens (times heads) of keys or of values. Each token takes a slot of the ring, and the token that was there
is quantized into its page by the same program. The last program to finish updates the counts: by then all have read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from .launch import Launcher
from .pages import PagedInputs
from .segments import Pair
from .triton_dequantize import load_vectors, store_vectors, vectors
from .triton_quantize import contiguous, launched, store_tile

ROWS = tl.constexpr(128)
"""Rows whose counts are updated at once."""


def launch_of_step(inputs: PagedInputs, x: Pair) -> Callable[[Pair], None]:
    """`pages.step` for tokens like `x`, `[B, H, T, D]`, with all other arguments prepared."""
    batch, heads, tokens, _ = x[0].shape
    pages, rows = inputs.pages, inputs.rows
    if rows is None:
        raise ValueError("the inputs have no counts on the device")
    k_planes, v_planes, numbers, grid, warps = launched(pages, contiguous(x))
    zones = [(ring, *ring.stride()[:2], sinks, *sinks.stride()[:2]) for ring, sinks in zip(inputs.ring, inputs.sinks, strict=True)]
    constants: dict[str, Any] = dict(zip(("K", "D", "V", "DV", "ACROSS", "ALONG"), numbers, strict=True))
    run = Launcher(
        _step_kernel, x[0].device, ("key", "value"), k_stored=(*zones[0], k_planes), v_stored=(*zones[1], v_planes), control=inputs.control,
        rows=rows, rows_b=rows.stride(0), table=pages.table, table_b=pages.table.stride(0), sink_slots=inputs.sinks[0].shape[2],
        ring_slots=inputs.ring[0].shape[2], tokens=tokens, heads=heads, batch=batch, PAGE=pages.page_size, BASE=pages.firsts[0],
        num_warps=warps, **constants,
    )  # fmt: skip

    def launch(x: Pair) -> None:
        key, value = contiguous(x)
        run(grid, (key, *key.stride()[:3]), (value, *value.stride()[:3]))

    return launch


@triton.jit
def _step_side(
    side, stored, control, rows, rows_b, table, table_b, sink_slots, ring_slots, tokens, heads,
    L: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, PAGE: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """A program of `_step_kernel`, for keys or for values; arguments as there."""
    x, xb, xh, xt = side
    ring, rb, rh, sinks, fb, fh, planes = stored
    b, h0, h, t, live = vectors(tokens, heads, ACROSS, ALONG)
    quantized = tl.load(rows + b * rows_b + 6)
    seen = tl.load(rows + b * rows_b + 7)
    live = live & (seen + tokens <= tl.load(control + 2))
    opening = tl.minimum(tl.maximum(sink_slots - seen, 0), tokens)  # of the new tokens, the sinks
    in_ring = seen - tl.minimum(seen, sink_slots) - quantized
    rank = t - opening
    leaves = live & (rank + in_ring >= ring_slots)
    place = ring + b * rb + h * rh + (quantized + in_ring + tl.maximum(rank, 0)) % ring_slots * D
    old = load_vectors(place, leaves, D)
    token = quantized + in_ring + rank - ring_slots  # of the quantized ones
    page = tl.load(table + b * table_b + token // PAGE, mask=leaves, other=BASE).to(tl.int64) - BASE
    store_tile(old, leaves, page, b, h0, token % PAGE, planes, L, D, ACROSS)
    new = load_vectors(x + (b * xb + h * xh + t * xt), live, D)
    tl.debug_barrier()  # before what others of this program have read is overwritten
    store_vectors(place, new, live & (rank >= 0), D)
    store_vectors(sinks + b * fb + h * fh + (seen + t) * D, new, live & (rank < 0), D)


@triton.jit(do_not_specialize=["rows_b", "table_b", "sink_slots", "ring_slots", "tokens", "heads", "batch"])
def _step_kernel(
    key, value, k_stored, v_stored, control, rows, rows_b, table, table_b, sink_slots, ring_slots, tokens, heads, batch,
    K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DV: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, PAGE: tl.constexpr,
    BASE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of ALONG tokens and ACROSS heads, B, 2): keys, values. Tensors of vectors come with their strides, in elements, of packed
    codes and high bits in words of 16 bits.

    key       new keys [B, H, tokens, D] model dtype, channels contiguous: over the first three dimensions; `tokens` <= `ring_slots`
    k_stored  the ring [B, H, ring_slots, D] model dtype, tokens contiguous: over rows and heads; the sinks [B, H, sink_slots, D] likewise;
              planes of the first page, as of `triton_quantize._quantize_kernel`, as is K
    value, v_stored, V   the same of values, [.., DV]
    control   int32 [3], `pages.CONTROL`
    rows      int32 [B, 8], `pages.COLUMNS`: rows_b
    table     int32 or int64 [B, P], entries of pages of PAGE tokens, BASE being the first: table_b
    heads     H                        batch   B
    """
    if tl.program_id(2) == 0:
        _step_side(
            key, k_stored, control, rows, rows_b, table, table_b, sink_slots, ring_slots, tokens, heads, K, D, ACROSS, ALONG, PAGE, BASE
        )  # fmt: skip
    else:
        _step_side(
            value, v_stored, control, rows, rows_b, table, table_b, sink_slots, ring_slots, tokens, heads, V, DV, ACROSS, ALONG, PAGE, BASE
        )  # fmt: skip
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    if tl.atomic_add(control, 1, sem="acq_rel") == programs - 1:
        room = tl.load(control + 2)
        dropped = 0
        for begin in range(0, batch, ROWS):
            b = begin + tl.arange(0, ROWS)
            row = rows + b * rows_b
            seen = tl.load(row + 7, mask=b < batch, other=0)
            quantized = tl.load(row + 6, mask=b < batch, other=0)
            fits = seen + tokens <= room
            dropped = tl.maximum(dropped, tl.max(tl.where(fits | (b >= batch), 0, tokens), 0))
            changes = fits & (b < batch)
            seen += tokens
            first = tl.minimum(seen, sink_slots)
            quantized += tl.maximum(seen - sink_slots - quantized - ring_slots, 0)
            tl.store(row + 3, first, mask=changes)
            tl.store(row + 4, quantized % ring_slots, mask=changes)
            tl.store(row + 5, seen - first - quantized, mask=changes)
            tl.store(row + 6, quantized, mask=changes)
            tl.store(row + 7, seen, mask=changes)
        tl.store(control + 1, tl.load(control + 1) + dropped)
        tl.store(control, 0)
