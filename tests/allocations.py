"""The memory that torch allocates, on any device, and the tensors that something holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Sizes of floating storages that are made inside, and the most bytes alive at once."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **kwargs or {})
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in given:
                storage = t.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                if t.is_floating_point() or t.is_complex():  # a table of several levels a row is gathered as complex numbers
                    self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def reachable(*things: object, modules: tuple[str, ...] = ("",)) -> Iterator[Tensor]:
    """Tensors that are found through containers, and objects whose classes are in `modules`, without the library's help."""
    seen, stack = set(), list(things)
    while stack:
        x = stack.pop()
        if id(x) in seen or isinstance(x, type):
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, dict):
            stack += x.values()
        elif isinstance(x, list | tuple):
            stack += x
        elif hasattr(x, "__dict__") and type(x).__module__.startswith(modules):
            stack += vars(x).values()


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of each storage, by address."""
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.numel()}
