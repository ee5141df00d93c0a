"""Converting the masks and keywords of every attention implementation of transformers to the form that kernels take.

The columns of a layer may differ from the columns of the model's mask, if not all tokens stay. It takes the running step's
columns from the model's mask (`new_tokens`) and puts the columns of its stored tokens before them (`joined`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from ..kernels import PagedInputs
from ..kernels.paged_inputs import RING_TOKENS, SINKS

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

T = TypeVar("T")


USED = frozenset(("scaling", "softcap", "s_aux", "is_causal", "sliding_window", "position_bias", "dropout"))
"""Keywords of attention functions that kernels of this library use."""
PACKED = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
"""Keywords that flash attention uses in place of a mask."""
HARMLESS = PACKED.union((
    "cache_position", "deterministic", "logits_to_keep", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "seq_idx", "use_cache",
))  # fmt: skip
"""Keywords that transformers passes to attention functions, and that change nothing in attention with a mask."""


def unknown(implementation: str, keywords: dict[str, Any]) -> list[str]:
    """The names of keywords that the attention function of `implementation` may use, and that kernels of this library do not."""
    if implementation in ("sdpa", "flex_attention"):  # transformers' functions ignore all others
        return []
    known = USED | HARMLESS - PACKED if "flash" in implementation else USED | HARMLESS
    return sorted(name for name in keywords.keys() - known if keywords[name] is not None)


def kernel_options(implementation: str, query: Tensor, keywords: dict[str, Any]) -> dict[str, Any]:
    """The kernel options `scaling`, `softcap` and `sinks` for queries `[B, Hq, Q, D]`."""
    scaling = keywords.get("scaling")
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if implementation == "sdpa":  # transformers 5.17 ignores both in sdpa, and decode steps must match the prefill
        return {"scaling": scaling, "softcap": None, "sinks": None}
    return {"scaling": scaling, "softcap": keywords.get("softcap"), "sinks": keywords.get("s_aux")}


def lower_right(queries: int, tokens: int) -> CausalBias | None:
    """The causal mask of the last `queries` of `tokens` tokens in the form for which sdpa runs flash
    attention; None where torch cannot make it."""
    from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: a second, unless a model is loaded

    try:
        return causal_lower_right(queries, tokens)
    except RuntimeError:  # under a TorchDispatchMode, such as FlopCounterMode
        return None


def visible(
    implementation: str, mask: Any, batch: int, queries: int, tokens: int, device: torch.device, options: dict[str, Any]
) -> tuple[Tensor | None, bool]:
    """`(mask, causal)` for the last `queries` of `tokens` tokens: mask bool or additive, broadcastable to `[B, Hq, Q, T]`, or None.

    flash passes a 2-D padding mask over the keys, and window and causality as keywords; flex passes index
    functions; the others pass the 4-D mask, or None for causal attention. A `position_bias` keyword is added.
    """
    bias = options.get("position_bias")
    if isinstance(mask, BlockMask):
        mask, causal = create_mask(mask.mask_mod, batch, 1, queries, tokens, device=device), False
    elif "flash" in implementation:
        causal = options.get("is_causal") is not False
        window = options.get("sliding_window")
        mask = None if mask is None else mask[:, None, None, -tokens:].bool()
        if window is not None and window < tokens:
            distance = torch.arange(tokens - queries, tokens, device=device)[:, None] - torch.arange(tokens, device=device)
            inside = (distance < window)[None, None]
            mask = inside if mask is None else mask & inside
    else:
        causal = mask is None and options.get("is_causal") is not False
    return mask if bias is None else biased(mask, bias), causal


def biased(mask: Tensor | None, bias: Tensor) -> Tensor:
    """`bias`, which is added to scores, with a bool or additive `mask`; broadcastable to `[B, Hq, Q, T]` all."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else mask + bias


def chosen_columns(mask: Tensor, indices: Tensor) -> Tensor:
    """`mask`, bool or additive `[B, 1, Q, T]`, with the columns `indices` `[B, Q, N]` alone."""
    chosen = torch.zeros_like(mask, dtype=torch.bool).scatter(-1, indices[:, None].long(), True)
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


class Padding(NamedTuple):
    """The padding in a mask.

    fits: whether the mask is causal except for columns hidden from all queries.
    columns: these hidden columns, bool `[B or 1, T]`; None if there are none.
    shown_from: the column after the last hidden one.
    """

    fits: bool
    columns: Tensor | None = None
    shown_from: int | None = None


