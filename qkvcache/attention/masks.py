"""Every mask that an implementation of transformers hands to attention, as one that `attend` takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask


def visible(
    implementation: str, mask: Any, batch: int, queries: int, tokens: int, device: torch.device, options: dict[str, Any]
) -> tuple[Tensor | None, bool]:
    """`(mask, causal)` for the last `queries` of `tokens` tokens: mask bool or additive, broadcastable to `[B, Hq, Q, T]`, or None.

    flash passes a 2-D padding mask over the keys and says window and causality in keywords; flex passes index functions; the others pass
    the finished 4-D mask, or None for "causal from the absolute offset". A `position_bias` keyword is added.
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
