"""Storing the tokens of a decode step in storage that counts on the device, in one launch that needs no number from the host: what
`counted.step` computes, for rows of any lengths and regions of many chunks.

A program stores a tile of new tokens (times heads) of keys or of values. Each token takes a slot of the ring, and the token that was there
is quantized into the region by the same program. The last program to finish updates the counts: by then all have read them."""

from __future__ import annotations

import triton
import triton.language as tl

from .segments import Buffers, Pair
from .triton_quantize import PreparedStep, store_tile, tile_of

ROWS = tl.constexpr(128)
"""Rows whose counts are updated at once."""


def step_launch(buffers: Buffers, x: Pair) -> PreparedStep:
    """The launch for tokens like `x`; `T` is 1 where the region may have many chunks."""
    planes, before = buffers.region.chunks[0], (buffers.state, buffers.region.table)
    return PreparedStep(_step_kernel, buffers.codecs, x, planes, buffers.residual, buffers.sinks, 2, before, buffers.grows)


def step_kv(buffers: Buffers, x: Pair) -> None:
    """`counted.step`."""
    key, value = (side if side.stride(3) == 1 else side.contiguous() for side in x)
    step_launch(buffers, (key, value))((key, value))


@triton.jit
def _step_side(
    x, xb, xh, xt, ring, rb, rh, sinks, fb, fh, rotation, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh,
    state, chunks, sink_slots, ring_slots, tokens, heads,
    L: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, GROWS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """A program of `_step_kernel`, for keys (SIDE 0) or for values (1); arguments as there."""
    b, h0, t0 = tile_of(heads, ACROSS, ALONG)
    seq_length = tl.load(state + 4 + 2 * b)
    region = tl.load(state + 5 + 2 * b)
    fits = seq_length + tokens <= tl.load(state + 2)
    i = tl.arange(0, ACROSS * ALONG)
    c = tl.arange(0, P)[None, :]
    h = (h0 + i % ACROSS).to(tl.int64)
    t = t0 + i // ACROSS
    opening = tl.minimum(tl.maximum(sink_slots - seq_length, 0), tokens)  # of the new tokens, the sinks
    exact = seq_length - tl.minimum(seq_length, sink_slots) - region
    rank = t - opening
    live = (t < tokens) & (h < heads) & fits
    leaves = live & (rank + exact >= ring_slots)
    place = ring + b * rb + h * rh + (region + exact + tl.maximum(rank, 0)) % ring_slots * D
    old = tl.load(place[:, None] + c, mask=leaves[:, None] & (c < D), other=0.0)
    slot = region + exact + t0 - opening - ring_slots
    if GROWS:  # the chunk that holds the slot, nearly always the last; its planes are as far from the first one's as the table says
        first = tl.load(chunks + 1)
        row = chunks + (tl.load(state + 3) - 1) * 8
        start = tl.load(row)
        while start > tl.maximum(slot, 0):
            row -= 8
            start = tl.load(row)
        capacity = tl.load(row + 1)
        slot = (slot - start).to(tl.int32)
        UNIT: tl.constexpr = 2 if codes.dtype.element_ty.primitive_bitwidth == 8 else 1  # the table counts words of 16 bits
        codes += tl.multiple_of(tl.load(row + 2 + 3 * SIDE), 16) * UNIT
        high += tl.multiple_of(tl.load(row + 3 + 3 * SIDE), 16) * 2
        cb, ch, hb, hh = cb // first * capacity, ch // first * capacity, hb // first * capacity, hh // first * capacity
        if L.span != "once":
            scales += tl.multiple_of(tl.load(row + 4 + 3 * SIDE), 16)
            sb, sh = sb // first * capacity, sh // first * capacity
    store_tile(
        old, leaves, b, b, h0, slot + i // ACROSS, rotation, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh,
        L, D, P, ACROSS, ALONG,
    )  # fmt: skip
    new = tl.load(x + (b * xb + h * xh + t.to(tl.int64) * xt)[:, None] + c, mask=live[:, None] & (c < D), other=0.0)
    tl.debug_barrier()  # before what others of this program have read is overwritten
    tl.store(place[:, None] + c, new, mask=(live & (rank >= 0))[:, None] & (c < D))
    start_of_sinks = sinks + b * fb + h * fh + (seq_length + t) * D
    tl.store(start_of_sinks[:, None] + c, new, mask=(live & (rank < 0))[:, None] & (c < D))


@triton.jit(do_not_specialize=["sink_slots", "ring_slots", "tokens", "heads", "rows"])
def _step_kernel(
    kx, kxb, kxh, kxt, kring, krb, krh, ksinks, kfb, kfh, ktable, kcodes, kcb, kch, khigh, khb, khh, kscales, ksb, ksh, kcenter, keb, keh,
    vx, vxb, vxh, vxt, vring, vrb, vrh, vsinks, vfb, vfh, vtable, vcodes, vcb, vch, vhigh, vhb, vhh, vscales, vsb, vsh, vcenter, veb, veh,
    state, chunks, sink_slots, ring_slots, tokens, heads, rows,
    KL: tl.constexpr, KD: tl.constexpr, KP: tl.constexpr,
    VL: tl.constexpr, VD: tl.constexpr, VP: tl.constexpr,
    ACROSS: tl.constexpr, ALONG: tl.constexpr, GROWS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of ALONG tokens and ACROSS heads, B, 2): keys, values.

    Arguments of keys begin with k, those of values with v. Strides are in elements, of packed codes and high bits in words of 16 bits.

    x          [B, H, tokens, D] model dtype, channels contiguous: xb, xh, xt; `tokens` <= `ring_slots`, 1 if GROWS
    ring       [B, H, ring_slots, D] model dtype, tokens contiguous: rb, rh          sinks   [B, H, sink_slots, D] likewise: fb, fh
    table, codes, high, scales, center with their strides, L, D and P: as of `triton_quantize._encode_kernel`; planes are those of the first
               chunk
    state      int32 [4 + 2 B]: `segments.Buffers`
    chunks     int64 [chunks, 8]: `QuantizedRegion.table`, read if GROWS
    heads      H                        rows   B                     GROWS   whether there may be more chunks than one
    """
    if tl.program_id(2) == 0:
        _step_side(
            kx, kxb, kxh, kxt, kring, krb, krh, ksinks, kfb, kfh, ktable, kcodes, kcb, kch, khigh, khb, khh,
            kscales, ksb, ksh, kcenter, keb, keh, state, chunks, sink_slots, ring_slots, tokens, heads,
            KL, KD, KP, ACROSS, ALONG, GROWS, 0,
        )  # fmt: skip
    else:
        _step_side(
            vx, vxb, vxh, vxt, vring, vrb, vrh, vsinks, vfb, vfh, vtable, vcodes, vcb, vch, vhigh, vhb, vhh,
            vscales, vsb, vsh, vcenter, veb, veh, state, chunks, sink_slots, ring_slots, tokens, heads,
            VL, VD, VP, ACROSS, ALONG, GROWS, 1,
        )  # fmt: skip
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    if tl.atomic_add(state, 1, sem="acq_rel") == programs - 1:
        room = tl.load(state + 2)
        dropped = 0
        for begin in range(0, rows, ROWS):
            row = begin + tl.arange(0, ROWS)
            lengths = state + 4 + 2 * row
            seq_length = tl.load(lengths, mask=row < rows, other=0)
            region = tl.load(lengths + 1, mask=row < rows, other=0)
            fits = seq_length + tokens <= room
            leaving = tl.maximum(seq_length + tokens - sink_slots - region - ring_slots, 0)
            tl.store(lengths, tl.where(fits, seq_length + tokens, seq_length), mask=row < rows)
            tl.store(lengths + 1, tl.where(fits, region + leaving, region), mask=row < rows)
            dropped = tl.maximum(dropped, tl.max(tl.where(fits | (row >= rows), 0, tokens), 0))
        tl.store(state + 1, tl.load(state + 1) + dropped)
        tl.store(state, 0)
