"""Kernels as operators of torch, so that `torch.compile(fullgraph=True)` sees one operation for each.

Operators take tensors and numbers: a codec is passed as its place in a list, and a payload or a storage as the tensors that it is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from . import dispatch
from .attend import attend, attend_observed
from .retire import Places
from .segments import CODECS, Body, Buffers, Exact, Packed, Pair, Payload, Side


@torch.library.custom_op("qkvcache::dense", mutates_args=())
def _dense(planes: Sequence[Tensor], table: Tensor | None, codecs: Sequence[int], tokens: int, exact: Sequence[Tensor]) -> Pair:
    payload = _payload(planes, table, codecs, tokens, exact)
    return dispatch.dense(payload.key), dispatch.dense(payload.value)


@_dense.register_fake
def _(planes, table, codecs, tokens, exact):
    total = exact[0].shape[2] + tokens + exact[2].shape[2]
    keys, values = (x.new_empty(*x.shape[:2], total, x.shape[3]) for x in exact[2:])
    return keys, values


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
    payload = _payload(planes, table, codecs, tokens, exact)
    if dispatch.fuses(query, payload):
        fused = dispatch.fused()
        return fused.fused_attend(query, payload, mask, scaling=scaling, causal=causal, softcap=softcap, sinks=sinks, observed=observed)
    options: dict[str, Any] = {"scaling": scaling, "causal": causal, "softcap": softcap, "sinks": sinks}
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)  # which nobody asks for here
    if observed is None:
        return attend(query, payload, mask, **options), lse, query.new_empty(*exact[0].shape[:2], 0, dtype=torch.float32)
    out, mass = attend_observed(query, payload, mask, observed=observed, **options)
    return out, lse, mass


def _payload(planes: Sequence[Tensor], table: Tensor | None, codecs: Sequence[int], tokens: int, exact: Sequence[Tensor]) -> Payload:
    first, recent = exact[:2], exact[2:]
    body = None
    packed: list[list[Packed]] = [[], []]
    if table is not None:
        key, value = (CODECS[number] for number in codecs)
        names = [[buffer.name for buffer in codec.buffers(x.shape[3])] for codec, x in zip((key, value), recent, strict=True)]
        left = iter(planes)
        count = len(planes) // sum(map(len, names))
        chunks = tuple(tuple({name: next(left) for name in side} for side in names) for _ in range(count))
        body = Body(key, value, chunks, tokens, table)  # type: ignore[arg-type]
        packed = [list(_packed(codec, [chunk[i] for chunk in chunks], tokens, recent[i])) for i, codec in enumerate((key, value))]
    sides = []
    for opening, middle, last in zip(first, packed, recent, strict=True):
        shape = (*last.shape[:2], opening.shape[2] + (tokens if table is not None else 0) + last.shape[2], last.shape[3])
        sides.append(Side.of((Exact(opening), *middle, Exact(last)), shape, last.dtype, last.device))
    return Payload(sides[0], sides[1], body, tuple(exact))


def _packed(codec: Codec, chunks: Sequence[Codes], left: int, like: Tensor) -> Iterator[Packed]:
    each = [b.name for b in codec.buffers(like.shape[3]) if b.tokens == "each"]
    for chunk in chunks:
        count = min(left, chunk[each[0]].shape[2])
        yield Packed(codec, {name: x[:, :, :count] if name in each else x for name, x in chunk.items()}, count, like.shape[3])
        left -= count


@_attend.register_fake
def _(query, planes, table, codecs, tokens, exact, mask, sinks, scaling, softcap, causal, observed=None):
    batch, heads, recent, dim = exact[3].shape
    total = 0 if observed is None else exact[0].shape[2] + tokens + recent
    lse, mass = (query.new_empty(shape, dtype=torch.float32) for shape in (query.shape[:3], (batch, heads, total)))
    return query.new_empty(*query.shape[:3], dim), lse, mass


# Chunks are written too. Whoever is told makes a copy of what is written, which the table does not lead to; nobody but operators that take
# `exact` reads chunks, and these stay in order.
@torch.library.custom_op("qkvcache::step", mutates_args=("exact",))
def _step(exact: Sequence[Tensor], quantized: Sequence[Tensor], codecs: Sequence[int], columns: int, key: Tensor, value: Tensor) -> None:
    dispatch.step(Buffers.of(exact, quantized, codecs, columns), (key, value))


@_step.register_fake
def _(exact, quantized, codecs, columns, key, value):
    return None


@torch.library.custom_op("qkvcache::attend_buffers", mutates_args=())
def _attend_buffers(
    query: Tensor,
    exact: Sequence[Tensor],
    quantized: Sequence[Tensor],
    codecs: Sequence[int],
    columns: int,
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    return dispatch.attend_on_buffers(
        query, Buffers.of(exact, quantized, codecs, columns), mask, scaling=scaling, softcap=softcap, sinks=sinks
    )


@_attend_buffers.register_fake
def _(query, exact, quantized, codecs, columns, mask, sinks, scaling, softcap):
    return query.new_empty(*query.shape[:3], exact[3].shape[3])


@torch.library.custom_op("qkvcache::unfold", mutates_args=())
def _unfold(
    exact: Sequence[Tensor], quantized: Sequence[Tensor], codecs: Sequence[int], columns: int, key: Tensor | None, value: Tensor | None
) -> Pair:
    new = None if key is None or value is None else (key, value)
    return dispatch.unfold(Buffers.of(exact, quantized, codecs, columns), new)


@_unfold.register_fake
def _(exact, quantized, codecs, columns, key, value):
    keys, values = (x.new_empty(*x.shape[:2], columns + 1, x.shape[3])[:, :, :columns] for x in exact[2:4])
    return keys, values


@torch.library.custom_op("qkvcache::arrive", mutates_args=("ring", "records", "shown", "seen", "columns"))
def _arrive(
    numbers: Sequence[int],
    planes: Sequence[Tensor],
    first: Sequence[Tensor],
    ring: Sequence[Tensor],
    records: Sequence[Tensor],
    shown: Tensor,
    seen: Tensor,
    columns: Tensor,
    key: Tensor,
    value: Tensor,
    new: Sequence[Tensor | None],
    real: Tensor | None,
) -> None:
    dispatch.arrive(Places.of(numbers, planes, first, ring, records, shown, seen, columns), (key, value), new, real)


@_arrive.register_fake
def _(numbers, planes, first, ring, records, shown, seen, columns, key, value, new, real):
    return None


@torch.library.custom_op("qkvcache::retire", mutates_args=("planes", "first", "records", "shown"))
def _retire(
    numbers: Sequence[int],
    planes: Sequence[Tensor],
    first: Sequence[Tensor],
    ring: Sequence[Tensor],
    records: Sequence[Tensor],
    shown: Tensor,
    seen: Tensor,
    columns: Tensor,
    order: Tensor,
) -> Tensor:
    return dispatch.retire(Places.of(numbers, planes, first, ring, records, shown, seen, columns), order)


@_retire.register_fake
def _(numbers, planes, first, ring, records, shown, seen, columns, order):
    return order.new_empty(order.shape[:2])
