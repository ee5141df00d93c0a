"""Causal attention of sequences of different lengths that lie one after another, in one launch where torch has flash attention; cuDNN
would prepare a plan for each new length, which takes a tenth of a second."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.full import QUERY_BLOCK, full_attention


@dataclass(frozen=True)
class Sequences:
    """The numbers of queries and of keys of each sequence. The last keys belong to the queries' tokens.

    starts: the cumulative numbers of queries and of keys from 0 (`cu_seqlens`), int32 `[N + 1]` each.
    """

    queries: list[int]
    keys: list[int]
    starts: tuple[Tensor, Tensor]


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention `[1, Q, Hq, D]` of queries `[1, Hq, Q, D]` over keys and values `[1, H, T, D]`. Options are those of
    `full_attention`; with a `window`, a query attends to this many tokens, of which the last is its own."""
    if window is not None and window >= max(sequences.keys):
        window = None
    if softcap is None and s_aux is None and in_one_launch(query, value):
        rows = [x[0].transpose(0, 1) for x in (query, key, value)]
        longest = max(sequences.queries), max(sequences.keys)
        windows = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        flash = torch.ops.aten._flash_attention_forward
        return flash(*rows, *sequences.starts, *longest, 0.0, True, False, scale=scaling, **windows)[0][None]
    options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, "is_causal": True}
    queries = query.split(sequences.queries, dim=2)
    keys, values = (x.split(sequences.keys, dim=2) for x in (key, value))
    if window is None:
        parts = [full_attention(None, *x, None, **options)[0] for x in zip(queries, keys, values, strict=True)]  # type: ignore[arg-type]
    else:
        parts = [out for x in zip(queries, keys, values, strict=True) for out in _blocks_in_window(*x, window, options)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _blocks_in_window(query: Tensor, key: Tensor, value: Tensor, window: int, options: dict[str, Any]) -> Iterator[Tensor]:
    """Yields attention `[1, Q', Hq, D]` of one block of queries after another, over the tokens that any of them sees."""
    queries, tokens = query.shape[2], key.shape[2]
    for start in range(tokens - queries, tokens, QUERY_BLOCK):
        end, first = min(start + QUERY_BLOCK, tokens), max(start + 1 - window, 0)
        distance = torch.arange(start, end, device=query.device)[:, None] - torch.arange(first, end, device=query.device)
        mask = ((distance >= 0) & (distance < window))[None, None]
        block = query[:, :, start - tokens + queries : end - tokens + queries]
        yield full_attention(None, block, key[:, :, first:end], value[:, :, first:end], mask, **options)[0]  # type: ignore[arg-type]


def in_one_launch(query: Tensor, value: Tensor) -> bool:
    """Whether torch has flash attention for these tensors, `[B, H, T, D]`. AMD is left out: there causality is aligned
    with the first key."""
    return (
        query.is_cuda
        and not torch.version.hip
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[3] == value.shape[3] <= 256
        and query.shape[3] % 8 == 0
        and _has_flash(query.device)
    )


@functools.cache
def _has_flash(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)
