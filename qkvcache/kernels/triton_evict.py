"""`evict.py` in one launch before attention and one after it: little data moves, so that launches are what it costs.

`append_token` has a program for each row, which counts the row's token once it has read the count. `evict_token` has one for each head,
which looks through the order of its tokens; torch.compile makes a minimum over thousands of columns one slow block of threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .evict import StaticTensors
from .segments import Pair
from .triton_dequantize import load_vectors, padded, store_vectors, tile
from .triton_quantize import contiguous, launched, store_tile

ORDERED = 1024
"""Columns of the order that a program compares at once."""
_MOST = tl.constexpr(2**63 - 1)


def append_token(static: StaticTensors, x: Pair, new: Sequence[Tensor | None], is_valid: Tensor | None) -> None:
    """`evict.append_token`."""
    records = tuple(static.records.values())
    given = False, *(value is not None for value in new)
    values = (record if value is None else value for record, value in zip(records, (None, *new), strict=True))
    batch, heads, width, _ = static.ring[0].shape
    key, value = ((token, *token.stride()[:2]) for token in contiguous(x))
    mask, lengths = static.column_mask, static.row_lengths
    padding = (mask, 0) if is_valid is None else (is_valid, is_valid.stride(0))
    sizes = [side.shape[3] for side in x]
    across = max(min(triton.next_power_of_2(heads), 4096 // max(map(padded, sizes))), 1)
    with torch.cuda.device_of(lengths):
        _append_kernel[(batch,)](
            static.ring, key, value, records, tuple((entry, *entry.stride()[:2]) for entry in values), mask, lengths, static.columns,
            *padding, heads, width, records[0].shape[2], mask.shape[1], *sizes, given, is_valid is not None, across,
        )  # fmt: skip


@triton.jit
def _enter(ring, x, b, h, heads, at, width, D: tl.constexpr):
    """Copies the vectors of the heads `h`, int [ACROSS], of row `b` of `x` into column `at` of `ring`."""
    x, xb, xh = x
    token = load_vectors(x + (b * xb + h * xh), h < heads, D)
    store_vectors(ring + ((b * heads + h) * width + at) * D, token, h < heads, D)


@triton.jit(do_not_specialize=["heads", "width", "record_columns", "all_columns"])
def _append_kernel(
    ring, key, value, records, new, column_mask, row_lengths, columns, is_valid, real_b, heads, width, record_columns, all_columns,
    D: tl.constexpr, DV: tl.constexpr, GIVEN: tl.constexpr, REAL: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Stores one token of each row in the ring. Grid (B). Strides are in elements.

    ring       of keys [B, H, width, D] and of values [.., DV], model dtype, contiguous
    key, value   [B, H, 1, D] and [.., DV] likewise, channels contiguous, each with its strides over rows and heads
    records    [B, H, record_columns] each, contiguous, of slots of the pages, then of the ring: int32 positions, then as many in fp32 as a
               policy keeps
    new        values of the records, fp32 [B, H, 1], each with its strides over rows and heads; read where GIVEN, else 0 is written
    column_mask      bool [B, all_columns], contiguous: sinks, pages, ring   row_lengths   int64 [B]: tokens of a row without padding
    columns    int64 [1]: tokens of a row with padding
    is_valid   bool [B]: real_b; read if REAL                        heads      H, in tiles of ACROSS
    """
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(row_lengths + b)
    total = tl.load(columns)
    if REAL:
        more = tl.load(is_valid + b * real_b).to(tl.int64)
    else:
        more = tl.full((), 1, tl.int64)
    at = count % width
    position = tl.where(more > 0, count, -1).to(tl.int32)
    for h0 in range(0, heads, ACROSS):
        h = (h0 + tl.arange(0, ACROSS)).to(tl.int64)
        _enter(ring[0], key, b, h, heads, at, width, D)
        _enter(ring[1], value, b, h, heads, at, width, DV)
        column = (b * heads + h) * record_columns + (record_columns - width + at)
        tl.store(records[0] + column, tl.broadcast_to(position, [ACROSS]), mask=h < heads)
        for i in tl.static_range(1, len(GIVEN)):
            x, xb, xh = new[i]
            entry = tl.load(x + b * xb + h * xh, mask=h < heads) if GIVEN[i] else tl.zeros([ACROSS], tl.float32)
            tl.store(records[i] + column, entry, mask=h < heads)
    tl.store(column_mask + b * all_columns + (all_columns - width + at), more > 0)
    tl.debug_barrier()  # before what others of this program have read is overwritten
    tl.store(row_lengths + b, count + more)
    tl.store(columns, total + 1, mask=b == 0)


