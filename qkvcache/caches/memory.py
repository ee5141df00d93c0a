"""What a cache holds, measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ..layers.compressed import CompressedLayer
from ..layers.evicting import EvictingLayer


@dataclass(frozen=True)
class Memory:
    """What a cache holds, in bytes, counted from live tensors.

    `exact` are tokens in the model's dtype, in compressed layers and in layers left as transformers makes them; `bookkeeping` is where
    kernels find the rest, and what a policy remembers of each token. `dense` is what all tokens seen would take in a DynamicCache, and
    `ratio` is `dense / total`.
    """

    codes: int
    scales: int
    exact: int
    bookkeeping: int
    total: int
    dense: int

    @property
    def ratio(self) -> float:
        return self.dense / self.total if self.total else 1.0


def measured(layers: Iterable[object]) -> Memory:
    """The storage of every live tensor, each counted once."""
    held = {"codes": 0, "scales": 0, "exact": 0, "bookkeeping": 0}
    seen: set[int] = set()
    dense = 0
    for layer in layers:
        if isinstance(layer, EvictingLayer):
            layer.settle()
        for role, tensor in _tensors(layer):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                held[role] += storage.nbytes()
        dense += _dense_bytes(layer)
    return Memory(**held, total=sum(held.values()), dense=dense)


def _tensors(layer: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(layer, CompressedLayer):
        yield from layer.tensors()
        return
    for held in vars(layer).values():
        for tensor in held.values() if isinstance(held, dict) else [held]:
            if isinstance(tensor, Tensor):
                yield "exact", tensor


def _dense_bytes(layer: object) -> int:
    if isinstance(layer, CompressedLayer):
        return layer.get_seq_length() * layer.dense_bytes_per_token
    return sum(tensor.untyped_storage().nbytes() for _, tensor in _tensors(layer))
