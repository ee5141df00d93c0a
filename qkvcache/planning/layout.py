"""The bytes of a cache, measured on storage of its final size on the meta device.

The code that allocates a cache is the arithmetic of its layout: what a step makes room for, how pages grow and are aligned, which tables a
layer needs. Formulas beside it would have to follow each change of it, and planned bytes would no longer be held bytes by construction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.cache_utils import StaticLayer as StockStaticLayer

from ..caches.memory import bytes_by_role
from ..layers.compressed import CompressedLayer
from .model import Shape


def cache_bytes(
    cache: Cache, shapes: Sequence[Shape], dtype: torch.dtype, seq_length: int, prompt: int, rows: int
) -> tuple[Counter[str], int]:
    """Bytes by role of `cache`, and how many of them are in host memory, with the arguments of `_layer_bytes`. Layers that are
    alike are measured once."""
    alike = Counter((_kind(layer), shape) for layer, shape in zip(cache.layers, shapes, strict=True))
    one = {_kind(layer): layer for layer in cache.layers}
    sizes: Counter[str] = Counter()
    host = 0
    for (of, shape), count in alike.items():
        by_role, outside = _layer_bytes(one[of], shape, dtype, seq_length, prompt, rows)
        sizes.update({role: size * count for role, size in by_role.items()})
        host += outside * count
    return sizes, host


def _kind(layer: object) -> tuple:
    """A key that is equal for layers of one cache that hold the same number of bytes for the same shape."""
    of = ("rule", "budget", "sliding_window", "format", "residual_length", "max_cache_len", "max_length", "is_compileable")
    return type(layer), *(getattr(layer, name, None) for name in of)


def _layer_bytes(layer: object, shape: Shape, dtype: torch.dtype, seq_length: int, prompt: int, rows: int) -> tuple[dict[str, int], int]:
    """Bytes by role of `layer` in a model of `dtype`, for `rows` requests of `seq_length` tokens without padding, of
    which `prompt` came at once; and those that lie in host memory.

    A sliding layer is counted after the step that follows the prompt, since transformers keeps the whole prompt until
    then. A preallocated layer has the same size from its first token on.
    """
    if isinstance(layer, CompressedLayer):
        dims = shape.head_dim, shape.value_dim
        like: Any = tuple(torch.empty(rows, shape.heads, 0, dim, dtype=dtype, device="meta") for dim in dims)
        storage = layer.simulated(like, prompt, seq_length, shape.query_heads)
        return bytes_by_role(storage.tensors()), storage.tokens.pool.host_nbytes
    token = rows * shape.heads * (shape.head_dim + shape.value_dim) * dtype.itemsize
    exact = 0
    if hasattr(layer, "conv_states"):
        exact += rows * shape.state
    if isinstance(layer, DynamicLayer):
        exact += token * min(seq_length, getattr(layer, "sliding_window", seq_length))
    if isinstance(layer, StockStaticLayer):
        exact += token * layer.max_cache_len
    return {"exact": exact}, 0
