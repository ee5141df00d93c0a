"""Attention of layers that evict: they own their masks, and learn from attention what it looked at.

transformers builds masks by column, but the tokens of an evicting layer lie in slots, in another order in each head. Of its mask only the
columns of the running step count: they tell which new tokens are real; of stored tokens the layer knows it. While nothing has been evicted
and all is in order, the model's own mask and attention function run as they are. Scores of a prompt are those of causal attention, also
where a mask of the user's own lets tokens see later ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..kernels import Exact, Side, attend_on_codes, column_mass, dense, observe_on_codes, prefill_with_lse
from .handle import KVHandle


class Watch(Protocol):
    """A layer that wants to know what attention does."""

    @property
    def observes(self) -> int:
        """Of how many of the step's last real queries it wants the attention weights."""

    @property
    def fades(self) -> float:
        """Factor on the weight of a query for each real one after it."""

    @property
    def in_order(self) -> bool:
        """Whether its tokens are, column by column, those that the model's mask speaks of."""

    def seen_before(self) -> Tensor:
        """Real tokens of each row before the step, `[B]`."""

    def enter(self, real: Tensor | None) -> Tensor | None:
        """Takes which of the step's tokens are real, bool `[B, Q]`; returns which of the stored ones are, `[B, S]`. None: all."""

    def observe(self, mass: Tensor | None) -> None:
        """Takes the weights `[B, H, S + Q]`, summed over queries and query heads of the group. The layer may change now."""

    @property
    def fixed(self) -> bool:
        """Whether a step of one token works in place, with `begin` and `finish` for `enter` and `observe`: compiled, or not."""

    def begin(self, real: Tensor | None) -> Tensor: ...

    def finish(self, mass: Tensor | None, real: Tensor | None) -> None: ...


