"""Callbacks from attention to the layers whose plain keys it gets: with the padding of a prompt, which only the mask shows, and with the
queries. A layer may attend itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .masks import new_tokens


class PlainAttention(NamedTuple):
    """Attention of the queries `[B, Hq, Q, D]` of `module` over plain keys; `mask` and further `keywords` as transformers makes them for
    `implementation`."""

    implementation: str
    module: torch.nn.Module
    query: Tensor
    mask: Any
    keywords: dict[str, Any]

    def is_valid(self) -> Tensor | None:
        """Which of the `Q` tokens are no padding, bool `[B, Q]`; None: all."""
        return new_tokens(self.implementation, self.mask, self.query.shape[0], self.query.shape[2], self.query.device).is_valid


_pending: dict[int, tuple[weakref.ref, weakref.WeakMethod]] = {}
"""Keys that have not reached attention yet, and the callback, by `id` of the keys."""


def await_attention(keys: Tensor, callback: Callable[[PlainAttention], Tensor | None]) -> None:
    """Calls `callback`, a bound method, once attention gets `keys`. It returns the output of attention, `[B, Q, Hq, Dv]`, or None to leave
    it to the model. Keeps neither the keys nor the method's object alive."""
    at = id(keys)
    _pending[at] = weakref.ref(keys, lambda _: _pending.pop(at, None)), weakref.WeakMethod(callback)


def report_attention(
    implementation: str, module: torch.nn.Module, query: Tensor, keys: Any, mask: Any, keywords: dict[str, Any]
) -> Tensor | None:
    """Calls the callback that waits for `keys`, and returns its result. There is rarely one, and this costs nothing then."""
    if _pending and (pending := _pending.pop(id(keys), None)):
        callback = pending[1]()
        if callback is not None and pending[0]() is keys:
            return callback(PlainAttention(implementation, module, query, mask, keywords))
    return None
