"""The attention implementation `qkvcache` on plain tensors.

`full_attention` is a prefill with softcap and attention sinks, in blocks of queries. transformers' sdpa supports
neither, and its eager function allocates the scores of all queries at once.

`varlen_attention` is causal attention of sequences of different lengths that lie one after another, in one launch where
torch has flash attention; cuDNN would prepare a plan for each new length, which takes a tenth of a second.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autocast import without_autocast
from ..kernels import AttentionInputs, Exact, KeysOrValues, attend
from .masks import biased, lower_right, unknown

NAME = "qkvcache"
QUERY_BLOCK = 256


@without_autocast("query", "key", "value")
def full_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of queries `[B, Hq, Q, D]` over keys and values `[B, H, T, D]`; returns `[B, Q, Hq, Dv]`, as transformers expects.
    `position_bias` `[B or 1, Hq, Q, T]` is added to the scores. Raises NotImplementedError for dropout and for `others` that may change the
    result."""
    if dropout:
        raise NotImplementedError("attention dropout is for training: call model.eval(), or use another attn_implementation")
    if names := unknown(NAME, others):
        raise NotImplementedError(
            f"{type(module).__name__} calls attention with {', '.join(names)}, which attn_implementation={NAME!r} does not know: "
            "use 'sdpa' or, where the model refuses that, 'eager'"
        )
    queries, tokens = query.shape[2], key.shape[2]
    causal = attention_mask is None and queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if position_bias is not None:
        if causal:
            attention_mask = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)
        attention_mask, causal = biased(attention_mask, position_bias[..., :tokens]), False
    plain = softcap is None and s_aux is None
    over_past = causal and queries != tokens
    mask = lower_right(queries, tokens) if plain and over_past else attention_mask
    if plain and (mask is not None or not over_past):
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, is_causal=causal and mask is None, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2).contiguous(), None
    blocks = []
    for start in range(0, queries, QUERY_BLOCK):
        rows = slice(start, min(start + QUERY_BLOCK, queries))
        visible = tokens - queries + rows.stop if causal else tokens  # later keys are masked for all of these queries
        key_side, value_side = (
            KeysOrValues.of((Exact(x[:, :, :visible]),), (*x.shape[:2], visible, x.shape[3]), x.dtype, x.device) for x in (key, value)
        )
        attention_inputs = AttentionInputs(key_side, value_side)
        mask = attention_mask
        if mask is not None and mask.shape[-2] > 1:
            mask = mask[..., rows, :]
        blocks.append(attend(query[:, :, rows], attention_inputs, mask, scaling=scaling, causal=causal, softcap=softcap, sinks=s_aux))
    return torch.cat(blocks, dim=2).transpose(1, 2).contiguous(), None


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
    """Attention `[1, Q, Hq, D]` of queries `[1, Hq, Q, D]` over keys and values `[1, H, T, D]`. Options: see
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
