"""Errors of caches for arguments of the wrong type, and for unknown options."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Protocol

from transformers import DynamicCache

from ..formats import FormatByLayer
from ..formats.base import hint


class Named(Protocol):
    """An object with a name, by which users know it."""

    @property
    def name(self) -> str: ...


def layer_indices(skip_layers: Iterable[int]) -> tuple[int, ...]:
    """`skip_layers` as a tuple. Raises TypeError for anything that is not iterable, for example a single index."""
    if not isinstance(skip_layers, Iterable):
        raise TypeError(f"skip_layers={skip_layers!r}: expected a tuple of layer indices, such as (0,) or (0, -1)")
    return tuple(skip_layers)


def refuse_unknown(cache: DynamicCache, options: Mapping[str, object], parts: Mapping[str, tuple[str, object]]) -> None:
    """Raises TypeError for the first of the unknown `options`; the message names the part of the cache that has the option, or the nearest
    name. `parts`: by their option, the public module that has their classes, and they themselves."""
    for name, value in options.items():
        kinds = type(cache).__mro__[: type(cache).__mro__.index(DynamicCache)]
        known = dict.fromkeys(word for kind in kinds for word in _keywords(kind))
        fix = hint(name, known)
        for word, (module, part) in parts.items():
            if not isinstance(part, FormatByLayer | None) and name in _keywords(type(part)):
                fix = f"it is the {word}'s: CompressedCache(config, {word}={module}.{type(part).__name__}({name}={value!r}))"
        raise TypeError(f"{type(cache).__name__} has no option {name}={value!r}: {fix}")


def _keywords(kind: type) -> list[str]:
    return [name for name, at in inspect.signature(kind).parameters.items() if at.kind is not at.VAR_KEYWORD]
