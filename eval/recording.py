"""Reading a prompt once for many caches that evict: what their policies observe is computed from the recorded inputs of attention."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from qkvcache import CompressedCache
from qkvcache.attention.compressed_kv import CompressedKV
from qkvcache.evaluation.quality import Prefilled, in_groups, prefill
from qkvcache.evict import observer
from qkvcache.evict.compress import ReadingLayer, fill, read_twice
from qkvcache.evict.layer import EvictingLayer
from qkvcache.evict.observe import sum_attention
from qkvcache.kernels import Pair
from qkvcache.policies import KVzip, Policy, Random
from qkvcache.releases import passing


@torch.no_grad()
def prompt_attention(policy: Policy, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor | None:
    """The sums that `observer.attend_observed` reports to a layer of `policy` after a prompt without padding: queries `[B, Hq, T, D]`,
    keys and values `[B, H, T, D]`; no softcap, no attention sinks."""
    weights = observer._query_weights(policy.observation_window, policy.decay, None, query)
    if weights is None:
        return None
    last = observer._last(policy.observation_window, None, query.shape[2])
    query, counts = query[:, :, last].detach(), weights[:, last]
    return sum_attention(query, keys, counts, None, scaling=scaling)


@dataclass(frozen=True)
class Call:
    """The inputs of one layer's attention: queries `[B, Hq, T, D]` and the factor on `q k`."""

    query: Tensor
    scaling: float


class Recorded(Prefilled):
    """The dense cache of a prompt, with the call of each layer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls: list[Call] = []
        self._observed: dict[tuple[int, float], dict[int, Tensor | None]] = {}
        self._read_twice: dict[tuple[int, int], tuple[DynamicCache, dict[int, Any]]] = {}

    def observed(self, index: int, policy: Policy) -> Tensor | None:
        """The accumulated attention `[B, H, T]` of a layer under `policy`; computed once for policies that observe alike."""
        call, layer = self.calls[index], self.layers[index]
        found = self._observed.setdefault((policy.observation_window, policy.decay), {})
        if index not in found:
            found[index] = prompt_attention(policy, call.query, layer.keys, layer.values, call.scaling)
        return found[index]

    def read_twice(self, policy: KVzip, model: PreTrainedModel, ids: Tensor, tokenizer: Any) -> tuple[DynamicCache, dict[int, Any]]:
        """`evict.compress.read_twice` of `ids` `[B, T]`, once for policies that read alike; a copy that can be taken apart."""
        key = policy.num_sink_tokens, policy.chunk_size
        if key not in self._read_twice:
            dense, others = self._read_twice[key] = read_twice(model, policy, ids, torch.ones_like(ids), tokenizer, progress=False)
            for mine, layer in zip(self.layers, dense.layers, strict=True):
                if isinstance(layer, ReadingLayer):
                    layer.keys, layer.values = mine.keys, mine.values  # held once
        dense, others = self._read_twice[key]
        taken = copy.copy(dense)
        taken.layers = list(dense.layers)
        return taken, copy.deepcopy(others)

    @torch.no_grad()
    def fill(self, cache: Cache, model: PreTrainedModel, ids: Tensor, tokenizer: PreTrainedTokenizerBase | None = None) -> Cache:
        policy = cache.policy if isinstance(cache, CompressedCache) else None
        if isinstance(policy, KVzip):
            fill(cache.layers, policy, model, torch.ones_like(ids), *self.read_twice(policy, model, ids, tokenizer))
            return cache
        if not policy or not self.calls:
            return super().fill(cache, model, ids, tokenizer)
        for index, (dense, call) in enumerate(zip(self.layers, self.calls, strict=True)):  # as attention does
            cache.update(dense.keys, dense.values, index)
            layer = cache.layers[index]
            if isinstance(layer, EvictingLayer):
                layer.begin_attention(None, call.query, call.scaling)
                layer.end_attention(self.observed(index, layer.policy))
        return cache


class RecordingLayer(EvictingLayer):
    """A layer that keeps the keys and values of its first step."""

    call: Call
    given: Pair

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[CompressedKV, CompressedKV]:
        self.given = key_states, value_states
        return super().update(key_states, value_states, *args, **kwargs)

    def begin_attention(self, is_valid: Tensor | None, query: Tensor, scaling: float) -> Tensor | None:
        self.call = Call(query, scaling)
        return super().begin_attention(is_valid, query, scaling)


def recording_cache(config: PreTrainedConfig, tokens: int) -> CompressedCache:
    """A cache that retains `tokens` tokens, of layers that record."""
    cache = CompressedCache(config, policy=Random(budget=tokens))
    for layer in cache.layers:
        layer.__class__ = RecordingLayer  # type: ignore[assignment]
    return cache


@torch.no_grad()
def record(model: PreTrainedModel, ids: Tensor) -> tuple[Recorded, Tensor]:
    """The dense cache of `ids` `[B, T]` with its calls, which take as much memory as keys and values or more, and the logits after the last
    token `[B, V]`. Without calls for models with other layers than those with full attention, in other attention than `sdpa`: they read
    `ids` again for each cache that evicts.
    """
    cache = Recorded(config=model.config)
    if not cache.copies or model.config._attn_implementation != "sdpa":
        found, logits = prefill(model, ids)
        cache.layers = found.layers
        return cache, logits
    parts, logits = [], []
    for rows in in_groups(model, ids):
        parts.append(recording_cache(model.config, ids.shape[1]))
        logits.append(model(rows, **passing(parts[-1]), logits_to_keep=1).logits[:, -1])
    for index, layers in enumerate(zip(*(part.layers for part in parts), strict=True)):
        cache.update(*(torch.cat(side) for side in zip(*(layer.given for layer in layers), strict=True)), index)
        call = layers[0].call
        cache.calls.append(Call(torch.cat([layer.call.query for layer in layers]), call.scaling))
    return cache, torch.cat(logits)
