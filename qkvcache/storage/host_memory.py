"""Host memory that a GPU reads and writes by its address."""

from __future__ import annotations

import torch
from torch import Tensor


class _Bytes:
    """A tensor of bytes in host memory, for `torch.as_tensor` on a GPU, which keeps it."""

    def __init__(self, x: Tensor):
        self.x = x
        self.__cuda_array_interface__ = {"shape": tuple(x.shape), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 2}


def zeros_on_host(nbytes: int, device: torch.device) -> Tensor:
    """Zeros in locked (pinned) host memory, uint8 `[nbytes]`, as a tensor of `device`. Operations on it are as slow as the bus, and need no
    other code. Raises NotImplementedError if `device` has other addresses for host memory."""
    if device.type != "cuda":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    held = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    found = torch.as_tensor(_Bytes(held), device=device)
    if found.data_ptr() != held.data_ptr():
        raise NotImplementedError(f"offload_pages on {device}, which cannot read host memory by its address: leave it out")
    return found
