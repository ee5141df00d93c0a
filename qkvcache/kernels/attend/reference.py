"""Attention of a few queries over a compressed layer, softmax(q . k) . v, with the options of transformers'
models, in plain torch: the reference that fused kernels are tested against.

Scores of all tokens exist at once, `[B, H, G * Q, T]` in fp32; keys and values never do (`segments.py`).
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from ..inputs import AttentionInputs
from ..paged_inputs import PagedInputs, paged_side
from ..segments import KeysOrValues, pv, qk

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


OPTIONS = "sinks", "scaling", "softcap", "causal"
"""The names of the options, in the order in which torch operators take them."""


def attend(query: Tensor, attention_inputs: AttentionInputs, mask: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """Attention output `[B, Hq, Q, Dv]` in the query's dtype.

    Args:
        query: `[B, Hq, Q, D]`, `Hq` a multiple of the KV heads.
        mask: bool (True: visible) or additive, broadcastable to `[B, Hq, Q, T]`; a longer last dimension is cut.
    """
    return weighted(query, weigh(query, attention_inputs, mask, **options)[0], attention_inputs.value)


def weigh(
    query: Tensor, attention_inputs: AttentionInputs, mask: Tensor | None = None, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """The softmax weights of all tokens, and their scores under the mask, fp32 `[B, Hq, Q, T]`. Arguments as in `attend`."""
    sinks = options.get("sinks")
    logits = scores(query, attention_inputs.key, options.get("scaling"), options.get("softcap"))
    logits = apply_mask(logits, mask, options.get("causal", False))
    every = logits
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        every = torch.cat([logits, column], dim=-1)
    return every.softmax(-1)[..., : logits.shape[3]], logits


def weighted(query: Tensor, weights: Tensor, value: KeysOrValues) -> Tensor:
    """The output `[B, Hq, Q, Dv]` for `weights` `[B, Hq, Q, T]`."""
    by_head = weights.reshape(len(query), value.shape[1], -1, value.shape[2])
    return pv(by_head, value).view(*query.shape[:3], -1).to(query.dtype)


def scores(query: Tensor, key: KeysOrValues, scaling: float | None, softcap: float | None) -> Tensor:
    """Scores before the mask, fp32 `[B, Hq, Q, T]`."""
    batch, (heads, tokens, dim) = len(query), key.shape[1:]
    scaling = dim**-0.5 if scaling is None else scaling
    logits = qk(query.float().mul(scaling).reshape(batch, heads, -1, dim), key).view(*query.shape[:3], tokens)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


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


def attend_pages(
    query: Tensor,
    inputs: PagedInputs,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a few queries over sinks, pages and a ring.

    Args:
        query: `[B, Hq, Q, D]`, `Hq` a multiple of the KV heads.
        mask: bool (True: visible) or additive, broadcastable to `[B, Hq, Q, T]`, where `T` is at least the tokens of the longest row: a
            column is a token's index in its row.
        scaling, causal, softcap, sinks: see `Options`.

    Returns the output `[B, Hq, Q, Dv]` in the query's dtype, and the log of the normaliser, fp32 `[B, Hq,
    Q]`. A row without tokens has the output 0 and, without `sinks`, the log -inf.
    """
    value, places = paged_side(inputs, 1)
    weights, _, lse = weigh_pages(query, inputs, places, mask, scaling, causal, softcap, sinks)
    return weighted(query, weights, value), lse


def weigh_pages(
    query: Tensor,
    inputs: PagedInputs,
    places: Tensor,
    mask: Tensor | None = None,
    scaling: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax weights of all slots, their scores under the mask, fp32 `[B, Hq, Q, S + max_length + R]`,
    and the log of the normaliser, fp32 `[B, Hq, Q]`. `places`: of the quantized tokens (`paged_side`); other
    arguments as in `attend_pages`."""
    logits = scores(query, paged_side(inputs, 0)[0], scaling, softcap)
    logits = mask_slots(logits, inputs.columns(places), mask, causal)
    lse = torch.logsumexp(logits, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float()[:, None])
    return (logits - lse[..., None]).exp().masked_fill(lse[..., None] == -torch.inf, 0), logits, lse


def mask_slots(logits: Tensor, columns: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """`logits` `[B, Hq, Q, slots]` under the mask of `attend_pages`; -inf where a slot has no token. `columns`: `PagedInputs.columns`."""
    batch, query_heads, queries, slots = logits.shape
    heads = columns.shape[1]
    logits, column = logits.unflatten(1, (heads, -1)), columns[:, :, None, None]
    newest = column.amax(-1, keepdim=True) + 1 - queries + torch.arange(queries, device=logits.device)[:, None]
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())].expand(batch, query_heads, queries, -1).unflatten(1, (heads, -1))
        index = column.clamp(0, mask.shape[-1] - 1).expand(batch, heads, query_heads // heads, queries, slots)
        logits = apply_mask(logits, mask.gather(-1, index), False)
    if causal:
        logits = logits.masked_fill(column > newest, torch.finfo(torch.float32).min)
    return logits.masked_fill(column < 0, -torch.inf).flatten(1, 2)
