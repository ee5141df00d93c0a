"""What caches say to arguments that they cannot take."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import DynamicCache

from ..formats import Format
from ..formats.base import hint
from ..policies import Policy


def layer_indices(skip_layers: Iterable[int]) -> tuple[int, ...]:
    """Raises TypeError for what holds no indices, such as a single one."""
    if not isinstance(skip_layers, Iterable):
        raise TypeError(f"skip_layers={skip_layers!r}: expected a tuple of layer indices, such as (0,) or (0, -1)")
    return tuple(skip_layers)


def with_own(kind: type[DynamicCache], options: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """`options` and what a named cache of that `kind` makes itself, its `own`.

    Raises TypeError for an option that is its own, with the names of those that it has in place of it.
    """
    for name in own.keys() & options.keys():
        base = _keywords(kind.__mro__[1])
        words = " or ".join(f"{word}=" for word in _keywords(kind) if word not in base)
        raise TypeError(f"{kind.__name__} makes its {name} itself: pass {words} in place of {name}={options[name]!r}")
    return {**own, **options}


def refuse_unknown(cache: DynamicCache, options: Mapping[str, object], format: Format, policy: Policy | None) -> None:
    """Raises TypeError for the first of `options`, none of which the cache has, with where it belongs or the nearest name."""
    for name, value in options.items():
        kinds = type(cache).__mro__[: type(cache).__mro__.index(DynamicCache)]
        fix = hint(name, dict.fromkeys(word for kind in kinds for word in _keywords(kind)))
        if name in _keywords(type(format)):
            fix = f"it is the format's: CompressedCache(config, format=formats.{type(format).__name__}({name}={value!r}))"
        if policy and name in _keywords(type(policy)):
            fix = f"it is the policy's: CompressedCache(config, policy=policies.{type(policy).__name__}({name}={value!r}))"
        raise TypeError(f"{type(cache).__name__} has no option {name}={value!r}: {fix}")


def _keywords(kind: type) -> list[str]:
    return [name for name, at in inspect.signature(kind).parameters.items() if at.kind is not at.VAR_KEYWORD]
