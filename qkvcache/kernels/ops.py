"""Kernels as operators of torch, so that `torch.compile(fullgraph=True)` sees one operation for each.

Operators accept tensors and numbers only: a codec is passed as its index (`segments.number`), and attention inputs or storage as their
`arguments`. Those that return nothing need no fake implementation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import dispatch, pages
from .evict import StaticTensors
from .pages import PagedInputs
from .segments import CODECS, AttentionInputs, Exact, KeysOrValues, Packed, QuantizedRegion, StorageTensors, packed


def _inputs_of(
    planes: Sequence[Tensor], table: Tensor | None, codecs: Sequence[int], tokens: int, exact: Sequence[Tensor]
) -> AttentionInputs:
    """The inverse of `AttentionInputs.arguments`."""
    first, recent = exact[:2], exact[2:]
    region = None
    middle: list[list[Packed]] = [[], []]
    if table is not None:
        key, value = (CODECS[number] for number in codecs)
        names = [[buffer.name for buffer in codec.buffers(x.shape[3])] for codec, x in zip((key, value), recent, strict=True)]
        left = iter(planes)
        count = len(planes) // sum(map(len, names))
        chunks = tuple(tuple({name: next(left) for name in side} for side in names) for _ in range(count))
        region = QuantizedRegion(key, value, chunks, tokens, table)  # type: ignore[arg-type]
        sides = zip((key, value), zip(*chunks, strict=True), recent, strict=True)
        middle = [list(packed(codec, side, tokens, x.shape[3])) for codec, side, x in sides]
    found = []
    for opening, segments, last in zip(first, middle, recent, strict=True):
        shape = (*last.shape[:2], opening.shape[2] + (tokens if table is not None else 0) + last.shape[2], last.shape[3])
        found.append(KeysOrValues.of((Exact(opening), *segments, Exact(last)), shape, last.dtype, last.device))
    return AttentionInputs(found[0], found[1], region, tuple(exact))


INPUTS = "Tensor[] planes, Tensor? table, SymInt[] codecs, SymInt tokens, Tensor[] exact"
"""`AttentionInputs.arguments`"""
OPTIONS = "Tensor? sinks, Tensor? observed, float? scaling, float? softcap, bool? causal"
"""`pages.OPTIONS`"""
BUFFERS = "Tensor[] exact, Tensor[] quantized, SymInt[] codecs, SymInt columns"
"""`StorageTensors.arguments`"""
STATIC = (
    "SymInt[] numbers, Tensor[] planes, Tensor[] sinks, Tensor[] ring, Tensor[] records, Tensor column_mask, Tensor row_lengths, "
    "Tensor columns"
)
"""`StaticTensors.arguments`"""


def _operator(name: str, arguments: str, returns: str = "()", mutates: Sequence[str] = ()) -> Callable:
    """Declares an operator whose tensors `mutates` are written."""
    for i, argument in enumerate(mutates):
        arguments = re.sub(rf"\bTensor((?:\[\])? {argument}\b)", rf"Tensor(a{i}!)\1", arguments)
    return torch.library.custom_op(f"qkvcache::{name}", mutates_args=mutates, schema=f"({arguments}) -> {returns}")


def _given(options: Sequence[Any]) -> dict[str, Any]:
    """The options that are not None, by name."""
    return {name: x for name, x in zip(pages.OPTIONS, options, strict=True) if x is not None}


@_operator("dense", INPUTS, "(Tensor, Tensor)")
def _dense(*args):
    attention_inputs = _inputs_of(*args)
    return dispatch.dense(attention_inputs.key), dispatch.dense(attention_inputs.value)


@_dense.register_fake
def _(planes, table, codecs, tokens, exact):
    total = exact[0].shape[2] + tokens + exact[2].shape[2]
    keys, values = (x.new_empty(*x.shape[:2], total, x.shape[3]) for x in exact[2:])
    return keys, values


@_operator("attend", f"Tensor query, {INPUTS}, Tensor? mask, {OPTIONS}", "(Tensor, Tensor)")
def _attend(query, planes, table, codecs, tokens, exact, mask, *options):
    out, sums = dispatch.observe_on_codes(query, _inputs_of(planes, table, codecs, tokens, exact), mask, **_given(options))
    return out.contiguous(), sums  # kernels write `[B, Q, Hq, D]`


@_attend.register_fake
def _(query, planes, table, codecs, tokens, exact, mask, sinks, observed, *options):
    batch, heads, recent, dim = exact[3].shape
    total = 0 if observed is None else exact[0].shape[2] + tokens + recent
    return query.new_empty(*query.shape[:3], dim), query.new_empty(batch, heads, total, dtype=torch.float32)


# Chunks are mutated too. Were they declared, functionalization would copy them, and the table would point to the originals. Only operators
# with `exact` among their arguments read chunks, and those keep their order.
@_operator("step", f"{BUFFERS}, Tensor key, Tensor value", mutates=["exact"])
def _step(*args):
    *buffers, key, value = args
    dispatch.step(StorageTensors.of(*buffers), (key, value))


@_operator("attend_buffers", f"Tensor query, {BUFFERS}, Tensor? mask, Tensor? sinks, float? scaling, float? softcap", "Tensor")
def _attend_buffers(query, *args):
    *buffers, mask, sinks, scaling, softcap = args
    return dispatch.attend_on_buffers(query, StorageTensors.of(*buffers), mask, scaling=scaling, softcap=softcap, sinks=sinks).contiguous()


@_attend_buffers.register_fake
def _(query, exact, *args):
    return query.new_empty(*query.shape[:3], exact[3].shape[3])


@_operator("unfold", f"{BUFFERS}, Tensor? key, Tensor? value", "(Tensor, Tensor)")
def _unfold(*args):
    *buffers, key, value = args
    return dispatch.unfold(StorageTensors.of(*buffers), None if key is None else (key, value))


@_unfold.register_fake
def _(exact, quantized, codecs, columns, key, value):
    keys, values = (x.new_empty(*x.shape[:2], columns + 1, x.shape[3])[:, :, :columns] for x in exact[2:4])
    return keys, values


@_operator(
    "append_token",
    f"{STATIC}, Tensor key, Tensor value, Tensor?[] new, Tensor? is_valid",
    mutates=["ring", "records", "column_mask", "row_lengths", "columns"],
)
def _append_token(*args):
    *static, key, value, new, is_valid = args
    dispatch.append_token(StaticTensors.of(*static), (key, value), new, is_valid)


@_operator("evict_token", f"{STATIC}, Tensor order", "Tensor", mutates=["planes", "sinks", "records", "column_mask"])
def _evict_token(*args):
    *static, order = args
    return dispatch.evict_token(StaticTensors.of(*static), order)


@_evict_token.register_fake
def _(*args):
    return args[-1].new_empty(args[-1].shape[:2])


PAGES = "Tensor[] pool, Tensor[] counts, Tensor[] exact, SymInt[] codecs, SymInt max_length, SymInt tokens"
"""`PagedInputs.arguments`"""


@_operator("attend_pages", f"Tensor query, {PAGES}, Tensor? mask, {OPTIONS}", "(Tensor, Tensor, Tensor)")
def _attend_pages(query, pool, counts, exact, codecs, max_length, tokens, mask, *options):
    inputs = PagedInputs.of(pool, counts, exact, codecs, max_length, tokens)
    out, lse, sums = dispatch.attend_pages(query, inputs, mask, **_given(options))
    return out.contiguous(), lse, sums


@_attend_pages.register_fake
def _(query, pool, counts, exact, codecs, max_length, tokens, mask, sinks, observed, *options):
    _, heads, ring_slots, dim = exact[3].shape
    slots = 0 if observed is None else exact[0].shape[2] + max_length + ring_slots
    lse, attention_sums = (query.new_empty(shape, dtype=torch.float32) for shape in (query.shape[:3], (query.shape[0], heads, slots)))
    return query.new_empty(*query.shape[:3], dim), lse, attention_sums
