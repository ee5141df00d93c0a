"""Reading a prompt once for many caches: its keys and values, and the attention weights that policies need."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer

from ..attention.compressed_kv import CompressedKV
from ..attention.observer import prompt_attention
from ..attention.second_reading import ReadingLayer
from ..caches import CompressedCache
from ..caches.compress import fill, read_twice
from ..formats import Format
from ..kernels import Pair
from ..layers.evicting import EvictingLayer
from ..policies import Budget, KVzip, Policy


@dataclass(frozen=True)
class Call:
    """The inputs of one layer's attention: queries `[B, Hq, T, D]`, the factor on `q k`, and the attention module."""

    query: Tensor
    scaling: float
    module: torch.nn.Module


class Prefilled(DynamicCache):
    """The dense cache of a prompt. `attention[window]`: the accumulated attention `[B, H, T]` of each layer, for each requested
    `Policy.observation_window`. `calls`: those of each layer, if they were requested."""

    attention: dict[int, list[Tensor]]
    calls: list[Call]

    def observed(self, index: int, policy: Policy) -> Tensor | None:
        """The accumulated attention `[B, H, T]` of a layer under `policy`, from the calls; computed once for policies that observe
        alike."""
        call, layer = self.calls[index], self.layers[index]
        if policy.reduces_attention:
            return prompt_attention(policy, call.query, layer.keys, layer.values, call.scaling)  # type: ignore[arg-type, union-attr]
        key = policy.observation_window, policy.decay
        found = self._observed.setdefault(key, {})
        if index not in found:
            found[index] = prompt_attention(policy, call.query, layer.keys, layer.values, call.scaling)  # type: ignore[arg-type, union-attr]
        return found[index]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.attention, self.calls = {}, []
        self._observed: dict[tuple[int, float], dict[int, Tensor | None]] = {}
        self._read_twice: dict[tuple[int, int, bool], tuple[DynamicCache, dict[int, Any]]] = {}

    def read_twice(self, policy: KVzip, model: PreTrainedModel, ids: Tensor, tokenizer: Any) -> tuple[DynamicCache, dict[int, Any]]:
        """`caches.compress.read_twice` of `ids` `[B, T]`, once for policies that read alike; a copy that can be taken apart."""
        key = policy.num_sink_tokens, policy.chunk_size, policy.normalized
        if key not in self._read_twice:
            dense, others = self._read_twice[key] = read_twice(model, policy, ids, torch.ones_like(ids), tokenizer, progress=False)
            for mine, layer in zip(self.layers, dense.layers, strict=True):
                if isinstance(layer, ReadingLayer):
                    layer.keys, layer.values = mine.keys, mine.values  # type: ignore[union-attr]  # held once
        dense, others = self._read_twice[key]
        taken = copy.copy(dense)
        taken.layers = list(dense.layers)
        return taken, copy.deepcopy(others)


class RecordingLayer(EvictingLayer):
    """A layer that keeps the keys and values of its first step."""

    call: Call
    given: Pair

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[CompressedKV, CompressedKV]:  # type: ignore[override]
        self.given = key_states, value_states
        return super().update(key_states, value_states, *args, **kwargs)

    def begin_attention(
        self, is_valid: Tensor | None, query: Tensor | None = None, scaling: float | None = None, module: torch.nn.Module | None = None
    ) -> Tensor | None:
        if query is not None and scaling is not None and module is not None:
            self.call = Call(query, scaling, module)
        return super().begin_attention(is_valid, query, scaling, module)


class RecordingCache(CompressedCache):
    """A cache that evicts nothing, of layers that record."""

    def _new_evicting(self, format: Format, policy: Policy, budget: Budget, **options) -> EvictingLayer:
        return RecordingLayer(format, policy, budget, **options)


@dataclass(frozen=True, kw_only=True)
class Recorder(Policy):
    """A policy that retains every token and records the accumulated attention of the last `window` queries of a step, layer by layer."""

    window: int
    found: list[Tensor] = field(default_factory=list)
    budget: int = 2**30
    recent: int = 0
    scores = True

    @property
    def observation_window(self) -> int:  # type: ignore[override]
        return self.window

    def observe(self, score: Tensor, attention_sums: Tensor, queries: Tensor | int) -> Tensor:
        if attention_sums.shape[-1]:  # an empty zone has none
            self.found.append(attention_sums)
        return score


