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
        self._running: list[Future] = []
        self._own = threading.local()

    def __call__(self, out: Tensor, x: Tensor) -> None:
        there = out if out.is_cuda else x
        if not there.is_cuda or out.device == x.device or x.ndim < 3 or not x.numel():
            out.copy_(x)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "qkvcache-copy")
        stream = torch.cuda.current_stream(there.device)
        for begin, end in _parts(x):
            self._running.append(self._pool.submit(self._send, out[:, :, begin:end], x[:, :, begin:end], stream))

    def wait(self) -> None:
        """Until all copies are done, or queued on the stream that was current when they were asked for; raises what they raised."""
        running, self._running = self._running, []
        wait(running)
        for copied in running:
            copied.result()

    def _send(self, out: Tensor, x: Tensor, stream: torch.cuda.Stream) -> None:
        if not hasattr(self._own, "buffer"):
            self._own.buffer, self._own.free = torch.empty(STAGE, dtype=torch.uint8, pin_memory=True), None
        if self._own.free is not None:
            self._own.free.synchronize()
        pinned = self._own.buffer[: x.numel() * x.itemsize].view(x.dtype).view(x.shape)
        with torch.inference_mode(), torch.cuda.stream(stream):  # what was made in inference mode may be written in no other
            if out.is_cuda:
                numpy.copyto(raw(pinned), raw(x))
                out.copy_(pinned, non_blocking=True)
                self._own.free = stream.record_event()
            else:
                pinned.copy_(x, non_blocking=True)
                stream.record_event().synchronize()
                numpy.copyto(raw(out), raw(pinned))


def raw(x: Tensor) -> numpy.ndarray:
    """The bytes of a tensor in host memory, a view. What numpy does with them takes one thread; torch would start a team for each copy."""
    return x.view(torch.uint8).numpy()


def _parts(x: Tensor) -> list[tuple[int, int]]:
    """Ranges of dimension 2 that fit into a buffer; one that does not is refused by no caller: a token is far smaller."""
    step = max(STAGE * x.shape[2] // (x.numel() * x.itemsize), 1)
    return [(begin, min(begin + step, x.shape[2])) for begin in range(0, x.shape[2], step)]
