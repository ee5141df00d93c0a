"""The measured bytes of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ..layers.compressed import CompressedLayer


@dataclass(frozen=True)
class Bytes:
    """Bytes by role. `exact`: tokens in the model's dtype, including tokens of transformers' own layers. `bookkeeping`:
    tables of kernels, and what layers note of tokens."""

    codes: int = 0
    scales: int = 0
    exact: int = 0
    bookkeeping: int = 0

    @property
    def total(self) -> int:
        return self.codes + self.scales + self.exact + self.bookkeeping


@dataclass(frozen=True)
class Memory(Bytes):
    """Bytes of a cache, counted from its tensors. `dense`: the bytes of all tokens seen in a DynamicCache; `ratio`:
    `dense / total`; `host`: the part of `total` of pages in host memory."""

    dense: int = 0
    host: int = 0

    @property
    def ratio(self) -> float:
        return self.dense / self.total if self.total else 1.0


def bytes_by_role(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Bytes for each role of `Memory` from `(role, tensor)` pairs. Memory that several tensors share counts once."""
    sizes = {"codes": 0, "scales": 0, "exact": 0, "bookkeeping": 0}
    left: dict[int, int] = {}
    """Bytes of each allocation that are not counted yet. On the meta device, data_ptr() is the same for all."""
    first: dict[int, str] = {}
    for role, tensor in tensors:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in left:
            left[key], first[key] = storage.nbytes(), role
        own = min(tensor.nbytes, left[key])
        left[key] -= own
        sizes[role] += own
    for key, rest in left.items():  # what no tensor covers, such as the bytes between planes
        sizes[first[key]] += rest
    return sizes


def measured(layers: Iterable[object]) -> Memory:
    """Bytes of the live tensors of `layers`."""
    layers = list(layers)
    host = sum(layer.host_bytes for layer in layers if isinstance(layer, CompressedLayer))
    return Memory(**bytes_by_role(pair for layer in layers for pair in _tensors(layer)), dense=sum(map(_dense_bytes, layers)), host=host)


def live_tensors(of: object) -> Iterator[Tensor]:
    """The plain tensors in `of`, which is a tensor, a tensor subclass (as quanto's), a dictionary, a list or
    a tuple."""
    if hasattr(of, "__tensor_flatten__"):  # a subclass has no storage of its own
        of = [getattr(of, name) for name in of.__tensor_flatten__()[0]]
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, dict | list | tuple):
        for part in of.values() if isinstance(of, dict) else of:
            yield from live_tensors(part)


def _tensors(layer: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(layer, CompressedLayer):
        return layer.tensors()
    return (("exact", tensor) for tensor in live_tensors(vars(layer)))


def _dense_bytes(layer: object) -> int:
    if isinstance(layer, CompressedLayer):
        return layer.dense_bytes
    return sum(tensor.untyped_storage().nbytes() for _, tensor in _tensors(layer))
