"""Detecting a prompt that does not continue the text in the cache: transformers appends it silently.

`generate` passes the tokens of a prompt that follow as many tokens as the cache has seen. Another prompt, or the whole text at every step
(`use_cache=False`), has positions that the cache has seen already. Positions are on the device, so they are read only in steps of several
tokens, and once for all layers.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .compressed_kv import CompressedKV

_last: Any = lambda: None  # noqa: E731
"""A weak reference to the positions read last: all layers of a step get the same tensor."""


def notice_again(implementation: str, query: Tensor, key: CompressedKV, mask: Any, options: dict[str, Any]) -> None:
    """Warns if the step's first token has a position that the cache has seen, in every row; raises ValueError if that is position 0."""
    global _last
    positions = options.get("position_ids")
    if query.shape[2] == 1 or torch.compiler.is_compiling() or not isinstance(positions, Tensor) or positions.dim() != 2:
        return  # positions of images and text have three dimensions, and need not increase
    if _last() is positions:
        return
    _last = weakref.ref(positions)
    seen = _seen(implementation, query, key, mask)
    first = positions[:, 0].to(query.device)
    if not bool((first < seen).all()):
        return
    begin = int(first.max())
    message = (
        f"the step's {query.shape[2]} tokens begin at position {begin}, and the cache has seen {int(seen.max())} tokens: for another "
        "prompt call cache.reset(), or pass a new cache; to go on, pass the whole text, longer than the cache"
    )
    if not begin:
        raise ValueError(f"{message}; with use_cache=False, which reads all tokens at every step, pass none")
    warnings.warn(message, stacklevel=3)


def _seen(implementation: str, query: Tensor, key: CompressedKV, mask: Any) -> Tensor:
    """Tokens of each row before the step, padding not counted, `[B]` or `[1]`: those that the last query attends to."""
    if key.observer is not None:
        return key.observer.tokens_before()
    queries, device = query.shape[2], query.device
    before = key.shape[2] - queries
    if mask is None:
        return torch.full((1,), before, device=device)
    if isinstance(mask, BlockMask):
        rows = torch.arange(query.shape[0], device=device)[:, None]
        shown = mask.mask_mod(rows, rows * 0, rows * 0 + queries - 1, torch.arange(before, device=device)[None])
    else:
        shown = mask[:, :before] if "flash" in implementation else mask[:, 0, -1, :before]
        shown = shown > torch.finfo(shown.dtype).min / 2 if shown.is_floating_point() else shown.bool()
    return shown.sum(-1)
