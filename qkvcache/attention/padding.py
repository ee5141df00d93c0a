"""Callbacks from attention to the layers that returned plain keys. A layer learns the queries and the padding of a
prompt, which only the mask shows, and may replace the mask, or attend itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autocast import autocasted
from .masks import new_tokens


class PlainAttention(NamedTuple):
    """Attention of the queries `[B, Hq, Q, D]` of `module` over plain keys; `mask` and further `keywords` as transformers makes them for
    `implementation`. `output` `[B, Q, Hq, D]`: the result, if the layer has attended itself."""

    implementation: str
    module: torch.nn.Module
    query: Tensor
    mask: Any
    keywords: dict[str, Any]
    output: Tensor | None = None

    def is_valid(self) -> Tensor | None:
        """The step's tokens that are not padding, bool `[B, Q]`; None: all."""
        batch, _, queries, _ = self.query.shape
        return new_tokens(self.implementation, self.module, self.mask, batch, queries, self.query.device).is_valid


_pending: dict[int, tuple[weakref.ref, weakref.WeakMethod]] = {}
"""Keys and their callback, by `id` of the keys."""


def await_attention(keys: Tensor, callback: Callable[[PlainAttention], PlainAttention | None]) -> None:
    """Calls `callback`, a bound method, when attention receives `keys`, once for each layer that shares them. The
    callback returns the attention with a new mask or with its output, or None to leave the mask. Keeps neither the keys
    nor the method's object alive."""
    at = id(keys)
    _pending[at] = weakref.ref(keys, lambda _: _pending.pop(at, None)), weakref.WeakMethod(callback)


def report_attention(
    implementation: str, module: torch.nn.Module, query: Tensor, keys: Any, mask: Any, keywords: dict[str, Any]
) -> tuple[Any, Tensor | None]:
    """Calls the callback that waits for `keys`, if any, and returns the mask to use and `PlainAttention.output`."""
    if _pending and (pending := _pending.get(id(keys))):
        callback = pending[1]()
        if callback is not None and pending[0]() is keys:
            attention = PlainAttention(implementation, module, autocasted(query), mask, keywords)
            attention = callback(attention) or attention
            return attention.mask, attention.output
    return mask, None