class _Found(NamedTuple):
    """A result of `once`, what it was asked for, and the layer that asked last; None: not known."""

    given: weakref.ref
    state: tuple
    result: Any
    layer: int | None


_last = threading.local()
"""The last `_Found` of the thread, by what was asked."""
COMPARED = 2**26
"""Entries of a mask compared at a time."""


def once(what: str, given: Any, state: tuple, module: Any, find: Callable[[], T]) -> T:
    """Caches `find()` for one step of a thread: it reads `given`, and so waits for the device, and all layers
    ask the same question. A caller may write into masks and positions between steps. A tensor has a version
    that tells, except in inference mode. Without a version, a result serves layers in ascending order: a
    layer that does not come after the last one begins another step. `module`: the attention that asks, which
    has a `layer_idx`."""
    version = given._version if isinstance(given, Tensor) and not given.is_inference() else None
    state, layer, last = (*state, version), getattr(module, "layer_idx", None), getattr(_last, what, None)
    if last is None or last.given() is not given or last.state != state or (version is None and not _follows(layer, last.layer)):
        last = _Found(weakref.ref(given), state, find(), layer)
    setattr(_last, what, last._replace(layer=layer))
    return last.result


def _follows(layer: int | None, last: int | None) -> bool:
    """Whether a layer that asks after the `last` one is known to be of the same step."""
    return layer is not None and last is not None and layer > last


def padding_columns(module: Any, given: Any, mask: Tensor | None, causal: bool, queries: int, tokens: int) -> Padding:
    """The padding in the mask that `visible` made from the mask `given` to the attention `module`."""
    if mask is None:
        return Padding(causal)
    if mask.dtype != torch.bool or mask.shape[1] != 1 or (mask.shape[2] == 1) != causal:
        return Padding(False)

    def find() -> Padding:
        shown = mask[:, 0, -1]  # the last query attends to every token except padding
        fits = causal or _hides_columns(mask)
        hidden = None if not fits or bool(shown.all()) else ~shown
        return Padding(fits, hidden, None if hidden is None else int(hidden.any(0).nonzero()[-1]) + 1)

    return once("padding", given, (queries, tokens), module, find)


