"""Kernels as operators of torch, so that `torch.compile(fullgraph=True)` sees one operation for each.

Operators accept tensors and numbers only: a codec is passed as its index (`segments.number`), and attention inputs or storage as their
`arguments`. Those that return nothing need no fake implementation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import dispatch, pages
from .evict import StaticTensors
from .pages import PagedInputs

INPUTS = "Tensor[] pool, Tensor?[] counts, Tensor[] exact, SymInt[] sizes, SymInt max_length"
"""`PagedInputs.arguments`"""
OPTIONS = "Tensor? sinks, Tensor? observed, float? scaling, float? softcap, bool? causal"
"""`pages.OPTIONS`"""
STATIC = "Tensor[] pool, Tensor[] exact, SymInt[] sizes, Tensor[] records, Tensor column_mask, Tensor row_lengths, Tensor columns"
"""`StaticTensors.arguments`"""


def _operator(name: str, arguments: str, returns: str = "()", mutates: Sequence[str] = ()) -> Callable:
    """Declares an operator whose tensors `mutates` are written."""
    for i, argument in enumerate(mutates):
        arguments = re.sub(rf"\bTensor((?:\[\])? {argument}\b)", rf"Tensor(a{i}!)\1", arguments)
    return torch.library.custom_op(f"qkvcache::{name}", mutates_args=mutates, schema=f"({arguments}) -> {returns}")


def _given(options: Sequence[Any]) -> dict[str, Any]:
    """The options that are not None, by name."""
    return {name: x for name, x in zip(pages.OPTIONS, options, strict=True) if x is not None}


@_operator("attend", f"Tensor query, {INPUTS}, Tensor? mask, {OPTIONS}", "(Tensor, Tensor, Tensor)")
def _attend(query, pool, counts, exact, sizes, max_length, mask, *options):
    inputs = PagedInputs.of(pool, counts, exact, sizes, max_length)
    out, lse, sums = dispatch.attend_pages(query, inputs, mask, **_given(options))
    return out.contiguous(), lse, sums  # kernels write `[B, Q, Hq, D]`


@_attend.register_fake
def _(query, pool, counts, exact, sizes, max_length, mask, sinks, observed, *options):
    _, heads, ring_slots, dim = exact[3].shape
    slots = 0 if observed is None else exact[0].shape[2] + max_length + ring_slots
    lse, attention_sums = (query.new_empty(shape, dtype=torch.float32) for shape in (query.shape[:3], (query.shape[0], heads, slots)))
    return query.new_empty(*query.shape[:3], dim), lse, attention_sums


@_operator("attend_latents", f"Tensor query, {INPUTS}, Tensor? mask, float scaling, bool causal, int? chosen", "Tensor")
def _attend_latents(query, pool, counts, exact, sizes, max_length, mask, scaling, causal, chosen):
    inputs = PagedInputs.of(pool, counts, exact, sizes, max_length)
    return dispatch.attend_latent_pages(query, inputs, mask, scaling=scaling, causal=causal, chosen=chosen).contiguous()


@_attend_latents.register_fake
def _(query, pool, counts, exact, *options):
    return query.new_empty(*query.shape[:3], exact[2].shape[3])


# Pages are mutated too. Were they declared, functionalization would copy them, and the table would point to the originals. Only operators
# with `exact` among their arguments read pages, and those keep their order.
@_operator(
    "step",
    "Tensor[] pool, Tensor rows, Tensor control, Tensor[] exact, SymInt[] sizes, Tensor key, Tensor value",
    mutates=["rows", "control", "exact"],
)
def _step(pool, rows, control, exact, sizes, key, value):
    dispatch.step(PagedInputs.of(pool, [rows, None, None, None, None, control], exact, sizes, 0), (key, value))


@_operator("unfold", f"{INPUTS}, SymInt columns, Tensor? key, Tensor? value", "(Tensor, Tensor)")
def _unfold(*args):
    *inputs, columns, key, value = args
    return dispatch.unfold(PagedInputs.of(*inputs), columns, None if key is None else (key, value))


@_unfold.register_fake
def _(pool, counts, exact, sizes, max_length, columns, key, value):
    keys, values = (x.new_empty(*x.shape[:2], columns + 1, x.shape[3])[:, :, :columns] for x in exact[2:4])
    return keys, values


@_operator(
    "append_token",
    f"{STATIC}, Tensor key, Tensor value, Tensor?[] new, Tensor? is_valid",
    mutates=["exact", "records", "column_mask", "row_lengths", "columns"],
)
def _append_token(*args):
    *static, key, value, new, is_valid = args
    dispatch.append_token(StaticTensors.of(*static), (key, value), new, is_valid)


@_operator("evict_token", f"{STATIC}, Tensor order", "Tensor", mutates=["exact", "records", "column_mask"])
def _evict_token(*args):
    *static, order = args
    return dispatch.evict_token(StaticTensors.of(*static), order)


@_evict_token.register_fake
def _(*args):
    return args[-1].new_empty(args[-1].shape[:2])
