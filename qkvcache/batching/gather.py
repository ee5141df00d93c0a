"""All tokens of requests, one after another: Triton where there is a kernel, else the torch reference."""

from __future__ import annotations

from torch import Tensor

from ..kernels import PagedInputs, Pair
from ..kernels.host.dispatch import dequantizes, module
from ..kernels.store import reference


def gather_rows(inputs: PagedInputs, new: Pair, starts: tuple[Tensor, Tensor], tiles: Tensor, out: Pair) -> None:
    """`reference.gather_rows`, in one launch where there is a kernel."""
    kernels = module(".batching.triton_gather") if dequantizes(inputs.pages, out) else reference
    kernels.gather_rows(inputs, new, starts, tiles, out)
