"""Attention over latents (MLA) in plain torch: many query heads over one head, whose latents are keys and values at once.

    scores = q . [latent | rope] * scaling;   output = softmax(scores) . latent

The attention inputs hold latents `[B, 1, T, R]` as keys and the rotated part of keys `[B, 1, T, P]` as values. Each block of latents is
unpacked once for both products. Queries are the model's queries times the up-projection of keys (`latents/attention.py`).

On a CPU, where a mask shows few tokens to each query, as an indexer's mask does, only the codes of these tokens are gathered and unpacked.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..formats.base import Codec
from ..kernels.attend.reference import MASKED_SCORE, apply_mask, mask_slots
from ..kernels.inputs import AttentionInputs
from ..kernels.paged_inputs import PagedInputs, paged_side
from ..kernels.segments import (
    Exact,
    KeysOrValues,
    Packed,
    Segment,
    names,
    qk,
    scores_of_levels,
    sum_of_levels,
    unrotated_sum,
)

BLOCK = 2**25
"""Scores in memory at a time."""
LEAST_SAVED = 2
"""Tokens are gathered where at least as many times as many would be unpacked otherwise."""


def attend_latents(
    query: Tensor, attention_inputs: AttentionInputs, mask: Tensor | None = None, *, scaling: float, causal: bool = False
) -> Tensor:
    """Attention output `[B, Hq, Q, R]` in the query's dtype.

    Args:
        query: `[B, Hq, Q, R + P]`.
        mask: bool (True: visible) or additive, broadcastable to `[B, Hq, Q, T]`; a longer last dimension is cut.
        causal: the last `Q` tokens are the queries' own, and a query attends to no later token.
    """
    latents, rope = attention_inputs.key, attention_inputs.value
    gathers = query.device.type == "cpu" and not (causal and query.shape[2] > 1) and not torch.compiler.is_compiling()
    if gathers and mask is not None and (chosen := _choose(query, latents, mask)) is not None:
        index, mask = chosen
        row = query.transpose(1, 2).flatten(0, 1)[:, :, None]
        out = _attend_all(row, _gathered(latents, index), _gathered(rope, index), mask, scaling, False)
        return out.view(len(query), -1, *out.shape[1::2]).transpose(1, 2)
    return _attend_all(query, latents, rope, mask, scaling, causal)


def _choose(query: Tensor, side: KeysOrValues, mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """`(index, mask)`, with a row for each query: the quantized tokens among which are all that it sees, int64 `[B * Q, K]`
    counted from the first quantized one, and its mask for these and the exact tokens, `[B * Q, 1, 1, T']`. None where
    gathering them would not save time."""
    begin = sum(segment.tokens for segment in itertools.takewhile(lambda x: isinstance(x, Exact), side.segments))
    count = sum(segment.tokens for segment in side.segments if isinstance(segment, Packed))
    (batch, _, queries, _), tokens = query.shape, side.shape[2]
    if not count or mask.shape[1] != 1:
        return None
    mask = mask[..., :tokens].expand(batch, 1, queries, tokens).reshape(-1, tokens)
    before, packed, after = mask.split([begin, count, tokens - begin - count], dim=1)
    shown = packed if mask.dtype == torch.bool else packed > torch.finfo(mask.dtype).min / 2
    most = max(int(shown.sum(-1).amax()), 1)
    if LEAST_SAVED * queries * most > count:
        return None
    index = shown.byte().topk(most, sorted=False).indices
    return index, torch.cat([before, packed.gather(1, index), after], dim=1)[:, None, None]


def _gathered(side: KeysOrValues, index: Tensor) -> KeysOrValues:
    """The exact tokens, and the quantized ones at `index` `[N, K]`, of the rows repeated to `N`."""
    rows = torch.arange(side.shape[0], device="cpu").repeat_interleave(len(index) // side.shape[0])
    place, row, begin = index.flatten(), rows.repeat_interleave(index.shape[1]), 0
    packed = [segment for segment in side.segments if isinstance(segment, Packed)]
    codec, dim, like = packed[0].codec, packed[0].head_dim, packed[0].codes
    each = names(codec, dim, "each")
    codes = {name: x[rows % len(x)] for name, x in like.items() if name not in each}
    codes |= {name: like[name].new_empty(len(place), *like[name].shape[1::2]) for name in each}
    for segment in packed:
        here = ((place >= begin) & (place < begin + segment.tokens)).nonzero()[:, 0]
        for name in each:
            codes[name][here] = segment.codes[name][row[here], :, place[here] - begin]
        begin += segment.tokens
    codes |= {name: codes[name].unflatten(0, index.shape).transpose(1, 2) for name in each}
    parts: list[Segment] = [Exact(x.x[rows]) for x in side.segments if isinstance(x, Exact)]
    parts.insert(next(i for i, x in enumerate(side.segments) if x is packed[0]), Packed(codec, codes, index.shape[1], dim))
    shape = len(rows), side.shape[1], sum(part.tokens for part in parts), side.shape[3]
    return KeysOrValues.of(parts, shape, side.dtype, side.device)


def _attend_all(query: Tensor, latents: KeysOrValues, rope: KeysOrValues, mask: Tensor | None, scaling: float, causal: bool) -> Tensor:
    """`attend_latents` without a choice of tokens, for as many queries at a time as `BLOCK` allows."""
    batch, heads, queries, _ = query.shape
    tokens, parts = latents.shape[2], []
    step = max(BLOCK // (batch * heads * tokens), 1)
    for begin in range(0, queries, step):
        rows = slice(begin, min(begin + step, queries))
        shown = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        latent_query, rope_query = _split(query[:, :, rows], latents, scaling)
        logits = qk(rope_query, rope).view(batch, heads, -1, tokens)
        if causal and queries > 1:
            later = torch.ones(logits.shape[2], tokens, dtype=torch.bool, device=query.device).triu(tokens - queries + 1 + begin)
            logits = logits.masked_fill(later, MASKED_SCORE)
        parts.append(_attend(latent_query, latents, apply_mask(logits, shown, False)))
    return torch.cat(parts, dim=2).to(query.dtype)


def attend_latent_pages(query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, *, scaling: float, causal: bool = False) -> Tensor:
    """`attend_latents` over sinks, pages and a ring. Arguments as in `attend.attend_pages`."""
    (latents, places), (rope, _) = paged_side(inputs, 0), paged_side(inputs, 1)
    latent_query, rope_query = _split(query, latents, scaling)
    logits = qk(rope_query, rope).view(*query.shape[:3], -1)
    return _attend(latent_query, latents, mask_slots(logits, inputs.columns(places), mask, causal)).to(query.dtype)


def _split(query: Tensor, latents: KeysOrValues, scaling: float) -> tuple[Tensor, Tensor]:
    """Scaled queries for latents, `[B, 1, Hq * Q, R]`, and for the rotated part, `[B, 1, Hq * Q, P]`, in fp32."""
    rank = latents.shape[3]
    latent, rope = query.float().mul(scaling).flatten(1, 2)[:, None].split([rank, query.shape[3] - rank], dim=-1)
    return latent, rope


def _attend(query: Tensor, latents: KeysOrValues, logits: Tensor) -> Tensor:
    """Output `[B, Hq, Q, R]` in fp32 of scaled queries `[B, 1, Hq * Q, R]`, with the masked scores `[B, Hq, Q, T]` of the rotated part."""
    shape, logits = logits.shape, logits.flatten(1, 2)[:, None]
    top = logits.new_full(logits.shape[:3], MASKED_SCORE)
    total, begin = torch.zeros_like(top), 0
    rotated: dict[Codec, Tensor] = {}
    sums: dict[Codec | None, Tensor] = {}
    for segment in latents.segments:
        codec, part = None if isinstance(segment, Exact) else segment.codec, logits[..., begin : begin + segment.tokens]
        begin += segment.tokens
        if isinstance(segment, Exact):
            vectors = segment.x.to(query.dtype)
            part = part + query @ vectors.mT
        else:
            if segment.codec not in rotated:
                rotated[segment.codec] = segment.codec.rotate(query)
            values = segment.levels()
            part = part + scores_of_levels(rotated[segment.codec], values)
        highest = torch.maximum(top, part.amax(-1))
        weights, shrink = (part - highest[..., None]).exp(), (top - highest).exp()
        total, top = total * shrink + weights.sum(-1), highest
        sums = {key: out * shrink[..., None] for key, out in sums.items()}
        out = weights @ vectors if isinstance(segment, Exact) else sum_of_levels(weights, values)
        sums[codec] = sums[codec] + out if codec in sums else out
    out = unrotated_sum(sums) / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    return out.view(*shape[:3], -1)
