"""Kernels as operators of torch, so that `torch.compile(fullgraph=True)` sees one operation for each.

Operators accept tensors and numbers only: a handle stands for attention inputs (`handles.py`). Those that
return nothing need no fake implementation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...autocast import without_autocast
from ..attend.reference import OPTIONS as NAMES
from ..segments import differ
from ..store.reference import calibrate
from . import dispatch
from .handles import inputs_of

HANDLE = "Tensor handle, Tensor order"
OPTIONS = "Tensor? sinks, float? scaling, float? softcap, bool? causal"
"""`attend.OPTIONS`"""


def operator(name: str, arguments: str, returns: str = "()", mutates: Sequence[str] = ()) -> Callable:
    """Declares an operator whose tensors `mutates` are written."""
    for i, argument in enumerate(mutates):
        arguments = re.sub(rf"\bTensor((?:\[\])? {argument}\b)", rf"Tensor(a{i}!)\1", arguments)
    made = torch.library.custom_op(f"qkvcache::{name}", mutates_args=mutates, schema=f"({arguments}) -> {returns}")
    return lambda function: made(without_autocast()(function))


def given(options: Sequence[Any]) -> dict[str, Any]:
    """The options that are not None, by name."""
    return {name: x for name, x in zip(NAMES, options, strict=True) if x is not None}


@operator("attend", f"Tensor query, {HANDLE}, SymInt[] shape, Tensor? mask, {OPTIONS}", "(Tensor, Tensor)")
def _attend(query, handle, order, shape, mask, *options):
    """`shape`: heads, slots and channels of values."""
    out, lse = dispatch.attend_pages(query, inputs_of(handle), mask, **given(options))
    return out.contiguous(), lse  # kernels write `[B, Q, Hq, D]`


@_attend.register_fake
def _(query, handle, order, shape, mask, *options):
    return query.new_empty(*query.shape[:3], shape[2]), query.new_empty(query.shape[:3], dtype=torch.float32)


@operator("step", f"{HANDLE}, Tensor key, Tensor value", mutates=["order"])
def _step(handle, order, key, value):
    inputs = inputs_of(handle)
    for held, new in zip(inputs.ring, (key, value), strict=True):
        if differ(held, new):
            raise ValueError(
                f"storage is for keys and values like {list(held.shape)} in {held.dtype}, got {list(new.shape)} in {new.dtype}: call "
                "cache.reset() and cache.early_initialization(...) before"
            )
    dispatch.step(inputs, (key, value))


@operator("calibrate", f"{HANDLE}, Tensor begun, Tensor key, Tensor value, Tensor? is_valid", mutates=["order", "begun"])
def _calibrate(handle, order, begun, key, value, is_valid):
    calibrate(inputs_of(handle).pages, begun, (key, value), is_valid)


@operator("unfold", f"{HANDLE}, SymInt columns, Tensor key, Tensor value", "(Tensor, Tensor)")
def _unfold(handle, order, columns, key, value):
    return dispatch.unfold(inputs_of(handle), columns, (key, value))


@_unfold.register_fake
def _(handle, order, columns, *new):
    keys, values = (x.new_empty(*x.shape[:2], columns + 1, x.shape[3])[:, :, :columns] for x in new)
    return keys, values


@operator("read", "Tensor x, Tensor order", "Tensor")
def _read(x, order):
    """A copy of a tensor that operators write behind a handle."""
    return x.clone()


@_read.register_fake
def _(x, order):
    return torch.empty_like(x)
