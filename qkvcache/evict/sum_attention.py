"""Accumulated attention in plain torch: the softmax weight of each token, summed over queries and over the query heads of its group.

`attend_observed` and `observe_pages` find it with the attention of a few queries. `sum_attention` finds it after the attention of many
queries, with memory linear in tokens."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from ..kernels.attend.chunked import BLOCK
from ..kernels.attend.reference import MASKED_BELOW, MASKED_SCORE, Options, weigh, weigh_pages, weighted
from ..kernels.inputs import AttentionInputs
from ..kernels.paged_inputs import PagedInputs, paged_side


def attend_observed(
    query: Tensor, attention_inputs: AttentionInputs, mask: Tensor | None = None, *, observed: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """`attend.attend`, and the accumulated attention of each token, fp32 `[B, H, T]`; 0 for tokens that the mask hides. `observed`: how
    often each query counts, fp32 or bool `[B, Q]`; 0 for padding."""
    weights, logits = weigh(query, attention_inputs, mask, **options)
    return weighted(query, weights, attention_inputs.value), _counted(weights, logits, observed, attention_inputs.key.shape[1])


def observe_pages(
    query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, *, observed: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The output of `attend.attend_pages`, and the accumulated attention of each slot, fp32 `[B, H, S + max_length + R]`."""
    value, places = paged_side(inputs, 1)
    weights, logits, _ = weigh_pages(query, inputs, places, mask, **options)
    return weighted(query, weights, value), _counted(weights, logits, observed, value.shape[1])


def _counted(weights: Tensor, logits: Tensor, observed: Tensor, heads: int) -> Tensor:
    """`weights` `[B, Hq, Q, T]` summed. Queries that see no token do not count."""
    count = observed.float()[:, None].masked_fill(logits.amax(-1) <= MASKED_BELOW, 0).reshape(len(weights), heads, 1, -1)
    counted = weights.reshape(len(weights), heads, -1, weights.shape[3]).masked_fill((count == 0).mT, 0)  # which may hold nan
    return (count @ counted)[:, :, 0]


def sum_attention(
    query: Tensor,
    key: Tensor,
    observed: Tensor,
    visible: Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    causal: bool = True,
    power: int = 1,
    columns: int | None = None,
) -> Tensor:
    """Accumulated attention of each token, fp32 `[B, H, T]`, or of the first `columns` tokens: its softmax weights, summed over queries and
    the query heads of its group.

    Args:
        query: `[B, Hq, Q, D]`.
        key: `[B, H, T, D]`.
        observed: how often each query counts, fp32 `[B, Q]`; 0 for padding.
        visible: bool `[B, T]`, or `[B, H, T]` where heads differ; False for padding.
        scaling: factor on the scores.
        softcap: as for `attend`.
        sinks: as for `attend`.
        lse: log of the normaliser, fp32 `[B, Hq, Q]`, of the scaled scores, sinks included, if it is known. Then `sinks` are not read, and
        the keys may be a part of those that queries attend to.
        causal: the last `Q` tokens belong to the queries, and each query sees tokens up to its own. Else each sees all tokens.
        power: weights, times how often their query counts, are raised to this power before they are added.
        columns: how many tokens are to be known. Default: all.
    """
    batch, query_heads, queries, dim = query.shape
    heads, tokens = key.shape[1:3]
    groups = query_heads // heads
    key = key.float()
    if visible is not None:
        visible = visible[:, None] if visible.dim() == 2 else visible.repeat_interleave(groups, dim=1)
    attention_sums = torch.zeros(batch, heads, tokens, dtype=torch.float32, device=key.device)
    step = max(BLOCK // (batch * query_heads * tokens), 1)
    for begin in range(0, queries, step):
        end = min(begin + step, queries)
        end_key = tokens - queries + end if causal else tokens
        rows = query[:, :, begin:end].float().mul(scaling).reshape(batch, heads, groups * (end - begin), dim)
        logits = (rows @ key[:, :, :end_key].mT).view(batch, query_heads, end - begin, end_key)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if causal:
            own = logits[..., end_key - (end - begin) :]
            own.masked_fill_(torch.ones_like(own[0, 0], dtype=torch.bool).triu(1), MASKED_SCORE)
        if visible is not None:
            logits.masked_fill_(~visible[:, :, None, :end_key], MASKED_SCORE)
        if lse is not None:
            level = lse[:, :, begin:end]
        else:
            level = logits.logsumexp(-1)
            if sinks is not None:
                level = torch.logaddexp(level, sinks.float()[:, None])
        unseen = logits <= MASKED_BELOW
        count = observed[:, None, begin:end].float().expand(batch, query_heads, -1)
        weights = logits.sub_(level[..., None]).exp_().masked_fill_(unseen | (count == 0)[..., None], 0)
        rows_of = (batch, heads, groups * (end - begin))
        count, weights, found = count.reshape(rows_of), weights.reshape(*rows_of, end_key), attention_sums[:, :, :end_key]
        if power > 1:
            found += weights.mul_(count[..., None]).pow_(power).sum(2)
        else:
            found += (count[:, :, None] @ weights)[:, :, 0]
    return attention_sums[..., :columns]
