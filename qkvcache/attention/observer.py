"""Attention over layers that evict tokens: these layers make their own masks, and are told the attention weights.

transformers builds masks by column, but the tokens of an evicting layer are in slots, in a different order in each head. Of the model's
mask only the columns of the running step are used: they tell which new tokens are padding. For stored tokens the layer knows it. While
nothing has been evicted and columns are in token order, the model's own mask and attention function are used unchanged. The attention
weights of a prompt are causal, even if the user's mask lets tokens attend to later ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..kernels import Exact, KeysOrValues, attend_on_codes, dense, observe_on_codes, prefill_with_lse, sum_attention
from ..kernels.sum_attention import BLOCK
from ..policies import ObservedAttention, Policy
from .compressed_kv import CompressedKV
from .full import full_attention


class AttentionObserver(Protocol):
    """A layer that is told what attention does between its `update`s."""

    policy: Policy

    @property
    def in_order(self) -> bool:
        """Whether its columns are in token order, as the model's mask assumes."""

    @property
    def is_static(self) -> bool:
        """Whether a step of one token runs in tensors of fixed size."""

    def tokens_before(self) -> Tensor:
        """Tokens of each row before the step, padding not counted, `[B]`."""

    def begin_attention(
        self, is_valid: Tensor | None, query: Tensor | None = None, scaling: float | None = None, module: torch.nn.Module | None = None
    ) -> Tensor | None:
        """Takes which of the step's tokens are no padding, bool `[B, Q]` (None: all), the queries `[B, Hq, Q, D]`, the factor on `q k` and
        the attention module, which policies may ask for. Returns which stored columns hold a token, bool `[B, S]`, or `[B, H, S]` where
        heads differ (None: all); if `is_static` and Q = 1, all columns `[B, T]`, the new token's included."""

    def end_attention(self, attention_sums: Tensor | None) -> None:
        """Takes the attention weights of all columns, `[B, H, T]`, summed over queries and over the query heads of a KV head, or what the
        policy's `reduce_attention` made of them; None if its `observation_window` is 0. The layer may evict tokens now."""


