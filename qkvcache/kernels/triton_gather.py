"""All tokens of rows of different lengths, one row after another, in one launch: what `pages.gather_rows` computes.

A program writes a tile of tokens of keys or of values: it reads them where they are, in the sinks, in the pages, which it dequantizes, in
the ring, or among the new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.base import PackedLayout
from .pages import GATHER_TILE, PagedInputs
from .segments import Pair
from .triton_dequantize import known, load_tile, padded, plane_arguments, rotation_table, store_vectors, tile


def tile_of(layouts: Sequence[PackedLayout], heads: int, width: int) -> tuple[int, int, int]:
    """`triton_dequantize.tile`, of at most 32 tokens: the addresses of more, in four places, would not fit in registers."""
    across, along, warps = tile([replace(layout, span="each") for layout in layouts], heads, GATHER_TILE, width)
    return across, min(along, 32), warps


def gather_rows(inputs: PagedInputs, new: Pair, starts: tuple[Tensor, Tensor], tiles: Tensor, out: Pair) -> None:
    """As `pages.gather_rows`."""
    pages, heads = inputs.pages, out[0].shape[1]
    layouts = [known(codec, x, writes=False) for codec, x in zip(pages.codecs, out, strict=True)]
    across, along, warps = tile_of(layouts, heads, max(padded(x.shape[3]) for x in out))
    arguments: list[object] = []
    constants: list[object] = []
    sides = zip(layouts, pages.codecs, pages.planes, pages.statistics, inputs.sinks, inputs.ring, new, out, strict=True)
    for layout, codec, each, once, sinks, ring, fresh, x in sides:
        dim = x.shape[3]
        if layout.centered:  # what is turned are integers, and the mean joins them afterwards
            once = once | {"center": codec.unrotate(once["center"])}
        rotation = rotation_table(dim, x.device, torch.bfloat16, layout.rotation == 2) if layout.rotated else x
        fresh = fresh if fresh.stride(3) == 1 else fresh.contiguous()
        arguments += [x, *x.stride()[1:3], fresh, *fresh.stride()[1:3], sinks, *sinks.stride()[:3], ring, *ring.stride()[:3], rotation]
        arguments += plane_arguments(layout, each | once, x)
        constants += [layout, dim, padded(dim)]
    grid = (len(tiles) * (GATHER_TILE // along), triton.cdiv(heads, across), 2)
    with torch.cuda.device_of(out[0]):
        _gather_rows_kernel[grid](
            *arguments, tiles, *starts, inputs.rows, pages.lengths, *pages.lengths.stride(), pages.table, pages.table.stride(0),
            max(inputs.slots[2], 1), heads, *constants, across, along, GATHER_TILE, pages.page_size, num_warps=warps,
        )  # fmt: skip


@triton.jit
def _gather_side(
    out, oh, ot, new, nh, nt, sinks, fb, fh, ft, ring, rb, rh, rt, rotation, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh,
    tiles, new_starts, out_starts, rows, lengths, lengths_b, table, table_b, ring_slots, heads,
    L: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """A program of `_gather_rows_kernel`, for keys or for values; arguments as there."""
    PARTS: tl.constexpr = TILE // ALONG
    entry = tiles + tl.program_id(0) // PARTS * 2
    b = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1) + tl.program_id(0) % PARTS * ALONG
    h0 = (tl.program_id(1) * ACROSS).to(tl.int64)
    begin = tl.load(rows + b * 6)
    sink_row = tl.load(rows + b * 6 + 1).to(tl.int64)
    n_sinks = tl.load(rows + b * 6 + 2)
    ring_row = tl.load(rows + b * 6 + 3).to(tl.int64)
    start = tl.load(rows + b * 6 + 4)
    in_ring = tl.load(rows + b * 6 + 5)
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
        _copy(sinks + (sink_row * fb + h * fh + t.to(tl.int64) * ft), at, live & (t < n_sinks), D, P)
    place = t - n_sinks  # in the pages, then in the ring, then among the new tokens
    if (first + ALONG > n_sinks) & (first < n_sinks + quantized):
        dequantized = live & (place >= 0) & (place < quantized)
        slot = begin + tl.maximum(place, 0)
        page = tl.load(table + b * table_b + slot // PAGE, mask=dequantized, other=0).to(tl.int64)
        y = load_tile(
            dequantized, page, b, h0, slot % PAGE, rotation, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh,
            L, D, P, ACROSS, ALONG,
        )  # fmt: skip
        store_vectors(at, y, dequantized, D)
    place -= quantized
    if (first + ALONG > n_sinks + quantized) & (first < n_sinks + quantized + in_ring):
        slot = (start + tl.maximum(place, 0)) % ring_slots
        _copy(ring + (ring_row * rb + h * rh + slot * rt), at, live & (place >= 0) & (place < in_ring), D, P)
    place -= in_ring
    if first + ALONG > n_sinks + quantized + in_ring:
        _copy(new + (h * nh + (new_start + place).to(tl.int64) * nt), at, live & (place >= 0), D, P)


@triton.jit
def _copy(source, at, live, D: tl.constexpr, P: tl.constexpr):
    """Copies vectors of D channels, padded to P, from the pointers `source` to `at`, where `live`, each [N]."""
    c = tl.arange(0, P)[None, :]
    inside = live[:, None] & (c < D)
    tl.store(at[:, None] + c, tl.load(source[:, None] + c, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["lengths_b", "table_b", "ring_slots", "heads"])
def _gather_rows_kernel(
    kout, koh, kot, knew, knh, knt, ksinks, kfb, kfh, kft, kring, krb, krh, krt, krotation,
    kcodes, kcb, kch, khigh, khb, khh, kscales, ksb, ksh, kcenter, keb, keh,
    vout, voh, vot, vnew, vnh, vnt, vsinks, vfb, vfh, vft, vring, vrb, vrh, vrt, vrotation,
    vcodes, vcb, vch, vhigh, vhb, vhh, vscales, vsb, vsh, vcenter, veb, veh,
    tiles, new_starts, out_starts, rows, lengths, lengths_b, table, table_b, ring_slots, heads,
    KL: tl.constexpr, KD: tl.constexpr, KP: tl.constexpr,
    VL: tl.constexpr, VD: tl.constexpr, VP: tl.constexpr,
    ACROSS: tl.constexpr, ALONG: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of TILE tokens, each in parts of ALONG; blocks of ACROSS heads; 2): keys, values.

    Arguments of keys begin with k, those of values with v. Strides are in elements, of packed codes and high bits in words of 16 bits.

    out        [1, H, T, D] model dtype, channels contiguous: oh, ot        new      [1, H, N, D] likewise: nh, nt
    sinks      [E, H, S, D] model dtype: fb, fh, ft                         ring     [F, H, ring_slots, D] model dtype: rb, rh, rt
    rotation, codes, high, scales, center with their strides, L, D and P: as of `triton_dequantize._dequantize_pages_kernel`
    tiles      int32 [M, 2]: `pages.gather_tiles`
    new_starts, out_starts   int32 [B + 1]: the first token of a row in `new` and in `out`
    rows       int32 [B, 6], contiguous: `pages.COLUMNS`
    lengths    int32 [B]: lengths_b                                         table    int32 [B, pages]: table_b
    heads      H
    """
    if tl.program_id(2) == 0:
        _gather_side(
            kout, koh, kot, knew, knh, knt, ksinks, kfb, kfh, kft, kring, krb, krh, krt, krotation,
            kcodes, kcb, kch, khigh, khb, khh, kscales, ksb, ksh, kcenter, keb, keh,
            tiles, new_starts, out_starts, rows, lengths, lengths_b, table, table_b, ring_slots, heads,
            KL, KD, KP, ACROSS, ALONG, TILE, PAGE,
        )  # fmt: skip
    else:
        _gather_side(
            vout, voh, vot, vnew, vnh, vnt, vsinks, vfb, vfh, vft, vring, vrb, vrh, vrt, vrotation,
            vcodes, vcb, vch, vhigh, vhb, vhh, vscales, vsb, vsh, vcenter, veb, veh,
            tiles, new_starts, out_starts, rows, lengths, lengths_b, table, table_b, ring_slots, heads,
            VL, VD, VP, ACROSS, ALONG, TILE, PAGE,
        )  # fmt: skip
