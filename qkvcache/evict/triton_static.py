"""`static.py` in one launch before attention and one after it: little data moves, so that launches are what it costs.

`append_token` has a program for each row, which counts the row's token once it has read the count. `evict_token` has one for each head,
which looks through the order of its tokens; torch.compile makes a minimum over thousands of columns one slow block of threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.segments import Pair
from ..kernels.store.triton_dequantize import load_vectors, padded, side_of, store_vectors
from ..kernels.store.triton_quantize import store_tile
from ..kernels.store.triton_store import contiguous, launched
from .static import StaticTensors

ORDERED = 1024
"""Columns of the order that a program compares at once."""
_MOST = tl.constexpr(2**63 - 1)


def append_token(static: StaticTensors, x: Pair, new: Sequence[Tensor | None], is_valid: Tensor | None) -> None:
    """`static.append_token`."""
    records = tuple(static.records.values())
    given = False, *(value is not None for value in new)
    values = (record if value is None else value for record, value in zip(records, (None, *new), strict=True))
    batch, heads, width, _ = static.ring[0].shape
    sides = tuple((held, token, *token.stride()[:2]) for held, token in zip(static.ring, contiguous(x), strict=True))
    mask, lengths = static.column_mask, static.row_lengths
    padding = (mask, 0) if is_valid is None else (is_valid, is_valid.stride(0))
    sizes = tuple(side.shape[3] for side in x)
    across = max(min(triton.next_power_of_2(heads), 4096 // max(map(padded, sizes))), 1)
    with torch.cuda.device_of(lengths):
        _append_kernel[(batch,)](
            sides, records, tuple((entry, *entry.stride()[:2]) for entry in values), mask, lengths, static.columns, *padding, heads, width,
            records[0].shape[2], mask.shape[1], sizes, given, is_valid is not None, across,
        )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "width", "record_columns", "all_columns"])
def _append_kernel(
    sides, records, fields, column_mask, row_lengths, columns, is_valid, real_b, heads, width, record_columns, all_columns,
    D: tl.constexpr, GIVEN: tl.constexpr, REAL: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Stores one token of each row in the ring. Grid (B). Strides are in elements.

    sides      of keys, then of values: the ring [B, H, width, D], model dtype, contiguous; the tokens [B, H, 1, D] likewise, channels
               contiguous, with strides over rows and heads
    records    [B, H, record_columns] each, contiguous, of slots of the pages, then of the ring: int32 positions, then as many in fp32 as a
               policy keeps
    fields     values of the records, fp32 [B, H, 1], each with its strides over rows and heads; read where GIVEN, else 0 is written
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
        for i in tl.static_range(2):
            ring, token, tb, th = sides[i]
            token = load_vectors(token + (b * tb + h * th), h < heads, D[i])
            store_vectors(ring + ((b * heads + h) * width + at) * D[i], token, h < heads, D[i])
        column = (b * heads + h) * record_columns + (record_columns - width + at)
        tl.store(records[0] + column, tl.broadcast_to(position, [ACROSS]), mask=h < heads)
        for i in tl.static_range(1, len(GIVEN)):
            x, xb, xh = fields[i]
            entry = tl.load(x + b * xb + h * xh, mask=h < heads) if GIVEN[i] else tl.zeros([ACROSS], tl.float32)
            tl.store(records[i] + column, entry, mask=h < heads)
    tl.store(column_mask + b * all_columns + (all_columns - width + at), more > 0)
    tl.debug_barrier()  # before what others of this program have read is overwritten
    tl.store(row_lengths + b, count + more)
    tl.store(columns, total + 1, mask=b == 0)


def evict_token(static: StaticTensors, order: Tensor) -> Tensor:
    """`static.evict_token`, for codecs that `triton_quantize.supports` and whose heads share no buffer kept for each token."""
    inputs, row_lengths, records = static.inputs, static.row_lengths, tuple(static.records.values())
    ring, sinks, pages = inputs.ring, inputs.sinks, inputs.pages
    batch, heads, width, _ = ring[0].shape
    planes, constants, _, warps = launched(pages, (ring[0][:, :1, :1], ring[1][:, :1, :1]))
    where = torch.empty(batch, heads, dtype=torch.int64, device=row_lengths.device)
    with torch.cuda.device_of(row_lengths):
        _evict_kernel[(heads, batch)](
            tuple(zip(ring, sinks, planes, strict=True)), pages.table, pages.table.stride(0), records, static.column_mask, row_lengths,
            order.contiguous(), where, heads, sinks[0].shape[2], width, records[0].shape[2], N=ORDERED, **constants, num_warps=warps,
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


@triton.jit(do_not_specialize=["heads", "exact", "width", "record_columns", "table_b"])
def _evict_kernel(
    stored, table, table_b, records, column_mask, row_lengths, order, where, heads, exact, width, record_columns,
    L: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """Moves the oldest token of the ring to the sinks or into the pages, or drops it. Grid (H, B).

    stored     of keys, then of values: the ring [B, H, width, D] model dtype, contiguous; the sinks [B, H, exact, D] likewise; planes, as
               of `triton_store._quantize_kernel`, as are the constants
    table      int64 [B, P], entries of pages of PAGE tokens, BASE being the first: table_b
    records    as of `_append_kernel`
    column_mask      bool [B, exact + record_columns], contiguous          row_lengths       int64 [B]: tokens of a row without padding
    order      int64 [B, H, record_columns - width + 1], contiguous: of each slot of the pages, then of the token itself
    where      int64 [B, H], contiguous: output, as `static.evict_token` returns it
    heads      H              N   entries of `order` that are compared at once
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
    n = tl.arange(0, ALONG)  # one token, in as many rows as a product has
    for i in tl.static_range(2):
        ring, sinks, planes = stored[i]
        raw = load_vectors(ring + ((b * heads + h) * width + at) * D[i] + 0 * n, n == 0, D[i])
        store_vectors(sinks + ((b * heads + h) * exact - 2 - slot) * D[i] + 0 * n, raw, (n == 0) & (slot < -1), D[i])
        store_tile(raw, (n == 0) & moves, page, b, h, slot % PAGE + n, planes, side_of(L, i), D[i], 1)
    for i in tl.static_range(len(records)):
        tl.store(records[i] + row + slot, tl.load(records[i] + column), mask=moves)
    here = column_mask + b * (exact + record_columns)
    tl.store(here + tl.where(slot < 0, -2 - slot, exact + slot), (slot < 0) | (position >= 0), mask=(h == 0) & (slot != -1))
    tl.store(here + exact + slots + at, False, mask=h == 0)
    tl.store(records[0] + column, -1)  # all have read it: the search for the least made them wait for each other
