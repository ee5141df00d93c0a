"""The entry into transformers models: `install` wraps what `AttentionInterface.get_interface` returns, once.

The first cache calls `install`; importing the library changes nothing. `route` gets the query, keys and
values (`CompressedKV`), the mask and the model's keywords:

    sdpa, flash, flex, qkvcache   the path of the table in `path_of`: few queries attend on the codes; many attend on the
                                  codes in tiles or, where that is slower or there is no kernel, on chunks of the
                                  past that are dequantized one at a time. The layer is dequantized for the stock kernel if
                                  the mask is not just causality and padding
    eager, and those that users   the function itself, which may have semantics of its own; its two matmuls, or torch's
    register                      `scaled_dot_product_attention`, run on the codes (`compressed_kv.py`)

A layer that follows the attention to its tokens attends itself (`CompressedKV.observer`). Models whose
softcap or attention sinks tie them to eager can opt in with `model.set_attn_implementation("qkvcache")`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..autocast import with_autocast, without_autocast
from ..kernels import AttentionInputs, attends_in_tiles, chooses, on_triton
from ..kernels.attend.chunked import CHUNK_BYTES, attend_chunked, outruns_tiles, supports
from .again import notice_again
from .compressed_kv import CompressedKV, Form, as_the_model_has_them, of_one_update, warn_once
from .full import NAME, full_attention
from .masks import Padding, chosen_columns, kernel_options, padding_columns, unknown, visible
from .padding import awaited, report_attention
from .plan import AttentionPlan
from .uncompiled import uncompiled

if TYPE_CHECKING:
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel

MAX_FUSED_ROWS = 384
"""The most query rows, queries times query heads of a KV head, for kernels that read codes under any mask."""
MAX_QUERIES = 16
"""The most queries for which torch attends on the codes."""
Path = Literal["codes", "tiles", "chunks", "dense"]

STANDARD = ("sdpa", "flex_attention", NAME)
"""Attention implementations that kernels of this library may replace, beside those with `flash` in their name."""

restorers: list[Callable[[], None]] = []
"""Functions that `uninstall` calls, too: each undoes what a room has replaced."""
_stock: list[tuple[type, Callable]] = []
"""The methods of transformers that are replaced, with their classes."""


def install() -> None:
    """Wraps transformers' attention and registers the attention implementation `qkvcache`. Idempotent."""
    if _stock:
        return
    # Imported with the first cache, since both take a second that a process without a model can save.
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface, PreTrainedModel

    stock, check = AttentionInterface.get_interface, PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(stock)
    def get_interface(self: AttentionInterface, attn_implementation: str, default: Callable) -> Callable:
        # A function that users registered may have semantics of its own, like the model's.
        standard = attn_implementation in STANDARD or "flash" in (attn_implementation or "")
        return functools.partial(route, stock(self, attn_implementation, default), attn_implementation if standard else "eager")

    @functools.wraps(check)
    def get_correct_attn_implementation(self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention == NAME:
            refuse_without_interface(self)
        return check(self, requested_attention, is_init_check)

    _stock.extend(((AttentionInterface, stock), (PreTrainedModel, check)))
    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation  # type: ignore[method-assign]

    def mask(*, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **others: Any) -> Tensor | None:
        # No mask is for sdpa causal attention from the first key, which hides the empty columns of a StaticCache, and here from the last.
        skips = allow_is_causal_skip and q_length in (1, kv_length)
        return sdpa_mask(q_length=q_length, kv_length=kv_length, allow_is_causal_skip=skips, **others)

    ALL_ATTENTION_FUNCTIONS.register(NAME, full_attention)
    # Without a mask function transformers would pass no mask at all, and padding would be attended.
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)


def refuse_without_interface(model: PreTrainedModel) -> None:
    """Raises ValueError for a model that may not hand all of its attention over: its code has no `AttentionInterface`, or transformers has
    neither sdpa for it nor, because of softcap or attention sinks, flash or flex attention instead."""
    instead = model._supports_attention_backend and (model._supports_flash_attn or model._supports_flex_attn)
    if not (model._can_set_attn_implementation() and (model._supports_sdpa or instead)):
        raise ValueError(
            f"attn_implementation={NAME!r} on {type(model).__name__}, whose attention is in code of its own: use "
            f"{'sdpa' if model._supports_sdpa else 'eager'!r}"
        )


