"""`fetch_blocks` in two launches, of which one finds the slots and one copies; and copies of the index (`HostPages`).

The GPU reads host memory by its address, as fast as the bus. A program copies all planes of a block: its loads are under way together,
since one takes as long as a thousand instructions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.base import Codes
from ..kernels.host.launch import Held, Launcher
from ..kernels.paged_inputs import PagedInputs
from ..kernels.pages import BLOCK
from .block_cache import BlockCache
from .fetch_blocks import over_slots
from .host_pages import HostPages, index_of
from .selection import Selection

PROGRAMS = 32
"""Programs that copy blocks for a row and head."""
WORD = 8
"""Bytes that a thread copies at a time; planes of blocks are multiples of it."""


@triton.jit(do_not_specialize=["room", "slots", "n_quantized", "lengths_b", "heads"])
def place_blocks_kernel(
    blocks, read, kept, hands, lengths, entries, missing, counts, room, slots, n_quantized, lengths_b, heads,
    N: tl.constexpr, S: tl.constexpr, STEPS: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The slots of chosen blocks, one program for a row and KV head. Grid (B * H).

    blocks, read   `Selection`, `room` blocks            N, S   powers of two, at least `room` and `slots`; STEPS: at least log2(room)
    kept, hands    `BlockCache`, `slots` slots
    entries        int64 or int32 [B * H, room]: the slots over all rows and heads
    missing        int32 [B * H, room]: the places in `blocks` of those that must be copied, `counts` int32 [B * H] of them
    """
    bh = tl.program_id(0)
    length = n_quantized
    if COUNTED:
        length = tl.load(lengths + bh // heads * lengths_b)
    blocks += bh * room
    entries += bh * room
    missing += bh * room
    kept += bh * slots
    chosen = tl.cdiv(tl.load(read + bh), BLOCK)
    hand = tl.load(hands + bh)
    o = tl.arange(0, S)
    slot = (hand + o) % slots
    mine = tl.load(kept + slot, mask=o < slots, other=-1)
    low = tl.zeros([S], tl.int32)
    high = low + chosen
    for _ in range(STEPS):  # blocks ascend
        middle = (low + high) // 2
        after = tl.load(blocks + middle, mask=low < high, other=0) < mine
        low, high = tl.where((low < high) & after, middle + 1, low), tl.where(after, high, middle)
    found = (mine >= 0) & (low < chosen)
    found = found & (tl.load(blocks + low, mask=found, other=-1) == mine)
    i = tl.arange(0, N)
    tl.store(entries + i, tl.full([N], -1, entries.dtype.element_ty), mask=i < chosen)
    tl.debug_barrier()
    tl.store(entries + low, slot + bh * slots, mask=found)
    tl.debug_barrier()
    misses = (tl.load(entries + i, mask=i < chosen, other=0) < 0).to(tl.int32)
    rank = tl.cumsum(misses, 0) - 1
    count = tl.sum(misses, 0)
    free = ((o < slots) & ~found).to(tl.int32)
    number = tl.cumsum(free, 0) - 1
    taken = (free > 0) & (number < count)
    tl.store(missing + number, slot, mask=taken)
    tl.debug_barrier()
    new = tl.load(missing + rank, mask=misses > 0, other=0)
    tl.debug_barrier()
    block = tl.load(blocks + i, mask=misses > 0, other=0)
    tl.store(missing + rank, i, mask=misses > 0)
    tl.store(entries + i, new + bh * slots, mask=misses > 0)
    tl.store(kept + new, tl.where((block + 1) * BLOCK <= length, block, -1), mask=misses > 0)
    tl.store(counts + bh, count)
    tl.store(hands + bh, (hand + tl.max(tl.where(taken, o + 1, 0), 0)) % slots)


@triton.jit
def _words(plane, COUNT: tl.constexpr):
    """Pointers to COUNT words of 8 bytes at `plane`, and which of them there are."""
    w = tl.arange(0, triton.next_power_of_2(COUNT))
    return plane.to(tl.pointer_type(tl.int64)) + w, w < COUNT


@triton.jit
def _copy_block(
    planes, page, near, h, offset, target, to_h, to_offset, WORDS: tl.constexpr, STRIDES: tl.constexpr, NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the BLOCK tokens at `offset` of head `h` of a page to `to_offset` of head `to_h` of the page `target`.

    planes    of the first pages: the source, then the target of each plane       WORDS   of a block, in each plane
    page, target   int64, entries from the first page's         STRIDES   of each plane over entries and heads, of the source and the target
    near      the page of the first NEAR planes, in place of `page`
    """
    block = ()
    for i in tl.static_range(len(WORDS)):
        at = (near if i < NEAR else page) * STRIDES[i][0] + h * STRIDES[i][1] + offset // BLOCK * WORDS[i]
        words, inside = _words(planes[2 * i].to(tl.pointer_type(tl.int64)) + at, WORDS[i])
        block = block + (tl.load(words, mask=inside, other=0),)  # type: ignore[assignment]
    for i in tl.static_range(len(WORDS)):
        at = target * STRIDES[i][2] + to_h * STRIDES[i][3] + to_offset // BLOCK * WORDS[i]
        words, inside = _words(planes[2 * i + 1].to(tl.pointer_type(tl.int64)) + at, WORDS[i])
        tl.store(words, block[i], mask=inside)


@triton.jit(do_not_specialize=["room", "heads", "index_b"])
def copy_blocks_kernel(
    planes, blocks, pages, index, missing, counts, entries, room, heads, index_b,
    WORDS: tl.constexpr, STRIDES: tl.constexpr, NEAR: tl.constexpr, PAGE: tl.constexpr, BASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies blocks into slots. Grid (programs, B * H).

    planes, WORDS, STRIDES, NEAR   as in `_copy_block`, from pages of PAGE tokens to slots; the first from those of the index
    index                    int64 [B, P], entries of the index, BASE being the first page: index_b; read if NEAR
    blocks, pages            `blocks` and `entries` of a `Selection`, BASE being the first page
    missing, counts, entries, room   as of `place_blocks_kernel`
    """
    bh = tl.program_id(1)
    h = (bh % heads).to(tl.int64)
    index += (bh // heads).to(tl.int64) * index_b
    count = tl.load(counts + bh)
    for rank in range(tl.program_id(0), count, tl.num_programs(0)):
        at = bh * room + tl.load(missing + bh * room + rank)
        page = tl.load(pages + at).to(tl.int64) - BASE
        token = tl.load(blocks + at) * BLOCK
        near = page
        if NEAR:
            near = tl.load(index + token // PAGE).to(tl.int64) - BASE
        _copy_block(planes, page, near, h, token % PAGE, tl.load(entries + at).to(tl.int64), 0, 0, WORDS, STRIDES, NEAR, BLOCK)


@triton.jit(do_not_specialize=["begin", "tokens", "table_b", "index_b", "lengths_b", "heads"])
def copy_index_kernel(
    planes, table, index, lengths, begin, tokens, table_b, index_b, lengths_b, heads,
    WORDS: tl.constexpr, STRIDES: tl.constexpr, PAGE: tl.constexpr, BASE: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Copies the blocks with `tokens` tokens from `begin` on, or with COUNTED the last ones, into the index. Grid (blocks, B * H).

    planes, WORDS, STRIDES   as in `_copy_block`
    table, index             int64 [B, P], entries of pages of PAGE tokens in both, BASE being the first: table_b, index_b
    lengths                  int32 [B]: lengths_b; read if COUNTED
    """
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    end = begin + tokens
    if COUNTED:
        end = tl.load(lengths + b * lengths_b)
        begin = tl.maximum(end - tokens, 0)
    token = (begin // BLOCK + tl.program_id(0)) * BLOCK
    if token < end:
        page = tl.load(table + b * table_b + token // PAGE).to(tl.int64) - BASE
        target = tl.load(index + b * index_b + token // PAGE).to(tl.int64) - BASE
        _copy_block(planes, page, page, h, token % PAGE, target, h, token % PAGE, WORDS, STRIDES, 0, BLOCK)


def _planes(source: Codes, target: Codes) -> dict[str, tuple]:
    """The arguments of `_copy_block` for the planes of `target`."""
    pairs = [(source[name], plane) for name, plane in target.items()]
    words = tuple(BLOCK * plane.shape[3] * plane.itemsize // WORD for _, plane in pairs)
    strides = tuple(tuple(n for x in pair for n in _strides(x)) for pair in pairs)
    return {"planes": tuple(x for pair in pairs for x in pair), "WORDS": words, "STRIDES": strides}


def _strides(plane: Tensor) -> tuple[int, int]:
    """Strides in words over entries and heads: 0 over heads that share what is in the plane."""
    return plane.stride(0) * plane.itemsize // WORD, plane.stride(1) * plane.itemsize // WORD if plane.shape[1] > 1 else 0


def _named(sides: tuple[Codes, Codes]) -> Codes:
    """The planes of keys and of values in one dictionary."""
    return {f"{side} {name}": plane for side, planes in enumerate(sides) for name, plane in planes.items()}


OF_PLACES = "blocks", "read", "lengths", "entries", "missing", "counts"
OF_COPIES = "blocks", "pages", "missing", "counts", "entries"


def fetch_blocks(inputs: PagedInputs, cache: BlockCache, selection: Selection) -> PagedInputs:
    """Run `fetch_blocks.fetch_blocks` on the device."""
    pages, (batch, heads, room) = inputs.pages, selection.blocks.shape
    counted, most = inputs.rows is not None, triton.next_power_of_2(room)
    if (counted, most) not in cache.launches:
        slots, device, index = cache.blocks.shape[2], cache.blocks.device, index_of(pages)
        near = {} if index is None else _named(index.planes)  # the bus is slower than the device
        source, target = _named(pages.planes) | near, _named(cache.pages.planes)
        planes = _planes(source, {name: target[name] for name in near | target}) | {"NEAR": len(near)}
        sizes = {"N": most, "S": triton.next_power_of_2(slots), "STEPS": most.bit_length(), "COUNTED": counted, "BLOCK": BLOCK}
        fixed: dict[str, Any] = {"kept": cache.blocks, "hands": cache.hands, "slots": slots, "heads": heads, "num_warps": 4}
        table = selection.entries if index is None else index.table
        of_pages = {"PAGE": pages.page_size, "BASE": pages.firsts[0], "index": table, "index_b": table.stride(0), "num_warps": 2}
        cache.launches[counted, most] = (
            Launcher(place_blocks_kernel, device, OF_PLACES, ("room", "n_quantized", "lengths_b"), **fixed | sizes),
            Launcher(copy_blocks_kernel, device, OF_COPIES, ("room",), **planes | fixed | sizes | of_pages),
        )
    place, copy = cache.launches[counted, most]
    entries, missing = torch.empty_like(selection.entries), torch.empty_like(selection.blocks)
    counts = torch.empty_like(selection.lengths)
    lengths: Tensor = pages.lengths if counted else selection.lengths  # type: ignore[assignment]
    numbers = Held(room=room, n_quantized=inputs.max_length, lengths_b=lengths.stride(0))
    place((batch * heads, 1, 1), selection.blocks, selection.lengths, lengths, entries, missing, counts, held=(numbers,))
    grid = min(room, PROGRAMS), batch * heads, 1
    copy(grid, selection.blocks, selection.entries, missing, counts, entries, held=(Held(room=room),))
    return over_slots(inputs, cache, replace(selection, entries=entries))


def copy_index(pages: HostPages, tokens: int, begin: int | None) -> Callable[[], None]:
    """A function that copies tokens into the index: `tokens` of them from `begin` on; None: the last ones, as the device counts. All
    arguments are prepared."""
    index = pages.index
    heads, counted = max(plane.shape[1] for plane in pages.planes[0].values()), begin is None
    lengths: Tensor = pages.lengths if counted else pages.table  # type: ignore[assignment]
    run = Launcher(
        copy_index_kernel, pages.table.device, (), table=pages.table, index=index.table, lengths=lengths, begin=begin or 0, tokens=tokens,
        table_b=pages.table.stride(0), index_b=index.table.stride(0), lengths_b=lengths.stride(0), heads=heads, PAGE=pages.page_size,
        BASE=pages.firsts[0], BLOCK=BLOCK, COUNTED=counted, num_warps=1, **_planes(_named(pages.planes), _named(index.planes)),
    )  # fmt: skip
    return functools.partial(run, (-(-tokens // BLOCK) + 1, len(pages.table) * heads, 1))
