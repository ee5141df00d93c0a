"""Attention over the blocks that queries choose, and copies of what chooses them, by Triton kernels or the torch reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from ..kernels.attend.reference import Options
from ..kernels.host.dispatch import module
from ..kernels.pages import PagedInputs, Pages
from ..kernels.segments import Packed
from . import fetch_blocks as fetching
from . import select_blocks as selecting

Attend = Callable[..., tuple[Tensor, Tensor]]


def attend_pages(
    attend: Attend,
    by_kernel: bool,
    query: Tensor,
    inputs: PagedInputs,
    mask: Tensor | None,
    keys: list[Packed] | None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """`attend`, by kernels or not, over the blocks that `query` chooses. `keys`: as of `select_blocks`."""
    choose = module(".select.triton_select_blocks").select_blocks if by_kernel else functools.partial(selecting.select_blocks, keys=keys)
    parts = []
    for few, read, shown in selecting.groups(query, inputs, mask, options.get("causal", False)):
        selection = choose(few, read, shown, **options)
        if read.cache is None:
            read = read.twin(selection=selection)
        else:
            read = (module(".select.triton_fetch_blocks") if by_kernel else fetching).fetch_blocks(read, selection)
        parts.append(attend(few, read, shown, **options))
    if len(parts) == 1:
        return parts[0]
    outs, lse = zip(*parts, strict=True)
    return torch.cat([out.transpose(1, 2) for out in outs], dim=1).transpose(1, 2), torch.cat(lse, dim=2)


def index_of(pages: Pages, tokens: int, begin: int | None) -> Callable[[], None]:
    """A function that copies tokens into `pages.index`: `tokens` of them from `begin` on; None: the last ones, as the device counts."""
    return module(".select.triton_fetch_blocks").index_of(pages, tokens, begin)
