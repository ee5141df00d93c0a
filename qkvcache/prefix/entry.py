"""`Entry`: the keys and values of a prompt's first tokens in host memory. `CacheTemplate`: the kind of cache that an entry is for.
`MemoryStore`: the entries and pages of a process.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from ..caches import CompressedCache
from ..caches.steps import Steps
from ..layers.compressed import CompressedLayer
from ..layers.evicting import EvictingLayer
from ..layers.hybrid import HybridLayer
from ..layers.indexed import IndexedLayer
from ..layers.snapshot import KINDS, Layer, Snapshot, check, check_checkpoint, checkpoint, copy_tokens, restore, snapshot
from . import match
from .host_memory import on_host

Checkpoints = dict[int, list[Snapshot | None]]
"""Earlier states of an entry's layers (`Snapshot.checkpoint`), by the number of tokens seen."""


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
            if type(layer) is not type(expected) and not _in_place_of(layer, expected):
                raise NotImplementedError(
                    f"layer {i} is a {type(layer).__name__}, not a {type(expected).__name__}: make the cache with the model's config"
                )
        self._layers = [_emptied(layer) if isinstance(layer, CompressedLayer) else None for layer in cache.layers]
        self.text = "; ".join(dict.fromkeys(map(_in_short, cache.layers)))
        self.name = hashlib.blake2b("\n".join(map(_describe, cache.layers)).encode(), digest_size=16).digest()
        self.evicts = any(isinstance(layer, EvictingLayer) for layer in cache.layers)
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
    return KINDS.get(type(layer)) in ("compressed", "dense", "empty") and not isinstance(layer, LinearAttentionLayer)


def _in_place_of(layer: Layer, stock: Layer) -> bool:
    """Whether `layer` is this library's for a layer of transformers."""
    kinds = {HybridLayer: LinearAttentionAndFullAttentionLayer, IndexedLayer: DynamicIndexedLayer}
    expected = next((of for kind, of in kinds.items() if isinstance(layer, kind)), DynamicLayer)
    return isinstance(layer, CompressedLayer) and type(stock) is expected


def _emptied(layer: CompressedLayer) -> CompressedLayer:
    new = copy.copy(layer)
    new.storage = None  # `reset` would clear the storage of `layer`
    new.is_initialized = False
    new.reset()
    return new


def _describe(layer: Layer) -> str:
    if not isinstance(layer, CompressedLayer):
        return f"{type(layer).__name__} {getattr(layer, 'sliding_window', '')}".strip()
    format = layer.made_with
    text = f"{format.name} ({type(format).__module__}.{format!r}), exact {layer.num_sink_tokens} + {layer.residual_length}"
    return f"{text}, {layer.policy!r}, {layer.budget!r}, {layer.rope is not None}" if isinstance(layer, EvictingLayer) else text


def _in_short(layer: Layer) -> str:
    """The format and the policy of a layer, and its exact zones if they are not the default."""
    if not isinstance(layer, CompressedLayer):
        return type(layer).__name__
    name = layer.made_with.name
    words = [name, type(layer.policy).__name__] if isinstance(layer, EvictingLayer) else [name]
    zones = layer.num_sink_tokens, layer.residual_length
    if zones != (4, 64) and name != "identity":  # which is exact everywhere
        words.append("exact {} + {}".format(*zones))
    return ", ".join(words)


