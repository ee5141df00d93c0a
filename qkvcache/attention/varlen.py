"""Causal attention of sequences of different lengths that lie one after another, in one launch where torch has flash attention.

`scaled_dot_product_attention` takes one sequence at a time. Where it prefers cuDNN (Hopper, torch with CUDA 13), it
prepares a plan for each new length, which takes a tenth of a second.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .full import full_attention


@dataclass(frozen=True)
class Sequences:
    """The numbers of queries and of keys of each sequence. The last keys are those of the queries' tokens.

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
) -> Tensor:
    """Attention `[1, Q, Hq, D]` of queries `[1, Hq, Q, D]` over keys and values `[1, H, T, D]`. Options are those of `full_attention`."""
    if softcap is None and s_aux is None and in_one_launch(query, value):
        rows = [x[0].transpose(0, 1) for x in (query, key, value)]
        longest = max(sequences.queries), max(sequences.keys)
        return torch.ops.aten._flash_attention_forward(*rows, *sequences.starts, *longest, 0.0, True, False, scale=scaling)[0][None]
    options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, "is_causal": True}
    queries = query.split(sequences.queries, dim=2)
    keys, values = (x.split(sequences.keys, dim=2) for x in (key, value))
    parts = [full_attention(None, *x, None, **options)[0] for x in zip(queries, keys, values, strict=True)]  # type: ignore[arg-type]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


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
