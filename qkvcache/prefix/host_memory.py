"""Snapshots in host memory from and to which GPUs copy at the speed of the bus."""

from __future__ import annotations

import contextlib
import mmap
import sys
import warnings
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from ..files import THREADS, as_bytes
from .snapshot import Snapshot

ALIGNMENT = 8
"""The alignment of tensors in a block, in bytes."""
PORTABLE = 1
"""The flag `cudaHostRegisterPortable`: locked for all GPUs."""
SHARE = 4 * 2**20
"""Bytes that a thread writes to at a time: two huge pages."""


class LockedMemory(mmap.mmap):
    """Host memory in locked pages: copies between it and GPUs need no other buffer, and do not block the host. Torch's
    pinned memory takes longer to allocate than a copy takes, and is rounded up to powers of two.

    Warns if the system does not lock the pages: copies are then correct and slower.
    """

    address: int | None = None
    """The address of the locked pages; None if they are not locked."""
    copies: dict[torch.device, torch.cuda.Event]
    """The event at the end of the last copy, by GPU."""

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
                torch.zeros(1, dtype=torch.uint8, device="cuda")
        else:
            self.address = block.data_ptr()

    def record(self, device: torch.device) -> None:
        """Records that a copy from or to `device` was queued."""
        if device.type == "cuda":
            self.copies[device] = torch.cuda.current_stream(device).record_event()

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

    def __call__(self, given: Snapshot) -> Snapshot:
        return on_host(given, True, self)


def on_host(given: Snapshot, lock: bool, blocks: Blocks | None = None) -> Snapshot:
    """A copy of `given` whose tensors are contiguous in one block of host memory, in locked pages if `lock` (from `blocks`, if passed). It
    is complete after `memory.wait()`."""
    sizes = [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in given.tensors.values()]
    memory, block = (blocks or Blocks()).take(sum(sizes)) if lock else (None, torch.empty(sum(sizes), dtype=torch.uint8, device="cpu"))
    parts = zip(given.tensors.items(), block.split(sizes), strict=True)
    tensors = {name: part[: x.nbytes].view(x.dtype).view(x.shape) for (name, x), part in parts}
    on_gpu = {name: x for name, x in given.tensors.items() if x.is_cuda}
    if memory is not None and on_gpu:
        _touch(block.numpy())
    for name in given.tensors.keys() - on_gpu.keys():
        numpy.copyto(as_bytes(tensors[name]), as_bytes(given.tensors[name]))
    if memory is not None:
        memory.lock(block)
    for name, x in on_gpu.items():
        tensors[name].copy_(x.detach(), non_blocking=True)
    if memory is not None:
        for device in {x.device for x in on_gpu.values()}:
            memory.record(device)
    return replace(given, tensors=tensors, memory=memory)


def _touch(block: numpy.ndarray) -> None:
    """Makes the system provide the pages of `block`, with several threads; locking them would use one."""
    with ThreadPoolExecutor(THREADS) as pool:
        for begin in range(0, len(block), SHARE):
            pool.submit(block[begin : begin + SHARE : mmap.PAGESIZE].fill, 0)
