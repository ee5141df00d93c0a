"""What storing and fetching a prefix takes: a model's real shapes and dtype, random contents, in the order of production.

The original is freed, layer by layer, before anything is fetched, so that three copies never exist at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from ..caches import CompressedCache
from ..formats import Format
from . import disk, match
from .entry import Mould, give, take
from .place import Staging

NAME = bytes(match.NAME)
Result = TypeVar("Result")


def measure(
    config: PreTrainedConfig,
    format: str | Format,
    contexts: Sequence[int],
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    repeats: int = 3,
) -> Iterator[dict]:
    """A row for each context: bytes, ratio to the dense cache, error, and milliseconds, the least of `repeats`.

    `store_ms`: a DynamicCache on `device` to codes in host memory. `fetch_ms`, `fetch_half_ms`: all or half of the tokens from host memory
    into a cache on `device`. `write_ms`, `read_ms`, `read_half_ms`: the same to and from files in `directory`, from the page cache.

    Raises ValueError for contexts below 2, an unknown format or one that cannot hold the model's head_dim; NotImplementedError for models
    whose cache has other layers than those with keys and values.
    """
    if not contexts or min(contexts) < 2:
        raise ValueError(f"contexts={list(contexts)}: must be numbers of tokens, 2 or more")
    mould, dense = Mould(CompressedCache(config, format=format), config), Mould(DynamicCache(config=config), config)
    for tokens in contexts:
        yield _row(config, mould, dense, tokens, directory, dtype, torch.device(device), repeats)


def _row(
    config: PreTrainedConfig,
    mould: Mould,
    dense: Mould,
    tokens: int,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
) -> dict:
    key = match.encode(NAME, torch.zeros(tokens, dtype=torch.int64))
    copy = Staging()
    store_ms = []
    for _ in range(repeats):
        cache = _random(config, tokens, dtype, device)
        given = sum(x.untyped_storage().nbytes() for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor))
        entry, ms = _timed(device, partial(take, cache, mould, key, 0, True, 2**63, copy, dense))
        store_ms.append(ms)
        del cache
    path, write_ms = _timed(device, partial(disk.write, directory, entry, config.model_type))
    file = disk.read_header(path)

    def fetch(count: int, from_disk: bool) -> Cache:
        layers = list(disk.read(file, count)) if from_disk else entry.cut(count)
        return give(mould, layers, mould, [device] * len(layers), copy)

    def least(count: int, from_disk: bool) -> float:
        return min(_timed(device, partial(fetch, count, from_disk))[1] for _ in range(repeats))

    sizes = {"tokens": tokens, "bytes": entry.nbytes, "bytes_per_token": entry.nbytes / tokens, "ratio": given / entry.nbytes}
    times = {"store_ms": min(store_ms), "fetch_ms": least(tokens, False), "fetch_half_ms": least(tokens // 2, False)}
    files = {"write_ms": write_ms, "read_ms": least(tokens, True), "read_half_ms": least(tokens // 2, True)}
    path.unlink()
    return sizes | {"error": max(entry.errors)} | times | files


def _random(config: PreTrainedConfig, tokens: int, dtype: torch.dtype, device: torch.device) -> DynamicCache:
    cache = DynamicCache(config=config)
    for i, (layer, own) in enumerate(zip(cache.layers, config.get_text_config(decoder=True).per_layer_config, strict=True)):
        if not isinstance(layer, DynamicLayer):
            raise NotImplementedError(f"layer {i} of {config.model_type} is a {type(layer).__name__}, which holds no keys and values")
        heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
        head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        layer.update(*(torch.randn(1, heads, tokens, head_dim, dtype=dtype, device=device) for _ in range(2)))
    return cache


def _timed(device: torch.device, call: Callable[[], Result]) -> tuple[Result, float]:
    """The result and the milliseconds that it took, the device's work included."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = call()
    if gpu:
        torch.cuda.synchronize(device)
    return result, 1000 * (time.perf_counter() - begin)
