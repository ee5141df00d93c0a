"""`CacheTemplate`: how an entry's tokens are stored, and the caches that are made of them; `Templates`: the templates of a store."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    LinearAttentionLayer,
)

from ..caches import CompressedCache
from ..caches.steps import Steps
from ..layers.compressed import CompressedLayer
from ..layers.kinds import stock_of
from . import match
from .checkpoints import Checkpoints
from .snapshot import Layer, Snapshot, check, check_checkpoint, kind_of, restore


class CacheTemplate:
    """A template that makes caches like `cache` for a model with `config`. `name` (16 bytes) identifies the contents and the format of its
    entries; `text` describes them.

    Raises NotImplementedError for a cache with layers that neither transformers nor this library would make for the
    model.
    """

    def __init__(self, cache: Cache, config: PreTrainedConfig):
        if any(isinstance(layer, CompressedLayer) and layer.is_compileable for layer in cache.layers):
            raise NotImplementedError("a preallocated or compiled cache: make it without max_length and compile=True")
        self._config = config
        self._cache = copy.copy(cache)
        self._cache.layers = []
        self._cache.layer_class_to_replicate = None  # may refer to the cache
        stock = DynamicCache(config=config).layers
        if len(stock) != len(cache.layers):
            raise NotImplementedError(f"a cache of {len(cache.layers)} layers for a model of {len(stock)}: make it with the model's config")
        for i, (layer, expected) in enumerate(zip(cache.layers, stock, strict=True)):
            if type(layer) is not type(expected) and not in_place_of(layer, expected):
                raise NotImplementedError(
                    f"layer {i} is a {type(layer).__name__}, not a {type(expected).__name__}: make the cache with the model's config"
                )
        self._layers = [_emptied(layer) if isinstance(layer, CompressedLayer) else None for layer in cache.layers]
        self.text = "; ".join(dict.fromkeys(map(_in_short, cache.layers)))
        self.name = hashlib.blake2b("\n".join(map(_describe, cache.layers)).encode(), digest_size=16).digest()
        self.keeps_all = not any(isinstance(layer, CompressedLayer) and layer.rule for layer in cache.layers)
        self.cuttable = all(_cuttable(layer) for layer in cache.layers)

    def __len__(self) -> int:
        return len(self._layers)

    def layers(self) -> list[Layer]:
        """A new empty layer for each layer of the model."""
        stock = DynamicCache(config=self._config).layers
        return [layer if ours is None else _emptied(ours) for ours, layer in zip(self._layers, stock, strict=True)]

    def cache(self) -> Cache:
        """A new empty cache."""
        new = copy.copy(self._cache)
        new.layers = self.layers()
        if isinstance(new, CompressedCache):
            new._steps = Steps()
        return new

    def check(self, stored: Sequence[Snapshot], tokens: int, checkpoints: Checkpoints) -> None:
        """Raises ValueError, LookupError or RuntimeError unless `stored` can be the layers of an entry of `tokens` tokens with these
        `checkpoints`."""
        for i, (layer, given) in enumerate(zip(self.layers(), stored, strict=True)):
            try:
                check(layer, given, tokens)
                for at, earlier in checkpoints.items():
                    if (own := earlier[i]) is not None:
                        check_checkpoint(layer, own, given, at)
            except ValueError as error:
                raise ValueError(f"layer {i}: {error}") from error

    def restore(self, layers: Iterable[Snapshot], devices: Sequence[torch.device], into: CacheTemplate) -> Cache:
        """A new cache of the template `into`, filled from the `layers` of an entry of this template, each on its device. Tokens are
        quantized or dequantized where only one of the two layers is compressed."""
        cache = into.cache()
        for layer, stored, own, device in zip(cache.layers, layers, self.layers(), devices, strict=True):
            restore(layer, stored, device, own)
        return cache


def _cuttable(layer: Layer) -> bool:
    """Whether it can be cut to any number of first tokens."""
    return kind_of(layer) in ("compressed", "dense", "empty") and not isinstance(layer, LinearAttentionLayer)


def in_place_of(layer: Layer, stock: Layer) -> bool:
    """Whether `layer` is this library's for a layer of transformers."""
    return isinstance(layer, CompressedLayer) and type(stock) in stock_of(type(layer)) and not getattr(stock, "is_compileable", False)


def _emptied(layer: CompressedLayer) -> CompressedLayer:
    new = copy.copy(layer)
    new.storage = None  # `reset` would clear the storage of `layer`
    new.is_initialized = False
    new.reset()
    return new


def _describe(layer: Layer) -> str:
    if not isinstance(layer, CompressedLayer):
        return f"{type(layer).__name__} {getattr(layer, 'sliding_window', '')}".strip()
    return layer.identity()


def _in_short(layer: Layer) -> str:
    """The format of a layer, what chooses its tokens, and its exact zones if they are not the default."""
    if not isinstance(layer, CompressedLayer):
        return type(layer).__name__
    name = layer.made_with.name
    words = [name, *filter(None, [layer.rule])]
    zones = layer.num_sink_tokens, layer.residual_length
    if zones != (4, 64) and name != "identity":  # which is exact everywhere
        words.append("exact {} + {}".format(*zones))
    return ", ".join(words)


class Templates:
    """The templates of a store, by name. `own` is the template of the caches that it makes, and of the tokens of a DynamicCache. `dense`:
    whether it returns DynamicCaches."""

    def __init__(self, own: CacheTemplate, config: PreTrainedConfig, dense: bool):
        self.own, self._config = own, config
        self._dense = CacheTemplate(DynamicCache(config=config), config) if dense else None
        self.names = {own.name: own}

    def of(self, cache: Cache) -> CacheTemplate:
        """The template in which the tokens of `cache` are stored: its own for a compressed cache, else the store's."""
        template = CacheTemplate(cache, self._config) if isinstance(cache, CompressedCache) else self.own
        return self.names.setdefault(template.name, template)

    def named(self, key: bytes) -> CacheTemplate:
        """The template of the entry of a key."""
        return self.names[key[match.NAME // 2 : match.NAME]]

    def into(self, template: CacheTemplate) -> CacheTemplate:
        """The template of the caches that are returned for entries of `template`."""
        return template if self._dense is None or not template.keeps_all else self._dense
