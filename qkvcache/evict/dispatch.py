"""Kernels of eviction: Triton where there are, else the torch reference; in compiled code operators of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.host.dispatch import module, on_triton, quantizes
from ..kernels.host.handles import ORDER, inputs_of
from ..kernels.host.ops import HANDLE, operator
from ..kernels.pages import Pages
from ..kernels.segments import Pair
from . import replace as replacing
from . import rotate as rotating
from . import static as evicting
from .static import StaticTensors

KERNELS, REPLACEMENT, ROTATION = ".evict.triton_static", ".evict.triton_replace", ".evict.triton_rotate"
STATIC = f"{HANDLE}, Tensor[] records, Tensor column_mask, Tensor row_lengths, Tensor columns"
"""`StaticTensors.arguments`"""


def append_token(static: StaticTensors, x: Pair, new: Sequence[Tensor | None], is_valid: Tensor | None) -> None:
    """`static.append_token`, in one launch where there are kernels."""
    if torch.compiler.is_compiling():
        torch.ops.qkvcache.append_token(static.inputs.handle, ORDER[x[0].device], *static.arguments, *x, list(new), is_valid)
        return
    kernels = module(KERNELS) if on_triton(static.row_lengths.device) else evicting
    kernels.append_token(static, x, new, is_valid)


def evict_token(static: StaticTensors, order: Tensor) -> Tensor:
    """`static.evict_token`, in one launch where there is a kernel for the codecs."""
    if torch.compiler.is_compiling():
        return torch.ops.qkvcache.evict_token(static.inputs.handle, ORDER[order.device], *static.arguments, order)
    pages = static.inputs.pages
    shared = any(
        b.heads == "shared" and b.tokens == "each"
        for codec, x in zip(pages.codecs, static.ring, strict=True)
        for b in codec.buffers(x.shape[3])
    )
    # Each head stores a copy of shared buffers, since it evicts on its own.
    kernels = module(KERNELS) if pages.by_page and quantizes(pages.codecs, static.ring) and not shared else evicting
    return kernels.evict_token(static, order)


def launch_into(pages: Pages, x: Pair) -> Callable[[Pair, Tensor], None] | None:
    """A function that quantizes keys and values like `x` in place of tokens of their rows, int64 `[B, H, T]`, negative for those that are
    not stored, with its launch prepared; None if there is no kernel for it."""
    if not (pages.by_page and x[0].numel() and quantizes(pages.codecs, x)):
        return None
    return module("store.triton_store").launch_into(pages, x)


def replace_lowest(
    priority: Tensor, union: dict[str, Tensor], region: dict[str, Tensor], num_sinks: int, first_recent: int | Tensor
) -> Tensor:
    """`replace.replace_lowest`, in one launch where there is a kernel, which takes a few new tokens."""
    few = priority.shape[2] - region["positions"].shape[2] <= replacing.MOST
    kernels = module(REPLACEMENT) if few and on_triton(priority.device) else replacing
    return kernels.replace_lowest(priority, union, region, num_sinks, first_recent)


def rotate(x: Tensor, by: Tensor, inv_freq: Tensor, interleaved: bool) -> Tensor:
    """`rotate.rotate`, in one launch where there is a kernel, which has neither gradients nor an operator of torch."""
    plain = not (torch.is_grad_enabled() and x.requires_grad) and not x.is_meta and not torch.compiler.is_compiling()
    kernels = module(ROTATION) if plain and on_triton(x.device) and module(ROTATION).supports(x) else rotating
    return kernels.rotate(x, by, inv_freq, interleaved)


@operator(
    "append_token",
    f"{STATIC}, Tensor key, Tensor value, Tensor?[] new, Tensor? is_valid",
    mutates=["order", "records", "column_mask", "row_lengths", "columns"],
)
def _append_token(handle, order, *args):
    *static, key, value, new, is_valid = args
    append_token(StaticTensors.of(inputs_of(handle), *static), (key, value), new, is_valid)


@operator("evict_token", f"{STATIC}, Tensor token_order", "Tensor", mutates=["order", "records", "column_mask"])
def _evict_token(handle, order, *args):
    *static, token_order = args
    return evict_token(StaticTensors.of(inputs_of(handle), *static), token_order)


@_evict_token.register_fake
def _(*args):
    return args[-1].new_empty(args[-1].shape[:2])
