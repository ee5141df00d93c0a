"""Detecting a prompt that does not continue the text in the cache: transformers appends it silently.

If the cache has seen N tokens, a wrong step begins at a position below N: another prompt of at most N tokens,
or the whole text at every step (`use_cache=False`). A position below N proves this only if the mask hides no
token, or if positions rise although the mask hides the step's last token (the mask is then too short for the
step); padding, and tokens after padding on the right, may have any position. A longer prompt cannot be told
from a continuation, since attention does not see token ids.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .compressed_kv import CompressedKV
from .masks import once


def notice_again(
    implementation: str, module: torch.nn.Module, query: Tensor, key: CompressedKV, mask: Any, options: dict[str, Any]
) -> None:
    """Warns if a row of the step, of several tokens, begins at a position that the cache has seen; raises ValueError if that is position
    0. `module`: the attention that asks."""
    positions = options.get("position_ids")
    if torch.compiler.is_compiling() or not isinstance(positions, Tensor):
        return
    if positions.shape[1:] != query.shape[2:3]:
        return  # positions of images and text have three dimensions, and need not increase
    shown = functools.partial(_shown, implementation, query, mask)
    once("positions", positions, (), module, lambda: _compare(positions.to(query.device), shown(), query.shape[2], key))


def _compare(positions: Tensor, shown: Tensor | None, queries: int, key: CompressedKV) -> None:
    """`positions` `[B, Q]` of the step with the tokens seen; `shown`: as in `_shown`."""
    tokens, first = key.side.shape[2], positions[:, 0]
    if key.observer is not None:
        seen = key.observer.tokens_before()
    elif shown is None:
        seen = torch.full_like(first, tokens - queries)
    else:
        shown = F.pad(shown, (0, tokens - shown.shape[1]))  # a preallocated cache has masks of `max_length` columns
        seen = shown[:, : tokens - queries].sum(-1)
    again = first < seen
    if shown is not None:
        again &= shown.all(-1) | (~shown[:, -1] & (positions[:, -1] > positions[:, -2]))
    if not bool(again.any()):
        return
    begin = int(first.expand_as(again)[again].min())
    message = (
        f"the step's {queries} tokens begin at position {begin}, and the cache has seen {int(seen.max())} tokens: for another "
        "prompt call cache.reset(), or pass a new cache; to go on, pass the whole text, longer than the cache"
    )
    if not begin:
        raise ValueError(f"{message}; with use_cache=False, which reads all tokens at every step, pass none")
    warnings.warn(message, stacklevel=6)


def _shown(implementation: str, query: Tensor, mask: Any) -> Tensor | None:
    """The columns that the last query attends to, all but padding, bool `[B or 1, T]`; None: all columns."""
    if mask is None:
        return None
    if isinstance(mask, BlockMask):
        rows, columns = (torch.arange(n, device=query.device) for n in (query.shape[0], mask.shape[-1]))
        rows = rows[:, None]
        return mask.mask_mod(rows, rows * 0, rows * 0 + query.shape[2] - 1, columns[None]).expand(len(rows), len(columns))
    shown = mask if "flash" in implementation else mask[:, 0, -1]
    return shown > torch.finfo(shown.dtype).min / 2 if shown.is_floating_point() else shown.bool()