def _hides_columns(mask: Tensor) -> bool:
    """Whether a mask, bool `[B, 1, Q, T]`, is causal except for columns hidden from all queries."""
    queries, shown = mask.shape[2], mask[:, 0, -1]
    rows, place = max(COMPARED // shown.numel(), 1), torch.arange(shown.shape[1], device=shown.device)
    newest = place[shown.shape[1] - queries :, None]
    return all(
        torch.equal(mask[:, 0, begin : begin + rows], shown[:, None] & (place <= newest[begin : begin + rows]))
        for begin in range(0, queries, rows)
    )


# The step's own tokens.


@dataclass(frozen=True)
class NewTokens:
    """The part of a mask over the step's own tokens.

    mask: bool or additive, `[B, H, Q, Q]` with `B` and `H` perhaps 1; None if causal.
    is_valid: the tokens that are not padding, bool `[B, Q]`; None: all.
    causal: whether the mask is causal except for the columns of padding.
    """

    mask: Tensor | None
    is_valid: Tensor | None
    causal: bool


def new_tokens(
    implementation: str, module: Any, mask: Any, batch: int, queries: int, device: torch.device, tokens: int | None = None
) -> NewTokens:
    """The part over the last `queries` of `tokens` tokens of the `mask` given to the attention `module`.
    `tokens`: the columns of the mask that stand for tokens; None: all."""
    new = mask_of_new(implementation, mask, batch, queries, device, tokens)
    if new is None:
        return NewTokens(None, None, True)

    def find() -> tuple[Tensor | None, bool]:
        valid = sees_itself(new, batch)
        causal = new.dtype == torch.bool and new.shape[1] == 1 and (queries == 1 or _hides_columns(new))
        return None if bool(valid.all()) else valid.clone(), causal  # a view would keep the mask alive

    is_valid, causal = once("new", mask, (queries, tokens), module, find)
    return NewTokens(new, None if is_valid is None else is_valid.to(device), causal)


def mask_of_new(implementation: str, mask: Any, batch: int, queries: int, device: torch.device, tokens: int | None = None) -> Tensor | None:
    """`NewTokens.mask` of the last `queries` of `tokens` tokens."""
    if mask is None:
        return None
    if isinstance(mask, BlockMask):
        rows, q = torch.arange(batch, device=device)[:, None, None], torch.arange(queries, device=device)
        columns = min(mask.shape[-1], tokens or mask.shape[-1])
        shown = mask.mask_mod(rows, rows * 0, q[None, :, None], q[None, None, :] + columns - queries)
        return shown.expand(batch, queries, queries)[:, None]
    if "flash" in implementation:
        return _causal(queries, device) & mask[:, None, None, -queries:].bool()
    return mask[..., :tokens][..., -queries:]


def sees_itself(new: Tensor, batch: int) -> Tensor:
    """Whether each new token attends to itself, bool `[B, Q]`: padding does not."""
    return _visible(new[:, 0].diagonal(dim1=-2, dim2=-1)).expand(batch, -1)


def sees_itself_at(implementation: str, mask: Any, batch: int, queries: int, begin: Tensor) -> Tensor | None:
    """`sees_itself` for new tokens in the columns of transformers' `mask` from `begin` on, int64 `[]`; None: all do. For compiled code."""
    if mask is None:
        return None
    if "flash" in implementation:
        return mask[:, -queries:].bool()
    query = torch.arange(queries, device=begin.device)
    if isinstance(mask, BlockMask):
        row = torch.arange(batch, device=begin.device)[:, None]
        return mask.mask_mod(row, row * 0, query, begin + query).expand(batch, queries)
    return _visible(mask[:, 0].gather(-1, (begin + query)[None, :, None].expand(len(mask), -1, 1))[..., 0]).expand(batch, -1)


def _visible(mask: Tensor) -> Tensor:
    """A mask as bool."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _causal(queries: int, device: torch.device) -> Tensor:
    return torch.ones(queries, queries, dtype=torch.bool, device=device).tril()


# With the columns of stored tokens.


def joined(valid: Tensor | None, new: Tensor | None, query: Tensor, tokens: int) -> Tensor:
    """A mask over all columns, `[B, H, Q, T]` with `H` 1 or the heads of `query` `[B, Hq, Q, D]`, bool or additive as
    `new` is. `valid`: the columns that hold a token, bool `[B, T]` or, where heads differ, `[B, H, T]`."""
    batch, query_heads, queries, _ = query.shape
    new = _causal(queries, query.device)[None, None] if new is None else new
    stored = tokens - queries
    past = torch.ones(batch, stored, dtype=torch.bool, device=query.device) if valid is None else valid[..., :stored]
    past = past.repeat_interleave(query_heads // past.shape[1], dim=1) if past.dim() == 3 else past[:, None]
    if new.dtype != torch.bool:
        past = torch.zeros_like(past, dtype=new.dtype).masked_fill(~past, torch.finfo(new.dtype).min)
    heads = max(past.shape[1], new.shape[1])
    return torch.cat([past[:, :, None].expand(-1, heads, queries, -1), new.expand(batch, heads, queries, -1)], dim=-1)


def joined_by_head(paged: PagedInputs, new: NewTokens, query: Tensor) -> Tensor:
    """A mask over the pages of each head, `[B, Hq, Q, T]`, bool or additive as `new` is. A column is the
    index of a token in its head; the last columns of a head are the tokens of the queries `[B, Hq, Q, D]`."""
    batch, query_heads, queries, _ = query.shape
    mask = _causal(queries, query.device)[None, None] if new.mask is None else new.mask
    lengths: Tensor = paged.pages.lengths  # type: ignore[assignment]
    exact = paged.rows[:, SINKS] + paged.rows[:, RING_TOKENS]  # type: ignore[index]
    stored = (lengths + exact[:, None] - queries).repeat_interleave(query_heads // lengths.shape[1], dim=1)
    index = torch.arange(sum(paged.slots), device=query.device) - stored[..., None, None]  # among the new tokens
    shape = batch, query_heads, queries, index.shape[-1]
    own = mask.expand(*shape[:3], -1).gather(-1, index.clamp(0, queries - 1).expand(shape))
    return torch.where(index < 0, torch.ones_like(own) if mask.dtype == torch.bool else torch.zeros_like(own), own)
