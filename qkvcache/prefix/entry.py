"""An entry: the keys and values of some first tokens as they were stored, and the empty cache that they go back into."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from ..caches import CompressedCache
from ..layers.compressed import CompressedLayer
from ..layers.evicting import EvictingLayer
from ..layers.snapshot import PLACEHOLDER, Layer, Snapshot, restore, snapshot, storages
from . import match
from .place import Staging

SAMPLE = 256
"""Tokens of a layer whose error is measured when they are quantized."""


class Mould:
    """Makes empty caches like `cache`, of a model with `config`; `name` (16 bytes) and `text` say what they store and how.

    Raises NotImplementedError for caches whose layers transformers would not make for the model, nor this library.
    """

    def __init__(self, cache: Cache, config: PreTrainedConfig):
        self._config = config
        self._cache = copy.copy(cache)
        self._cache.layers = []
        self._cache.layer_class_to_replicate = None  # it may hold on to the cache
        stock = DynamicCache(config=config).layers
        if len(stock) != len(cache.layers):
            raise NotImplementedError(f"a cache of {len(cache.layers)} layers for a model of {len(stock)}: make it with the model's config")
        for i, (layer, own) in enumerate(zip(cache.layers, stock, strict=True)):
            if type(layer) is not type(own) and not (isinstance(layer, CompressedLayer) and type(own) is DynamicLayer):
                raise NotImplementedError(
                    f"layer {i} is a {type(layer).__name__}, not a {type(own).__name__}: make the cache with the model's config"
                )
        self._layers = [_emptied(layer) if isinstance(layer, CompressedLayer) else None for layer in cache.layers]
        self.text = "; ".join(dict.fromkeys(map(_describe, cache.layers)))
        self.name = hashlib.blake2b("\n".join(map(_describe, cache.layers)).encode(), digest_size=16).digest()
        self.evicts = any(isinstance(layer, EvictingLayer) for layer in cache.layers)
        self.cuttable = not self.evicts and all(type(layer) in (CompressedLayer, DynamicLayer, PLACEHOLDER) for layer in cache.layers)

    def __len__(self) -> int:
        return len(self._layers)

    def layers(self) -> list[Layer]:
        """A new empty layer for each of the model's."""
        stock = DynamicCache(config=self._config).layers
        return [own if kept is None else _emptied(kept) for kept, own in zip(self._layers, stock, strict=True)]

    def cache(self) -> Cache:
        """A new empty cache."""
        new = copy.copy(self._cache)
        new.layers = self.layers()
        if isinstance(new, CompressedCache):
            new._last_layer = None
        return new


def _emptied(layer: CompressedLayer) -> CompressedLayer:
    new = copy.copy(layer)
    new.storage = None  # which `layer` keeps: nothing of it may be reset in place
    new.is_initialized = False
    new.reset()
    return new


def _describe(layer: Layer) -> str:
    if not isinstance(layer, CompressedLayer):
        return f"{type(layer).__name__} {getattr(layer, 'sliding_window', '')}".strip()
    kind = type(layer.format)
    text = f"{layer.format.name} ({kind.__module__}.{layer.format!r}), exact {layer.num_sink_tokens} + {layer.residual_length}"
    return f"{text}, {layer.policy!r}, {layer.budget!r}, {layer.rope is not None}" if isinstance(layer, EvictingLayer) else text


def in_short(text: str) -> str:
    """What a mould's `text` says, for people: names of formats and policies, and the exact zones where they are not as usual."""
    parts = []
    for part in text.split("; "):
        if found := re.fullmatch(r"(\S+) \(.*\), exact (\d+ \+ \d+)(?:, (\w+)\(.*)?", part):
            name, zones, policy = found.groups()
            usual = zones == "4 + 64" or name == "identity"  # which is exact everywhere
            part = ", ".join(filter(None, [name, policy, None if usual else f"exact {zones}"]))
        parts.append(part)
    return "; ".join(dict.fromkeys(parts))


