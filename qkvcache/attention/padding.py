"""Telling layers what of a prompt is padding: they are handed plain tensors, and only the mask that comes with these to attention knows."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor

from .watch import new_tokens


class Waits(Protocol):
    """A layer that wants to know."""

    def padding(self, real: Tensor | None) -> None: ...


_announced: dict[int, tuple[weakref.ref, weakref.ref]] = {}
"""Keys on their way to attention, by identity."""


def announce(keys: Tensor, layer: Waits) -> None:
    """`layer` is told when attention gets `keys`."""
    at = id(keys)

    def forget(_: object) -> None:
        _announced.pop(at, None)

    _announced[at] = weakref.ref(keys, forget), weakref.ref(layer)


def report(implementation: str, query: Tensor, keys: Any, mask: Any) -> None:
    """Tells the layer that announced `keys`, if one did. Nearly always there is none, and this costs nothing."""
    if _announced and (found := _announced.pop(id(keys), None)):
        layer = found[1]()
        if layer is not None and found[0]() is keys:
            layer.padding(new_tokens(implementation, mask, query.shape[0], query.shape[2], query.device)[1])
