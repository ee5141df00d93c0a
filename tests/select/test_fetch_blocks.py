"""Fetching chosen blocks into a cache of blocks: in torch and in kernels, against one block after another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qkvcache.kernels import PagedInputs
from qkvcache.kernels.pages import BLOCK
from qkvcache.select.block_cache import BlockCache
from qkvcache.select.fetch_blocks import fetch_blocks
from qkvcache.select.host_pages import HostPages, index_names
from qkvcache.select.select_blocks import over_blocks
from qkvcache.select.selection import Selection
from qkvcache.storage.pool import PageLayout
from tests.kernels.paged_inputs import build
from tests.kernels.test_pages import DEVICE, KERNELS
from tests.matrix import COVER, FORMATS, slowly

LENGTHS = [300, 70, 0, 161]
SLOTS = 5


def cached(format: str, **options) -> tuple[PagedInputs, BlockCache]:
    """Inputs, and an empty cache of `SLOTS` blocks for each head."""
    inputs = build(FORMATS[format], LENGTHS, ring=5, dims=(64, 64), **options)
    layout = PageLayout(inputs.pages.codecs, (64, 64), 1, BLOCK, inputs.ring[0].dtype)
    count, device = len(LENGTHS) * 2 * SLOTS, inputs.rows.device
    slots = layout.views(torch.zeros(count * layout.nbytes, dtype=torch.uint8, device=device), count, step=layout.nbytes)
    held = torch.full((len(LENGTHS), 2, SLOTS), -1, dtype=torch.int32, device=device)
    return inputs, BlockCache.of(inputs.pages, slots, held, torch.zeros_like(held[..., 0]))


def chosen(inputs: PagedInputs, *blocks: int) -> Selection:
    """Those of these blocks that a row has, for each head; the second head reads one less."""
    lengths = torch.tensor(LENGTHS, device=inputs.rows.device)
    every = torch.zeros(len(LENGTHS), 2, len(blocks), dtype=torch.int32, device=lengths.device)
    read = torch.zeros(len(LENGTHS), 2, dtype=torch.int32, device=lengths.device)
    for b, length in enumerate(LENGTHS):
        for h in range(2):
            mine = [n for n in blocks[h:] if n * BLOCK < length]
            every[b, h, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            read[b, h] = sum(min(length - n * BLOCK, BLOCK) for n in mine)
    page = (every.long() * BLOCK // inputs.pages.page_size).clamp_max(inputs.pages.table.shape[1] - 1)
    return Selection(every, inputs.pages.table[:, None].expand(-1, 2, -1).gather(2, page), read)


STEPS = [(0, 2, 9), (0, 2, 3), (2, 3, 5), (1, 2, 9), (0, 3, 4)]
"""Blocks of neighbouring steps; block 9 of the first row, and 2 and 5 of others, are not full."""


def assert_holds(read: PagedInputs, inputs: PagedInputs, selection: Selection) -> None:
    """The slots have the codes of the chosen blocks."""
    for side in (0, 1):
        mine, places = read.pages.read(side, read.max_length)
        wanted, same = over_blocks(inputs, selection).pages.read(side, inputs.max_length)
        assert torch.equal(places, same)
        for name in inputs.pages.slabs[0][side]:
            assert torch.equal(mine[name].view(torch.uint8), wanted[name].expand_as(mine[name]).view(torch.uint8)), name


@pytest.mark.parametrize("format", slowly(FORMATS, COVER))
def test_slots_have_the_codes_of_chosen_blocks(format):
    inputs, cache = cached(format)
    for step in STEPS:
        selection = chosen(inputs, *step)
        assert_holds(fetch_blocks(inputs, cache, selection), inputs, selection)


def test_blocks_that_are_held_are_not_copied_again():
    """Slots keep what neighbouring steps share, in the order of the ring, but blocks that are not full."""
    inputs, cache = cached("turboquant_4bit_nc")
    fetch_blocks(inputs, cache, chosen(inputs, 0, 2, 9))
    before = fetch_blocks(inputs, cache, chosen(inputs, 0, 2, 3))
    for plane in (plane for side in inputs.pages.slabs[0] for plane in side.values()):
        plane.view(torch.uint8).fill_(7)
    after = fetch_blocks(inputs, cache, selection := chosen(inputs, 0, 2, 3))
    for side in (0, 1):
        for name in inputs.pages.slabs[0][side]:
            held, now = (read.pages.read(side, 0)[0][name].view(torch.uint8) for read in (before, after))
            assert torch.equal(held[0], now[0]) and torch.equal(held[1, 0, :BLOCK], now[1, 0, :BLOCK])
            assert (now[1, 0, BLOCK : int(selection.lengths[1, 0])] == 7).all()  # block 2 of the second row
    assert cache.blocks[0, 0].tolist() == [0, 2, -1, 3, -1] and cache.hands[0].tolist() == [4, 3]


PLANES = ("identity", "fp8_token", "int4", "turboquant_4bit_nc", "turboquant_3bit_nc")
"""Formats whose planes differ in their number, their widths and the heads that share them."""


@KERNELS
@pytest.mark.parametrize("format", slowly(FORMATS, PLANES))
def test_the_kernels(format):
    from qkvcache.select import triton_fetch_blocks

    inputs, cache = cached(format, device=DEVICE)
    twin = BlockCache.of(inputs.pages, *map(_copied, (cache.pages.slabs[0], cache.blocks, cache.hands)))
    for step in STEPS:
        selection = chosen(inputs, *step)
        mine, wanted = triton_fetch_blocks.fetch_blocks(inputs, cache, selection), fetch_blocks(inputs, twin, selection)
        assert torch.equal(mine.pages.selection.places(), wanted.pages.selection.places())
        live = torch.arange(len(step), device=DEVICE) < -(-selection.lengths // BLOCK)[..., None]
        assert torch.equal(mine.pages.selection.entries[live], wanted.pages.selection.entries[live])
        assert torch.equal(cache.blocks, twin.blocks) and torch.equal(cache.hands, twin.hands)
        assert_holds(mine, inputs, selection)


def _copied(x):
    return x.clone() if isinstance(x, torch.Tensor) else tuple({name: plane.clone() for name, plane in side.items()} for side in x)


@KERNELS
@pytest.mark.parametrize("begin", [None, 70])
def test_the_index_has_the_keys_that_choose_blocks(begin):
    """Of the tokens that were stored, and of no others."""
    lengths = [161, 40 if begin is None else 95, 97]
    pages, tokens = build(FORMATS["turboquant_4bit_nc"], lengths, device=DEVICE).pages, 25
    planes = {name: torch.zeros_like(pages.slabs[0][0][name]) for name in index_names(pages.codecs[0], 64)}
    assert planes.keys() == {"high", "scale"}
    table = torch.randperm(len(planes["high"]), device=DEVICE)[: pages.table.numel()].view_as(pages.table)
    index = replace(pages, slabs=[(planes, {})], table=table, lengths=None)
    HostPages(**vars(pages), index=index).copy_of(tokens, begin)()
    for b, length in enumerate(lengths):
        first, used = max(length - tokens, 0) if begin is None else begin, -(-length // 64)
        for name, plane in planes.items():
            mine = plane[table[b, :used]].transpose(1, 2).flatten(0, 1).view(torch.uint8)
            wanted = pages.slabs[0][0][name][pages.table[b, :used].long()].transpose(1, 2).flatten(0, 1).view(torch.uint8)
            assert torch.equal(mine[first : first + tokens], wanted[first : first + tokens])
            assert (mine[: first // BLOCK * BLOCK] == 0).all()