def watched(
    stock: Callable, implementation: str, few: bool, module: torch.nn.Module, query: Tensor, key: KVHandle, value: KVHandle, mask: Any,
    *args: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`route` for the handles of an evicting layer; `few`: attention on the codes is faster than decoding them."""
    watch: Watch = key.watch
    if watch.fixed and query.shape[2] == 1:
        return _watched_in_place(stock, implementation, module, query, key, value, mask, *args, **kwargs)
    batch, queries, stored_tokens = query.shape[0], query.shape[2], key.shape[2] - query.shape[2]
    new, real = new_tokens(implementation, mask, batch, queries, query.device)
    in_order, stored = watch.in_order or not stored_tokens, watch.enter(real)
    in_order = in_order and _fits(mask, key.shape[2], padded=stored is not None)
    observed = _observed(watch.observes, watch.fades, real, query)
    options = _options(implementation, query, kwargs)
    mass: Tensor | None = None
    weights: Tensor | None = None
    lse: Tensor | None = None
    if not in_order and few and "eager" not in implementation and not kwargs.get("dropout"):
        bits = None if stored is None and new is None else _joined(stored, new, batch, stored_tokens, queries, query.device)
        causal = bits is None
        if observed is None:
            out = attend_on_codes(query, key.payload, bits, causal=causal, **options)
        else:
            out, mass = observe_on_codes(query, key.payload, bits, observed=observed, causal=causal, **options)
        watch.observe(mass)
        return out.transpose(1, 2).contiguous(), None

    keys, values = key, value
    if in_order or "eager" not in implementation:
        keys, values = _whole(key), _whole(value)  # type: ignore[assignment]
    if not in_order:
        mask = _whole_mask(implementation, stored, new, real, query, stored_tokens)
    if observed is not None and mask is None and implementation == "sdpa" and not stored_tokens:
        found = prefill_with_lse(query, keys, values, options["scaling"])  # type: ignore[arg-type]
        if found is not None:
            out, lse = found[0].transpose(1, 2).contiguous(), found[1]
    if lse is None:
        out, weights = stock(module, query, keys, values, mask, *args, **kwargs)

    if observed is not None and isinstance(weights, Tensor):
        mass = torch.einsum("bhgqt,bq->bht", weights.float().unflatten(1, (key.side.shape[1], -1)), observed)
    elif observed is not None:
        last = _last(watch.observes, real, queries)
        visible = _visible(stored, real, batch, stored_tokens, queries, query.device)
        lse = None if lse is None else lse[:, :, last]
        mass = column_mass(query[:, :, last].detach(), keys, observed[:, last], visible, lse=lse, **options)  # type: ignore[arg-type]
    watch.observe(mass)
    return out, weights


def _watched_in_place(
    stock: Callable, implementation: str, module: torch.nn.Module, query: Tensor, key: KVHandle, value: KVHandle, mask: Any,
    *args: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A step of one token that neither asks the device nor depends on how many tokens there are."""
    watch: Watch = key.watch
    batch = query.shape[0]
    new = _of_new_tokens(implementation, mask, batch, 1, query.device)
    real = None if new is None else _diagonal(new, batch)[:, 0]
    shown = watch.begin(real)[:, None, None]
    weights: Tensor | None = None
    mass: Tensor | None = None
    count = query.new_ones(batch, 1, dtype=torch.bool) if real is None else real[:, None]
    if "eager" in implementation or kwargs.get("dropout"):
        hidden = torch.zeros_like(shown, dtype=query.dtype).masked_fill(~shown, torch.finfo(query.dtype).min)
        out, weights = stock(module, query, key.dense(), value.dense(), hidden, *args, **kwargs)
        if watch.observes and isinstance(weights, Tensor):
            mass = torch.einsum("bhgqt,bq->bht", weights.float().unflatten(1, (key.side.shape[1], -1)), count.float())
    else:
        options = _options(implementation, query, kwargs)
        if watch.observes:
            out, mass = observe_on_codes(query, key.payload, shown, observed=count, **options)
        else:
            out = attend_on_codes(query, key.payload, shown, **options)
        out = out.transpose(1, 2).contiguous()
    watch.finish(mass, real)
    return out, weights


def _options(implementation: str, query: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    scaling = kwargs.get("scaling")
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if implementation == "sdpa":  # which has neither: transformers 5.17 drops them, and a decode must not differ from its prefill
        return {"scaling": scaling, "softcap": None, "sinks": None}
    return {"scaling": scaling, "softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}


def _fits(mask: Any, tokens: int, padded: bool) -> bool:
    """Whether the mask is of this layer: transformers makes one for all layers of a kind, as the first of them needs it."""
    return not padded if mask is None else mask.shape[-1] == tokens


def _whole(handle: KVHandle) -> Tensor:
    side: Side = handle.side
    if len(side.segments) == 1 and isinstance(side.segments[0], Exact):
        return side.segments[0].x
    return dense(side)


_last_mask: tuple[Any, tuple[int, int], Tensor | None] = (lambda: None, (0, 0), None)
"""All layers of a step have the same mask: which tokens it says are real, which takes a look at the device, is found out once."""


def new_tokens(implementation: str, mask: Any, batch: int, queries: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """`_of_new_tokens`, and which of the step's tokens are real, bool `[B, Q]`, or None if all are."""
    global _last_mask
    if mask is None:
        return None, None
    new = _of_new_tokens(implementation, mask, batch, queries, device)
    written = mask._version if isinstance(mask, Tensor) and not mask.is_inference() else 0  # by someone who uses it again
    if _last_mask[0]() is not mask or _last_mask[1] != (queries, written):
        real = None if new is None else _diagonal(new, batch).clone()  # a view would keep the mask alive
        _last_mask = weakref.ref(mask), (queries, written), None if real is None or bool(real.all()) else real
    real = _last_mask[2]
    return new, real if real is None else real.to(device)


def _of_new_tokens(implementation: str, mask: Any, batch: int, queries: int, device: torch.device) -> Tensor | None:
    """The mask among the step's own tokens, bool or additive, `[B, H, Q, Q]` with `B` and `H` perhaps 1; None if it is just causal."""
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


def _diagonal(new: Tensor, batch: int) -> Tensor:
    """Whether each new token sees itself, bool `[B, Q]`: padding does not."""
    own = new[:, 0].diagonal(dim1=-2, dim2=-1)
    own = own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
    return own.expand(batch, -1)


def _observed(count: int, fades: float, real: Tensor | None, query: Tensor) -> Tensor | None:
    """With what weight each query counts, fp32 `[B, Q]`: 1 for the last real one, `fades` times less for each before, of `count` in all."""
    if not count:
        return None
    if real is None:
        real = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    if count >= query.shape[2] and fades == 1:
        return real.float()
    from_the_end = real.flip(-1).cumsum(-1).flip(-1)
    return (real & (from_the_end <= count)).float() * fades ** (from_the_end - 1).clamp_min(0)


def _last(count: int, real: Tensor | None, queries: int) -> slice:
    """A range of queries that holds the last `count` real ones."""
    if count < queries and (real is None or bool(real[:, -count:].all())):
        return slice(queries - count, queries)
    return slice(0, queries)


def _visible(
    stored: Tensor | None, real: Tensor | None, batch: int, stored_tokens: int, queries: int, device: torch.device
) -> Tensor | None:
    """Which tokens are real, bool `[B, S + Q]`, or None for all."""
    if stored is None and real is None:
        return None
    parts = (stored, stored_tokens), (real, queries)
    return torch.cat([torch.ones(batch, n, dtype=torch.bool, device=device) if x is None else x for x, n in parts], dim=1)


def _joined(stored: Tensor | None, new: Tensor | None, batch: int, stored_tokens: int, queries: int, device: torch.device) -> Tensor:
    """A mask over all tokens, `[B, H, Q, S + Q]` with `H` perhaps 1, bool or additive as `new` is."""
    new = _causal(queries, device)[None, None] if new is None else new
    new = new.expand(batch, -1, queries, -1)
    past = torch.ones(batch, stored_tokens, dtype=torch.bool, device=device) if stored is None else stored
    if new.dtype != torch.bool:
        past = torch.zeros_like(past, dtype=new.dtype).masked_fill(~past, torch.finfo(new.dtype).min)
    return torch.cat([past[:, None, None, :].expand(-1, new.shape[1], queries, -1), new], dim=-1)


def _whole_mask(
    implementation: str, stored: Tensor | None, new: Tensor | None, real: Tensor | None, query: Tensor, stored_tokens: int
) -> Tensor | None:
    """The mask over all tokens as the stock function of `implementation` takes it."""
    batch, queries, device = query.shape[0], query.shape[2], query.device
    if "flash" in implementation:
        return _visible(stored, real, batch, stored_tokens, queries, device)
    mask = _joined(stored, new, batch, stored_tokens, queries, device)
    if mask.dtype == torch.bool and ("eager" in implementation or "flex" in implementation):
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return mask
