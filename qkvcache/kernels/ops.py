"""Kernels as operators of torch, so that `torch.compile(fullgraph=True)` sees one operation for each.

Operators take tensors and numbers: a codec is passed as its place in a list, and a payload or a store as the tensors that it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import dispatch
from .segments import CODECS, Body, Payload, Side
from .store import Store

Both = tuple[Tensor, Tensor]


def attend_op(
    query: Tensor,
    payload: Payload,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    observed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fused_attend` as `torch.ops.qkvcache.attend`."""
    body = payload.body
    planes = [] if body is None else [plane for slab in body.slabs for codes in slab for plane in codes.values()]
    codecs = [] if body is None else list(body.numbers)
    table, tokens = (None, 0) if body is None else (body.table, body.tokens)
    exact = list(payload.exact)
    return torch.ops.qkvcache.attend(query, planes, table, codecs, tokens, exact, mask, sinks, scaling, softcap, causal, observed)


@torch.library.custom_op("qkvcache::attend", mutates_args=())
def _attend(
    query: Tensor,
    planes: Sequence[Tensor],
    table: Tensor | None,
    codecs: Sequence[int],
    tokens: int,
    exact: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    causal: bool,
    observed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    first_k, first_v, recent_k, recent_v = exact
    key_dim, value_dim = recent_k.shape[3], recent_v.shape[3]
    body = None
    if table is not None:
        key, value = (CODECS[number] for number in codecs)
        names = [[buffer.name for buffer in codec.buffers(dim)] for codec, dim in ((key, key_dim), (value, value_dim))]
        left = iter(planes)
        slabs = tuple(tuple({name: next(left) for name in side} for side in names) for _ in range(table.shape[0]))
        body = Body(key, value, slabs, tokens, table)  # type: ignore[arg-type]
    total = first_k.shape[2] + tokens + recent_k.shape[2]
    key_side, value_side = (Side.of((), (*x.shape[:2], total, x.shape[3]), x.dtype, x.device) for x in (recent_k, recent_v))
    payload = Payload(key_side, value_side, body, (first_k, first_v, recent_k, recent_v))
    fused = dispatch.fused()
    return fused.fused_attend(query, payload, mask, scaling=scaling, causal=causal, softcap=softcap, sinks=sinks, observed=observed)


@_attend.register_fake
def _(query, planes, table, codecs, tokens, exact, mask, sinks, scaling, softcap, causal, observed=None):
    batch, heads, recent, dim = exact[3].shape
    total = 0 if observed is None else exact[0].shape[2] + tokens + recent
    lse, mass = (query.new_empty(shape, dtype=torch.float32) for shape in (query.shape[:3], (batch, heads, total)))
    return query.new_empty(*query.shape[:3], dim), lse, mass


@torch.library.custom_op("qkvcache::step", mutates_args=("tensors",))
def _step(tensors: Sequence[Tensor], codecs: Sequence[int], limit: int, key: Tensor, value: Tensor) -> None:
    dispatch.step(Store.of(tensors, codecs, limit), (key, value))


@_step.register_fake
def _(tensors, codecs, limit, key, value):
    return None


@torch.library.custom_op("qkvcache::attend_store", mutates_args=())
def _attend_store(
    query: Tensor,
    tensors: Sequence[Tensor],
    codecs: Sequence[int],
    limit: int,
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    return dispatch.attend_on_store(query, Store.of(tensors, codecs, limit), mask, scaling=scaling, softcap=softcap, sinks=sinks)


@_attend_store.register_fake
def _(query, tensors, codecs, limit, mask, sinks, scaling, softcap):
    return query.new_empty(*query.shape[:3], tensors[3].shape[3])


@torch.library.custom_op("qkvcache::unfold", mutates_args=())
def _unfold(tensors: Sequence[Tensor], codecs: Sequence[int], limit: int, key: Tensor | None, value: Tensor | None) -> Both:
    new = None if key is None or value is None else (key, value)
    return dispatch.unfold(Store.of(tensors, codecs, limit), new)


@_unfold.register_fake
def _(tensors, codecs, limit, key, value):
    keys, values = (x.new_empty(*x.shape[:2], limit + 1, x.shape[3])[:, :, :limit] for x in tensors[2:4])
    return keys, values
