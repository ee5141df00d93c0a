"""All tokens of rows of different lengths, one row after another, in one launch: what `reference.gather_rows` computes.

A program writes a tile of tokens of keys or of values: it reads them where they are, in the sinks, in the pages, which it dequantizes, in
the ring, or among the new tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.paged_inputs import PagedInputs
from ..kernels.segments import Pair
from ..kernels.store.reference import GATHER_TILE
from ..kernels.store.triton_dequantize import (
    load_tile,
    load_vectors,
    padded,
    planes_to_read,
    store_vectors,
    tile_of_pages,
)
from ..kernels.store.triton_store import contiguous


def arguments_of(inputs: PagedInputs) -> tuple[list[tuple], list[Any], tuple[int, int, int]]:
    """Arguments that depend on neither rows nor tokens, computed once: sinks, ring and planes of keys and of values;
    constants; the tile."""
    if "gather" not in inputs.prepared.of_layer:
        pages, sides, constants = inputs.pages, list[tuple](), list[Any]()
        parts = zip(pages.codecs, pages.planes, pages.statistics, inputs.sinks, inputs.ring, strict=True)
        for codec, each, once, sinks, ring in parts:
            layout, planes = planes_to_read(codec, each | once, ring)
            sides.append((sinks, *sinks.stride()[:3], ring, *ring.stride()[:3], planes))
            constants += [layout, ring.shape[3]]
        sizes = tile_of_pages(tuple(constants[::2]), inputs.ring[0].shape[1], GATHER_TILE, max(map(padded, constants[1::2])))
        inputs.prepared.of_layer["gather"] = sides, constants, sizes
    return inputs.prepared.of_layer["gather"]


def gather_rows(inputs: PagedInputs, new: Pair, starts: tuple[Tensor, Tensor], tiles: Tensor, out: Pair) -> None:
    """Run `reference.gather_rows` in one launch."""
    pages, heads = inputs.pages, out[0].shape[1]
    rows: Tensor = inputs.rows  # type: ignore[assignment]
    lengths: Tensor = pages.lengths  # type: ignore[assignment]
    sides, constants, (across, along, warps) = arguments_of(inputs)
    arguments: list[object] = []
    for side, fresh, x in zip(sides, contiguous(new), out, strict=True):
        arguments.append((x, *x.stride()[1:3], fresh, *fresh.stride()[1:3], *side))
    grid = (len(tiles) * (GATHER_TILE // along), triton.cdiv(heads, across), 2)
    with torch.cuda.device_of(out[0]):
        _gather_rows_kernel[grid](
            *arguments, tiles, *starts, rows, rows.stride(0), lengths, *lengths.stride(), pages.table, pages.table.stride(0),
            max(inputs.slots[2], 1), heads, *constants, across, along, GATHER_TILE, pages.page_size, pages.firsts[0],
            num_warps=warps,
        )  # fmt: skip


@triton.jit
def _gather_side(
    side, tiles, new_starts, out_starts, rows, rows_b, lengths, lengths_b, table, table_b, ring_slots, heads,
    L: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """A program of `_gather_rows_kernel`, for keys or for values; arguments as there."""
    out, oh, ot, new, nh, nt, sinks, fb, fh, ft, ring, rb, rh, rt, planes = side
    PARTS: tl.constexpr = TILE // ALONG
    entry = tiles + tl.program_id(0) // PARTS * 2
    b = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1) + tl.program_id(0) % PARTS * ALONG
    h0 = (tl.program_id(1) * ACROSS).to(tl.int64)
    begin = tl.load(rows + b * rows_b)
    sink_row = tl.load(rows + b * rows_b + 1).to(tl.int64)
    n_sinks = tl.load(rows + b * rows_b + 3)
    ring_row = tl.load(rows + b * rows_b + 2).to(tl.int64)
    start = tl.load(rows + b * rows_b + 4)
    in_ring = tl.load(rows + b * rows_b + 5)
    quantized = tl.maximum(tl.load(lengths + b * lengths_b) - begin, 0)
    new_start = tl.load(new_starts + b)
    out_start = tl.load(out_starts + b)
    total = tl.load(out_starts + b + 1) - out_start

    i = tl.arange(0, ACROSS * ALONG)
    h = h0 + i % ACROSS
    t = first + i // ACROSS
    live = (t < total) & (h < heads)
    at = out + (h * oh + (out_start + t).to(tl.int64) * ot)
    if first < n_sinks:
        _copy(sinks + (sink_row * fb + h * fh + t.to(tl.int64) * ft), at, live & (t < n_sinks), D)
    place = t - n_sinks  # in the pages, then in the ring, then among the new tokens
    if (first + ALONG > n_sinks) & (first < n_sinks + quantized):
        dequantized = live & (place >= 0) & (place < quantized)
        slot = begin + tl.maximum(place, 0)
        page = tl.load(table + b * table_b + slot // PAGE, mask=dequantized, other=BASE).to(tl.int64) - BASE
        store_vectors(at, load_tile(dequantized, page, b, h0, slot % PAGE, planes, L, D, ACROSS), dequantized, D)
    place -= quantized
    if (first + ALONG > n_sinks + quantized) & (first < n_sinks + quantized + in_ring):
        slot = (start + tl.maximum(place, 0)) % ring_slots
        _copy(ring + (ring_row * rb + h * rh + slot * rt), at, live & (place >= 0) & (place < in_ring), D)
    place -= in_ring
    if first + ALONG > n_sinks + quantized + in_ring:
        _copy(new + (h * nh + (new_start + place).to(tl.int64) * nt), at, live & (place >= 0), D)


@triton.jit
def _copy(source, at, live, D: tl.constexpr):
    """Copies vectors of D channels from the pointers `source` to `at`, where `live`, each [N]."""
    store_vectors(at, load_vectors(source, live, D), live, D)


@triton.jit(do_not_specialize=["rows_b", "lengths_b", "table_b", "ring_slots", "heads"])
def _gather_rows_kernel(
    key, value, tiles, new_starts, out_starts, rows, rows_b, lengths, lengths_b, table, table_b, ring_slots, heads,
    K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DV: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of TILE tokens, each in parts of ALONG; blocks of ACROSS heads; 2): keys, values. Tensors of vectors come with their
    strides, in elements, of packed codes and high bits in words of 16 bits.

    key        output [1, H, T, D] model dtype, channels contiguous, and new keys [1, H, N, D] likewise: over heads and tokens; sinks
               [E, H, S, D] model dtype, and rings [F, H, ring_slots, D]: over the first three dimensions; planes of the first
               page, as in `triton_dequantize._dequantize_pages_kernel`; K: layout
    value, V   the same of values, [.., DV]
    tiles      int32 [M, 2]: `store.reference.gather_tiles`
    new_starts, out_starts   int32 [B + 1]: the first token of a row among the new ones and in the output
    rows       int32 [B, 8], `paged_inputs.COLUMNS`: rows_b                        lengths  int32 [B]: lengths_b
    table      int32 or int64 [B, pages], BASE being the first page: table_b
    heads      H
    """
    if tl.program_id(2) == 0:
        _gather_side(
            key, tiles, new_starts, out_starts, rows, rows_b, lengths, lengths_b, table, table_b, ring_slots, heads, K, D, ACROSS, ALONG,
            TILE, PAGE, BASE,
        )  # fmt: skip
    else:
        _gather_side(
            value, tiles, new_starts, out_starts, rows, rows_b, lengths, lengths_b, table, table_b, ring_slots, heads, V, DV, ACROSS, ALONG,
            TILE, PAGE, BASE,
        )  # fmt: skip
