"""Kernels as operators of torch, so that `torch.compile(fullgraph=True)` sees one operation for each.

Operators accept tensors and numbers only: a codec is passed as its index (`segments.number`), and attention inputs or storage as their
`arguments`. Those that return nothing need no fake implementation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import dispatch
from .attend import Options
from .evict import StaticTensors
from .pages import PagedInputs, PageOptions
from .segments import CODECS, AttentionInputs, Buffers, Exact, KeysOrValues, Packed, Pair, QuantizedRegion, packed


@torch.library.custom_op("qkvcache::dense", mutates_args=())
def _dense(planes: Sequence[Tensor], table: Tensor | None, codecs: Sequence[int], tokens: int, exact: Sequence[Tensor]) -> Pair:
    attention_inputs = _inputs_of(planes, table, codecs, tokens, exact)
    return dispatch.dense(attention_inputs.key), dispatch.dense(attention_inputs.value)


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
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    observed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    options: Options = {"scaling": scaling, "causal": causal, "softcap": softcap, "sinks": sinks}
    return dispatch.observe_on_codes(query, _inputs_of(planes, table, codecs, tokens, exact), mask, observed=observed, **options)


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


@_attend.register_fake
def _(query, planes, table, codecs, tokens, exact, mask=None, sinks=None, scaling=None, softcap=None, causal=False, observed=None):
    batch, heads, recent, dim = exact[3].shape
    total = 0 if observed is None else exact[0].shape[2] + tokens + recent
    return query.new_empty(*query.shape[:3], dim), query.new_empty(batch, heads, total, dtype=torch.float32)


BUFFERS = "Tensor[] exact, Tensor[] quantized, SymInt[] codecs, SymInt columns"
"""`Buffers.arguments`"""
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


# Chunks are mutated too. Were they declared, functionalization would copy them, and the table would point to the originals. Only operators
# with `exact` among their arguments read chunks, and those keep their order.
@_operator("step", f"{BUFFERS}, Tensor key, Tensor value", mutates=["exact"])
def _step(*args):
    *buffers, key, value = args
    dispatch.step(Buffers.of(*buffers), (key, value))


@_operator("attend_buffers", f"Tensor query, {BUFFERS}, Tensor? mask, Tensor? sinks, float? scaling, float? softcap", "Tensor")
def _attend_buffers(query, *args):
    *buffers, mask, sinks, scaling, softcap = args
    return dispatch.attend_on_buffers(query, Buffers.of(*buffers), mask, scaling=scaling, softcap=softcap, sinks=sinks)


@_attend_buffers.register_fake
def _(query, exact, *args):
    return query.new_empty(*query.shape[:3], exact[3].shape[3])


@_operator("unfold", f"{BUFFERS}, Tensor? key, Tensor? value", "(Tensor, Tensor)")
def _unfold(*args):
    *buffers, key, value = args
    return dispatch.unfold(Buffers.of(*buffers), None if key is None else (key, value))


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


@torch.library.custom_op("qkvcache::attend_pages", mutates_args=())
def _attend_pages(
    query: Tensor,
    pool: Sequence[Tensor],
    counts: Sequence[Tensor],
    exact: Sequence[Tensor],
    codecs: Sequence[int],
    max_length: int,
    tokens: int,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    observed: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = PagedInputs.of(pool, counts, exact, codecs, max_length, tokens)
    options: PageOptions = {"scaling": scaling, "softcap": softcap, "causal": causal}
    return dispatch.attend_pages(query, inputs, mask, **options | {"sinks": sinks, "observed": observed})


@_attend_pages.register_fake
def _(
    query, pool, counts, exact, codecs, max_length, tokens, mask=None, sinks=None, observed=None, scaling=None, softcap=None,
    causal=False,
):  # fmt: skip
    _, heads, ring_slots, dim = exact[3].shape
    slots = 0 if observed is None else exact[0].shape[2] + max_length + ring_slots
    lse, attention_sums = (query.new_empty(shape, dtype=torch.float32) for shape in (query.shape[:3], (query.shape[0], heads, slots)))
    return query.new_empty(*query.shape[:3], dim), lse, attention_sums
