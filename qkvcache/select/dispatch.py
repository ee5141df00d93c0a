"""`BlockSelect`: attention over the blocks that queries choose, by Triton kernels or the torch reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import PagedInputs
from ..kernels.host.dispatch import module
from ..kernels.pages import BLOCK
from ..kernels.segments import Packed
from . import fetch_blocks as fetching
from . import select_blocks as selecting
from .block_cache import BlockCache
from .budget import Budget

MOST_QUERIES = 512
"""The most queries that read chosen blocks: a turn, not a part of a prompt, which reads all tokens."""


@dataclass(frozen=True, eq=False)
class BlockSelect:
    """The choice under a `budget` (`kernels.Select`).

    cache   of blocks, where the pages lie in host memory and there may be more tokens than the budget
    """

    budget: Budget
    cache: BlockCache | None = None

    @property
    def key(self) -> tuple[Budget, bool]:
        return self.budget, self.cache is None

    @property
    def tensors(self) -> Sequence[Tensor]:
        return () if self.cache is None else self.cache.tensors

    def reads_all(self, tokens: int) -> bool:
        return self.budget.tokens >= tokens

    def chooses(self, query: Tensor, inputs: PagedInputs) -> bool:
        """Whether there are more tokens than the budget, and choosing pays, as it always does where the others lie in host memory."""
        if query.shape[2] > MOST_QUERIES:
            return False
        skipped = inputs.max_length - self.budget.blocks(-(-inputs.max_length // BLOCK)) * BLOCK
        return skipped > 0 and (self.cache is not None or self.budget.pays(skipped * query.shape[0], inputs.ring[0]))

    def attend(
        self,
        attend: Callable[..., tuple[Tensor, Tensor]],
        by_kernel: bool,
        query: Tensor,
        inputs: PagedInputs,
        mask: Tensor | None,
        keys: list[Packed] | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        choose: Callable = functools.partial(selecting.select_blocks, keys=keys)
        fetch = fetching.fetch_blocks
        if by_kernel:
            choose = module(".select.triton_select_blocks").select_blocks
            fetch = module(".select.triton_fetch_blocks").fetch_blocks
        parts = []
        for few, read, shown in selecting.groups(query, inputs, mask, options.get("causal", False)):
            selection = choose(few, read, self.budget, shown, **options)
            chosen = fetch(read, self.cache, selection) if self.cache else selecting.over_blocks(read, selection)
            parts.append(attend(few, chosen, shown, **options))
        if len(parts) == 1:
            return parts[0]
        outs, lse = zip(*parts, strict=True)
        return torch.cat([out.transpose(1, 2) for out in outs], dim=1).transpose(1, 2), torch.cat(lse, dim=2)