@dataclass(frozen=True)
class Entry:
    """What is stored under `key`. `errors`: of each layer, how far decoded tokens are from those that were given (RMS of the difference
    over RMS, the larger of keys and values, of a sample); 0 where nothing was quantized."""

    key: bytes
    mould: Mould
    layers: list[Snapshot]
    errors: tuple[float, ...]

    @property
    def tokens(self) -> int:
        return match.length(self.key)

    @property
    def whole(self) -> bool:
        """Whether only prompts that begin with all of its tokens can use it."""
        return any(layer.whole for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds in memory, the token ids among them."""
        return storages(self.layers) + len(self.key)

    def cut(self, tokens: int) -> list[Snapshot]:
        return self.layers if tokens == self.tokens else [layer.cut(tokens) for layer in self.layers]


class TooLarge(Exception):
    """More bytes than a store may hold."""


def take(
    cache: Cache, mould: Mould, key: bytes, row: int, quantize: bool, max_bytes: int, copy: Staging, release: Mould | None = None
) -> Entry:
    """The tokens of `key` out of row `row` of `cache`, stored as `mould` holds them.

    With `release`, the cache's layers are replaced by empty ones of that mould as they are done, so that one layer at a time exists twice.
    Raises NotImplementedError, with the reason, where that would not be exact, and TooLarge beyond `max_bytes`.
    """
    into = mould.layers()
    if len(into) != len(cache.layers):
        raise NotImplementedError(f"a cache of {len(cache.layers)} layers for a model of {len(into)}: make it with the model's config")
    layers: list[Snapshot] = []
    errors = []
    for i, (layer, empty) in enumerate(zip(list(cache.layers), into, strict=True)):
        held, error = freeze(layer, empty, match.length(key), row, quantize, copy)
        copy.wait()
        layers.append(held)
        errors.append(error)
        if storages(layers) + len(key) > max_bytes:
            raise TooLarge
        if release:
            cache.layers[i] = release.layers()[i]
        del layer, empty
    return Entry(key, mould, layers, tuple(errors))


def owned(key: bytes, mould: Mould, layers: Iterable[Snapshot], errors: tuple[float, ...], max_bytes: int | None = None) -> Entry:
    """An entry of `layers` in memory of its own, such as those of a file. Raises TooLarge beyond `max_bytes`, where that is given."""
    copied = []
    for layer in layers:
        copied.append(replace(layer, tensors={name: x.clone() for name, x in layer.tensors.items()}))
        if max_bytes is not None and storages(copied) + len(key) > max_bytes:
            raise TooLarge
    return Entry(key, mould, copied, errors)


def freeze(layer: Layer, into: Layer, tokens: int, row: int, quantize: bool, copy: Staging) -> tuple[Snapshot, float]:
    """The first `tokens` tokens of row `row` of `layer` as `into`, an empty layer, would hold them, and the error that this makes.

    Codes and states are taken as they are; dense tokens are encoded where `into` is compressed, unless `quantize` is False. Raises
    NotImplementedError, with the reason, where the layer cannot be taken or not be had so.
    """
    encodes = type(layer) is DynamicLayer and isinstance(into, CompressedLayer)
    if encodes and isinstance(into, EvictingLayer):
        raise NotImplementedError("what a cache evicts depends on its attention: a DynamicCache cannot be stored as one that evicts")
    if not encodes and type(layer) is not type(into):
        raise NotImplementedError(
            f"a {type(layer).__name__} where a {type(into).__name__} is stored: make the cache with the model's config"
        )
    if not encodes or not quantize or not layer.is_initialized:
        counts = hasattr(layer, "get_seq_length") and layer.get_seq_length()
        return snapshot(layer, tokens if counts else None, row, copy), 0.0
    keys, values = (x[row : row + 1, :, :tokens] for x in (layer.keys, layer.values))
    into.update(keys, values)  # type: ignore[attr-defined]
    held = snapshot(into, copy=copy)
    return held, _error(into, (keys, values))  # type: ignore[arg-type]


def give(into: Mould, layers: Iterable[Snapshot], mould: Mould, devices: list[torch.device], copy: Staging) -> Cache:
    """A new cache of `into` that holds `layers`, which were stored as `mould` holds them, each on its device."""
    cache = into.cache()
    try:
        empties = cache.layers if into is mould else mould.layers()
        for layer, held, empty, device in zip(cache.layers, layers, empties, devices, strict=True):
            thaw(layer, held, empty, device, copy)
    finally:
        copy.wait()
    return cache


def thaw(layer: Layer, held: Snapshot, empty: Layer, device: torch.device, copy: Staging) -> None:
    """Puts `held` into `layer`, an empty one on `device`, decoding or encoding where the one is dense and the other is not.

    `empty` is an empty layer of the kind that `held` came from.
    """
    if held.kind == "dense" and isinstance(layer, CompressedLayer):
        dense = DynamicLayer()
        restore(dense, held, device, copy)
        copy.wait()
        layer.update(dense.keys, dense.values)  # type: ignore[arg-type]
    elif held.kind == "compressed" and type(layer) is DynamicLayer and isinstance(empty, CompressedLayer):
        restore(empty, held, device, copy)
        copy.wait()
        layer.update(*empty.dense())
    else:
        restore(layer, held, device, copy)


@torch.no_grad()
def _error(layer: CompressedLayer, given: tuple[Tensor, Tensor]) -> float:
    worst = 0.0
    (first, _), chunks, _ = layer.storage.zones()  # type: ignore[union-attr]
    for side, x in enumerate(given):
        for packed in chunks.packed(side, SAMPLE):
            begin = first.shape[2]
            sample = x[:, :, begin : begin + packed.tokens].float()
            decoded = packed.codec.decode(packed.codes, x.shape[3])
            worst = max(worst, float((decoded - sample).square().mean().sqrt() / sample.square().mean().sqrt().clamp_min(1e-12)))
            break
    return worst


def batch(cache: Cache) -> int:
    """Rows of what the cache holds; 0 while it is empty."""
    for layer in cache.layers:
        held = layer.rows if isinstance(layer, CompressedLayer) else getattr(layer, "keys", None)
        if isinstance(held, int) and held:
            return held
        if isinstance(held, Tensor) and held.ndim == 4:
            return int(held.shape[0])
    return 0
