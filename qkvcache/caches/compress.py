"""Fills a cache with a context that is read twice, for policies that score tokens by the second reading."""

from __future__ import annotations

import copy
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..attention.route import install
from ..attention.second_reading import Reading, ReadingLayer
from ..layers.evicting import EvictingLayer
from ..policies import KVzip
from ..policies.base import share_of
from ..policies.kvzip import weigh_heads

FIRST = "\n\nRepeat the previous context exactly.\n\n"
LATER = "\n\nRepeat the part of the previous context that starts as follows.\n\n"
HINT = 8
"""Tokens before a chunk that end its instruction; the first chunk has none."""


@torch.no_grad()
def fill(layers: list[Any], policy: KVzip, model: PreTrainedModel, mask: Tensor, dense: DynamicCache, others: dict[int, Any]) -> None:
    """Moves the context from the result of `read_twice` to the `layers` of an empty cache. `mask` `[B, T]`: that of
    `read_twice`."""
    weights = _weights(layers, policy, mask.bool(), dense) if policy.shares_layers else {}
    padding = None if bool(mask.all()) else mask.bool()
    for i, layer in enumerate(dense.layers):
        if not isinstance(layer, ReadingLayer):
            layers[i] = others[i]
            continue
        _fill(layers[i], layer, model, padding, weights.get(i))
        dense.layers[i] = DynamicLayer()  # its memory is free from here on


def _weights(layers: list[Any], policy: KVzip, is_valid: Tensor, dense: DynamicCache) -> dict[int, Tensor]:
    """The result of `weigh_heads` for the layers that evict. `is_valid` `[B, T]`: the tokens that are not padding."""
    seen, positions = is_valid.sum(-1)[:, None, None], is_valid.cumsum(-1)[:, None] - 1
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for i, read in enumerate(dense.layers):
        if isinstance(read, ReadingLayer) and layers[i].policy.second_reading and read.scores is not None:
            protected, rest = policy.protected_and_rest(layers[i].budget, seen)
            recent = (protected - policy.num_sink_tokens).clamp_min(0)
            own = (share_of(policy.alpha_safeguard or 0.0, protected + rest) - protected).clamp_min(0)
            competes = is_valid[:, None] & (positions >= policy.num_sink_tokens) & (positions < seen - recent) & (rest > 0)
            found[i] = read.scores.to(seen.device).masked_fill(~competes, -torch.inf), rest, own
    return dict(zip(found, weigh_heads(*map(list, zip(*found.values(), strict=True))), strict=True)) if found else {}


@torch.no_grad()
def read_twice(
    model: PreTrainedModel, policy: KVzip, ids: Tensor, mask: Tensor, tokenizer: Any, progress: bool
) -> tuple[DynamicCache, dict[int, Any]]:
    """A dense cache of `ids` `[B, T]`. Its full-attention layers (`ReadingLayer`) have the scores of `policy`; its
    other layers are as after the first reading. `mask` `[B, T]` is 0 for padding."""
    install()  # so that attention reports to the layers
    dense = DynamicCache(config=model.config)
    for i, layer in enumerate(dense.layers):
        if type(layer) is DynamicLayer:
            dense.layers[i] = ReadingLayer(policy.num_sink_tokens, policy.kvzip_plus_normalization)
    _forward(model, dense, ids, mask, ids.shape[1])
    others = {i: copy.deepcopy(x) for i, x in enumerate(dense.layers) if not isinstance(x, ReadingLayer)}
    order = (mask == 0).int().argsort(dim=-1, stable=True)  # columns of each row's tokens, then padding
    lengths = mask.sum(-1)
    longest, sinks = int(lengths.max()), policy.num_sink_tokens
    steps = range(min(sinks, longest), longest, policy.chunk_size)
    handles = _watch_inputs(model, dense) if policy.kvzip_plus_normalization else []
    try:
        for begin in track(list(steps), "Reading the context again", transient=True, disable=not progress):
            _read(model, dense, ids, mask, order, lengths, begin, policy, _instruction(tokenizer, begin > sinks, ids.device))
            for i, layer in others.items():
                dense.layers[i] = copy.deepcopy(layer)
    finally:
        for handle in handles:
            handle.remove()
    return dense, others


