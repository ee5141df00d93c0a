"""Noticing a prompt that does not go on where the cache ends: transformers appends it without a word.

`generate` gives a cache that is in use the tokens of a prompt after as many as the cache has seen. A prompt that is as long as that, or a
little shorter, or the whole text at every step (`use_cache=False`), comes with positions that the cache has seen already. Positions are on
the device, so they are read at steps of several tokens only, and once for all layers.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .handle import KVHandle

_last: Any = lambda: None  # noqa: E731
"""The positions that were looked at last: all layers of a step get the same."""


def notice_again(implementation: str, query: Tensor, key: KVHandle, mask: Any, options: dict[str, Any]) -> None:
    """Warns if in every row the step's first token has a position that the cache has seen; raises ValueError if that is position 0."""
    global _last
    positions = options.get("position_ids")
    if query.shape[2] == 1 or torch.compiler.is_compiling() or not isinstance(positions, Tensor) or positions.dim() != 2:
        return  # of three dimensions are those of images and text, which may stand still
    if _last() is positions:
        return
    _last = weakref.ref(positions)
    seen = _seen(implementation, query, key, mask)
    first = positions[:, 0].to(query.device)
    if not bool((first < seen).all()):
        return
    begins = int(first.max())
    said = (
        f"the step's {query.shape[2]} tokens begin at position {begins}, and the cache has seen {int(seen.max())} tokens: for another "
        "prompt call cache.reset(), or pass a new cache; to go on, pass the whole text, longer than the cache"
    )
    if not begins:
        raise ValueError(f"{said}; with use_cache=False, which reads all tokens at every step, pass none")
    warnings.warn(said, stacklevel=3)


def _seen(implementation: str, query: Tensor, key: KVHandle, mask: Any) -> Tensor:
    """Real tokens of each row before the step, `[B]` or `[1]`: those that its last query sees."""
    if key.watch is not None:
        return key.watch.seen_before()
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
