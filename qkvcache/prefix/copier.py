"""`PinnedCopier`: copies between host memory and GPUs at the speed of the bus."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy
import torch
from torch import Tensor

STAGE = 8 * 2**20
"""Bytes of the pinned buffer of a thread."""
SMALL = 2**20
"""Bytes below which tensors are copied together instead of by threads."""
THREADS = min(os.cpu_count() or 1, 12)


class PinnedCopier:
    """Copies between host memory and GPUs through pinned buffers. Several threads fill and empty them, since one is slower than the bus.
    Small tensors are collected, and copied together.

    Entries themselves are not pinned: pinned memory is rounded up to powers of two, cannot be swapped, and takes longer to allocate than a
    copy takes. Copies are complete after `wait`; on a GPU, for what its current stream does afterwards.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[tuple[torch.cuda.Stream, Future]] = []
        self._local = threading.local()
        self._small: list[tuple[Tensor, Tensor]] = []
        self._bytes = 0

    def __call__(self, out: Tensor, x: Tensor) -> None:
        on_gpu = out if out.is_cuda else x
        if x.nbytes < SMALL or not on_gpu.is_cuda or out.device == x.device or x.ndim < 3:
            self._small.append((out, x))
            self._bytes += x.nbytes
            if self._bytes > STAGE:
                self._copy_small()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "qkvcache-copy")
        stream = torch.cuda.current_stream(on_gpu.device)
        ready = stream.record_event()  # before it, others may use the memory
        for begin, end in _parts(x):
            self._running.append((stream, self._pool.submit(self._send, out[:, :, begin:end], x[:, :, begin:end], ready)))

    def wait(self) -> None:
        """Waits for all copies, or makes the streams that were current at their calls wait for them. Raises their errors."""
        self._copy_small()
        running, self._running = self._running, []
        wait(copied for _, copied in running)
        for stream, copied in running:
            if (done := copied.result()) is not None:
                stream.wait_event(done)

    def _copy_small(self) -> None:
        """Copies the tensors that were collected: from one device to another in one transfer."""
        devices = defaultdict(list)
        for out, x in self._small:
            devices[out.device, x.device].append((out, x))
        self._small, self._bytes = [], 0
        for (to, at), pairs in devices.items():
            outs, given = zip(*pairs, strict=True)
            if "cuda" not in (to.type, at.type) or to == at:
                torch._foreach_copy_(outs, given)
                continue
            sent, parts = _joined(given, at)
            torch._foreach_copy_(parts, given)
            received, parts = _joined(outs, to)
            received.copy_(sent, non_blocking=True)
            if to.type == "cpu":
                torch.cuda.current_stream(at).synchronize()
            torch._foreach_copy_(outs, parts)

    def _send(self, out: Tensor, x: Tensor, ready: torch.cuda.Event) -> torch.cuda.Event | None:
        """Copies on a stream of this thread: on a shared stream copies would wait for one another, and for the caller's work."""
        local, device = self._local, out.device if out.is_cuda else x.device
        if not hasattr(local, "buffer"):
            local.buffer, local.free, local.streams = torch.empty(STAGE, dtype=torch.uint8, pin_memory=True), None, {}
        if device not in local.streams:
            local.streams[device] = torch.cuda.Stream(device)
        if local.free is not None:
            local.free.synchronize()
        stream = local.streams[device]
        pinned = local.buffer[: x.numel() * x.itemsize].view(x.dtype).view(x.shape)
        with torch.inference_mode(), torch.cuda.stream(stream):  # tensors made in inference mode cannot be written outside of it
            stream.wait_event(ready)
            if out.is_cuda:
                numpy.copyto(as_bytes(pinned), as_bytes(x))
                out.copy_(pinned, non_blocking=True)
                local.free = stream.record_event()
                return local.free
            pinned.copy_(x, non_blocking=True)
            stream.record_event().synchronize()
            numpy.copyto(as_bytes(out), as_bytes(pinned))
            return None


def as_bytes(x: Tensor) -> numpy.ndarray:
    """The bytes of a tensor in host memory, a view. numpy copies them in the calling thread; torch would start a team of threads for
    tensors that are not contiguous, and wait for members that are busy."""
    return x.view(torch.uint8).numpy()


def _joined(like: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A buffer on `device`, pinned in host memory, and its views of the shapes and dtypes of `like`."""
    sizes = [-(-x.nbytes // 16) * 16 for x in like]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device, pin_memory=device.type == "cpu")
    parts = zip(like, buffer.split(sizes), strict=True)
    return buffer, [part[: x.nbytes].view(x.dtype).view(x.shape) for x, part in parts]


def _parts(x: Tensor) -> list[tuple[int, int]]:
    """Ranges of dimension 2 whose bytes fit into a buffer, of at least one token each."""
    step = max(STAGE * x.shape[2] // (x.numel() * x.itemsize), 1)
    return [(begin, min(begin + step, x.shape[2])) for begin in range(0, x.shape[2], step)]
