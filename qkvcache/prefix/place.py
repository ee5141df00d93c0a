"""Between host memory and devices: where each layer lives, and copies that a GPU takes at the speed of its bus."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

STAGE = 32 * 2**20
"""Bytes of a pinned buffer; there are two."""


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
    """Copies tensors from host memory through two pinned buffers: while one is on its way to the GPU, the other is filled.

    Pinning entries would save the step, but pinned memory is rounded up to powers of two, cannot be swapped, and takes longer to make than
    a copy does.
    """

    def __init__(self) -> None:
        self._stages: dict[torch.device, list[tuple[Tensor, torch.cuda.Event]]] = {}

    def __call__(self, out: Tensor, x: Tensor) -> None:
        if out.device.type != "cuda" or x.ndim < 3 or not x.numel():
            out.copy_(x)
            return
        with torch.cuda.device(out.device):
            for begin, end in _parts(x):
                buffer, arrived = self._next(out.device)
                part = x[:, :, begin:end]
                arrived.synchronize()
                pinned = buffer[: part.numel() * part.itemsize].view(part.dtype).view(part.shape)
                pinned.copy_(part)
                out[:, :, begin:end].copy_(pinned, non_blocking=True)
                arrived.record()

    def _next(self, device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
        if device not in self._stages:
            buffers = [torch.empty(STAGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._stages[device] = [(buffer, torch.cuda.Event()) for buffer in buffers]
        stages = self._stages[device]
        stages.reverse()
        return stages[0]


def _parts(x: Tensor) -> list[tuple[int, int]]:
    """Ranges of dimension 2 that fit into a buffer; one that does not is refused by no caller: a token is far smaller."""
    step = max(STAGE * x.shape[2] // (x.numel() * x.itemsize), 1)
    return [(begin, min(begin + step, x.shape[2])) for begin in range(0, x.shape[2], step)]
