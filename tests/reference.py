"""What caches are compared with: the same steps through a DynamicCache, or through the same codes decoded into dense tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from qkvcache.kernels import KeysOrValues
from qkvcache.layers.compressed import CompressedLayer
from qkvcache.releases import passing
from tests.seeds import SEED

ZONES = {"zones": {"num_sink_tokens": 2, "residual_length": 4}, "bare": {"num_sink_tokens": 0, "residual_length": 0}}
NEW = 18
"""Tokens that `run` generates, so that a group of 16 is quantized on the way."""


@dataclass(frozen=True)
class Mode:
    """How one prompt goes through a model: padding on the left of each row, and the tokens of each forward."""

    padding: tuple[int, ...]
    sizes: tuple[int, ...]

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """`(ids, mask)`, `[B, T]` each."""
        torch.manual_seed(SEED + seed)
        length = sum(self.sizes)
        ids = torch.randint(3, 100, (len(self.padding), length))
        mask = (torch.arange(length) >= torch.tensor(self.padding)[:, None]).long()
        return ids * mask, mask


# Chunks above and below the number of queries that attend on codes; boundaries inside padding; a step of three tokens among those of one.
MODES = {
    "single": Mode((0,), (30, 1, 3, 1)),
    "padded": Mode((0, 5, 9), (30, 1, 3, 1)),
    "chunked": Mode((0,), (4, 18, 8, 1, 3, 1)),
    "chunked_padded": Mode((0, 5, 9), (4, 18, 8, 1, 3, 1)),
}


def forward(model: PreTrainedModel, cache: Cache, ids: Tensor, mask: Tensor, begin: int, end: int) -> Tensor:
    """Logits of the real tokens in `[begin, end)`, `[N, V]`."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, begin:end]
    with torch.no_grad():
        out = model(input_ids=ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions, **passing(cache))
    return out.logits[mask[:, begin:end].bool()]


def steps(model: PreTrainedModel, cache: Cache, mode: Mode) -> Iterator[Tensor]:
    """Logits of the real tokens of each forward."""
    ids, mask = mode.inputs()
    begin = 0
    for size in mode.sizes:
        yield forward(model, cache, ids, mask, begin, begin + size)
        begin += size


def assert_steps_alike(model: PreTrainedModel, ours: Cache, theirs: Cache, mode: Mode, tolerance: float) -> None:
    """The logits of each forward are those of `theirs`."""
    for got, expected in zip(steps(model, ours, mode), steps(model, theirs, mode), strict=True):
        assert_close(got, expected, tolerance)


def prompt(rows: int = 1, length: int = 40) -> dict[str, Tensor]:
    torch.manual_seed(SEED + 1)
    ids = torch.randint(3, 100, (rows, length))
    mask = torch.ones_like(ids)
    for row in range(1, rows):  # left padding
        mask[row, : 5 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def run(network, cache, inputs=None, **options):
    torch.manual_seed(SEED + 2)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    return network.generate(**(inputs or prompt()), **passing(cache), **options)


@functools.cache
def dense_class(kind: type[CompressedLayer]) -> type[CompressedLayer]:
    """Layers of the class `kind` that hand attention their codes decoded."""

    class DenseLayer(kind):
        def update(self, *args, **kwargs):
            return tuple(x if isinstance(x, Tensor) else x.dense() for x in super().update(*args, **kwargs))

    return DenseLayer


def decoded(cache: Cache) -> Cache:
    """A copy of `cache` whose compressed layers hand out dense tensors."""
    cache = copy.deepcopy(cache)
    for inner in (getattr(cache, "self_attention_cache", cache),):
        for layer in inner.layers:
            if getattr(layer, "snapshot_kind", None) == "compressed" and not hasattr(layer, "update_indexer"):
                layer.__class__ = dense_class(type(layer))
    return cache


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Every entry within `tolerance` of the largest expected one."""
    assert got.shape == expected.shape
    assert got.isfinite().all()
    error = (got - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance}"


@contextmanager
def count_decoded_layers() -> Iterator[list[KeysOrValues]]:
    """Collects every side that is decoded as a whole meanwhile."""
    seen: list[KeysOrValues] = []
    stock = KeysOrValues.dense

    def dense(self: KeysOrValues) -> Tensor:
        seen.append(self)
        return stock(self)

    KeysOrValues.dense = dense
    try:
        yield seen
    finally:
        KeysOrValues.dense = stock


def count_fused(monkeypatch) -> list:
    """A list that grows by one with each attention call of the fused kernels."""
    from qkvcache.kernels.attend import plan
    from qkvcache.kernels.host import launch

    calls, run = [], plan.Plan.run

    def counted(self, query, *args):
        if not launch._AHEAD.on:  # then it compiles, and launches nothing
            calls.append(query.shape)
        return run(self, query, *args)

    monkeypatch.setattr(plan.Plan, "run", counted)
    return calls