def _forward(model: PreTrainedModel, cache: DynamicCache, ids: Tensor, mask: Tensor, count: int) -> None:
    """Runs the last `count` tokens of `ids` `[B, T]`; `mask` `[B, T]` is 0 for padding."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -count:]
    model(ids[:, -count:], attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _instruction(tokenizer: Any, later: bool, device: torch.device) -> Tensor:
    """Token ids that ask for the repetition; none without a tokenizer."""
    found = [] if tokenizer is None else tokenizer(LATER if later else FIRST, add_special_tokens=False)["input_ids"]
    return torch.tensor(found, dtype=torch.long, device=device)


def _read(
    model: PreTrainedModel, dense: DynamicCache, ids: Tensor, mask: Tensor, order: Tensor, lengths: Tensor, begin: int, policy: KVzip,
    instruction: Tensor,
) -> None:  # fmt: skip
    """Reads the tokens `begin` to `begin + chunk_size` of each row again, at positions after the whole context."""
    sinks, size, device = policy.num_sink_tokens, policy.chunk_size, ids.device
    end = min(begin + size, int(lengths.max()))
    hint = min(HINT, begin - sinks) if len(instruction) else 0
    place = torch.arange(begin - hint, end, device=device)
    at = order[:, begin - hint : end]
    real = place < lengths[:, None]
    real &= (begin < lengths)[:, None]  # a row that has ended repeats nothing, not even the hint
    asked = instruction.expand(len(ids), -1)
    reading = torch.cat([asked, ids.gather(1, at)], dim=1)
    is_valid = torch.cat([(begin < lengths)[:, None].expand_as(asked), real], dim=1)
    left = is_valid.int().argsort(dim=-1, stable=True)  # padding to the left
    reading, is_valid = reading.gather(1, left), is_valid.gather(1, left)
    first = torch.arange(sinks, device=device)
    columns = torch.cat([order[:, :sinks], order[:, begin:end]], dim=1)
    attended = torch.cat([first < lengths[:, None], place[hint:] < lengths[:, None], is_valid], dim=1)
    local = Reading(columns, attended, padded=not bool(attended.all()))
    for layer in dense.layers:
        if isinstance(layer, ReadingLayer):
            layer.reading = local
    whole = torch.cat([ids, reading], dim=1), torch.cat([mask, is_valid.to(mask.dtype)], dim=1)
    _forward(model, dense, *whole, reading.shape[1])
    for layer in dense.layers:
        if isinstance(layer, ReadingLayer):
            layer.reading = layer.local = None


def _watch_inputs(model: PreTrainedModel, dense: DynamicCache) -> list[Any]:
    """Passes to each layer the norms of its attention's inputs."""
    handles = []
    for layer in dense.layers:
        if isinstance(layer, ReadingLayer) and layer.module is not None:

            def before(module: Any, args: tuple, kwargs: dict, layer: ReadingLayer = layer) -> None:
                states = args[0] if args else kwargs["hidden_states"]
                layer.inputs = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32).clamp_min(1e-6)

            handles.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
    return handles


def _fill(layer: EvictingLayer, read: ReadingLayer, model: PreTrainedModel, is_valid: Tensor | None, weights: Tensor | None) -> None:
    """Fills `layer` with the context and the scores of `read`, as attention would, and sets the `weights` of its heads
    in the budget."""
    keys, values, scores = read.keys, read.values, read.scores
    if keys is None or values is None or read.module is None:
        raise NotImplementedError(
            f"compress on {model.config.model_type}: its attention does not go through transformers' AttentionInterface"
        )
    layer.read_twice = True
    layer.update(keys, values)
    layer.begin_attention(is_valid, read.query, None, read.module)
    if weights is not None and layer.storage is not None:
        layer.storage.metadata.head_weights = weights.to(keys.device)
    if not layer.policy.second_reading:  # a layer that evicts nothing
        scores = None
    elif scores is None:  # no token but sinks
        scores = torch.zeros(*keys.shape[:3], device=keys.device)
    layer.end_attention(scores)
