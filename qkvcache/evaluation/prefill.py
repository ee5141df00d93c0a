"""One reading of a prompt by the model serves every cache: its keys and values, and the attention that policies want to see."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ..caches import CompressedCache
from ..layers.evicting import EvictingLayer
from ..policies import Policy


class Prefilled(DynamicCache):
    """The dense cache of a prompt. `attention`: of each layer the mass of every token, for each `Policy.observes` that was asked for."""

    attention: dict[int, list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Recorder(Policy):
    """Keeps every token, and notes the attention of the last `window` queries of one step, layer by layer."""

    window: int
    found: list[Tensor] = field(default_factory=list)
    budget: int = 2**30
    recent: int = 0
    scores = True

    @property
    def observes(self) -> int:  # type: ignore[override]
        return self.window

    def observe(self, score: Tensor, mass: Tensor, queries: Tensor | int) -> Tensor:
        if mass.shape[-1]:  # of an empty zone there is none
            self.found.append(mass)
        return score


SCORES = 2**30
"""Attention scores of one forward pass: torch holds them all where keys of grouped heads are in fp32."""


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor, observes: tuple[int, ...] = ()) -> tuple[Prefilled, Tensor]:
    """The dense cache of `ids` `[B, T]`, and the logits after the last token `[B, V]`; one more reading for each of `observes`.

    Rows are read in groups whose scores fit into `SCORES`, where every layer has full attention.
    """
    cache = Prefilled(config=model.config)
    full = all(type(layer) is DynamicLayer for layer in cache.layers)
    scores = model.config.get_text_config(decoder=True).num_attention_heads * ids.shape[1] ** 2
    groups = ids.split(max(SCORES // scores, 1) if full else len(ids))
    logits, parts = [], []
    cache.attention = {}
    for rows in groups:
        part = cache if len(groups) == 1 else DynamicCache(config=model.config)
        logits.append(model(rows, past_key_values=part, logits_to_keep=1).logits[:, -1])
        parts.append(part)
    if len(parts) > 1:
        for index, layers in enumerate(zip(*(part.layers for part in parts), strict=True)):
            cache.update(torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]), index)
    for window in observes:
        found = []
        for rows in groups:
            recorder = Recorder(window=window)
            model(rows, past_key_values=CompressedCache(model.config, policy=recorder), logits_to_keep=1)
            found.append(recorder.found)
        cache.attention[window] = [torch.cat(masses) for masses in zip(*found, strict=True)]
    return cache, torch.cat(logits)


@torch.no_grad()
def refill(cache: Cache, prefilled: Prefilled, model: PreTrainedModel, ids: Tensor) -> Cache:
    """`cache` as it stands after a prefill of `ids`, all of them real: from what `prefilled` holds, or by running the model."""
    policy = cache.policy if isinstance(cache, CompressedCache) else None
    observes = policy.observes if policy else 0
    if not all(type(layer) is DynamicLayer for layer in prefilled.layers) or (observes and observes not in prefilled.attention):
        model(ids, past_key_values=cache, logits_to_keep=1)
        return cache
    for index, dense in enumerate(prefilled.layers):
        cache.update(dense.keys, dense.values, index)  # type: ignore[arg-type, union-attr]
        layer = cache.layers[index]
        if isinstance(layer, EvictingLayer):  # what attention would tell it
            layer.enter(None)
            layer.observe(prefilled.attention[observes][index] if observes else None)
    return cache
