"""Caches without a model: the keys and values of a token depend on all tokens before it, as a model's do."""

from __future__ import annotations

import errno
import functools
import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Cache, LlamaConfig, LlamaForCausalLM

from qkvcache import CompressedCache
from qkvcache.formats import Identity
from qkvcache.layers.compressed import CompressedLayer
from tests.seeds import SEED
from tests.tolerance import same_decoded

LAYERS, HEADS, DIM, WORDS = 2, 2, 32, 100
IDENTITY = Identity().codecs()
ZONES = {"num_sink_tokens": 2, "residual_length": 8}
FORK = get_context("fork")


@functools.lru_cache
def model(seed: int = 0, head_dim: int = DIM, **changes) -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": head_dim}
    config = LlamaConfig(
        **sizes | {"vocab_size": WORDS, "num_hidden_layers": LAYERS, "initializer_range": 0.2, "pad_token_id": 0} | changes
    )
    torch.manual_seed(SEED + seed)
    return LlamaForCausalLM(config).eval()


@functools.lru_cache
def _words(head_dim: int) -> Tensor:
    return torch.randn(LAYERS, 2, HEADS, WORDS, head_dim, generator=torch.Generator().manual_seed(SEED + 7), dtype=torch.float64)


def keys_and_values(ids: Tensor, head_dim: int = DIM, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[layers, 2, heads, T, head_dim]`."""
    seen = _words(head_dim)[..., ids, :].cumsum(3)
    return (seen / torch.arange(1, len(ids) + 1)[:, None] ** 0.5).to(dtype)


def fill(cache: Cache, ids: Tensor, step: int = 0, dtype: torch.dtype = torch.float32, head_dim: int = DIM) -> Cache:
    """Lets the cache see `ids`: at once, or after `cache.get_seq_length()` tokens what is missing, `step` tokens at a time."""
    made = keys_and_values(ids, head_dim, dtype)
    begin = cache.get_seq_length()
    for at in range(begin, len(ids), step or len(ids)):
        for i, (keys, values) in enumerate(made[:, :, None, :, at : at + (step or len(ids))]):
            cache.update(keys, values, i)
    return cache


def held(cache: Cache) -> list[Tensor]:
    """Keys and values of every layer, decoded, `[B, H, T, D]` each."""
    return [x for layer in cache.layers for x in (layer.dense() if isinstance(layer, CompressedLayer) else (layer.keys, layer.values))]


def same(cache: Cache, expected: list[Tensor], tokens: int) -> bool:
    """Whether `cache` holds the first `tokens` tokens of `expected`: bit for bit, but for the last places of what is rotated back."""
    codecs = [codec for layer in cache.layers for codec in (layer.format.codecs() if isinstance(layer, CompressedLayer) else IDENTITY)]
    found = held(cache)
    return len(found) == len(expected) and all(
        same_decoded(a, b[:, :, :tokens], codec) for a, b, codec in zip(found, expected, codecs, strict=True)
    )


def random_ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, WORDS, (count,), generator=torch.Generator().manual_seed(SEED + seed))


def compressed(ids: Tensor, format="int8", **options) -> CompressedCache:
    """A cache of `model()` that has seen `ids`."""
    return fill(CompressedCache(model().config, format=format, **ZONES | options), ids)


# Files that something happens to.


def begin_of(content: bytes) -> int:
    """Where the tensors of a safetensors file begin."""
    return 8 + struct.unpack("<Q", content[:8])[0]


def metadata_of(path: Path) -> dict[str, str]:
    content = path.read_bytes()
    return json.loads(content[8 : begin_of(content)])["__metadata__"]


def rewrite(path: Path, change: Callable[[dict, dict], object]) -> None:
    """Changes the tensors of a file, by name, and its metadata."""
    tensors, data = load_file(path), metadata_of(path)
    change(tensors, data)
    save_file(tensors, path, metadata=data)


def flipped(content: bytes, at: int = -9) -> bytes:
    """With a bit of another value."""
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


DAMAGES = {"cut": lambda content: content[:-1], "flipped": flipped, "empty": lambda content: b""}


@contextmanager
def failing_open(patch: pytest.MonkeyPatch, name: str, code: int = errno.EACCES) -> Iterator[None]:
    """Files whose path ends with, or holds, `name` cannot be opened."""

    def fails(path, *args, open=os.open):
        if name in str(path):
            raise OSError(code, os.strerror(code))
        return open(path, *args)

    with patch.context() as within:
        within.setattr(os, "open", fails)
        yield


def received(pipe) -> list:
    """What a process that was killed has still sent."""
    found = []
    while pipe.poll():
        try:
            found.append(pipe.recv())
        except EOFError:
            break
    return found