def uninstall() -> None:
    """Restores transformers. Live caches still work, but slower; those that follow their attention raise NotImplementedError."""
    if not _stock:
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    while _stock:
        kind, stock = _stock.pop()
        setattr(kind, stock.__name__, stock)
    for restore in restorers:
        restore()
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        registry._global_mapping.pop(NAME, None)


def installed() -> bool:
    """Whether the route is installed. The first cache installs it, and `uninstall` removes it."""
    return bool(_stock)


def path_of(implementation: str, query: Tensor, attention_inputs: AttentionInputs, softcap: float | None = None) -> Path:
    """The first row of this table that serves queries `[B, Hq, Q, D]`. Rows below the first are for causal attention that hides nothing
    but whole columns; under other masks, the model's own function takes their place.

        codes    one query, queries that read chosen blocks, up to 384 rows; in torch up to 16 queries
                     Each code is read once, under any mask. Beyond 400 rows, dequantizing is faster (rows "chunk" of `kernels.jsonl`).
                     In torch, the scores of more queries, in fp32, would exceed a dequantized layer.
        tiles    more rows, where `attends_in_tiles`, if the outputs in fp32 have at most CHUNK_BYTES
                     A code is dequantized once for up to 128 rows. Larger outputs would take more memory than chunks.
                     `_attend_on_codes` takes chunks instead where they are faster (`outruns_tiles`) and no column is hidden.
        chunks   eager inference in dtypes of flash attention, without a softcap under flash and flex
                     Memory is bounded. In torch a softcap is slow, which those two have in their kernels.
        dense    everything else
                     The model's own function has every option, and gradients.
    """
    paged, queries = attention_inputs.paged, query.shape[2]
    rows = queries * query.shape[1] // attention_inputs.key.shape[1]
    few = rows <= MAX_FUSED_ROWS if on_triton(query.device) else queries <= MAX_QUERIES
    if few or queries == 1 or (paged is not None and chooses(paged, query)):
        return "codes"
    if not supports(query, attention_inputs) or (softcap is not None and implementation not in ("sdpa", NAME)):
        return "dense"
    if 8 * query.numel() <= CHUNK_BYTES and attends_in_tiles(query, attention_inputs):
        return "tiles"
    return "chunks"


