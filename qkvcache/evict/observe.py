"""Attention whose weights are summed for each token, by kernels or the torch reference (`sum_attention.py`).

Kernels attend as for all layers. The sums depend on the normalisers, which attention finds: then the keys are read a second time, so that
attention need not keep weights, which few callers want."""

from __future__ import annotations

import functools
from typing import Any, Unpack

import torch
from torch import Tensor

from ..kernels import AttentionInputs, PagedInputs
from ..kernels.attend.chunked import Chunks, attend_chunked, hidden_exact, rotate
from ..kernels.attend.reference import OPTIONS, Options
from ..kernels.host.dispatch import fuses, module, on_triton
from ..kernels.host.handles import ORDER, inputs_of
from ..kernels.host.ops import HANDLE, given, operator
from ..kernels.host.ops import OPTIONS as TYPES
from . import sum_attention as reference

KEYS, COLUMNS = ".evict.triton_sum_keys", ".evict.triton_sum_attention"


@functools.lru_cache(maxsize=32)
def once(rows: int, device: torch.device) -> Tensor:
    """`observed` of one query that counts once in each row, fp32 `[B, 1]`."""
    with torch.inference_mode(False):
        return torch.ones(rows, 1, dtype=torch.float32, device=device)


def observe_on_codes(
    query: Tensor, attention_inputs: AttentionInputs, mask: Tensor | None = None, *, observed: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """`attend_observed`, by the fused kernel where there is one; by slot where `observes_slots`."""
    inputs = attention_inputs.paged
    if torch.compiler.is_compiling() and attention_inputs.compiled:
        shape, arguments = list(attention_inputs.value.shape[1:]), [options.get(name) for name in OPTIONS]
        return torch.ops.qkvcache.observe(query, inputs.handle, ORDER[query.device], shape, mask, observed, *arguments)
    if inputs is not None and not attention_inputs.by_head and fuses("attend.launches", inputs, query):
        return observe_pages(query, inputs, mask, observed=observed, **options)
    return reference.attend_observed(query, attention_inputs, mask, observed=observed, **options)


def observes_slots(query: Tensor, attention_inputs: AttentionInputs) -> bool:
    """Whether `observe_on_codes` accumulates attention by slot, and not by column: a kernel reads tokens that the device counts."""
    return attention_inputs.counted and fuses("attend.launches", attention_inputs.paged, query)


def observe_pages(
    query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, *, observed: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """`sum_attention.observe_pages`, by kernels where there are."""
    if not fuses("attend.launches", inputs, query):
        return reference.observe_pages(query, inputs, mask, observed=observed, **options)
    plan = module("attend.plan").plan_pages(query, inputs, mask, **options)
    out, lse, arguments = plan.run(query, inputs, options.get("sinks"))
    return out, module(KEYS).sum_keys(plan, lse, arguments, observed)


def observe_chunks(
    query: Tensor, attention_inputs: AttentionInputs, hidden: Tensor | None, *, observed: Tensor, chunk_tokens: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output of `attend_chunked`, and the accumulated attention of each token, fp32 `[B, H, T]`. Chunks are dequantized a second time
    for it, the last one first, which is still there. `observed`: how often each of the last `W` queries counts, fp32 `[B, W]`."""
    chunks = Chunks(query, attention_inputs, chunk_tokens)
    out, lse = attend_chunked(query, chunks, hidden, **options)
    last, exact, before, column = query.shape[2] - observed.shape[1], chunks.tokens.exact[0], chunks.tokens.before, chunks.end
    query, level, own = query[:, :, last:].detach(), lse[:, :, last:], hidden_exact(hidden, chunks)
    scaling = query.shape[3] ** -0.5 if options.get("scaling") is None else options["scaling"]
    known = {"softcap": options.get("softcap"), "lse": level}
    rest = sum_attention(query, exact, observed, None if own is None else ~own, scaling=scaling, **known)
    found = [rest[..., before:]]
    for count, codecs, fill in reversed(chunks.pieces):
        keys, values = chunks.scratch[:, :, :, :count]
        if column < chunks.end:
            fill((keys, values))
        column -= count
        visible, (turned, factor) = None if hidden is None else ~hidden[..., column : column + count], rotate(query, codecs[0])
        found.append(sum_attention(turned, keys, observed, visible, scaling=scaling * factor, causal=False, **known))
    return out, torch.cat([rest[..., :before], *reversed(found)], dim=-1)


@functools.wraps(reference.sum_attention)
def sum_attention(query: Tensor, key: Tensor, observed: Tensor, visible: Tensor | None = None, **options: Any) -> Tensor:
    """`sum_attention.sum_attention`, by kernels where they exist: the accumulated attention of many queries, fp32 `[B, H, T]`."""
    by_head = visible is not None and visible.dim() == 3
    if on_triton(query.device) and (options.get("lse") is not None or not by_head):
        kernels = module(COLUMNS)
        if kernels.supports(query, key):
            if not by_head:
                return kernels.sum_attention(query, key, observed, visible, **options)
            return kernels.sum_attention(query, key, observed, **options).masked_fill_(~visible, 0)  # type: ignore[operator]
    return reference.sum_attention(query, key, observed, visible, **options)


@operator("observe", f"Tensor query, {HANDLE}, SymInt[] shape, Tensor? mask, Tensor observed, {TYPES}", "(Tensor, Tensor)")
def _observe(query, handle, order, shape, mask, observed, *options):
    """`shape`: heads, slots and channels of values."""
    out, sums = observe_pages(query, inputs_of(handle), mask, observed=observed, **given(options))
    return out.contiguous(), sums  # kernels write `[B, Q, Hq, D]`


@_observe.register_fake
def _(query, handle, order, shape, mask, observed, *options):
    heads, slots, dim = shape
    return query.new_empty(*query.shape[:3], dim), query.new_empty(query.shape[0], heads, slots, dtype=torch.float32)
