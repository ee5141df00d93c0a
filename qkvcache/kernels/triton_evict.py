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
from .triton_dequantize import known, padded, plane_arguments, table_of, tile
from .triton_quantize import store_tile

ORDERED = 1024
"""Columns of the order that a program compares at once."""
_MOST = tl.constexpr(2**63 - 1)
ABSENT, ZERO, GIVEN = map(tl.constexpr, range(3))
"""Of a record, what `append_token` writes."""


def append_token(static: StaticTensors, x: Pair, new: Sequence[Tensor | None], is_valid: Tensor | None) -> None:
    """`evict.append_token`."""
    ring, shown, (positions, *others) = static.ring, static.shown, static.records.values()
    batch, heads, width, _ = ring[0].shape
    tokens = [token if token.stride(3) == 1 else token.contiguous() for token in x]
    arguments: list[object] = []
    for zone, token in zip(ring, tokens, strict=True):
        arguments += [zone, token, *token.stride()[:2]]
    arguments.append(positions)
    kinds = [ABSENT.value] * 3
    for i in range(3):
        record, value = (others[i], new[i]) if i < len(others) else (positions, None)
        arguments += [record, *((positions, 0, 0) if value is None else (value, *value.stride()[:2]))]
        kinds[i] = ABSENT.value if i >= len(others) else ZERO.value if value is None else GIVEN.value
    arguments += [shown, static.seen, static.columns, *((shown, 0) if is_valid is None else (is_valid, is_valid.stride(0)))]
    arguments += [heads, width, positions.shape[2], shown.shape[1]]
    sizes = [size for token in tokens for size in (token.shape[3], padded(token.shape[3]))]
    across = max(min(triton.next_power_of_2(heads), 4096 // max(sizes)), 1)
    with torch.cuda.device_of(static.seen):
        _append_kernel[(batch,)](*arguments, *sizes, *kinds, is_valid is not None, across)


@triton.jit
def _enter(ring, x, xb, xh, b, h, heads, at, width, D: tl.constexpr, P: tl.constexpr):
    """Copies the vectors of the heads `h`, int [ACROSS], of row `b` of `x` into column `at` of `ring`."""
    c = tl.arange(0, P)[None, :]
    inside = (h < heads)[:, None] & (c < D)
    token = tl.load(x + (b * xb + h * xh)[:, None] + c, mask=inside)
    tl.store(ring + (((b * heads + h) * width + at) * D)[:, None] + c, token, mask=inside)


@triton.jit
def _note(record, new, nb, nh, b, h, heads, at, KIND: tl.constexpr):
    """Writes the new value of a record to `record + at`, int [ACROSS], for the heads `h` of row `b`: `new` if GIVEN, 0 if ZERO."""
    if KIND == GIVEN:
        tl.store(record + at, tl.load(new + b * nb + h * nh, mask=h < heads), mask=h < heads)
    elif KIND == ZERO:
        tl.store(record + at, tl.zeros(h.shape, record.dtype.element_ty), mask=h < heads)


@triton.jit(do_not_specialize=["heads", "width", "record_columns", "all_columns"])
def _append_kernel(
    kring, kx, kxb, kxh, vring, vx, vxb, vxh, positions, r0, n0, n0b, n0h, r1, n1, n1b, n1h, r2, n2, n2b, n2h,
    shown, seen, columns, is_valid, real_b, heads, width, record_columns, all_columns,
    KD: tl.constexpr, KP: tl.constexpr, VD: tl.constexpr, VP: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, REAL: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Stores one token of each row in the ring. Grid (B).

    Arguments of keys begin with k, those of values with v; r0 to r2 are records, n0 to n2 their new values. Strides are in elements.

    ring       [B, H, width, D] model dtype, contiguous              x          [B, H, 1, D] likewise, channels contiguous: xb, xh
    positions  int32 [B, H, record_columns], contiguous: of slots of the region, then of the ring
    r0, r1, r2   fp32, likewise; R0, R1, R2 (ABSENT, ZERO, GIVEN) say what is written: nothing, 0, or n0, n1, n2
    n0, n1, n2   fp32 [B, H, 1]: n0b, n0h, n1b, n1h, n2b, n2h over B and H
    shown      bool [B, all_columns], contiguous: sinks, region, ring   seen   int64 [B]: tokens of a row without padding
    columns    int64 [1]: tokens of a row with padding
    is_valid   bool [B]: real_b; read if REAL                        heads      H, in tiles of ACROSS; D channels, padded to P
    """
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(seen + b)
    total = tl.load(columns)
    if REAL:
        more = tl.load(is_valid + b * real_b).to(tl.int64)
    else:
        more = tl.full((), 1, tl.int64)
    at = count % width
    position = tl.where(more > 0, count, -1).to(tl.int32)
    for h0 in range(0, heads, ACROSS):
        h = (h0 + tl.arange(0, ACROSS)).to(tl.int64)
        _enter(kring, kx, kxb, kxh, b, h, heads, at, width, KD, KP)
        _enter(vring, vx, vxb, vxh, b, h, heads, at, width, VD, VP)
        column = (b * heads + h) * record_columns + (record_columns - width + at)
        tl.store(positions + column, tl.broadcast_to(position, [ACROSS]), mask=h < heads)
        _note(r0, n0, n0b, n0h, b, h, heads, column, R0)
        _note(r1, n1, n1b, n1h, b, h, heads, column, R1)
        _note(r2, n2, n2b, n2h, b, h, heads, column, R2)
    tl.store(shown + b * all_columns + (all_columns - width + at), more > 0)
    tl.debug_barrier()  # before what others of this program have read is overwritten
    tl.store(seen + b, count + more)
    tl.store(columns, total + 1, mask=b == 0)


def evict_token(static: StaticTensors, order: Tensor) -> Tensor:
    """`evict.evict_token`, for codecs that `triton_quantize.supports` and whose heads share no buffer kept for each token."""
    arguments: list[object] = []
    constants: list[object] = []
    ring, seen, (positions, *others) = static.ring, static.seen, static.records.values()
    layouts = [known(codec, x) for codec, x in zip(static.codecs, ring, strict=True)]
    batch, heads, width, _ = ring[0].shape
    for layout, planes, first, x in zip(layouts, static.planes, static.first, ring, strict=True):
        arguments += [x, first, table_of(layout, x), *plane_arguments(layout, planes, x)]
        constants += [layout, x.shape[3], padded(x.shape[3])]
    where = torch.empty(batch, heads, dtype=torch.int64, device=seen.device)
    arguments += [positions, *others, *[positions] * (3 - len(others)), static.shown, seen, order.contiguous(), where]
    _, along, warps = tile(tuple(layouts), 1, 1, max(padded(x.shape[3]) for x in ring), ring[0].element_size())
    sizes = heads, static.first[0].shape[2], width, positions.shape[2]
    with torch.cuda.device_of(seen):
        _evict_kernel[(heads, batch)](*arguments, *sizes, *constants, len(others), along, ORDERED, num_warps=warps)
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
def _retire_side(
    ring, first, table, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh, slot, b, h, heads, exact, width, at,
    L: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """A program of `_evict_kernel`, for keys or for values: column `at` of the ring into slot `slot` of the region, or, if it is less than
    -1, into sink `-2 - slot`."""
    c = tl.arange(0, P)[None, :]
    inside = tl.arange(0, ALONG) == 0  # one token, in as many rows as a product has
    mask = inside[:, None] & (c < D)
    raw = tl.load(ring + ((b * heads + h) * width + at) * D + c + 0 * inside[:, None], mask=mask, other=0.0)
    tl.store(first + ((b * heads + h) * exact - 2 - slot) * D + c + 0 * inside[:, None], raw, mask=mask & (slot < -1))
    store_tile(
        raw, inside & (slot >= 0), b, b, h, slot + tl.arange(0, ALONG), table, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh,
        L, D, P, 1, ALONG,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "exact", "width", "record_columns"])
def _evict_kernel(
    kring, kfirst, ktable, kcodes, kcb, kch, khigh, khb, khh, kscales, ksb, ksh, kcenter, keb, keh,
    vring, vfirst, vtable, vcodes, vcb, vch, vhigh, vhb, vhh, vscales, vsb, vsh, vcenter, veb, veh,
    positions, r0, r1, r2, shown, seen, order, where, heads, exact, width, record_columns,
    KL: tl.constexpr, KD: tl.constexpr, KP: tl.constexpr,
    VL: tl.constexpr, VD: tl.constexpr, VP: tl.constexpr,
    RECORDS: tl.constexpr, ALONG: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Moves the oldest token of the ring to the sinks or into the region, or drops it. Grid (H, B).

    Arguments of keys begin with k, those of values with v. Strides are in elements, of packed codes and high bits in words of 16 bits.

    ring       [B, H, width, D] model dtype, contiguous              first      sinks [B, H, exact, D] likewise
    table, codes, high, scales, center with their strides, L, D and P: as of `triton_quantize._encode_kernel`
    positions  int32 [B, H, record_columns], r0, r1, r2 fp32 likewise, contiguous; RECORDS: how many of these there are
    shown      bool [B, exact + record_columns], contiguous          seen       int64 [B]: tokens of a row without padding
    order      int64 [B, H, record_columns - width + 1], contiguous: of each slot of the region, then of the token itself
    where      int64 [B, H], contiguous: output, as `evict.evict_token` returns it
    heads      H              N   entries of `order` that are compared at once        ALONG   rows of the tile that quantizes
    """
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    slots = record_columns - width
    at = tl.load(seen + b) % width
    row = (b * heads + h) * record_columns
    column = row + slots + at
    position = tl.load(positions + column)
    slot = _first_least(order + (b * heads + h) * (slots + 1), slots + 1, N)
    slot = tl.where(slot < slots, slot, -1)
    slot = tl.where((position >= 0) & (position < exact), -2 - position, slot)
    tl.store(where + b * heads + h, slot.to(tl.int64))
    _retire_side(
        kring, kfirst, ktable, kcodes, kcb, kch, khigh, khb, khh, kscales, ksb, ksh, kcenter, keb, keh,
        slot, b, h, heads, exact, width, at, KL, KD, KP, ALONG,
    )  # fmt: skip
    _retire_side(
        vring, vfirst, vtable, vcodes, vcb, vch, vhigh, vhb, vhh, vscales, vsb, vsh, vcenter, veb, veh,
        slot, b, h, heads, exact, width, at, VL, VD, VP, ALONG,
    )  # fmt: skip
    moves = slot >= 0
    tl.store(positions + row + slot, position, mask=moves)
    if RECORDS > 0:
        tl.store(r0 + row + slot, tl.load(r0 + column), mask=moves)
    if RECORDS > 1:
        tl.store(r1 + row + slot, tl.load(r1 + column), mask=moves)
    if RECORDS > 2:
        tl.store(r2 + row + slot, tl.load(r2 + column), mask=moves)
    shows = shown + b * (exact + record_columns)
    tl.store(shows + tl.where(slot < 0, -2 - slot, exact + slot), (slot < 0) | (position >= 0), mask=(h == 0) & (slot != -1))
    tl.store(shows + exact + slots + at, False, mask=h == 0)
    tl.store(positions + column, -1)  # all have read it: the search for the least made them wait for each other
