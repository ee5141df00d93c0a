"""Attention over layers that evict tokens: these layers make their own masks and receive the attention weights.

transformers builds masks by column, but an evicting layer stores tokens in slots, in a different order in each head.
Only the running step's columns of the model's mask are used: they show which new tokens are padding. The layer knows
the padding among its stored tokens. While columns are in token order, the model's own mask and attention function are
used unchanged.

Attention runs as in layers that keep everything (`route.py`), and returns the weights that the policy needs. Those of a
prompt are causal, even if the user's mask lets tokens attend to later ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..attention.compressed_kv import CompressedKV
from ..attention.full import NAME, full_attention
from ..attention.masks import (
    NewTokens,
    joined,
    joined_by_head,
    kernel_options,
    mask_of_new,
    new_tokens,
    sees_itself,
    unknown,
)
from ..attention.plan import AttentionPlan
from ..attention.route import path_of
from ..kernels import Exact, KeysOrValues, attend_on_codes, attend_pages
from ..kernels.attend.chunked import attend_chunked
from .observe import observe_chunks, observe_on_codes, observe_pages, observes_slots, sum_attention
from .prefill import prefill_with_lse


def attend_observed(
    stock: Callable, implementation: str, module: torch.nn.Module, query: Tensor, key: CompressedKV, value: CompressedKV,
    mask: Any, *args: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`route` for an evicting layer."""
    observer = key.observer
    _refuse_by_column(observer, implementation, module, kwargs)
    if observer.is_static and query.shape[2] == 1:
        return _attend_static(stock, implementation, module, query, key, value, mask, *args, **kwargs)
    batch, queries, tokens = query.shape[0], query.shape[2], key.shape[2]
    new = new_tokens(implementation, module, mask, batch, queries, query.device)
    options, policy = kernel_options(implementation, query, kwargs), observer.policy
    observed = _query_weights(policy.observation_window, policy.decay, new.is_valid, query)
    if new.causal and new.is_valid is None and "eager" not in implementation and not kwargs.get("dropout"):
        plan = AttentionPlan.of(implementation, module, query, key, mask, kwargs, None, options)
        if plan is not None:
            key.attention_inputs.running.plan = plan  # type: ignore[union-attr]
            return plan.attend(query, key, kwargs), None
    in_order, paged = observer.in_order or tokens == queries, key.attention_inputs.by_head
    observer.begin_attention(new.is_valid, query, options["scaling"])
    valid = functools.cache(observer.valid_columns)  # not computed for attention over pages
    last = _last(policy.observation_window, new.is_valid, queries)
    in_order = in_order and (valid() is None if mask is None else mask.shape[-1] == tokens)  # layers of a kind share it
    path = path_of(implementation, query, key.attention_inputs, options["softcap"])
    path = "chunks" if path == "tiles" else path
    on_path = path == "codes" or (path == "chunks" and new.causal)
    if paged and "eager" not in implementation and implementation != "sdpa":
        stock, implementation = full_attention, NAME  # the masks of flash and flex are the same for all heads
    if not in_order and on_path and "eager" not in implementation and not kwargs.get("dropout"):
        attention_sums = None
        if path == "chunks":
            hidden = None if (shown := valid()) is None else ~shown
            if observed is None:
                out = attend_chunked(query, key.attention_inputs, hidden, **options)[0]
            else:
                out, attention_sums = observe_chunks(query, key.attention_inputs, hidden, observed=observed[:, last], **options)
        else:
            out, attention_sums = _attend_on_codes(query, key, new, valid, observed, options)
        by_slot = paged or (path == "codes" and observes_slots(query, key.attention_inputs))
        observer.end_attention(attention_sums, by_slot)
        return out.transpose(1, 2).contiguous(), None

    keys, values = key, value
    if in_order or "eager" not in implementation:
        keys, values = _dense(key), _dense(value)  # type: ignore[assignment]
    if not in_order:
        mask = _mask_of_all(implementation, valid(), new, query, tokens)
    weights: Tensor | None = None
    attention_sums = None
    found = None
    if observed is not None and mask is None and implementation == "sdpa" and tokens == queries:
        found = prefill_with_lse(query, keys, values, options["scaling"])  # type: ignore[arg-type]
    if found is not None:
        out = found[0].transpose(1, 2).contiguous()
    else:
        out, weights = stock(module, query, keys, values, mask, *args, **kwargs)
    if observed is not None and isinstance(weights, Tensor):
        attention_sums = _summed(weights, key, observed)
    elif observed is not None:
        lse = None if found is None else found[1][:, :, last]
        k = _of_kv_heads(keys, key.form.repeats)
        attention_sums = sum_attention(query[:, :, last].detach(), k, observed[:, last], valid(), lse=lse, **options)
    observer.end_attention(attention_sums)
    return out, weights


def _refuse_by_column(observer: Any, implementation: str, module: torch.nn.Module, keywords: dict[str, Any]) -> None:
    """Raises NotImplementedError for keywords that may be about columns: the columns of an evicting layer are in another order."""
    names = [] if "eager" in implementation else unknown(implementation, keywords)
    names += ["position_bias"] if keywords.get("position_bias") is not None else []
    if names:
        observer.refuse(f"{type(module).__name__} calls attention with {', '.join(names)}")


