"""Storing keys and values of a layer in one launch: quantized into pages, and in the model's dtype into sinks and rings.

A program stores a tile of tokens (times heads) of keys or of values. `quantize_into` is told the slot of each
token. `launch_of_step` needs no number from the host: the tokens enter a ring, and a program quantizes those
that leave it, which were in the ring or are new ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.base import Codes, PackedLayout
from ..host.launch import Held, Launcher
from ..paged_inputs import PagedInputs
from ..pages import Pages
from ..segments import Pair
from .triton_dequantize import (
    known,
    load_vectors,
    padded,
    plane_arguments,
    side_of,
    store_vectors,
    table_of,
    tile,
    vectors,
)
from .triton_quantize import store_tile

ROWS = tl.constexpr(128)
"""Rows whose counts are updated at once."""


def contiguous(x: Pair) -> Pair:
    """Keys and values whose channels are contiguous."""
    key, value = (side if side.stride(3) == 1 else side.contiguous() for side in x)
    return key, value


def launched(pages: Pages, x: Pair) -> tuple[tuple[Any, ...], dict[str, Any], tuple[int, int, int], int]:
    """The arguments of a launch that stores vectors like `x`, keys and values `[B, H, T, D]`:
    `plane_arguments` of both; constants; the grid; warps."""
    (key, value), (of_keys, of_values), once = x, pages.slabs[0], pages.statistics
    layouts = known(pages.codecs[0], key), known(pages.codecs[1], value)
    (batch, heads, tokens, _), dims = key.shape, (key.shape[3], value.shape[3])
    across, along, warps = tile(layouts, heads, tokens, padded(max(dims)), key.element_size())
    planes = _planes(layouts[0], of_keys | once[0], key), _planes(layouts[1], of_values | once[1], value)
    constants = {"L": layouts, "D": dims, "ACROSS": across, "ALONG": along, "PAGE": pages.page_size, "BASE": pages.firsts[0]}
    return planes, constants, (-(-tokens // along) * -(-heads // across), batch, 2), warps


def _planes(layout: PackedLayout, codes: Codes, like: Tensor) -> tuple[object, ...]:
    """`plane_arguments` without a reference to `like`, which launches would keep alive."""
    none = next(iter(codes.values()))
    return plane_arguments(layout, codes, none, table_of(layout, like) if layout.rotated else none)


def quantize_into(pages: Pages, x: Pair, slots: Tensor | int, zones: Sequence[tuple[Pair, Tensor]] = ()) -> None:
    """Run `reference.quantize_into` in one launch, for keys and values in fp16, bf16 or fp32. Raises
    ValueError for a codec that `triton_quantize.supports` does not accept."""
    if not x[0].numel():
        return
    x = contiguous(x)
    start, table = (slots, pages.table) if isinstance(slots, int) else (0, None)
    given, (slots_b, slots_h, slots_t) = (None, (0, 0, 0)) if isinstance(slots, int) else (slots, _slot_strides(slots))
    planes, constants, grid, warps = launched(pages, x)
    key, value = x
    held = tuple((at, *at.stride(), zone[0].shape[2], *((side, *side.stride()[:3]) for side in zone)) for zone, at in zones)
    run = _launcher(
        _quantize_kernel, key.device, ("key", "value"), (*OF_TOKENS, "slots", "planes", "table", "table_b"),
        **constants, ZONES=len(held), BY_TABLE=table is not None, num_warps=warps,
    )  # fmt: skip
    of_call = Held(
        new_strides=(key.stride()[:3], value.stride()[:3]), slots_b=slots_b, slots_h=slots_h, slots_t=slots_t, start=start,
        tokens=key.shape[2], heads=key.shape[1], zones=held or None, slots=given, planes=planes, table=table,
        table_b=0 if table is None else table.stride(0),
    )  # fmt: skip
    run(grid, key, value, held=(of_call,))


def _slot_strides(slots: Tensor) -> tuple[int, int, int]:
    """Strides of slots `[B, 1 or H, T]`; 0 over heads that have the same."""
    return slots.stride(0), slots.stride(1) if slots.shape[1] > 1 else 0, slots.stride(2)


OF_TOKENS = "new_strides", "slots_b", "slots_h", "slots_t", "start", "tokens", "heads", "zones"


def launch_into(pages: Pages, x: Pair) -> Callable[[Pair, Tensor], None]:
    """A function that quantizes vectors like `x` in place of the tokens `[B, H, T]` of each row, with all other arguments prepared."""
    planes, constants, grid, warps = launched(pages, contiguous(x))
    run = _launcher(
        _quantize_kernel, x[0].device, ("key", "value", "slots"), (*OF_TOKENS, "planes", "table", "table_b"),
        **constants, ZONES=0, BY_TABLE=True, num_warps=warps,
    )  # fmt: skip
    heads, tokens = x[0].shape[1:3]
    of_pages, strides = Held(planes=planes, table=pages.table, table_b=pages.table.stride(0)), dict[tuple, Held]()

    def launch(x: Pair, places: Tensor) -> None:
        key, value = x
        given = key.stride(), value.stride(), places.stride()
        if given not in strides:
            if given[0][3] != 1 or given[1][3] != 1:
                return launch(contiguous(x), places)
            b, h, t = _slot_strides(places)
            strides[given] = Held(
                new_strides=(given[0][:3], given[1][:3]), slots_b=b, slots_h=h, slots_t=t, start=0, tokens=tokens, heads=heads, zones=None
            )
        run(grid, key, value, places, held=(strides[given], of_pages))

    return launch


@functools.lru_cache(maxsize=256)
def _launcher(kernel: Any, device: torch.device, given: tuple[str, ...], held: tuple[str, ...], **fixed: Any) -> Launcher:
    """The `Launcher` that layers with the same constants share."""
    return Launcher(kernel, device, given, held, **fixed)


OF_STEP = "new_strides", "tokens", "heads", "batch"
OF_STORAGE = "stored", "control", "rows", "rows_b", "table", "table_b", "sink_slots", "ring_slots"


def launch_of_step(inputs: PagedInputs, x: Pair) -> Callable[[Pair], None]:
    """`reference.step` for tokens like `x`, `[B, H, T, D]`, with all other arguments prepared."""
    batch, heads, tokens, dim = x[0].shape
    if "store" not in inputs.prepared.of_inputs:
        inputs.prepared.of_inputs["store"] = _of_storage(inputs)
    layouts, storage = inputs.prepared.of_inputs["store"]
    dims, pages = (dim, x[1].shape[3]), inputs.pages
    across, along, warps = tile(layouts, heads, tokens, padded(max(dims)), x[0].element_size())
    run = _launcher(
        _step_kernel, x[0].device, ("key", "value"), (*OF_STEP, *OF_STORAGE),
        L=layouts, D=dims, ACROSS=across, ALONG=along, PAGE=pages.page_size, BASE=pages.firsts[0], num_warps=warps,
    )  # fmt: skip
    grid = -(-tokens // along) * -(-heads // across), batch, 2
    strides: dict[tuple, Held] = {}
    """Arguments by the strides of new keys and values, which are the same in all steps but the first."""

    def launch(x: Pair) -> None:
        key, value = x
        given = key.stride(), value.stride()
        if given not in strides:
            if given[0][3] != 1 or given[1][3] != 1:
                return launch(contiguous(x))
            strides[given] = Held(new_strides=(given[0][:3], given[1][:3]), tokens=tokens, heads=heads, batch=batch)
        run(grid, key, value, held=(strides[given], storage))

    return launch


def _of_storage(inputs: PagedInputs) -> tuple[tuple[PackedLayout, PackedLayout], Held]:
    """The layouts of keys and values, and the arguments `OF_STORAGE`."""
    rows, pages = inputs.rows, inputs.pages
    if rows is None:
        raise ValueError("the inputs have no counts on the device")
    planes, constants, _, _ = launched(pages, inputs.ring)
    sides = zip(inputs.ring, inputs.sinks, planes, strict=True)
    stored = tuple([(ring, *ring.stride()[:2], sinks, *sinks.stride()[:2], side) for ring, sinks, side in sides])
    held = Held(
        stored=stored, control=inputs.control, rows=rows, rows_b=rows.stride(0), table=pages.table, table_b=pages.table.stride(0),
        sink_slots=inputs.sinks[0].shape[2], ring_slots=inputs.ring[0].shape[2],
    )  # fmt: skip
    return constants["L"], held


@triton.jit(do_not_specialize=["start", "tokens", "heads", "table_b"])
def _quantize_kernel(
    key, value, new_strides, planes, zones, slots, slots_b, slots_h, slots_t, table, table_b, start, tokens, heads,
    L: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, PAGE: tl.constexpr, BASE: tl.constexpr,
    ZONES: tl.constexpr, BY_TABLE: tl.constexpr,
):  # fmt: skip
    """Stores `tokens` tokens. Grid (tiles of ALONG tokens and ACROSS heads, B, 2): keys, values. Strides are
    in elements, of packed codes and high bits in words of 16 bits.

    key       [B, H, tokens, D[0]] fp16, bf16 or fp32, channels contiguous; value [B, H, tokens, D[1]] likewise; new_strides: of both, over
              the first three dimensions
    planes    `plane_arguments` of the first page, of keys and of values, strides over entries and heads. Codes [entries, H', PAGE, width],
              H' being H, or 1 if heads share them or have pages of their own; high bits and scales [entries,
              H', PAGE, scales of a token] likewise; the mean fp32 [B, H, 1, D]
    zones     ZONES tuples of slots int64 [B, tokens], `row * R + slot`, negative: not stored, with both strides; R; keys [F, H, R, D] in
              the model's dtype with strides over the first three dimensions; then values
    slots     int64 [B, tokens] or [B, H, tokens], `entry * PAGE + offset`, BASE being the entry of the first page, or negative: not
              stored. BY_TABLE: numbers of tokens of their row, negative: not stored; None: `start` and those after it
    table     int32 or int64 [B, pages], entries of the pages: table_b; None without BY_TABLE
    L         `PackedLayout` of keys and of values; what one has not is not read                 heads   H
    """
    b, h0, h, t, live = vectors(tokens, heads, ACROSS, ALONG)
    if BY_TABLE:
        if slots is None:
            place = start + t
        else:
            place = tl.load(slots + b * slots_b + h * slots_h + t * slots_t, mask=live, other=-1).to(tl.int64)
        slot = tl.where(place < 0, -1, place % PAGE)
        page = tl.load(table + b * table_b + place // PAGE, mask=live & (place >= 0), other=BASE).to(tl.int64) - BASE
    else:
        slot = tl.load(slots + b * slots_b + h * slots_h + t * slots_t, mask=live, other=-1).to(tl.int64)
        page = slot // PAGE - BASE
        slot = tl.where(slot < 0, -1, slot % PAGE)
    for i in tl.static_range(2):
        if tl.program_id(2) == i:
            x = value if i else key
            xb, xh, xt = new_strides[i]
            raw = load_vectors(x + (b * xb + h * xh + t * xt), live, D[i])
            for n in tl.static_range(ZONES):
                at = tl.load(zones[n][0] + b * zones[n][1] + t * zones[n][2], mask=live, other=-1)
                zone, zb, zh, zt = zones[n][4 + i]
                store_vectors(zone + (at // zones[n][3] * zb + h * zh + at % zones[n][3] * zt), raw, at >= 0, D[i])
            store_tile(raw, live, page, b, h0, slot, planes[i], side_of(L, i), D[i], ACROSS)


@triton.jit(do_not_specialize=["rows_b", "table_b", "sink_slots", "ring_slots", "tokens", "heads", "batch"])
def _step_kernel(
    key, value, new_strides, stored, control, rows, rows_b, table, table_b, sink_slots, ring_slots, tokens, heads, batch,
    L: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, PAGE: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of ALONG tokens and ACROSS heads, B, 2): keys, values. Strides are in elements, of packed
    codes and high bits in words of 16 bits.

    key       [B, H, tokens, D[0]] model dtype, channels contiguous; value [B, H, tokens, D[1]] likewise; new_strides: of both, over the
              first three dimensions
    stored    of keys, then of values: the ring [B, H, ring_slots, D] model dtype, tokens contiguous, with strides over rows and heads; the
              sinks [B, H, sink_slots, D] likewise; planes of the first page, as of `_quantize_kernel`, as is L
    control   int32 [3], `paged_inputs.CONTROL`
    rows      int32 [B, 8], `paged_inputs.COLUMNS`: rows_b
    table     int32 or int64 [B, P], entries of pages of PAGE tokens, BASE being the first: table_b
    heads     H                        batch   B

    A token takes the place of the one that came `ring_slots` tokens before it, which is quantized. The
    program that reads a slot of the ring also writes it: the last of the new tokens that belong there. The
    last program to finish updates the counts: by then all have read them.
    """
    b, h0, h, t, live = vectors(tokens, heads, ACROSS, ALONG)
    quantized = tl.load(rows + b * rows_b + 6)
    seen = tl.load(rows + b * rows_b + 7)
    live = live & (seen + tokens <= tl.load(control + 2))
    opening = tl.minimum(tl.maximum(sink_slots - seen, 0), tokens)  # of the new tokens, the sinks
    in_ring = seen - tl.minimum(seen, sink_slots) - quantized
    rank = t.to(tl.int32) - opening
    slot = (quantized + in_ring + tl.maximum(rank, 0)) % ring_slots
    enters = live & (rank < ring_slots)
    last = t + tl.where(rank < 0, 0, (tokens - 1 - t.to(tl.int32)) // ring_slots * ring_slots)
    leaves = live & (rank + in_ring >= ring_slots)
    token = quantized + in_ring + rank - ring_slots  # of the quantized ones
    page = tl.load(table + b * table_b + token // PAGE, mask=leaves, other=BASE).to(tl.int64) - BASE
    for i in tl.static_range(2):
        if tl.program_id(2) == i:
            x = value if i else key
            xb, xh, xt = new_strides[i]
            ring, rb, rh, sinks, fb, fh, planes = stored[i]
            place, x = ring + b * rb + h * rh + slot * D[i], x + (b * xb + h * xh)
            old = load_vectors(place, leaves & (rank < ring_slots), D[i])
            y = load_vectors(x + last * xt, enters, D[i])
            tl.debug_barrier()  # before what others of this program have read is overwritten
            store_vectors(place, y, enters & (rank >= 0), D[i])
            store_vectors(sinks + b * fb + h * fh + (seen + t) * D[i], y, enters & (rank < 0), D[i])
            if tokens > ring_slots:
                old += load_vectors(x + (t - ring_slots) * xt, leaves & (rank >= ring_slots), D[i])
            store_tile(old, leaves, page, b, h0, token % PAGE, planes, side_of(L, i), D[i], ACROSS)
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    if tl.atomic_add(control, 1, sem="acq_rel") == programs - 1:
        _count(control, rows, rows_b, sink_slots, ring_slots, tokens, batch)


@triton.jit
def _count(control, rows, rows_b, sink_slots, ring_slots, tokens, batch):
    """Counts the tokens of a step; arguments as in `_step_kernel`."""
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