@dataclass(frozen=True)
class Entry:
    """The tokens of `key`, as `template` stores them."""

    key: bytes
    template: CacheTemplate
    layers: Sequence[Snapshot]
    checkpoints: Checkpoints = field(default_factory=dict)

    @cached_property
    def cuts(self) -> match.Cuts:
        """The numbers of tokens to which it can be cut; None: any."""
        return (*sorted(self.checkpoints), match.length(self.key)) if any(layer.whole for layer in self.layers) else None

    @cached_property
    def nbytes(self) -> int:
        """Bytes in memory, token ids included."""
        return sum(layer.nbytes for layer in self.layers) + sum(map(checkpoint_bytes, self.checkpoints.values())) + len(self.key)

    def cut(self, tokens: int) -> Sequence[Snapshot]:
        """Views of the first `tokens` tokens of each layer."""
        if tokens == match.length(self.key):
            return self.layers
        return [layer.cut(tokens, x) for layer, x in zip(self.layers, self.checkpoints.get(tokens, repeat(None)), strict=False)]

    def checkpoints_within(self, key: bytes) -> Checkpoints:
        """Those at fewer tokens than `key` has, with which `key` begins too; the end of this entry among them."""
        shared, tokens = min(match.common(self.key, key), match.length(key) - 1), match.length(self.key)
        found = {at: checkpoint for at, checkpoint in self.checkpoints.items() if at <= shared}
        return found | ({tokens: [_copy(layer.checkpoint) for layer in self.layers]} if tokens <= shared else {})


def take_checkpoint(cache: Cache) -> list[Snapshot | None]:
    """A checkpoint of the first row of `cache`, in host memory."""
    return [_copy(checkpoint(layer)) for layer in cache.layers]


def _copy(given: Snapshot | None) -> Snapshot | None:
    """A copy in host memory of its own, so that it does not keep the memory of a layer's tokens."""
    return given and on_host(given, lock=any(x.is_cuda for x in given.tensors.values()))


def checkpoint_bytes(checkpoint: Sequence[Snapshot | None]) -> int:
    return sum(layer.nbytes for layer in checkpoint if layer is not None)


def thinned(checkpoints: Checkpoints, room: int) -> Checkpoints:
    """Those that are left if every second one is left out until the rest fits in `room` bytes."""
    kept = sorted(checkpoints)
    while sum(checkpoint_bytes(checkpoints[at]) for at in kept) > room:
        kept = kept[-2::-2][::-1]
    return {at: checkpoints[at] for at in kept}


class TooLarge(Exception):
    """Raised for an entry with more bytes than a store may hold."""


def snapshot_cache(
    cache: Cache, template: CacheTemplate, key: bytes, row: int, quantize: bool, max_bytes: int, release: bool = False
) -> Entry:
    """An entry of the tokens of `key` from row `row` of `cache`, stored as `template` stores them.

    Args:
        quantize: whether dense layers are quantized where the template's are compressed.
        release: whether the cache gives up each layer once it is copied, so that only one layer exists twice.

    Raises NotImplementedError, with the reason, if the entry would not be exact, and TooLarge beyond `max_bytes`.
    """
    into = template.layers()
    if len(into) != len(cache.layers):
        raise NotImplementedError(f"a cache of {len(cache.layers)} layers for a model of {len(into)}: make it with the model's config")
    if hasattr(cache, "position_ids"):  # Qwen4's model sets it in older releases of transformers
        raise NotImplementedError("a cache with positions beside its layers: install a release of transformers that keeps them in a layer")
    layers: list[Snapshot] = []
    left = max_bytes - len(key)
    for i, (layer, empty) in enumerate(zip(list(cache.layers), into, strict=True)):
        there = _snapshot_as(empty, layer, match.length(key), row, quantize)
        layers.append(on_host(there, lock=any(x.is_cuda for x in there.tensors.values())))
        if (left := left - layers[-1].nbytes) < 0:
            raise TooLarge
        if release:
            cache.layers[i] = None  # type: ignore[call-overload]
        del layer, empty, there
    for stored in layers:
        if stored.memory is not None:
            stored.memory.wait()
    return Entry(key, template, layers)


