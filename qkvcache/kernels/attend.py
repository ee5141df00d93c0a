"""Attention of a few queries over a compressed layer: softmax(q . k) . v with the options of transformers' models.

Scores of all tokens exist at once, `[B, H, G * Q, T]` in fp32; keys and values never do (`segments.py`).
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from .segments import AttentionInputs, pv, qk

MASKED_SCORE = -1e30  # finite: a fully masked row must come out as numbers, not as nan
MASKED_BELOW = -1e29  # scores below it are of masked tokens


class Options(TypedDict, total=False):
    """Options of attention."""

    scaling: float | None
    """Factor on the scores; None: `D ** -0.5`."""
    causal: bool
    """The last `Q` tokens are the queries' own, and a query attends to no later token. Default: False."""
    softcap: float | None
    """`softcap * tanh(score / softcap)` before the mask (Gemma 2)."""
    sinks: Tensor | None
    """A learned logit for each query head, `[Hq]`, that takes part in the softmax and has no value (gpt-oss)."""


def attend(query: Tensor, attention_inputs: AttentionInputs, mask: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """Attention output `[B, Hq, Q, Dv]` in the query's dtype.

    Args:
        query: `[B, Hq, Q, D]`, `Hq` a multiple of the KV heads.
        mask: bool (True: visible) or additive, broadcastable to `[B, Hq, Q, T]`; a longer last dimension is cut.
    """
    return attend_observed(query, attention_inputs, mask, **options)[0]


def attend_observed(
    query: Tensor,
    attention_inputs: AttentionInputs,
    mask: Tensor | None = None,
    *,
    observed: Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """Run `attend` and also return the accumulated attention of each token, fp32 `[B, H, T]`: its softmax weights, summed over the
    query heads of the group and over queries. Without `observed` it is empty, `[B, H, 0]`.

    Args:
        observed: how often each query counts, fp32 or bool `[B, Q]`; 0 for padding. Tokens that the mask hides accumulate nothing.
    """
    batch, query_heads, queries, _ = query.shape
    _, heads, tokens, _ = attention_inputs.key.shape
    logits = scores(query, attention_inputs, mask, **options)
    probabilities = logits.softmax(-1)[..., :tokens]
    rows = (batch, heads, query_heads // heads * queries)
    out = pv(probabilities.reshape(*rows, tokens), attention_inputs.value).view(batch, query_heads, queries, -1).to(query.dtype)
    if observed is None:
        return out, query.new_empty(batch, heads, 0, dtype=torch.float32)
    count = observed.float()[:, None].masked_fill(logits[..., :tokens].amax(-1) <= MASKED_BELOW, 0)
    counted = probabilities.masked_fill((count == 0)[..., None], 0)  # which may hold nan
    return out, (count.reshape(rows)[:, :, None] @ counted.reshape(*rows, tokens))[:, :, 0]


def scores(
    query: Tensor,
    attention_inputs: AttentionInputs,
    mask: Tensor | None,
    scaling: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Masked scores, fp32 `[B, Hq, Q, T]`, with `sinks` one more column."""
    batch, query_heads, queries, dim = query.shape
    _, heads, tokens, _ = attention_inputs.key.shape
    groups = query_heads // heads
    scaling = dim**-0.5 if scaling is None else scaling
    logits = qk(query.float().mul(scaling).reshape(batch, heads, groups * queries, dim), attention_inputs.key)
    logits = logits.view(batch, query_heads, queries, tokens)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = apply_mask(logits, mask, causal)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(batch, query_heads, queries, 1)
        logits = torch.cat([logits, column], dim=-1)
    return logits


def apply_mask(logits: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """`logits` `[B, Hq, Q, T]` with masked entries at `MASKED_SCORE`."""
    queries, tokens = logits.shape[-2:]
    if causal and queries > 1:
        visible = torch.ones(queries, tokens, dtype=torch.bool, device=logits.device).tril(tokens - queries)
        logits = logits.masked_fill(~visible, MASKED_SCORE)
    if mask is None:
        return logits
    mask = mask[..., :tokens]
    if mask.dtype == torch.bool:
        return logits.masked_fill(~mask, MASKED_SCORE)
    return (logits + mask).clamp_min(MASKED_SCORE)
