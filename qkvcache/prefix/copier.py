"""`PinnedCopier`: copies between host memory and GPUs at the speed of the bus."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy
import torch
from torch import Tensor

STAGE = 8 * 2**20
"""Bytes of the pinned buffer of a thread."""
SMALL = 2**20
"""Bytes below which tensors are collected, and copied together."""
ALIGNMENT = 16
"""Of tensors in a buffer, in bytes."""
THREADS = min(os.cpu_count() or 1, 12)
Copies = list[tuple[Tensor, Tensor]]
"""Destinations and sources."""


class PinnedCopier:
    """Copies between host memory and GPUs through pinned buffers. Several threads fill and empty them, since one is slower than the bus.

    Entries themselves are not pinned: pinned memory is rounded up to powers of two, cannot be swapped, and takes longer to allocate than a
    copy takes. Copies are complete after `wait`; on a GPU, for what its current stream does afterwards.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[tuple[torch.cuda.Stream, Future]] = []
        self._local = threading.local()
        self._small: dict[tuple[torch.device, torch.device], Copies] = {}
        self._bytes = 0
        self._within: Copies = []
        """Copies within host memory, or within a GPU."""

    def __call__(self, out: Tensor, x: Tensor) -> None:
        if not x.numel():
            return
        if out.device == x.device or not (out.is_cuda or x.is_cuda):
            self._within.append((out, x))
        elif x.ndim and x.nbytes < min(SMALL, STAGE - ALIGNMENT):
            if self._bytes + x.nbytes + ALIGNMENT > STAGE:
                self._submit_small()
            self._small.setdefault((out.device, x.device), []).append((out, x))
            self._bytes += x.nbytes + ALIGNMENT
        elif x.ndim < 3:
            out.copy_(x)
        else:
            for begin, end in _parts(x):
                self._submit([(out[:, :, begin:end], x[:, :, begin:end])])

    def wait(self) -> None:
        """Waits for all copies, or makes the streams that were current at their calls wait for them. Raises their errors."""
        self._submit_small()
        running, self._running, within, self._within = self._running, [], self._within, []
        if within:
            outs, given = zip(*within, strict=True)
            torch._foreach_copy_(outs, given)
        wait(copied for _, copied in running)
        for stream, copied in running:
            if (done := copied.result()) is not None:
                stream.wait_event(done)

    def _submit_small(self) -> None:
        for batch in self._small.values():
            self._submit(batch)
        self._small, self._bytes = {}, 0

    def _submit(self, copies: Copies) -> None:
        """Hands copies that fit into a buffer, between the same two devices, to a thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "qkvcache-copy")
        out, x = copies[0]
        stream = torch.cuda.current_stream(out.device if out.is_cuda else x.device)
        ready = stream.record_event()  # before it, others may use the memory
        self._running.append((stream, self._pool.submit(self._send, copies, ready)))

    def _send(self, copies: Copies, ready: torch.cuda.Event) -> torch.cuda.Event | None:
        """Copies on a stream of this thread: on a shared stream copies would wait for one another, and for the caller's work."""
        local, (outs, given) = self._local, zip(*copies, strict=True)
        to_gpu = outs[0].is_cuda
        device = outs[0].device if to_gpu else given[0].device
        if not hasattr(local, "buffer"):
            local.buffer, local.free, local.streams = torch.empty(STAGE, dtype=torch.uint8, pin_memory=True), None, {}
        if device not in local.streams:
            local.streams[device] = torch.cuda.Stream(device)
        if local.free is not None:
            local.free.synchronize()
        stream, places = local.streams[device], _places(copies)
        with torch.inference_mode(), torch.cuda.stream(stream):  # tensors made in inference mode cannot be written outside of it
            stream.wait_event(ready)
            pinned = local.buffer[: sum(places)]
            in_host = _views(pinned, places, given)
            several = len(copies) > 1  # they cross the bus as one
            there = torch.empty(len(pinned) if several else 0, dtype=torch.uint8, device=device)
            on_gpu = _views(there, places, given) if several else []
            if to_gpu:
                for part, x in zip(in_host, given, strict=True):
                    numpy.copyto(as_bytes(part), as_bytes(x))
                if several:
                    there.copy_(pinned, non_blocking=True)
                    torch._foreach_copy_(outs, on_gpu)
                else:
                    outs[0].copy_(in_host[0], non_blocking=True)
                local.free = stream.record_event()
                return local.free
            if several:
                torch._foreach_copy_(on_gpu, given)
                pinned.copy_(there, non_blocking=True)
            else:
                in_host[0].copy_(given[0], non_blocking=True)
            stream.record_event().synchronize()
            for out, part in zip(outs, in_host, strict=True):
                numpy.copyto(as_bytes(out), as_bytes(part))
            return None


def _places(copies: Copies) -> list[int]:
    """Bytes of each copy in a buffer."""
    return [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for _, x in copies]


def _views(buffer: Tensor, places: list[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer with the shapes and dtypes of `like`."""
    parts = zip(buffer.split(places), like, strict=True)
    return [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in parts]


def as_bytes(x: Tensor) -> numpy.ndarray:
    """The bytes of a tensor in host memory, a view. numpy copies them in the calling thread; torch would start a team of threads for
    tensors that are not contiguous, and wait for members that are busy."""
    return x.view(torch.uint8).numpy()


def _parts(x: Tensor) -> list[tuple[int, int]]:
    """Ranges of dimension 2 whose bytes fit into a buffer, of at least one token each."""
    step = max(STAGE * x.shape[2] // (x.numel() * x.itemsize), 1)
    return [(begin, min(begin + step, x.shape[2])) for begin in range(0, x.shape[2], step)]
