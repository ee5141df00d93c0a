"""Converting the masks of every attention implementation of transformers to the form that `attend` takes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask


def visible(
    implementation: str, mask: Any, batch: int, queries: int, tokens: int, device: torch.device, options: dict[str, Any]
) -> tuple[Tensor | None, bool]:
    """`(mask, causal)` for the last `queries` of `tokens` tokens: mask bool or additive, broadcastable to `[B, Hq, Q, T]`, or None.

    flash passes a 2-D padding mask over the keys, and window and causality as keywords; flex passes index functions; the others pass the
    4-D mask, or None for causal attention. A `position_bias` keyword is added.
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
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else mask + bias
    return mask, causal


_last_padding: tuple[Any, tuple[int, int, int], tuple[bool, Tensor | None]] = (lambda: None, (0, 0, 0), (False, None))
"""The mask of the last step and its result: all layers of a step have the same mask, and reading it waits for the device."""
COMPARED = 2**26
"""Entries of a mask compared at a time."""


def padding_columns(given: Any, mask: Tensor | None, causal: bool, queries: int, tokens: int) -> tuple[bool, Tensor | None]:
    """Whether a mask of `visible`, made from the `given` mask of transformers, is causal except for columns hidden from all queries; and
    these columns, bool `[B or 1, T]`, or None if there are none."""
    global _last_padding
    if mask is None:
        return causal, None
    if mask.dtype != torch.bool or mask.shape[1] != 1 or (mask.shape[2] == 1) != causal:
        return False, None
    written = given._version if isinstance(given, Tensor) and not given.is_inference() else 0
    state = queries, tokens, written
    if _last_padding[0]() is not given or _last_padding[1] != state:
        shown = mask[:, 0, -1]  # the last query attends to every token that is no padding
        fits = causal or all(
            torch.equal(mask[:, 0, begin : begin + rows], shown[:, None] & _before(begin, min(rows, queries - begin), queries, shown))
            for rows in (max(COMPARED // shown.numel(), 1),)
            for begin in range(0, queries, rows)
        )
        padding = fits, None if not fits or bool(shown.all()) else ~shown
        _last_padding = weakref.ref(given), state, padding
    return _last_padding[2]


def _before(begin: int, count: int, queries: int, shown: Tensor) -> Tensor:
    """Which tokens are not after each of the queries `begin` to `begin + count`, bool `[count, T]`."""
    tokens = shown.shape[1]
    newest = torch.arange(tokens - queries + begin, tokens - queries + begin + count, device=shown.device)
    return torch.arange(tokens, device=shown.device) <= newest[:, None]