def _snapshot_as(into: Layer, layer: Layer, tokens: int, row: int, quantize: bool) -> Snapshot:
    """A snapshot of the first `tokens` tokens of row `row` of `layer`, in the form in which `into`, an empty layer,
    stores them."""
    quantizes = isinstance(into, CompressedLayer) and _in_place_of(into, layer)
    if quantizes and isinstance(into, EvictingLayer):
        raise NotImplementedError("a DynamicCache cannot be stored as a cache that evicts: evictions depend on its attention")
    if not quantizes and type(layer) is not type(into):
        raise NotImplementedError(
            f"a {type(layer).__name__} where a {type(into).__name__} is stored: make the cache with the model's config"
        )
    if not quantizes or not quantize or not layer.is_initialized:
        counts = hasattr(layer, "get_seq_length") and layer.get_seq_length()
        return snapshot(layer, tokens if counts else None, row)
    copy_tokens(into, layer, tokens, row)
    return snapshot(into).joined(snapshot(layer, row=row).states)


def batch_size(cache: Cache) -> int:
    """Rows of the cache; 0 while it is empty."""
    dense = (getattr(layer, "keys", None) for layer in cache.layers if not isinstance(layer, CompressedLayer))
    rows = [layer.rows for layer in cache.layers if isinstance(layer, CompressedLayer)]
    return max([0, *rows, *(x.shape[0] for x in dense if isinstance(x, Tensor) and x.ndim == 4)])


class MemoryStore:
    """Entries, and pages of continuous batching, in the order of their last use; together at most `max_bytes`. Those that nobody used for
    `time_to_live` seconds are evicted, too, unless it is None. Pinned ones stay. Threads may use it at the same time."""

    def __init__(self, max_bytes: int, time_to_live: float | None = None):
        self.max_bytes, self.time_to_live = max_bytes, time_to_live
        self.nbytes = self.evicted = 0
        self.pinned: set[bytes] = set()
        self._items: dict[bytes, tuple[Any, float]] = {}
        """Items with the times of their last use."""
        self._lock = threading.RLock()

    @property
    def entries(self) -> list[Entry]:
        with self._lock:
            return [item for item, _ in self._items.values() if isinstance(item, Entry)]

    @property
    def cuts(self) -> match.Entries:
        return {entry.key: entry.cuts for entry in self.entries}

    def use(self, key: bytes) -> Any:
        """The item of `key`, which becomes the most recently used; None if there is none."""
        with self._lock:
            item, _ = self._items.pop(key, (None, 0.0))
            if item is not None:
                self._items[key] = item, time.monotonic()
            return item

    def put(self, key: bytes, item: Any) -> None:
        """Adds an item in place of another of this key, and makes room. An entry takes the place of those whose tokens it begins with, too,
        unless they are pinned."""
        with self._lock:
            replaced = match.replaced(self.cuts, key, item.cuts) if isinstance(item, Entry) else []
            for other in (key, *(other for other in replaced if other not in self.pinned)):
                self._remove(other)
            self._items[key] = item, time.monotonic()
            self.nbytes += item.nbytes
            self.trim()

    def pin(self, key: bytes, pinned: bool = True) -> None:
        """Keeps an item whatever its age and the room, or no longer."""
        with self._lock:
            (self.pinned.add if pinned else self.pinned.discard)(key)

    def demote(self, keys: Sequence[bytes]) -> None:
        """Makes items the first to go, the last of `keys` before the others."""
        with self._lock:
            first = {key: (self._items[key][0], 0.0) for key in reversed(keys) if key in self._items}
            self._items = first | {key: item for key, item in self._items.items() if key not in first}

    def trim(self, max_bytes: int | None = None) -> None:
        """Evicts items that are too old, and the least recently used until at most `max_bytes` are left; None: the store's."""
        most = self.max_bytes if max_bytes is None else max_bytes
        with self._lock:
            while (key := next((key for key in self._items if key not in self.pinned), None)) is not None:
                old = self.time_to_live is not None and self._items[key][1] < time.monotonic() - self.time_to_live
                if not old and self.nbytes <= most:
                    return
                self._remove(key)
                self.evicted += 1

    def _remove(self, key: bytes) -> None:
        if key in self._items:
            self.nbytes -= self._items.pop(key)[0].nbytes
