"""`Entry`: the keys and values of a prompt's first tokens in host memory, and how they get there from a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

from torch import Tensor
from transformers.cache_utils import (
    Cache,
)

from ..layers.compressed import CompressedLayer
from . import match
from .checkpoints import Checkpoints, checkpoint_bytes, copied
from .host_memory import on_host
from .snapshot import Layer, Snapshot, copy_tokens, snapshot
from .template import CacheTemplate, in_place_of


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
        return found | ({tokens: [copied(layer.checkpoint) for layer in self.layers]} if tokens <= shared else {})


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
    quantizes = isinstance(into, CompressedLayer) and in_place_of(into, layer)
    if quantizes and into.rule:
        raise NotImplementedError("a DynamicCache cannot be stored as a cache that drops tokens: which stay depends on its attention")
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
