"""Callbacks from attention to the layers whose plain keys it gets: with the padding of a prompt, which only the mask shows, and with the
queries."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from .observer import new_tokens


class PendingPrompt(Protocol):
    """A layer that stores its prompt once the padding is known."""

    def store_pending(self, is_valid: Tensor | None) -> None: ...


class AttentionReceiver(Protocol):
    """A layer that receives the attention over its keys."""

    def receive_attention(self, module: torch.nn.Module, query: Tensor, scaling: float, softcap: float | None) -> None: ...


_pending: dict[int, tuple[weakref.ref, weakref.ref]] = {}
"""Keys that have not reached attention yet, and their layer, by `id` of the keys."""


def _await(keys: Tensor, layer: PendingPrompt | AttentionReceiver) -> None:
    at = id(keys)

    def forget(_: object) -> None:
        _pending.pop(at, None)

    _pending[at] = weakref.ref(keys, forget), weakref.ref(layer)


def await_padding(keys: Tensor, layer: PendingPrompt) -> None:
    """`layer.store_pending` is called when attention gets `keys`."""
    _await(keys, layer)


def await_attention(keys: Tensor, layer: AttentionReceiver) -> None:
    """`layer.receive_attention` is called when attention gets `keys`."""
    _await(keys, layer)


def report_attention(
    implementation: str, module: torch.nn.Module, query: Tensor, keys: Any, mask: Any, scaling: float | None, softcap: float | None
) -> None:
    """Tells the layer that waits for `keys`. There is rarely one, and this costs nothing then."""
    if _pending and (found := _pending.pop(id(keys), None)):
        layer = found[1]()
        if layer is None or found[0]() is not keys:
            return
        if hasattr(layer, "receive_attention"):
            layer.receive_attention(module, query, query.shape[3] ** -0.5 if scaling is None else scaling, softcap)
        else:
            layer.store_pending(new_tokens(implementation, mask, query.shape[0], query.shape[2], query.device)[1])
