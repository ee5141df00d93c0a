"""`HostSnapshot`: a snapshot in host memory from and to which GPUs copy at the speed of the bus."""

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
"""The alignment of tensors in a block, in bytes."""
PORTABLE = 1
"""The flag `cudaHostRegisterPortable`: locked for all GPUs."""
THREADS = min(os.cpu_count() or 1, 16)
SHARE = 4 * 2**20
"""Bytes that a thread writes to at a time: two huge pages."""


class LockedMemory(mmap.mmap):
    """Host memory in locked pages: copies between it and GPUs need no other buffer, and do not block the host. Torch's
    pinned memory takes longer to allocate than a copy takes, and is rounded up to powers of two.

    Warns if the system does not lock the pages: copies are then correct and slower.
    """

    @classmethod
    def of(cls, nbytes: int) -> LockedMemory:
        """Allocates `nbytes` bytes; `lock` locks them."""
        size, linux = max(nbytes, 1), hasattr(mmap, "MADV_HUGEPAGE")
        memory = cls(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if linux else cls(-1, size)  # shared memory rarely has huge pages
        memory.copies = {}
        if linux:
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def lock(self, block: Tensor) -> None:
        """Locks the pages of `block`, its bytes, unless they are locked. This is faster if `block` was written to, so
        that the system has provided its pages."""
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
    """The address of the locked pages; None if they are not locked."""
    copies: dict[torch.device, torch.cuda.Event]
    """The event at the end of the last copy, by GPU."""

    def wait(self) -> None:
        """Waits for the copies."""
        for end in self.copies.values():
            end.synchronize()

    def __del__(self) -> None:
        if self.address is not None and not sys.is_finalizing():
            self.wait()
            torch.cuda.cudart().cudaHostUnregister(self.address)


class Blocks:
    """A pool of locked memory for the layers of one read. A block returns to the pool when its last tensor is freed,
    and is reused after the copies from it have ended. If the pool is empty, `take` allocates a block instead of
    waiting: there are never more blocks than in use at a time."""

    def __init__(self) -> None:
        self.free: deque[LockedMemory] = deque()

    def take(self, nbytes: int) -> tuple[LockedMemory, Tensor]:
        """A block and a tensor of its first `nbytes` bytes, which keeps the block. The memory of a new block is not
        locked yet."""
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
    """A snapshot whose tensors are contiguous in one block of host memory. `memory`: the locked pages, or None."""

    memory: LockedMemory | None = None

    @classmethod
    def of(cls, given: Snapshot, lock: bool, blocks: Blocks | None = None) -> HostSnapshot:
        """A copy of `given`, in locked pages if `lock` (from `blocks`, if passed). It is complete after `wait`."""
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

    def copy_into(self, tensors: dict[str, Tensor]) -> None:
        """Copies the tensors into others of the same names, in the order of the current stream."""
        for name, x in self.tensors.items():
            tensors[name].copy_(x, non_blocking=True)
        self._record(Snapshot(self.kind, tensors))

    def wait(self) -> None:
        """Waits for the copies."""
        if self.memory is not None:
            self.memory.wait()

    def _record(self, other: Snapshot) -> None:
        """Records that copies from or to the devices of `other` were queued."""
        if self.memory is not None:
            for device in {x.device for x in other.tensors.values() if x.is_cuda}:
                self.memory.copies[device] = torch.cuda.current_stream(device).record_event()


def on_gpu(devices: Iterable[torch.device]) -> bool:
    """Whether one of the devices is a GPU, for which memory is locked."""
    return any(device.type == "cuda" for device in devices)


def _touch(block: numpy.ndarray) -> None:
    """Makes the system provide the pages of `block`, with several threads; locking them would use one."""
    with ThreadPoolExecutor(THREADS) as pool:
        for begin in range(0, len(block), SHARE):
            pool.submit(block[begin : begin + SHARE : mmap.PAGESIZE].fill, 0)


def as_bytes(x: Tensor) -> numpy.ndarray:
    """The bytes of a tensor in host memory as a numpy array, a view if its last dimension is contiguous. numpy copies
    in the calling thread; torch would start a team of threads and wait for busy ones."""
    x = x.detach() if x.ndim else x.detach()[None]
    return (x if x.stride(-1) == 1 else x.contiguous()).view(torch.uint8).numpy()