def evict_token(static: StaticTensors, order: Tensor) -> Tensor:
    """`evict.evict_token`, for codecs that `triton_quantize.supports` and whose heads share no buffer kept for each token."""
    inputs, row_lengths, records = static.inputs, static.row_lengths, tuple(static.records.values())
    ring, sinks, pages = inputs.ring, inputs.sinks, inputs.pages
    batch, heads, width, _ = ring[0].shape
    k_planes, v_planes, constants, _, _ = launched(pages, ring)
    where = torch.empty(batch, heads, dtype=torch.int64, device=row_lengths.device)
    layouts, dims = (constants[0], constants[2]), (constants[1], constants[3])
    _, along, warps = tile(layouts, 1, 1, max(map(padded, dims)), ring[0].element_size())  # type: ignore[arg-type]
    with torch.cuda.device_of(row_lengths):
        _evict_kernel[(heads, batch)](
            (ring[0], sinks[0], k_planes), (ring[1], sinks[1], v_planes), pages.table, pages.table.stride(0), records, static.column_mask,
            row_lengths, order.contiguous(), where, heads, sinks[0].shape[2], width, records[0].shape[2], *constants[:4], along, ORDERED,
            pages.page_size, pages.firsts[0], num_warps=warps,
        )  # fmt: skip
    return where


@triton.jit
def _first_least(row, columns, N: tl.constexpr):
    """The index of the least of `columns` int64 at the pointer `row`, the first of equal ones; N are compared at once."""
    best = tl.full([N], _MOST, tl.int64)
    index = tl.zeros([N], tl.int32)
    for start in range(0, columns, N):
        column = start + tl.arange(0, N)
        x = tl.load(row + column, mask=column < columns, other=_MOST)
        index = tl.where(x < best, column, index)
        best = tl.minimum(x, best)
    return tl.min(tl.where(best == tl.min(best, 0), index, columns), 0)


@triton.jit
def _retire_side(side, slot, page, offset, b, h, heads, exact, width, at, L: tl.constexpr, D: tl.constexpr, ALONG: tl.constexpr):
    """A program of `_evict_kernel`, for keys or for values: column `at` of the ring into `offset` of `page` if `slot`
    is not negative, or, if it is less than -1, into sink `-2 - slot`."""
    ring, sinks, planes = side
    i = tl.arange(0, ALONG)  # one token, in as many rows as a product has
    raw = load_vectors(ring + ((b * heads + h) * width + at) * D + 0 * i, i == 0, D)
    store_vectors(sinks + ((b * heads + h) * exact - 2 - slot) * D + 0 * i, raw, (i == 0) & (slot < -1), D)
    store_tile(raw, (i == 0) & (slot >= 0), page, b, h, offset + i, planes, L, D, 1)


@triton.jit(do_not_specialize=["heads", "exact", "width", "record_columns", "table_b"])
def _evict_kernel(
    key, value, table, table_b, records, column_mask, row_lengths, order, where, heads, exact, width, record_columns,
    K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DV: tl.constexpr, ALONG: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    BASE: tl.constexpr,
):  # fmt: skip
    """Moves the oldest token of the ring to the sinks or into the pages, or drops it. Grid (H, B).

    key        the ring [B, H, width, D] model dtype, contiguous; the sinks [B, H, exact, D] likewise; planes, and K, as of
               `triton_quantize._quantize_kernel`
    value, V   the same of values, [.., DV]
    table      int64 [B, P], entries of pages of PAGE tokens, BASE being the first: table_b
    records    as of `_append_kernel`
    column_mask      bool [B, exact + record_columns], contiguous          row_lengths       int64 [B]: tokens of a row without padding
    order      int64 [B, H, record_columns - width + 1], contiguous: of each slot of the pages, then of the token itself
    where      int64 [B, H], contiguous: output, as `evict.evict_token` returns it
    heads      H              N   entries of `order` that are compared at once        ALONG   rows of the tile that quantizes
    """
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    slots = record_columns - width
    at = tl.load(row_lengths + b) % width
    row = (b * heads + h) * record_columns
    column = row + slots + at
    position = tl.load(records[0] + column)
    slot = _first_least(order + (b * heads + h) * (slots + 1), slots + 1, N)
    slot = tl.where(slot < slots, slot, -1)
    slot = tl.where((position >= 0) & (position < exact), -2 - position, slot)
    tl.store(where + b * heads + h, slot.to(tl.int64))
    moves = slot >= 0
    page = tl.load(table + b * table_b + slot // PAGE, mask=moves, other=BASE).to(tl.int64) - BASE
    _retire_side(key, slot, page, slot % PAGE, b, h, heads, exact, width, at, K, D, ALONG)
    _retire_side(value, slot, page, slot % PAGE, b, h, heads, exact, width, at, V, DV, ALONG)
    for i in tl.static_range(len(records)):
        tl.store(records[i] + row + slot, tl.load(records[i] + column), mask=moves)
    here = column_mask + b * (exact + record_columns)
    tl.store(here + tl.where(slot < 0, -2 - slot, exact + slot), (slot < 0) | (position >= 0), mask=(h == 0) & (slot != -1))
    tl.store(here + exact + slots + at, False, mask=h == 0)
    tl.store(records[0] + column, -1)  # all have read it: the search for the least made them wait for each other
