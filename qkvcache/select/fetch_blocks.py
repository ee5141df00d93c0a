"""Fetching the chosen blocks of pages in host memory into the device's cache of blocks (`block_cache.py`).

Neighbouring steps choose much the same blocks. A block that is in a slot stays there; the others go to the slots that this step does not
read, in the order of the ring from the hand on. There are slots for twice as many blocks as a step reads, so that what one step leaves out
is still there for the next ones. The host takes no part in it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.paged_inputs import PagedInputs, Prepared
from ..kernels.pages import BLOCK
from .block_cache import BlockCache
from .selection import ChosenPages, Selection


def fetch_blocks(inputs: PagedInputs, cache: BlockCache, selection: Selection) -> PagedInputs:
    """Copies the chosen blocks that have no slot into slots. Returns the inputs of attention over the slots of all chosen blocks."""
    slots, missing = place_blocks(inputs, cache, selection)
    pages, target = inputs.pages, (slots * BLOCK)[..., None] + torch.arange(BLOCK, device=slots.device)
    source = torch.where(missing, selection.entries.long(), pages.firsts[0]) * pages.page_size
    source = source + selection.blocks.long() * BLOCK % pages.page_size
    target = target.masked_fill(~missing[..., None], -1).flatten(2)
    for side in (0, 1):
        cache.pages.put(side, target, pages.take(side, source, BLOCK))
    return over_slots(inputs, cache, replace(selection, entries=slots.to(selection.entries.dtype)))


def over_slots(inputs: PagedInputs, cache: BlockCache, selection: Selection) -> PagedInputs:
    """The inputs of attention over a selection whose entries are slots of the cache."""
    pages = ChosenPages(cache.pages, selection)
    pages.lengths = inputs.pages.lengths
    return inputs.twin(pages=pages, prepared=Prepared(cache.launches))


def place_blocks(inputs: PagedInputs, cache: BlockCache, selection: Selection) -> tuple[Tensor, Tensor]:
    """Gives each chosen block a slot, and sets the cache accordingly. Returns the slots, int64 `[B, H, N]` over all rows and heads, and
    which blocks must be copied, bool `[B, H, N]`. A block that is not full will change: its slot does not count in the next step."""
    blocks, held, hands = selection.blocks, cache.blocks, cache.hands
    (batch, heads, count), slots = blocks.shape, held.shape[2]
    chosen = torch.arange(count, device=held.device) < ((selection.lengths + BLOCK - 1) // BLOCK)[..., None]
    same = (held[:, :, None] == blocks[..., None]) & chosen[..., None]
    missing, used = chosen & ~same.any(-1), same.any(-2)
    order = (hands[..., None] + torch.arange(slots, device=held.device)) % slots
    free = order.gather(-1, used.gather(-1, order).int().argsort(dim=-1, stable=True))
    slot = torch.where(missing, free.gather(-1, (missing.cumsum(-1) - 1).clamp_min(0)), same.int().argmax(-1))
    stored = inputs.max_length if inputs.rows is None else inputs.pages.lengths.view(-1, 1, 1)  # type: ignore[union-attr]
    kept = torch.where((blocks + 1) * BLOCK <= stored, blocks, -1)
    beyond = torch.nn.functional.pad(held, (0, 1)).scatter(-1, torch.where(missing, slot, slots), kept)  # of those that have a slot already
    held.copy_(beyond[..., :slots])
    fetched = missing.sum(-1, keepdim=True)
    last = free.gather(-1, (fetched - 1).clamp_min(0))
    hands.copy_(torch.where(fetched > 0, (last + 1) % slots, hands[..., None])[..., 0])
    first = torch.arange(batch * heads, device=held.device).view(batch, heads, 1) * slots
    return first + torch.where(chosen, slot, 0), missing