def _attend_on_codes(
    query: Tensor, key: CompressedKV, new: NewTokens, valid: Callable[[], Tensor | None], observed: Tensor | None, options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention on the codes for a few queries under any mask, and the attention sums of the `observed` queries, if there are any."""
    inputs = key.attention_inputs
    if inputs.by_head:
        mask = None if new.causal and new.is_valid is None else joined_by_head(inputs.paged, new, query)
        options = options | {"causal": mask is None}
        if observed is None:
            return attend_pages(query, inputs.paged, mask, **options)[0], None
        return observe_pages(query, inputs.paged, mask, observed=observed, **options)
    if new.causal:  # costs a kernel less than a mask of queries x tokens
        shown = valid()
        mask = None if shown is None else shown[:, None, None]
    else:
        mask = joined(valid(), new.mask, query, key.shape[2])
    options = options | {"causal": new.causal}
    if observed is None:
        return attend_on_codes(query, inputs, mask, **options), None
    return observe_on_codes(query, inputs, mask, observed=observed, **options)


def _mask_of_all(implementation: str, valid: Tensor | None, new: NewTokens, query: Tensor, tokens: int) -> Tensor | None:
    """The mask over all columns, in the form that the stock attention function of `implementation` takes."""
    if "flash" in implementation:
        return valid
    mask = joined(valid, new.mask, query, tokens)
    if mask.dtype == torch.bool and ("eager" in implementation or "flex" in implementation):
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return mask


def _attend_static(
    stock: Callable, implementation: str, module: torch.nn.Module, query: Tensor, key: CompressedKV, value: CompressedKV, mask: Any,
    *args: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of a step of one token in the static layout: it neither waits for the device nor depends on the number
    of tokens."""
    observer = key.observer
    batch = query.shape[0]
    new = mask_of_new(implementation, mask, batch, 1, query.device)
    is_valid = None if new is None else sees_itself(new, batch)
    options, policy = kernel_options(implementation, query, kwargs), observer.policy
    shown = observer.begin_attention(is_valid, query, options["scaling"])[:, None, None]  # type: ignore[index]
    weights: Tensor | None = None
    attention_sums: Tensor | None = None
    observed = None
    if policy.observation_window:
        observed = query.new_ones(batch, 1, dtype=torch.bool) if is_valid is None else is_valid
    if "eager" in implementation or kwargs.get("dropout"):
        hidden = torch.zeros_like(shown, dtype=query.dtype).masked_fill(~shown, torch.finfo(query.dtype).min)
        out, weights = stock(module, query, key.dense(), value.dense(), hidden, *args, **kwargs)
        if observed is not None and isinstance(weights, Tensor):
            attention_sums = _summed(weights, key, observed.float())
    else:
        if observed is None:
            out = attend_on_codes(query, key.attention_inputs, shown, **options)
        else:
            out, attention_sums = observe_on_codes(query, key.attention_inputs, shown, observed=observed, **options)
        out = out.transpose(1, 2).contiguous()
    observer.end_attention(attention_sums)
    return out, weights


# The attention sums for policies.


def _summed(weights: Tensor, key: CompressedKV, observed: Tensor) -> Tensor:
    """`weights` `[B, Hq, Q, T]` summed with the queries' weights `observed` `[B, Q]`: `[B, H, T]`."""
    return torch.einsum("bhgqt,bq->bht", weights.float().unflatten(1, (key.side.shape[1], -1)), observed)


def _dense(given: CompressedKV) -> Tensor:
    side: KeysOrValues = given.side
    if len(side.segments) == 1 and isinstance(side.segments[0], Exact) and given.form.repeats == 1:
        return side.segments[0].x
    return given.dense()


def _of_kv_heads(keys: Tensor | CompressedKV, repeats: int) -> Tensor:
    """Keys dequantized, without the head repetitions of `repeat_kv`."""
    return (keys.dense() if isinstance(keys, CompressedKV) else keys)[:, ::repeats]


def _query_weights(window: int, decay: float, is_valid: Tensor | None, query: Tensor) -> Tensor | None:
    """The weight of each query's attention, fp32 `[B, Q]`: 1 for the last valid query, `decay` times less for each before it, 0 outside of
    the last `window` ones; None if `window` is 0."""
    if not window:
        return None
    if window >= query.shape[2] and decay == 1:
        shape = query.shape[0], query.shape[2]
        return torch.ones(shape, dtype=torch.float32, device=query.device) if is_valid is None else is_valid.float()
    if is_valid is None:
        is_valid = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    from_the_end = is_valid.flip(-1).cumsum(-1).flip(-1)
    return (is_valid & (from_the_end <= window)).float() * decay ** (from_the_end - 1).clamp_min(0).float()


def _last(window: int, is_valid: Tensor | None, queries: int) -> slice:
    """A range of queries that contains the last `window` valid ones."""
    if window < queries and (is_valid is None or bool(is_valid[:, -window:].all())):
        return slice(queries - window, queries)
    return slice(0, queries)
