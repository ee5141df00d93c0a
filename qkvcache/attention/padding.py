"""Callbacks from attention to the layers whose `update` returned its keys. A layer learns the queries and the padding of a step, which
only the mask shows; a layer that returned plain keys may replace the mask, or attend itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autocast import autocasted
from ..kernels import AttentionInputs
from .masks import new_tokens, sees_itself_at


class PlainAttention(NamedTuple):
    """Attention of the queries `[B, Hq, Q, D]` of `module`; `mask` and further `keywords` as transformers makes them for `implementation`.
    `output` `[B, Q, Hq, D]`: the result, if the layer has attended itself."""

    implementation: str
    module: torch.nn.Module
    query: Tensor
    mask: Any
    keywords: dict[str, Any]
    output: Tensor | None = None

    def is_valid(self, tokens: int) -> Tensor | None:
        """The step's tokens that are not padding, bool `[B, Q]`, of a layer that has seen `tokens` with them; None: all."""
        batch, _, queries, _ = self.query.shape
        return new_tokens(self.implementation, self.module, self.mask, batch, queries, self.query.device, tokens).is_valid

    def is_valid_at(self, begin: Tensor) -> Tensor | None:
        """`is_valid` in compiled code, of a layer that had seen `begin` tokens, int64 `[]`."""
        return sees_itself_at(self.implementation, self.mask, self.query.shape[0], self.query.shape[2], begin)


awaited: dict[int, tuple[weakref.ref, list[weakref.WeakMethod]]] = {}
"""Keys and their callbacks, by `id` of the keys."""


def await_attention(keys: Tensor | AttentionInputs, callback: Callable[[PlainAttention], PlainAttention | None]) -> None:
    """Calls `callback`, a bound method, when attention receives `keys`, plain ones or the inputs of
    compressed ones, once for each layer that shares them. The callback returns the attention with a new mask
    or with its output, or None to leave the mask; only over plain keys can it change anything. Keeps neither
    the keys nor the method's object alive."""
    at = id(keys)
    if at not in awaited:
        awaited[at] = weakref.ref(keys, lambda _: awaited.pop(at, None)), []
    awaited[at][1].append(weakref.WeakMethod(callback))


class _Compiling:
    """Keys that compiled code returned, and their callback. Tensors of compiled code have no `id`."""

    keys: Tensor | None = None
    callback: Callable[[PlainAttention], None] | None = None


_compiling = _Compiling()


def await_compiled_attention(keys: Tensor, callback: Callable[[PlainAttention], None]) -> None:
    """`await_attention` in compiled code, where attention follows before the next keys."""
    _compiling.keys, _compiling.callback = keys, callback


def report_attention(
    implementation: str, module: torch.nn.Module, query: Tensor, keys: Any, mask: Any, keywords: dict[str, Any]
) -> tuple[Any, Tensor | None]:
    """Calls the callback that waits for `keys`, if any, and returns the mask to use and `PlainAttention.output`."""
    if _compiling.callback is not None and keys is _compiling.keys:
        store, _compiling.keys, _compiling.callback = _compiling.callback, None, None
        store(PlainAttention(implementation, module, query, mask, keywords))
        return mask, None
    if awaited and (pending := awaited.get(id(keys))) and pending[0]() is keys:
        attention = PlainAttention(implementation, module, autocasted(query), mask, keywords)
        for method in pending[1]:
            if callback := method():
                attention = callback(attention) or attention
        return attention.mask, attention.output
    return mask, None
