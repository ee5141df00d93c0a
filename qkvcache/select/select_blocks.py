"""The choice of the blocks of quantized tokens that attention with a budget reads: those with the largest softmax weights.

Few tokens have most of the weight of a query, and other tokens in each step, so that no token is dropped. The weight of a block is that of
its tokens among all quantized tokens, summed over the queries and the query heads of a group. It is computed from the keys' codes, from the
upper halves where they are kept apart (`PackedLayout.upper`): these choose as well as exact keys. Quest (arXiv
2406.10774) chooses by the extent of a block's keys, which costs as many bytes and chooses worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attend.reference import MASKED_BELOW, mask_slots
from ..kernels.paged_inputs import BEGIN, PagedInputs
from ..kernels.pages import BLOCK
from ..kernels.segments import Packed, scores_of_levels
from .budget import WHOLE, Budget
from .selection import ChosenPages, Selection

GROUP, SAMPLED = 32, 8
"""The most queries that share a choice, and how many of them weigh the blocks for all: neighbouring queries choose alike."""


def groups(query: Tensor, inputs: PagedInputs, mask: Tensor | None, causal: bool) -> Iterator[tuple[Tensor, PagedInputs, Tensor | None]]:
    """Yields the queries of each choice, the inputs without later tokens of a causal step, and the rows of the mask."""
    queries = query.shape[2]
    if mask is not None and mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    if queries <= GROUP:
        yield query, inputs, mask
        return
    for begin in range(0, queries, GROUP):
        end = min(begin + GROUP, queries)
        rows = mask if mask is None or mask.shape[2] == 1 else mask[:, :, begin:end]
        yield query[:, :, begin:end], inputs.ended(queries - end if causal else 0), rows


def sampled(x: Tensor) -> Tensor:
    """The queries of a group, `[B, Hq, Q, D]`, or rows of its mask, that weigh blocks: evenly spaced up to the last one."""
    if x.shape[2] <= SAMPLED:
        return x
    step = -(-x.shape[2] // SAMPLED)
    return x[:, :, (x.shape[2] - 1) % step :: step]


def select_blocks(
    query: Tensor,
    inputs: PagedInputs,
    budget: Budget,
    mask: Tensor | None = None,
    keys: Iterable[Packed] | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> Selection:
    """The blocks that queries `[B, Hq, Q, D]` read under `budget`: one choice for all of them in each KV head, which `sampled` make.

    Args:
        mask: as in `attend_pages`. Tokens that it hides have no weight.
        keys: the first `inputs.max_length` quantized keys of all rows, in order, if the caller has them; else they are gathered.
        others: options of attention that do not change the choice.
    """
    few, shown = sampled(query), None if mask is None else sampled(mask)
    logits = upper_logits(few, inputs, shown, keys, scaling, softcap)
    return choose_blocks(block_weights(logits, inputs.ring[0].shape[1]), inputs, budget)


def over_blocks(inputs: PagedInputs, selection: Selection) -> PagedInputs:
    """The inputs of attention over chosen blocks."""
    return inputs.anew(pages=ChosenPages(inputs.pages, selection))


def upper_logits(
    query: Tensor, inputs: PagedInputs, mask: Tensor | None, keys: Iterable[Packed] | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """The scores of all quantized tokens by the upper halves of their codes, where they are kept apart, under the mask: fp32 `[B, Hq, Q,
    T]`."""
    batch, query_heads, queries, dim = query.shape
    heads, tokens = inputs.ring[0].shape[1], inputs.max_length
    if keys is None:
        keys = [Packed(inputs.pages.codecs[0], inputs.pages.read(0, tokens)[0], tokens, dim)]
    rotated = inputs.pages.codecs[0].rotate(query.float().mul(dim**-0.5 if scaling is None else scaling).reshape(batch, heads, -1, dim))
    parts = [scores_of_levels(rotated, part.levels(upper=True)) for part in keys]
    logits = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.view(batch, query_heads, queries, tokens)
    place = torch.arange(tokens, device=query.device)
    places = torch.where(place < _range(inputs)[1][:, None, None], place, -1)
    return mask_slots(logits, inputs.quantized_columns(places), mask, False)


def block_weights(logits: Tensor, heads: int) -> Tensor:
    """The weights of blocks, fp32 `[B, H, N]`, from the scores of tokens: they add up to the number of query rows that see one."""
    batch, _, _, tokens = logits.shape
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp_().masked_fill_(top <= MASKED_BELOW, 0)
    by_block = F.pad(weights, (0, -tokens % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1)
    by_block /= by_block.sum(-1, keepdim=True).clamp_min(1e-30)
    return by_block.view(batch, heads, -1, by_block.shape[-1]).sum(2)


def _range(inputs: PagedInputs) -> tuple[Tensor, Tensor]:
    """The first token in pages that each row reads, and the end of those tokens, int64 `[B]` each."""
    table, tokens = inputs.pages.table, inputs.max_length
    if inputs.rows is None:
        return table.new_zeros(len(table), dtype=torch.int64), table.new_full((len(table),), tokens, dtype=torch.int64)
    return inputs.rows[:, BEGIN].long(), inputs.pages.lengths.clamp_max(tokens).long()  # type: ignore[union-attr]


def choose_blocks(weights: Tensor, inputs: PagedInputs, budget: Budget) -> Selection:
    """The blocks of the largest `weights` `[B, H, N]` that have tokens which are read; of equal ones, the first."""
    blocks = weights.shape[2]
    room = budget.blocks(blocks)
    begin, lengths = _range(inputs)
    first, end = begin // BLOCK, (lengths + BLOCK - 1) // BLOCK
    stored = (end - first).clamp_min(0)
    read = ((budget.share * stored + WHOLE - 1) // WHOLE).clamp_min(-(-budget.tokens // BLOCK)).minimum(stored)
    block = torch.arange(blocks, device=weights.device)
    exists = (block >= first[:, None, None]) & (block < end[:, None, None])
    order = weights.masked_fill(~exists, -1).argsort(dim=-1, descending=True, stable=True)[..., :room]
    allowed = torch.arange(room, device=weights.device) < read[:, None, None]
    chosen = torch.zeros_like(exists.expand_as(weights)).scatter(-1, order, allowed.expand_as(order))
    count, heads = chosen.sum(-1), chosen.shape[1]
    listed = torch.where(chosen, block, blocks).sort(-1).values[..., :room]
    missing = chosen.gather(-1, (end - 1).clamp_min(0)[:, None, None].expand(-1, heads, -1))[..., 0] * (end * BLOCK - lengths)[:, None]
    listed = listed.clamp_max(max(blocks - 1, 0))
    entries = inputs.pages.table[:, None].expand(-1, heads, -1).gather(2, listed * BLOCK // inputs.pages.page_size)
    return Selection(listed.int(), entries, (count * BLOCK - missing).int())
