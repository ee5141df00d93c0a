"""`CompressedCache.from_cache`: the tokens of a cache that another library filled, compressed as if the cache had read them as a prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..layers.compressed import CompressedLayer
from ..layers.static_sliding import StaticSlidingLayer
from .snapshot import copy_states, copy_tokens, kind_of, restore, snapshot


def check_source(source: object) -> None:
    """Raises TypeError unless `source` is a cache whose layers can be read."""
    if isinstance(source, EncoderDecoderCache):
        raise TypeError("from_cache of an EncoderDecoderCache: pass its self_attention_cache")
    if not isinstance(source, Cache) or not hasattr(source, "layers"):
        raise TypeError(f"from_cache of a {type(source).__name__}: pass a cache of transformers, such as DynamicCache")


@torch.no_grad()
def take(into: Any, source: Any, attention_mask: Tensor | None) -> None:
    """Fills the empty cache `into` with the tokens of `source`, which stays as it is."""
    if len(into.layers) != len(source.layers):
        raise ValueError(f"from_cache of {len(source.layers)} layers for a model of {len(into.layers)}: pass the config of its model")
    for i, (own, layer) in enumerate(zip(into.layers, source.layers, strict=True)):
        if reason := _why_not(own, layer):
            raise NotImplementedError(f"from_cache of layer {i}, a {type(layer).__name__}: {reason}")
    is_valid = _valid(attention_mask, source)
    for i, (own, layer) in enumerate(zip(into.layers, source.layers, strict=True)):
        if type(own) is type(layer):
            held = snapshot(layer, row=None)
            restore(own, held, next((x.device for x in held.tensors.values()), "cpu"))
            continue
        if layer.keys is not None and layer.keys.numel():
            copy_tokens(own, layer, row=None)
            if isinstance(own, CompressedLayer):
                own.end_prompt(is_valid)
            into._biased_keys.examine(layer.keys, i, own, is_valid)
        copy_states(own, layer)


def _why_not(into: Any, layer: Any) -> str | None:
    """The reason why the tokens of `layer` cannot be put into `into`, which is empty; None: they can."""
    if kind_of(layer) is None or isinstance(layer, CompressedLayer):
        return "pass a DynamicCache, whose keys and values are dense"
    if type(into) is type(layer):
        windows = getattr(into, "sliding_window", None), getattr(layer, "sliding_window", None)
        return None if windows[0] == windows[1] else f"its window of {windows[1]} is {windows[0]} in the config"
    if isinstance(into, CompressedLayer) and kind_of(layer) == "dense":
        return None
    if isinstance(into, DynamicSlidingWindowLayer) and type(layer) is DynamicLayer:
        return None
    if isinstance(into, StaticSlidingLayer):
        slides = isinstance(layer, DynamicSlidingWindowLayer)
        if type(layer) is DynamicLayer or slides and layer.get_seq_length() < layer.sliding_window:
            return None
        return "its first tokens have left the window: leave out max_length and compile"
    return f"the model has a {type(into).__name__} there: pass the config of its model"


def _valid(attention_mask: Tensor | None, source: Any) -> Tensor | None:
    """The tokens that are not padding, bool `[B, T]`; None: all. Raises ValueError for a mask of other tokens."""
    if attention_mask is None:
        return None
    tokens = int(source.get_seq_length())
    rows = next((len(x) for layer in source.layers if isinstance(x := getattr(layer, "keys", None), Tensor)), len(attention_mask))
    if attention_mask.shape != (rows, tokens):
        raise ValueError(f"attention_mask {list(attention_mask.shape)} for a cache of {rows} rows and {tokens} tokens: pass [B, T]")
    valid = attention_mask.bool()
    return None if bool(valid.all()) else valid
