"""Bytes and latency of storing and fetching a prefix, with a model's shapes and dtype and random contents.

The original cache is freed layer by layer before a fetch, so that three copies never exist at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ..caches import CompressedCache
from ..caches.memory import measured
from ..formats import FormatLike
from ..layers.snapshot import Snapshot
from ..planning.model import shapes
from . import disk, match
from .entry import CacheTemplate, restore_cache, snapshot_cache
from .host_memory import Blocks

NAME = bytes(match.NAME)
REPEATS = 3
Result = TypeVar("Result")


def measure(
    config: PreTrainedConfig, format: FormatLike, contexts: Sequence[int], directory: Path, dtype: torch.dtype, device: torch.device
) -> Iterator[dict]:
    """A row for each context: bytes, ratio to the dense cache, and milliseconds, the minimum of
    `REPEATS` runs.

    `store_ms`: from a DynamicCache on `device` to codes in host memory. `fetch_ms`, `fetch_half_ms`: all or half of the
    tokens from host memory into a cache on `device`. `write_ms`, `read_ms`, `read_half_ms`: to and from files in
    `directory`, which the page cache holds.

    Raises ValueError for contexts below 2, an unknown format or one that cannot hold the model's head_dim;
    NotImplementedError for models with layers that do not cache keys and values.
    """
    if not contexts or min(contexts) < 2:
        raise ValueError(f"contexts={list(contexts)}: must be numbers of tokens, 2 or more")
    template, dense = CacheTemplate(CompressedCache(config, format=format), config), CacheTemplate(DynamicCache(config=config), config)

    def least(layers: Callable[[], Iterable[Snapshot]]) -> float:
        devices = [device] * len(template)
        return min(_timed(device, lambda: restore_cache(template, layers(), template, devices))[1] for _ in range(REPEATS))

    for tokens in contexts:
        key = match.encode(NAME, torch.zeros(tokens, dtype=torch.int64))
        store_ms = []
        for _ in range(REPEATS):
            cache = _random(config, tokens, dtype, device)
            nbytes = measured(cache.layers).total
            entry, ms = _timed(device, partial(snapshot_cache, cache, template, key, 0, True, 2**63, dense))
            store_ms.append(ms)
            del cache
        file, write_ms = _timed(device, partial(disk.write, directory, entry, config.model_type))
        sources = entry.cut, lambda count, file=file: disk.read(file, count, Blocks() if device.type == "cuda" else None)
        fetch_ms, read_ms = ([least(partial(layers, count)) for count in (tokens, tokens // 2)] for layers in sources)
        sizes = {"tokens": tokens, "bytes": entry.nbytes, "bytes_per_token": entry.nbytes / tokens, "ratio": nbytes / entry.nbytes}
        times = {"store_ms": min(store_ms), "fetch_ms": fetch_ms[0], "fetch_half_ms": fetch_ms[1]}
        files = {"write_ms": write_ms, "read_ms": read_ms[0], "read_half_ms": read_ms[1]}
        file.path.unlink()
        yield sizes | times | files


def _random(config: PreTrainedConfig, tokens: int, dtype: torch.dtype, device: torch.device) -> DynamicCache:
    cache = DynamicCache(config=config)
    for i, (layer, shape) in enumerate(zip(cache.layers, shapes(config, dtype.itemsize), strict=True)):
        if not isinstance(layer, DynamicLayer):
            raise NotImplementedError(f"layer {i} of {config.model_type} is a {type(layer).__name__}, which holds no keys and values")
        layer.update(*(torch.randn(1, shape.heads, tokens, shape.head_dim, dtype=dtype, device=device) for _ in range(2)))
    return cache


def _timed(device: torch.device, call: Callable[[], Result]) -> tuple[Result, float]:
    """The result of `call` and its time in milliseconds, the device's work included."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = call()
    if gpu:
        torch.cuda.synchronize(device)
    return result, 1000 * (time.perf_counter() - begin)
