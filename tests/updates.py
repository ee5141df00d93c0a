"""Keys and values for `layer.update`, good ones and bad ones."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, HEADS, DIM, VALUE_DIM = 3, 2, 64, 32
Pair = tuple[Tensor, Tensor]


def new(tokens: int, rows: int = ROWS, heads: int = HEADS, dims=(DIM, VALUE_DIM), dtype=torch.float32) -> Pair:
    return tuple(torch.randn(rows, heads, tokens, dim).to(dtype) for dim in dims)


def _pair(key: tuple, value: tuple, dtypes=(torch.float32, torch.float32)) -> Pair:
    return tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in zip((key, value), dtypes, strict=True))


K, V = (ROWS, HEADS, 1, DIM), (ROWS, HEADS, 1, VALUE_DIM)
BAD_UPDATES = {
    "batch": _pair((2, *K[1:]), (2, *V[1:])),
    "heads": _pair((ROWS, 4, 1, DIM), (ROWS, 4, 1, VALUE_DIM)),
    "key head_dim": _pair((ROWS, HEADS, 1, 128), V),
    "value head_dim": _pair(K, (ROWS, HEADS, 1, DIM)),
    "key dtype": _pair(K, V, (torch.bfloat16, torch.float32)),
    "value dtype": _pair(K, V, (torch.float32, torch.bfloat16)),
    "tokens of keys and values": _pair((ROWS, HEADS, 2, DIM), V),
    "batch of keys and values": _pair((2, *K[1:]), V),
}
"""For a layer that holds what `new` made."""
