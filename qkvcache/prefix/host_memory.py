"""`HostSnapshot`: a snapshot in host memory, which GPUs copy from and to at the speed of the bus."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from ..layers.snapshot import Snapshot

ALIGNMENT = 8
"""Of tensors in a block, in bytes."""
PORTABLE = 1
"""`cudaHostRegisterPortable`: for all GPUs."""
THREADS = min(os.cpu_count() or 1, 16)
SHARE = 4 * 2**20
"""Bytes that a thread touches at a time: two huge pages."""


class LockedMemory(mmap.mmap):
    """Bytes in pages that are locked: copies between them and GPUs need no other buffer, and the host goes on meanwhile. Torch's
    pinned memory takes longer to allocate than a copy takes, and is rounded up to powers of two.

    Warns if the system does not lock them: copies are then correct and slower.
    """

    @classmethod
    def of(cls, nbytes: int) -> LockedMemory:
        """`nbytes` bytes, which `lock` locks."""
        size, linux = max(nbytes, 1), hasattr(mmap, "MADV_HUGEPAGE")
        memory = cls(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if linux else cls(-1, size)  # shared memory rarely has huge pages
        memory.copies = {}
        if linux:
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def lock(self, block: Tensor) -> None:
        """Locks the pages of `block`, its bytes, if they are not yet: sooner those that the system has provided, because they were written
        to, than others."""
        if self.address is not None:
            return
        error = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), len(self), PORTABLE)
        if int(error):
            warnings.warn(f"host memory cannot be locked ({error}): copies between a PrefixStore and GPUs are slower", stacklevel=2)
            with contextlib.suppress(RuntimeError):  # CUDA reports the error again at the next launch
                torch.zeros(1, device="cuda")
        else:
            self.address = block.data_ptr()

    address: int | None = None
    """Where locked pages begin; None if they are not locked."""
    copies: dict[torch.device, torch.cuda.Event]
    """The end of the last copy, by GPU."""

    def wait(self) -> None:
        """Waits for the copies."""
        for end in self.copies.values():
            end.synchronize()

    def __del__(self) -> None:
        if self.address is not None and not sys.is_finalizing():
            self.wait()
            torch.cuda.cudart().cudaHostUnregister(self.address)


class Blocks:
    """Locked memory for the layers of one read. A block comes back by itself when the last tensor in it is gone, and is used again when
    the copies from it have ended. Nothing waits for a block to come back, since there is a new one if none has: there are no more than are
    in use at a time."""

    def __init__(self) -> None:
        self.free: deque[LockedMemory] = deque()

    def take(self, nbytes: int) -> tuple[LockedMemory, Tensor]:
        """A block and the tensor of its first `nbytes` bytes, which keeps it. The memory of a new one is not locked yet."""
        memory = None
        with contextlib.suppress(IndexError):  # none is free
            memory = self.free.popleft()  # its copies end first
        if memory is None or len(memory) < nbytes:
            memory = LockedMemory.of(nbytes)
        memory.wait()
        view = memoryview(memory)
        weakref.finalize(view, self.free.append, memory)
        return memory, torch.frombuffer(view, dtype=torch.uint8)[:nbytes]

    def __call__(self, given: Snapshot) -> HostSnapshot:
        return HostSnapshot.of(given, True, self)


@dataclass(frozen=True)
class HostSnapshot(Snapshot):
    """A snapshot whose tensors are contiguous, in one block of host memory; `memory`: of locked pages, else None."""

    memory: LockedMemory | None = None

    @classmethod
    def of(cls, given: Snapshot, lock: bool, blocks: Blocks | None = None) -> HostSnapshot:
        """A copy of `given`, in locked pages if `lock`, those of `blocks` if given; complete after `wait`."""
        sizes = [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in given.tensors.values()]
        memory, block = (blocks or Blocks()).take(sum(sizes)) if lock else (None, torch.empty(sum(sizes), dtype=torch.uint8))
        parts = zip(given.tensors.items(), block.split(sizes), strict=True)
        tensors = {name: part[: x.nbytes].view(x.dtype).view(x.shape) for (name, x), part in parts}
        if memory is not None and any(x.is_cuda for x in given.tensors.values()):
            _touch(block.numpy())
        for name, x in given.tensors.items():
            if not x.is_cuda:
                numpy.copyto(as_bytes(tensors[name]), as_bytes(x))
        if memory is not None:
            memory.lock(block)
        for name, x in given.tensors.items():
            if x.is_cuda:
                tensors[name].copy_(x.detach(), non_blocking=True)
        found = cls(given.kind, tensors, given.numbers, memory)
        found._record(given)
        return found

    def to(self, device: torch.device | str, copy: bool) -> Snapshot:
        found = super().to(device, copy)
        self._record(found)
        return found

    def wait(self) -> None:
        """Waits for the copies."""
        if self.memory is not None:
            self.memory.wait()

    def _record(self, other: Snapshot) -> None:
        """Copies from or to the devices of `other` were queued."""
        if self.memory is not None:
            for device in {x.device for x in other.tensors.values() if x.is_cuda}:
                self.memory.copies[device] = torch.cuda.current_stream(device).record_event()


def on_gpu(devices: Iterable[torch.device]) -> bool:
    """Whether one of the devices is a GPU, so that memory is locked."""
    return any(device.type == "cuda" for device in devices)


def _touch(block: numpy.ndarray) -> None:
    """Makes the system provide the pages of `block`, by several threads; locking them would use one."""
    with ThreadPoolExecutor(THREADS) as pool:
        for begin in range(0, len(block), SHARE):
            pool.submit(block[begin : begin + SHARE : mmap.PAGESIZE].fill, 0)


def as_bytes(x: Tensor) -> numpy.ndarray:
    """The bytes of a tensor in host memory, as a view if its last dimension is contiguous. numpy copies them in the calling thread; torch
    would start a team of threads, and wait for members that are busy."""
    x = x.detach() if x.ndim else x.detach()[None]
    return (x if x.stride(-1) == 1 else x.contiguous()).view(torch.uint8).numpy()
