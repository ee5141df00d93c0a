"""Bytes and latency of storing and fetching a prefix, with a model's shapes and dtype and random contents.

The original cache is freed layer by layer before a fetch, so that three copies never exist at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ..caches import CompressedCache
from ..caches.memory import measured
from ..formats import FormatLike
from ..planning.model import shapes
from . import match
from .entry import CacheTemplate, snapshot_cache

REPEATS = 3
Result = TypeVar("Result")


def measure(
    config: PreTrainedConfig, format: FormatLike, contexts: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Iterator[dict]:
    """A row for each context: bytes, ratio to the dense cache, and milliseconds, the minimum of
    `REPEATS` runs.

    `store_ms`: from a DynamicCache on `device` to codes in host memory. `fetch_ms`, `fetch_half_ms`: all or half of the
    tokens from host memory into a cache on `device`.

    Raises ValueError for contexts below 2, an unknown format or one that cannot hold the model's head_dim;
    NotImplementedError for models with layers that do not cache keys and values.
    """
    if not contexts or min(contexts) < 2:
        raise ValueError(f"contexts={list(contexts)}: must be numbers of tokens, 2 or more")
    template = CacheTemplate(CompressedCache(config, format=format), config)
    devices = [device] * len(template)
    for tokens in contexts:
        key = match.encode(bytes(match.NAME), torch.zeros(tokens, dtype=torch.int64, device="cpu"))
        times: dict[str, list[float]] = {"store_ms": [], "fetch_ms": [], "fetch_half_ms": []}
        for _ in range(REPEATS):
            cache = _random(config, tokens, dtype, device)
            nbytes = measured(cache.layers).total
            entry, ms = _timed(device, partial(snapshot_cache, cache, template, key, 0, True, 2**63, release=True))
            times["store_ms"].append(ms)
            for name, count in (("fetch_ms", tokens), ("fetch_half_ms", tokens // 2)):
                times[name].append(_timed(device, partial(template.restore, entry.cut(count), devices, template))[1])
        row = {"tokens": tokens, "bytes": entry.nbytes, "bytes_per_token": entry.nbytes / tokens, "ratio": nbytes / entry.nbytes}
        yield row | {name: min(measured_ms) for name, measured_ms in times.items()}


def _random(config: PreTrainedConfig, tokens: int, dtype: torch.dtype, device: torch.device) -> DynamicCache:
    cache = DynamicCache(config=config)
    for i, (layer, shape) in enumerate(zip(cache.layers, shapes(config, dtype.itemsize), strict=True)):
        if not isinstance(layer, DynamicLayer):
            raise NotImplementedError(f"layer {i} of {config.model_type} is a {type(layer).__name__}, which holds no keys and values")
        dims = shape.head_dim, shape.value_dim
        layer.update(*(torch.randn(1, shape.heads, tokens, dim, dtype=dtype, device=device) for dim in dims))
    return cache


def _timed(device: torch.device, call: Callable[[], Result]) -> tuple[Result, float]:
    """The result of `call` and its time in milliseconds, the device's work included."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else bool
    wait()
    begin = time.perf_counter()
    result = call()
    wait()
    return result, 1000 * (time.perf_counter() - begin)
