"""`HostPool`: pages in host memory, and an index of them on the device."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from ..storage.pool import Numbers, PageLayout, PagePool, Slab, zeros
from .host_pages import index_names


class _Bytes:
    """A tensor of bytes in host memory, for `torch.as_tensor` on a GPU, which keeps it."""

    def __init__(self, x: Tensor):
        self.x = x
        self.__cuda_array_interface__ = {"shape": tuple(x.shape), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 2}


@torch.inference_mode(False)  # tensors made in inference mode cannot be written outside of it
def host_zeros(nbytes: int, device: torch.device) -> Tensor:
    """Zeros, uint8 `[nbytes]`, in locked (pinned) host memory, as a tensor of the GPU, whose operations on it are as slow as the bus; where
    there is no GPU, in its own. Raises NotImplementedError if `device` has other addresses for host memory."""
    if device.type != "cuda":
        return zeros(nbytes, device)
    held = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    found = torch.as_tensor(_Bytes(held), device=device)
    if found.data_ptr() != held.data_ptr():
        raise NotImplementedError(f"offload_pages on {device}, which cannot read host memory by its address: leave it out")
    return found


class HostSlab(Slab):
    """A slab in host memory."""

    zeros = staticmethod(host_zeros)

    def __setstate__(self, state: dict) -> None:
        data = state["data"]
        super().__setstate__(state | {"data": self.zeros(len(data), data.device).copy_(data)})


class IndexLayout(PageLayout):
    """The planes of a page of the index."""

    def keeps(self, side: int, name: str) -> bool:
        return not side and name in index_names(self.codecs[0], self.dims[0])


class HostPool(PagePool):
    """A pool in host memory. Where kernels read it, there is an `index` in pages with the same numbers: copies of what each step reads."""

    slab = HostSlab

    def __init__(self, layout: PageLayout, device: torch.device, by_address: bool):
        super().__init__(layout, device, by_address)
        has_index = by_address or device.type == "meta"  # which is for planning
        of_index = IndexLayout(*(getattr(layout, field.name) for field in fields(layout)))
        self.index = PagePool(of_index, device, True) if has_index else None

    def allocate(self, groups: int, neighbours: int) -> Numbers:
        numbers = super().allocate(groups, neighbours)
        if self.index is not None:
            self.index.allocate(groups, neighbours)
        return numbers

    def simulate(self, count: int) -> None:
        super().simulate(count)
        if self.index is not None:
            self.index.simulate(count)

    def trim(self) -> None:
        super().trim()
        if self.index is not None:
            kept = {slab.first for slab in self.slabs}
            self.index.slabs = [slab for slab in self.index.slabs if slab.first in kept]

    def copy(self, source: Numbers, target: Numbers) -> None:
        super().copy(source, target)
        if self.index is not None:
            self.index.copy(source, target)

    @property
    def host_nbytes(self) -> int:
        return self.nbytes

    def tensors(self):
        yield from super().tensors()
        yield from () if self.index is None else self.index.tensors()
