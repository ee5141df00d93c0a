"""`LayerMaker`: which layers a cache has, and how they are made."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer

from ..formats import Format, FormatByLayer, Identity
from ..formats.outlying import Int8Keys
from ..layers.compressed import CompressedLayer
from ..layers.kinds import COMPRESSED, LayerKind, kinds_of
from ..layers.static_sliding import StaticSlidingLayer
from ..rooms import registered

UNLIMITED = 2**30
"""The most tokens of a layer of a cache without `max_length`."""


class LayerMaker:
    """Makes the layers of `cache`, which keep all tokens. A room may register another maker for an option (`rooms.py`)."""

    policy: Any = None
    """What chooses the tokens that stay; None: all stay."""
    rule: str | None = None
    """The same in words."""
    reads_twice = False
    """Whether `compress` reads a context."""
    at_most = False
    """Whether the bytes that a cache will take are known as an upper bound only."""
    filling = 0
    """Tokens beside the exact ones, and tokens of a page, with which all kernels of a layer run."""
    lost = "nothing will be compressed"
    """What users are told if no layer is of this library."""

    def __init__(self, cache: Any):
        self.cache = cache
        self.exact: frozenset[int] = frozenset()
        """Full-attention layers that are uncompressed layers of this library."""

    @property
    def parts(self) -> dict[str, tuple[str, Any]]:
        """What the cache was given beside its format: by option, the public module of its class, and the object."""
        return {}

    def prepare(self) -> None:
        """Called once before layers are made, when no refusal applies."""

    def stock(self, config: PreTrainedConfig) -> list[Any]:
        """The layers that transformers' own cache would have."""
        cache = self.cache
        length = UNLIMITED if cache.max_length is None else cache.max_length
        try:
            layers: list[Any] = (StaticCache(config, length) if cache.compile else DynamicCache(config=config)).layers
        except KeyError as unknown:
            fix = f"leave out {cache.fixed_by}" if cache.compile else "make the cache after the model, which registers its layers"
            raise NotImplementedError(
                f"transformers has no such cache for layers of {config.model_type} of type {unknown.args[0]!r}: {fix}"
            ) from None
        return [StaticSlidingLayer(length, x.max_cache_len) if type(x) is StaticSlidingWindowLayer else x for x in layers]

    def swap(self, layers: list[Any], config: PreTrainedConfig) -> None:
        """Puts layers of this library in place of those with full attention."""
        cache, count, kinds = self.cache, len(layers), kinds_of(config)
        for index in cache.skip_layers:
            if not isinstance(index, int) or not -count <= index < count:
                raise ValueError(f"skip_layers holds {index!r}: the model has layers 0 to {count - 1} (or -1 to -{count} from the end)")
        skipped = {index % count for index in cache.skip_layers}
        full = [i for i, layer in enumerate(layers) if type(layer) in kinds]
        chosen = [i for i in full if i not in skipped]
        self.check(len(chosen))
        if self.rule or cache.compile:
            self.exact = frozenset(skipped.intersection(full))
        for i, format in zip(full, cache.format.for_layers(len(full)), strict=True):
            kind, own = kinds[type(layers[i])], config.per_layer_config[i]
            options = kind.options(layers[i], own)
            if i in self.exact:
                layers[i] = self.uncompressed(kind, **options)
            elif i in chosen:
                if head_dim := kind.head_dim(own):
                    format.check(head_dim)
                layers[i] = self.new(format, chosen.index(i), kind, i, **options)
        if not chosen:
            self._warn(layers, bool(full))

    def _warn(self, layers: list[Any], full: bool) -> None:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        why = f"no layer of this model has full attention, but {kinds}"
        if full:
            why = f"skip_layers={self.cache.skip_layers} contains every full-attention layer"
        named = type(self.cache).__name__ != "CompressedCache"
        warnings.warn(f"{why}: {self.lost}", stacklevel=4 + 2 * named)

    def check(self, layers: int) -> None:
        """Raises ValueError for options that are not of so many compressed layers."""

    def new(
        self, format: Format | None = None, number: int = 0, kind: LayerKind = COMPRESSED, index: int | None = None, **options: Any
    ) -> CompressedLayer:
        """A new layer of `kind` in `format` (None: the cache's), with `options` of the kind: the layer
        `number` of those compressed, and `index` of all (None: the next)."""
        cache = self.cache
        if format is None:
            (format,) = cache.format.for_layers(1)
        layer = self.compressed(kind, format, number, **options)
        instead = Int8Keys.instead_of(format)
        if instead and layer.examines_keys and not isinstance(cache.format, FormatByLayer):  # the user's own choice
            index = len(cache.layers) if index is None else index
            layer.instead = partial(cache._outlying_keys.choose, instead, index)
        return layer

    def compressed(self, kind: LayerKind, format: Format, number: int, **options: Any) -> CompressedLayer:
        cache = self.cache
        layer = kind.make(
            format,
            **cache._layer_options,
            max_length=cache.max_length,
            compile=cache.compile,
            **cache._pages,
            **options,
        )
        layer.running = cache._running
        return layer

    def uncompressed(self, kind: LayerKind, **options: Any) -> CompressedLayer:
        """A new uncompressed layer of this library, for a cache whose masks need one."""
        return kind.make(Identity(), 0, 0, self.cache.max_length, self.cache.compile, **options)

    def compress(self, *args: Any, **options: Any) -> None:
        """`CompressedCache.compress`."""
        raise ValueError("compress of a cache that retains all tokens: only KVzip reads a context twice; call generate")

    def check_source(self) -> None:
        """Raises NotImplementedError if the tokens of a cache that was filled elsewhere are not enough."""

    def counts(self, layers: Any) -> dict[str, int]:
        """The numbers of kinds of layers, beside those compressed, by what users call them."""
        return {}

    def shrink(self, layer: Any, tokens: int, length: int) -> Any:
        """`layer` with room for few tokens, so that it is soon full: of `tokens`, and if it has a `max_length`, of `length`."""
        if isinstance(layer, CompressedLayer):
            layer.storage = None
            if layer.max_length is not None:
                layer.max_length = length
        return layer


def maker_of(cache: Any, **options: Any) -> LayerMaker:
    """The maker of the layers of `cache` with these `options`, of which those that are None ask for nothing.
    Raises NotImplementedError for an option without the room that has it."""
    makers: dict[str, Any] = dict(registered("MAKERS"))
    for name, value in options.items():
        if value is not None:
            if name not in makers:
                raise NotImplementedError(f"{name}={value!r}: this installation of qkvcache comes without it")
            return makers[name](cache, value)
    return LayerMaker(cache)
