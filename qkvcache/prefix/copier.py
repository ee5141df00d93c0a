"""`PinnedCopier`: copies between host memory and GPUs at the speed of the bus; and which device each layer is on."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedModel

STAGE = 8 * 2**20
"""Bytes of the pinned buffer of a thread."""
SMALL = 2**20
"""Bytes below which a copy is not handed to a thread."""
THREADS = min(os.cpu_count() or 1, 12)


def layer_devices(model: PreTrainedModel, layers: int) -> list[torch.device]:
    """The device on which the keys and values of each layer are computed."""
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


class PinnedCopier:
    """Copies between host memory and GPUs through pinned buffers. Several threads fill and empty them, since one is slower than the bus.

    Entries themselves are not pinned: pinned memory is rounded up to powers of two, cannot be swapped, and takes longer to allocate than a
    copy takes. Copies are complete after `wait`; on a GPU, for what its current stream does afterwards.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[tuple[torch.cuda.Stream, Future]] = []
        self._local = threading.local()

    def __call__(self, out: Tensor, x: Tensor) -> None:
        on_gpu = out if out.is_cuda else x
        if not on_gpu.is_cuda or out.device == x.device or x.ndim < 3:
            out.copy_(x)
            return
        if x.numel() * x.itemsize < SMALL:
            out.copy_(x if x.is_cuda or x.is_contiguous() else torch.from_numpy(numpy.ascontiguousarray(as_bytes(x))).view(x.dtype))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "qkvcache-copy")
        stream = torch.cuda.current_stream(on_gpu.device)
        ready = stream.record_event()  # before it, others may use the memory
        for begin, end in _parts(x):
            self._running.append((stream, self._pool.submit(self._send, out[:, :, begin:end], x[:, :, begin:end], ready)))

    def wait(self) -> None:
        """Waits for all copies, or makes the streams that were current at their calls wait for them. Raises their errors."""
        running, self._running = self._running, []
        wait(copied for _, copied in running)
        for stream, copied in running:
            if (done := copied.result()) is not None:
                stream.wait_event(done)

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


def _parts(x: Tensor) -> list[tuple[int, int]]:
    """Ranges of dimension 2 whose bytes fit into a buffer, of at least one token each."""
    step = max(STAGE * x.shape[2] // (x.numel() * x.itemsize), 1)
    return [(begin, min(begin + step, x.shape[2])) for begin in range(0, x.shape[2], step)]
