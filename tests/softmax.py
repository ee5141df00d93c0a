"""Softmax attention by its definition, in float64: what every implementation of attention is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights `[B, Hq, Q, T]`, of a query that sees nothing zeros, and the log of their normalisers.

    `mask`: bool or added to the scores, of T columns or more. `causal`: the last token is that of the last query. `sinks`: a score of each
    head that takes part in the softmax and has no value."""
    queries, tokens = query.shape[2], key.shape[2]
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query.double() @ key.mT * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if mask is not None:
        mask = mask[..., :tokens]
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.double()
    if causal:
        later = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).triu(tokens - queries + 1)
        logits = logits.masked_fill(later, -torch.inf)
    others = [] if sinks is None else [sinks.double()[:, None, None].expand(*logits.shape[:3], 1)]
    total = torch.logsumexp(torch.cat([logits, *others], dim=-1), dim=-1)
    return (logits - total.nan_to_num(neginf=0)[..., None]).exp(), total


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options) -> Tensor:
    """The output `[B, Hq, Q, Dv]`; `options` of `attention_weights`."""
    return attention_weights(query, key, mask, **options)[0] @ value.double().repeat_interleave(query.shape[1] // value.shape[1], 1)
