"""Between host memory and devices: where each layer lives, and copies that a GPU takes at the speed of its bus."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedModel

STAGE = 8 * 2**20
"""Bytes of a pinned buffer; each thread has one."""
SMALL = 2**20
"""Bytes that are sooner copied than handed to a thread."""
THREADS = min(os.cpu_count() or 1, 12)


def layer_devices(model: PreTrainedModel, layers: int) -> list[torch.device]:
    """Where each layer's keys and values are computed."""
    devices = [model.device] * layers
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and 0 <= index < layers:
            hook = getattr(module, "_hf_hook", None)
            weight = next(module.parameters(), None)
            device = getattr(hook, "execution_device", None) or (None if weight is None else weight.device)
            if device is not None:
                devices[index] = torch.device(device)
    return devices


class Staging:
    """Copies between host memory and GPUs through pinned buffers, filled and emptied by several threads: one is slower than the bus.

    Pinning entries would save the step, but pinned memory is rounded up to powers of two, cannot be swapped, and takes longer to make than
    a copy does. What was called for is there after `wait`; on a GPU, for what its current stream does then.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[tuple[torch.cuda.Stream, Future]] = []
        self._own = threading.local()

    def __call__(self, out: Tensor, x: Tensor) -> None:
        there = out if out.is_cuda else x
        if not there.is_cuda or out.device == x.device or x.ndim < 3:
            out.copy_(x)
            return
        if x.numel() * x.itemsize < SMALL:
            out.copy_(x if x.is_cuda or x.is_contiguous() else torch.from_numpy(numpy.ascontiguousarray(raw(x))).view(x.dtype))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "qkvcache-copy")
        stream = torch.cuda.current_stream(there.device)
        ready = stream.record_event()  # before, others may use the memory
        for begin, end in _parts(x):
            self._running.append((stream, self._pool.submit(self._send, out[:, :, begin:end], x[:, :, begin:end], ready)))

    def wait(self) -> None:
        """Until all copies are done, or the streams that were current when they were asked for wait for them; raises what they raised."""
        running, self._running = self._running, []
        wait(copied for _, copied in running)
        for stream, copied in running:
            if (done := copied.result()) is not None:
                stream.wait_event(done)

    def _send(self, out: Tensor, x: Tensor, ready: torch.cuda.Event) -> torch.cuda.Event | None:
        """On a stream of this thread: on that of all, one copy would wait for the others, and so would what the caller does meanwhile."""
        own, device = self._own, out.device if out.is_cuda else x.device
        if not hasattr(own, "buffer"):
            own.buffer, own.free, own.streams = torch.empty(STAGE, dtype=torch.uint8, pin_memory=True), None, {}
        if device not in own.streams:
            own.streams[device] = torch.cuda.Stream(device)
        if own.free is not None:
            own.free.synchronize()
        pinned = own.buffer[: x.numel() * x.itemsize].view(x.dtype).view(x.shape)
        with torch.inference_mode(), torch.cuda.stream(own.streams[device]):  # what is made in inference mode may be written in no other
            own.streams[device].wait_event(ready)
            if out.is_cuda:
                numpy.copyto(raw(pinned), raw(x))
                out.copy_(pinned, non_blocking=True)
                own.free = own.streams[device].record_event()
                return own.free
            pinned.copy_(x, non_blocking=True)
            own.streams[device].record_event().synchronize()
            numpy.copyto(raw(out), raw(pinned))
            return None


def raw(x: Tensor) -> numpy.ndarray:
    """The bytes of a tensor in host memory, a view. What numpy does with them takes one thread; torch would have a team copy what is not
    contiguous, and wait for its members that are busy."""
    return x.view(torch.uint8).numpy()


def _parts(x: Tensor) -> list[tuple[int, int]]:
    """Ranges of dimension 2 that fit into a buffer; one that does not is refused by no caller: a token is far smaller."""
    step = max(STAGE * x.shape[2] // (x.numel() * x.itemsize), 1)
    return [(begin, min(begin + step, x.shape[2])) for begin in range(0, x.shape[2], step)]