def route(
    stock: Callable, implementation: str, module: torch.nn.Module, query: Tensor, key: Any, value: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Calls `stock` for plain tensors; for `CompressedKV`, attends on its attention inputs."""
    given, args = (args[0], args[1:]) if args else (kwargs.pop("attention_mask", None), args)
    if type(key) is CompressedKV and not awaited and not torch.compiler.is_compiling():
        running = key.attention_inputs.running
        plan = None if running is None else running.plan
        if plan is not None and plan.serves(implementation, module, query, key, value, given, kwargs):
            return plan.attend(query, key, kwargs), None
    if implementation == NAME and (indices := kwargs.pop("indices", None)) is not None:
        given = chosen_columns(given, indices)  # of an indexer, which makes masks for sdpa and eager alone
    if not isinstance(key, CompressedKV) and not isinstance(value, CompressedKV):
        mask, out = report_attention(implementation, module, query, key, given, kwargs)
        return stock(module, query, key, value, mask, *args, **kwargs) if out is None else (out, None)
    if isinstance(key, CompressedKV) and isinstance(value, CompressedKV) and key.form.tiled and key.form == value.form:
        repeats = key.form.repeats
        query = query.unflatten(1, (repeats, -1)).transpose(1, 2).flatten(1, 2)  # as if `repeat_kv` had repeated the heads
        key, value = (x.like(x.columns, Form(repeats)) for x in (key, value))
        out, weights = route(stock, implementation, module, query, key, value, given, *args, **kwargs)
        weights = None if weights is None else weights.unflatten(1, (-1, repeats)).transpose(1, 2).flatten(1, 2)
        return out.unflatten(2, (-1, repeats)).transpose(2, 3).flatten(2, 3), weights
    if not of_one_update(key, value):
        return stock(module, query, *as_the_model_has_them(key, value), given, *args, **kwargs)
    if torch.compiler.is_compiling() and key.observer is None and not key.attention_inputs.compiled:  # an uncompiled layer
        return _route_uncompiled(stock, implementation, module, query, key, value, given, *args, **kwargs)
    return _attend(with_autocast(stock), implementation, module, query, key, value, given, *args, **kwargs)


@without_autocast("query")
def _attend(
    stock: Callable, implementation: str, module: torch.nn.Module, query: Tensor, key: CompressedKV, value: CompressedKV, given: Any,
    *args: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`route` for keys and values of one `update`; `given`: the model's mask."""
    if awaited:
        report_attention(implementation, module, query, key.attention_inputs, given, kwargs)
    if query.shape[2] > 1:
        notice_again(implementation, module, query, key, given, kwargs)
    if key.observer is not None:
        return key.observer.attend(stock, implementation, module, query, key, value, given, *args, **kwargs)
    queries, tokens = query.shape[2], key.side.shape[2]
    mask = given
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[3] > tokens:
        mask = mask[..., :tokens]  # the mask of a preallocated cache has `max_length` columns
    if kwargs.get("position_bias") is not None:
        kwargs["position_bias"] = kwargs["position_bias"][..., :tokens]  # as above
    if "eager" in implementation:
        if torch.compiler.is_compiling():
            return stock(module, query, key.seen().dense(), value.seen().dense(), mask, *args, **kwargs)
        paged = key.attention_inputs.paged
        if paged is not None and paged.select is not None and not paged.select.reads_all(paged.max_length):
            warn_once("attention_budget with eager attention: it reads all tokens; use another implementation, such as sdpa")
        return stock(module, query, key.seen(), value.seen(), mask, *args, **kwargs)
    out = _attend_on_codes(implementation, module, query, key, given, mask, kwargs)
    if out is not None:
        return out.transpose(1, 2).contiguous(), None
    if isinstance(mask, BlockMask) and mask.shape[-1] > tokens:
        mask = mask._adjust(queries, tokens)  # as above
    return stock(module, query, key.seen().dense(), value.seen().dense(), mask, *args, **kwargs)


def _attend_on_codes(
    implementation: str, module: torch.nn.Module, query: Tensor, key: CompressedKV, given: Any, mask: Any, keywords: dict[str, Any]
) -> Tensor | None:
    """Attention `[B, Hq, Q, D]` on the codes or in chunks; None where the model's own function must attend to
    a dequantized layer. `mask`: the mask `given` by transformers without columns after the tokens."""
    queries, tokens, options = query.shape[2], key.side.shape[2], kernel_options(implementation, query, keywords)
    path = key.path(options) or path_of(implementation, query, key.attention_inputs, options["softcap"])
    if names := unknown(implementation, keywords):
        warn_once(f"attention called with {', '.join(names)}, which only {implementation} knows: each step dequantizes the whole layer")
    if keywords.get("dropout") or names or path == "dense":
        return None
    if keywords.get("is_causal") is None:
        keywords = keywords | {"is_causal": getattr(module, "is_causal", True)}
    shown, causal = visible(implementation, mask, query.shape[0], queries, tokens, query.device, keywords)
    padding = Padding(False)
    if queries > 1 and not torch.compiler.is_compiling():
        padding = padding_columns(module, given, shown, causal, queries, tokens)
    hidden = padding.columns
    if padding.fits:  # causality costs a kernel less than a mask of queries x tokens
        shown, causal = None if hidden is None else ~hidden[:, None, None], True
    if padding.fits and (out := key.attend_many(query, hidden, options)) is not None:
        return out
    if path != "codes" and not padding.fits:
        return None
    if path == "tiles" and hidden is None and options["softcap"] is None and outruns_tiles(query, key.side.shape[1]):
        path = "chunks"
    if path == "chunks":
        return attend_chunked(query, key.attention_inputs, hidden, shown_from=padding.shown_from, **options)[0]
    if plan := AttentionPlan.of(implementation, module, query, key, given, keywords, shown, options | {"causal": causal}):
        key.attention_inputs.running.plan = plan  # type: ignore[union-attr]
        return plan.attend(query, key, keywords).transpose(1, 2)
    return key.attend(query, shown, causal=causal, **options)


@uncompiled("codes in storage that grows: graphs of them would be made again for each shape that it takes")
def _route_uncompiled(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    return route(*args, **kwargs)
