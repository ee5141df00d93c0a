"""New tokens into sinks, ring and pages in one launch that needs no number from the host: what `pages.append_tokens` computes.

A program takes a tile of new tokens (times heads) of keys or of values. Each takes its slot in the ring, and the token that was there is
quantized into the row's pages by the same program. The last program to finish updates the counts: by then all have read them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .pages import PagedInputs
from .segments import Pair
from .triton_quantize import PreparedStep, store_tile, tile_of

ROWS = tl.constexpr(128)
"""Rows whose counts are updated at once."""


def append_launch(inputs: PagedInputs, x: Pair, state: Tensor) -> PreparedStep:
    """The launch for tokens like `x`."""
    pages = inputs.pages
    planes = pages.planes[0] | pages.statistics[0], pages.planes[1] | pages.statistics[1]
    before = inputs.rows, pages.lengths, pages.table, pages.table.stride(0), state
    return PreparedStep(_append_kernel, pages.codecs, x, planes, inputs.ring, inputs.sinks, 3, before, pages.page_size)


def append_tokens(inputs: PagedInputs, x: Pair, state: Tensor) -> None:
    """`pages.append_tokens`."""
    key, value = (side if side.stride(3) == 1 else side.contiguous() for side in x)
    append_launch(inputs, (key, value), state)((key, value))


@triton.jit
def _append_side(
    x, xb, xh, xt, ring, rb, rh, rt, sinks, fb, fh, ft, rotation, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh,
    rows, lengths, table, table_b, state, sink_slots, ring_slots, tokens, heads,
    L: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """A program of `_append_kernel`, for keys or for values; arguments as there."""
    b, h0, t0 = tile_of(heads, ACROSS, ALONG)
    row = rows + b * 6
    sink_row = tl.load(row + 1).to(tl.int64)
    n_sinks = tl.load(row + 2)
    ring_row = tl.load(row + 3).to(tl.int64)
    start = tl.load(row + 4)
    count = tl.load(row + 5)
    length = tl.load(lengths + b)
    opening = tl.minimum(tl.maximum(sink_slots - n_sinks, 0), tokens)  # of the new tokens, the sinks
    fits = length + tl.maximum(count + tokens - opening - ring_slots, 0) <= tl.load(state + 2)
    i = tl.arange(0, ACROSS * ALONG)
    c = tl.arange(0, P)[None, :]
    h = (h0 + i % ACROSS).to(tl.int64)
    t = t0 + i // ACROSS
    live = (t < tokens) & (h < heads) & fits
    number = count + t - opening  # in the ring, the oldest being 0
    leaves = live & (number >= ring_slots)
    slot = ring + ring_row * rb + h * rh + (start + tl.maximum(number, 0)) % ring_slots * rt
    old = tl.load(slot[:, None] + c, mask=leaves[:, None] & (c < D), other=0.0)
    place = tl.maximum(length + number - ring_slots, 0)
    page = tl.load(table + b * table_b + place // PAGE, mask=leaves, other=0).to(tl.int64)
    store_tile(
        old, leaves, page, b, h0, place % PAGE, rotation, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh,
        L, D, P, ACROSS, ALONG,
    )  # fmt: skip
    new = tl.load(x + (b * xb + h * xh + t.to(tl.int64) * xt)[:, None] + c, mask=live[:, None] & (c < D), other=0.0)
    tl.debug_barrier()  # before what others of this program have read is overwritten
    tl.store(slot[:, None] + c, new, mask=(live & (t >= opening))[:, None] & (c < D))
    sink = sinks + sink_row * fb + h * fh + (n_sinks + t) * ft
    tl.store(sink[:, None] + c, new, mask=(live & (t < opening))[:, None] & (c < D))


@triton.jit(do_not_specialize=["table_b", "sink_slots", "ring_slots", "tokens", "heads", "batch"])
def _append_kernel(
    kx, kxb, kxh, kxt, kring, krb, krh, krt, ksinks, kfb, kfh, kft, krotation, kcodes, kcb, kch, khigh, khb, khh, kscales, ksb, ksh,
    kcenter, keb, keh,
    vx, vxb, vxh, vxt, vring, vrb, vrh, vrt, vsinks, vfb, vfh, vft, vrotation, vcodes, vcb, vch, vhigh, vhb, vhh, vscales, vsb, vsh,
    vcenter, veb, veh,
    rows, lengths, table, table_b, state, sink_slots, ring_slots, tokens, heads, batch,
    KL: tl.constexpr, KD: tl.constexpr, KP: tl.constexpr,
    VL: tl.constexpr, VD: tl.constexpr, VP: tl.constexpr,
    ACROSS: tl.constexpr, ALONG: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of ALONG tokens and ACROSS heads, B, 2): keys, values.

    Arguments of keys begin with k, those of values with v. Strides are in elements, of packed codes and high bits in words of 16 bits.

    x          [B, H, tokens, D] model dtype, channels contiguous: xb, xh, xt; `tokens` <= `ring_slots`
    ring       [F, H, ring_slots, D] model dtype: rb, rh, rt        sinks    [E, H, sink_slots, D] model dtype: fb, fh, ft
    rotation   `triton_dequantize.rotation_table`; codes, high, scales, center with their strides, L, D and P: as of
               `triton_quantize._quantize_pages_kernel`
    rows       int32 [B, 6], contiguous: `pages.COLUMNS`            lengths  int32 [B]
    table      int32 [B, P]: table_b                                state    int32 [3]: `pages.STATE`
    heads      H                                                    batch    B
    """
    if tl.program_id(2) == 0:
        _append_side(
            kx, kxb, kxh, kxt, kring, krb, krh, krt, ksinks, kfb, kfh, kft, krotation, kcodes, kcb, kch, khigh, khb, khh, kscales, ksb, ksh,
            kcenter, keb, keh, rows, lengths, table, table_b, state, sink_slots, ring_slots, tokens, heads,
            KL, KD, KP, ACROSS, ALONG, PAGE,
        )  # fmt: skip
    else:
        _append_side(
            vx, vxb, vxh, vxt, vring, vrb, vrh, vrt, vsinks, vfb, vfh, vft, vrotation, vcodes, vcb, vch, vhigh, vhb, vhh, vscales, vsb, vsh,
            vcenter, veb, veh, rows, lengths, table, table_b, state, sink_slots, ring_slots, tokens, heads,
            VL, VD, VP, ACROSS, ALONG, PAGE,
        )  # fmt: skip
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    if tl.atomic_add(state, 1, sem="acq_rel") == programs - 1:
        room = tl.load(state + 2)
        dropped = 0
        for begin in range(0, batch, ROWS):
            b = begin + tl.arange(0, ROWS)
            row = rows + b * 6
            n_sinks = tl.load(row + 2, mask=b < batch, other=0)
            start = tl.load(row + 4, mask=b < batch, other=0)
            count = tl.load(row + 5, mask=b < batch, other=0)
            length = tl.load(lengths + b, mask=b < batch, other=0)
            opening = tl.minimum(tl.maximum(sink_slots - n_sinks, 0), tokens)
            leaving = tl.maximum(count + tokens - opening - ring_slots, 0)
            fits = (length + leaving <= room) & (b < batch)
            tl.store(row + 2, n_sinks + opening, mask=fits)
            tl.store(row + 4, (start + leaving) % ring_slots, mask=fits)
            tl.store(row + 5, tl.minimum(count + tokens - opening, ring_slots), mask=fits)
            tl.store(lengths + b, length + leaving, mask=fits)
            dropped = tl.maximum(dropped, tl.max(tl.where(fits | (b >= batch), 0, tokens), 0))
        tl.store(state + 1, tl.load(state + 1) + dropped)
        tl.store(state, 0)