SCORES = 2**30
"""The most attention scores of one forward pass: torch allocates all of them for grouped heads in fp32."""


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor, observation_window: tuple[int, ...] = (), calls: bool = False) -> tuple[Prefilled, Tensor]:
    """The dense cache of `ids` `[B, T]`, and the logits after the last token `[B, V]`. The model reads `ids` once more for each window in
    `observation_window`. `calls` records the inputs of attention instead, which serve every policy and take as much memory as keys and
    values; for models with full attention in every layer, in `sdpa`. If every layer has full attention, rows are read in groups of at most
    `SCORES` scores.
    """
    cache = Prefilled(config=model.config)
    full = all(type(layer) is DynamicLayer for layer in cache.layers)
    scores = model.config.get_text_config(decoder=True).num_attention_heads * ids.shape[1] ** 2
    groups = ids.split(max(SCORES // scores, 1) if full else len(ids))
    logits, parts = [], []
    if calls and full and model.config._attn_implementation == "sdpa":
        recording = RecordingCache(model.config, policy=Recorder(window=0))
        logits = model(ids, past_key_values=recording, logits_to_keep=1).logits[:, -1]
        for index, layer in enumerate(recording.layers):
            if isinstance(layer, RecordingLayer):
                cache.update(*layer.given, index)
                cache.calls.append(layer.call)
        return cache, logits
    for rows in groups:
        part = cache if len(groups) == 1 else DynamicCache(config=model.config)
        logits.append(model(rows, past_key_values=part, logits_to_keep=1).logits[:, -1])
        parts.append(part)
    if len(parts) > 1:
        for index, layers in enumerate(zip(*(part.layers for part in parts), strict=True)):
            cache.update(torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]), index)
    for window in observation_window:
        found = []
        for rows in groups:
            recorder = Recorder(window=window)
            model(rows, past_key_values=CompressedCache(model.config, policy=recorder), logits_to_keep=1)
            found.append(recorder.found)
        cache.attention[window] = [torch.cat(sums) for sums in zip(*found, strict=True)]
    return cache, torch.cat(logits)


@torch.no_grad()
def refill(
    cache: Cache, prefilled: Prefilled, model: PreTrainedModel, ids: Tensor, tokenizer: PreTrainedTokenizerBase | None = None
) -> Cache:
    """Fills `cache` as a prefill of `ids` without padding does: from `prefilled`, or by running the model. With `tokenizer`, policies that
    read the context twice ask for its repetition (`CompressedCache.compress`)."""
    policy = cache.policy if isinstance(cache, CompressedCache) else None
    observation_window = policy.observation_window if policy else 0
    if isinstance(policy, KVzip):
        fill(cache.layers, policy, model, torch.ones_like(ids), *prefilled.read_twice(policy, model, ids, tokenizer))
        return cache
    asks_more = policy and (policy.needs_queries or policy.needs_output_projection or policy.reduces_attention or policy.decay != 1)
    missing = asks_more or (observation_window and observation_window not in prefilled.attention)
    if not all(type(layer) is DynamicLayer for layer in prefilled.layers) or (missing and not prefilled.calls):
        model(ids, past_key_values=cache, logits_to_keep=1)
        return cache
    for index, dense in enumerate(prefilled.layers):
        cache.update(dense.keys, dense.values, index)  # type: ignore[arg-type, union-attr]
        layer = cache.layers[index]
        if not isinstance(layer, EvictingLayer):
            continue
        if prefilled.calls:  # as attention does
            call = prefilled.calls[index]
            layer.begin_attention(None, call.query, call.scaling, call.module)
            layer.end_attention(prefilled.observed(index, layer.policy))
        else:
            layer.begin_attention(None)
            layer.end_attention(prefilled.attention[observation_window][index] if observation_window else None)
    return cache