def attend_observed(
    stock: Callable, implementation: str, few: bool, module: torch.nn.Module, query: Tensor, key: CompressedKV, value: CompressedKV,
    mask: Any, *args: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`route` for an evicting layer. `few`: attention on the codes is faster than dequantizing them first."""
    observer: AttentionObserver = key.observer
    if observer.is_static and query.shape[2] == 1:
        return _attend_static(stock, implementation, module, query, key, value, mask, *args, **kwargs)
    batch, queries, stored_tokens = query.shape[0], query.shape[2], key.shape[2] - query.shape[2]
    new, is_valid = new_tokens(implementation, mask, batch, queries, query.device)
    options, policy = _options(implementation, query, kwargs), observer.policy
    in_order, stored = observer.in_order or not stored_tokens, observer.begin_attention(is_valid, query, options["scaling"], module)
    in_order = in_order and _fits(mask, key.shape[2], padded=stored is not None)
    observed = _query_weights(policy.observation_window, policy.decay, is_valid, query)
    reduced = observed if policy.reduces_attention else None
    observed = None if policy.reduces_attention else observed
    attention_sums: Tensor | None = None
    weights: Tensor | None = None
    lse: Tensor | None = None
    if _by_head(stored) and "eager" not in implementation and implementation != "sdpa":
        stock, implementation = full_attention, "qkvcache"  # the masks of flash and flex are the same for all heads
    if not in_order and few and "eager" not in implementation and not kwargs.get("dropout"):
        unmasked = (stored is None and new is None) or (
            key.attention_inputs.paged is not None and is_valid is None and (new is None or queries == 1)
        )
        bits = None if unmasked else _joined(stored, new, batch, stored_tokens, query)
        causal = bits is None
        if observed is None:
            out = attend_on_codes(query, key.attention_inputs, bits, causal=causal, **options)
        else:
            out, attention_sums = observe_on_codes(query, key.attention_inputs, bits, observed=observed, causal=causal, **options)
        if reduced is not None:
            valid = _valid_columns(stored, is_valid, batch, stored_tokens, queries, query.device)
            attention_sums = _reduced(policy, query, key.dense(), value.dense(), reduced, valid, **options)
        observer.end_attention(attention_sums)
        return out.transpose(1, 2).contiguous(), None

    keys, values = key, value
    if in_order or "eager" not in implementation:
        keys, values = _dense(key), _dense(value)  # type: ignore[assignment]
    if not in_order:
        mask = _mask_of_all(implementation, stored, new, is_valid, query, stored_tokens)
    if observed is not None and mask is None and implementation == "sdpa" and not stored_tokens:
        found = prefill_with_lse(query, keys, values, options["scaling"])  # type: ignore[arg-type]
        if found is not None:
            out, lse = found[0].transpose(1, 2).contiguous(), found[1]
    if lse is None:
        out, weights = stock(module, query, keys, values, mask, *args, **kwargs)

    if observed is not None and isinstance(weights, Tensor):
        attention_sums = _summed(weights, key, observed)
    elif policy.observation_window:
        last = _last(policy.observation_window, is_valid, queries)
        valid = _valid_columns(stored, is_valid, batch, stored_tokens, queries, query.device)
        if reduced is not None:
            k, v = (x.dense() if isinstance(x, CompressedKV) else x for x in (keys, values))
            attention_sums = _reduced(policy, query[:, :, last], k, v, reduced[:, last], valid, **options)
        elif observed is not None:
            lse = None if lse is None else lse[:, :, last]
            attention_sums = sum_attention(query[:, :, last].detach(), keys, observed[:, last], valid, lse=lse, **options)  # type: ignore[arg-type]
    observer.end_attention(attention_sums)
    return out, weights


def _attend_static(
    stock: Callable, implementation: str, module: torch.nn.Module, query: Tensor, key: CompressedKV, value: CompressedKV, mask: Any,
    *args: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A step of one token that neither waits for the device nor depends on how many tokens there are."""
    observer: AttentionObserver = key.observer
    batch = query.shape[0]
    new = _mask_of_new(implementation, mask, batch, 1, query.device)
    is_valid = None if new is None else _sees_itself(new, batch)
    options, policy = _options(implementation, query, kwargs), observer.policy
    shown = observer.begin_attention(is_valid, query, options["scaling"], module)[:, None, None]  # type: ignore[index]
    weights: Tensor | None = None
    attention_sums: Tensor | None = None
    observed = query.new_ones(batch, 1, dtype=torch.bool) if is_valid is None else is_valid
    if "eager" in implementation or kwargs.get("dropout"):
        hidden = torch.zeros_like(shown, dtype=query.dtype).masked_fill(~shown, torch.finfo(query.dtype).min)
        out, weights = stock(module, query, key.dense(), value.dense(), hidden, *args, **kwargs)
        if policy.observation_window and isinstance(weights, Tensor):
            attention_sums = _summed(weights, key, observed.float())
    else:
        if policy.observation_window and not policy.reduces_attention:
            out, attention_sums = observe_on_codes(query, key.attention_inputs, shown, observed=observed, **options)
        else:
            out = attend_on_codes(query, key.attention_inputs, shown, **options)
        out = out.transpose(1, 2).contiguous()
    if policy.observation_window and policy.reduces_attention:
        attention_sums = _reduced(policy, query, key.dense(), value.dense(), observed.float(), shown[:, 0, 0], **options)  # type: ignore[arg-type]
    observer.end_attention(attention_sums)
    return out, weights


def _reduced(
    policy: Policy, query: Tensor, keys: Tensor, values: Tensor, observed: Tensor, valid: Tensor | None, *, scaling: float,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`policy.reduce_attention` of the last queries `[B, Hq, Q, D]` over keys and values `[B, H, T, D]`, of which the last `Q` columns are
    their own tokens if `Q > 1`; added over blocks of queries, which bound the memory. `valid`, bool `[B, T]` or `[B, H, T]`: columns with a
    token."""
    (batch, heads, tokens, _), queries = keys.shape, query.shape[2]
    total = torch.zeros(batch, heads, tokens, device=keys.device)
    columns = torch.arange(tokens, device=keys.device)
    block = max(BLOCK // (batch * query.shape[1] * tokens), 1)
    for begin in range(0, queries, block):
        rows = query[:, :, begin : begin + block].float().unflatten(1, (heads, -1))  # [B, H, G, q, D]
        logits = rows * scaling @ keys.float().mT[:, :, None]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if queries > 1:
            last = torch.arange(begin, begin + rows.shape[3], device=keys.device) + tokens - queries
            logits = logits.masked_fill(columns > last[:, None], -torch.inf)
        if valid is not None:
            logits = logits.masked_fill(~(valid[:, :, None, None] if _by_head(valid) else valid[:, None, None, None]), -torch.inf)
        lse = logits.logsumexp(-1, keepdim=True)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float().view(heads, -1, 1, 1))
        count = observed[:, begin : begin + block].float()
        weights = (logits - lse).exp().masked_fill((count == 0)[:, None, None, :, None], 0)  # of padding they are nan
        total += policy.reduce_attention(ObservedAttention(weights, weights @ values.float()[:, :, None], values, count))
    return total


@torch.no_grad()
def prompt_attention(policy: Policy, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor | None:
    """What `attend_observed` reports to a layer of `policy` after a prompt without padding: queries `[B, Hq, T, D]`, keys and values
    `[B, H, T, D]`; no softcap, no attention sinks."""
    weights = _query_weights(policy.observation_window, policy.decay, None, query)
    if weights is None:
        return None
    last, options = _last(policy.observation_window, None, query.shape[2]), {"scaling": scaling, "softcap": None, "sinks": None}
    if policy.reduces_attention:
        return _reduced(policy, query[:, :, last], keys, values, weights[:, last], None, **options)  # type: ignore[arg-type]
    return sum_attention(query[:, :, last], keys, weights[:, last], None, lse=None, **options)  # type: ignore[arg-type]


def _summed(weights: Tensor, key: CompressedKV, observed: Tensor) -> Tensor:
    """`weights` `[B, Hq, Q, T]` summed with the queries' weights `observed` `[B, Q]`: `[B, H, T]`."""
    return torch.einsum("bhgqt,bq->bht", weights.float().unflatten(1, (key.side.shape[1], -1)), observed)


def _options(implementation: str, query: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    scaling = kwargs.get("scaling")
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if implementation == "sdpa":  # transformers 5.17 ignores both in sdpa; a decode must not differ from its prefill
        return {"scaling": scaling, "softcap": None, "sinks": None}
    return {"scaling": scaling, "softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}


def _fits(mask: Any, tokens: int, padded: bool) -> bool:
    """Whether the mask has this layer's columns: transformers makes one mask for all layers of a kind, from the first of them."""
    return not padded if mask is None else mask.shape[-1] == tokens


def _dense(given: CompressedKV) -> Tensor:
    side: KeysOrValues = given.side
    if len(side.segments) == 1 and isinstance(side.segments[0], Exact):
        return side.segments[0].x
    return dense(side)


_last_mask: tuple[Any, tuple[int, int], Tensor | None] = (lambda: None, (0, 0), None)
"""The mask of the last step and which tokens it shows as valid. All layers of a step have the same mask; reading it waits for the
device."""


def new_tokens(implementation: str, mask: Any, batch: int, queries: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """`_mask_of_new`, and which of the step's tokens are no padding, bool `[B, Q]`; None if none is padding."""
    global _last_mask
    if mask is None:
        return None, None
    new = _mask_of_new(implementation, mask, batch, queries, device)
    written = mask._version if isinstance(mask, Tensor) and not mask.is_inference() else 0  # the caller may write into its mask
    if _last_mask[0]() is not mask or _last_mask[1] != (queries, written):
        is_valid = None if new is None else _sees_itself(new, batch).clone()  # a view would keep the mask alive
        _last_mask = weakref.ref(mask), (queries, written), None if is_valid is None or bool(is_valid.all()) else is_valid
    is_valid = _last_mask[2]
    return new, is_valid if is_valid is None else is_valid.to(device)


def _mask_of_new(implementation: str, mask: Any, batch: int, queries: int, device: torch.device) -> Tensor | None:
    """The part of the mask among the step's own tokens, bool or additive, `[B, H, Q, Q]` with `B` and `H` perhaps 1; None if causal."""
    if mask is None:
        return None
    if isinstance(mask, BlockMask):
        rows, q = torch.arange(batch, device=device)[:, None, None], torch.arange(queries, device=device)
        shown = mask.mask_mod(rows, rows * 0, q[None, :, None], q[None, None, :] + mask.shape[-1] - queries)
        return shown.expand(batch, queries, queries)[:, None]
    if "flash" in implementation:
        return _causal(queries, device) & mask[:, None, None, -queries:].bool()
    return mask[..., -queries:]


def _causal(queries: int, device: torch.device) -> Tensor:
    return torch.ones(queries, queries, dtype=torch.bool, device=device).tril()


def _sees_itself(new: Tensor, batch: int) -> Tensor:
    """Whether each new token attends to itself, bool `[B, Q]`: padding does not."""
    diagonal = new[:, 0].diagonal(dim1=-2, dim2=-1)
    diagonal = diagonal if diagonal.dtype == torch.bool else diagonal > torch.finfo(diagonal.dtype).min / 2
    return diagonal.expand(batch, -1)


def _query_weights(window: int, decay: float, is_valid: Tensor | None, query: Tensor) -> Tensor | None:
    """The weight of each query's attention, fp32 `[B, Q]`: 1 for the last valid query, `decay` times less for each before it, 0 outside of
    the last `window` ones; None if `window` is 0."""
    if not window:
        return None
    if is_valid is None:
        is_valid = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    if window >= query.shape[2] and decay == 1:
        return is_valid.float()
    from_the_end = is_valid.flip(-1).cumsum(-1).flip(-1)
    return (is_valid & (from_the_end <= window)).float() * decay ** (from_the_end - 1).clamp_min(0)


def _last(window: int, is_valid: Tensor | None, queries: int) -> slice:
    """A range of queries that contains the last `window` valid ones."""
    if window < queries and (is_valid is None or bool(is_valid[:, -window:].all())):
        return slice(queries - window, queries)
    return slice(0, queries)


def _valid_columns(
    stored: Tensor | None, is_valid: Tensor | None, batch: int, stored_tokens: int, queries: int, device: torch.device
) -> Tensor | None:
    """Which columns hold a token, bool `[B, S + Q]`, or `[B, H, S + Q]` where heads differ; None: all."""
    if stored is None and is_valid is None:
        return None
    parts = [
        torch.ones(batch, n, dtype=torch.bool, device=device) if x is None else x for x, n in ((stored, stored_tokens), (is_valid, queries))
    ]
    if _by_head(stored):
        parts[1] = parts[1][:, None].expand(-1, parts[0].shape[1], -1)
    return torch.cat(parts, dim=-1)


def _by_head(stored: Tensor | None) -> bool:
    """Whether the columns that hold a token differ between heads."""
    return stored is not None and stored.dim() == 3


def _joined(stored: Tensor | None, new: Tensor | None, batch: int, stored_tokens: int, query: Tensor) -> Tensor:
    """A mask over all columns, `[B, H, Q, S + Q]` with `H` 1 or the heads of `query` `[B, Hq, Q, D]`, bool or additive as `new` is."""
    queries, device = query.shape[2], query.device
    new = _causal(queries, device)[None, None] if new is None else new
    new = new.expand(batch, -1, queries, -1)
    past = torch.ones(batch, stored_tokens, dtype=torch.bool, device=device) if stored is None else stored
    if new.dtype != torch.bool:
        past = torch.zeros_like(past, dtype=new.dtype).masked_fill(~past, torch.finfo(new.dtype).min)
    past = past.repeat_interleave(query.shape[1] // past.shape[1], dim=1) if _by_head(stored) else past[:, None]
    heads = max(past.shape[1], new.shape[1])
    return torch.cat([past[:, :, None].expand(-1, heads, queries, -1), new.expand(-1, heads, -1, -1)], dim=-1)


def _mask_of_all(
    implementation: str, stored: Tensor | None, new: Tensor | None, is_valid: Tensor | None, query: Tensor, stored_tokens: int
) -> Tensor | None:
    """The mask over all columns, in the form that the stock attention function of `implementation` takes."""
    batch, queries, device = query.shape[0], query.shape[2], query.device
    if "flash" in implementation:
        return _valid_columns(stored, is_valid, batch, stored_tokens, queries, device)
    mask = _joined(stored, new, batch, stored_tokens, query)
    if mask.dtype == torch.bool and ("eager" in implementation or "flex" in implementation):
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return mask
