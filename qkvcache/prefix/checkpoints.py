"""Checkpoints: earlier states of layers that cannot be cut to any number of tokens, recurrent states and sliding windows, from which
prompts with as much in common go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from .host_memory import on_host
from .prompt import Inputs, compute
from .snapshot import Snapshot, checkpoint

Checkpoints = dict[int, list[Snapshot | None]]
"""Earlier states of an entry's layers (`Snapshot.checkpoint`), by the number of tokens seen."""


def take_checkpoint(cache: Cache) -> list[Snapshot | None]:
    """A checkpoint of the first row of `cache`, in host memory."""
    return [copied(checkpoint(layer)) for layer in cache.layers]


def copied(given: Snapshot | None) -> Snapshot | None:
    """A copy in host memory of its own, so that it does not keep the memory of a layer's tokens."""
    return given and on_host(given, lock=any(x.is_cuda for x in given.tensors.values()))


def checkpoint_bytes(checkpoint: Sequence[Snapshot | None]) -> int:
    return sum(layer.nbytes for layer in checkpoint if layer is not None)


def thinned(checkpoints: Checkpoints, room: int) -> Checkpoints:
    """Those that are left if every second one is left out until the rest fits in `room` bytes."""
    kept = sorted(checkpoints)
    while sum(checkpoint_bytes(checkpoints[at]) for at in kept) > room:
        kept = kept[-2::-2][::-1]
    return {at: checkpoints[at] for at in kept}


def computed(model: Any, row: Tensor, inputs: Inputs, count: int, cache: Cache, interval: int, room: int) -> Checkpoints | None:
    """Runs the model on the tokens of `row` as `prompt.compute` does. Returns checkpoints of the steps before the last one, of at most
    `room` bytes; None if the cache has seen all tokens before."""
    found: Checkpoints | None = None
    for tokens in compute(model, row, inputs, count, cache, interval):
        found = found or {}
        if tokens < len(row):
            found = thinned(found | {tokens: take_checkpoint(cache)}, room)
    return found
