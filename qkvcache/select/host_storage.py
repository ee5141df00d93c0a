"""`HostRowPages`: the quantized tokens of a layer in host memory, of which the device keeps an index and the blocks that it read last."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import Pair
from ..kernels.pages import BLOCK
from ..storage.paged import PAGE, RowPages
from ..storage.pool import zeros
from .block_cache import BlockCache
from .budget import Budget
from .dispatch import BlockSelect
from .host_pages import HostPages
from .host_pool import HostPool


class HostRowPages(RowPages):
    """`RowPages` in host memory, for attention with a `budget`."""

    pool_of = HostPool
    pool: HostPool
    cache: BlockCache | None = None
    """The blocks that the device keeps, once there may be more tokens than the budget."""

    def __init__(self, codecs: tuple[Codec, Codec], like: Pair, budget: Budget, **options: Any):
        self.budget, self.index_table = budget, like[0].new_empty(0, dtype=torch.int64)
        """`index_table`: the entries of the pages of the index, if there is one."""
        super().__init__(codecs, like, **options)

    def __getstate__(self) -> dict:
        """Also leaves out the cache, and the table of the index, which `bind` makes anew."""
        return {name: x for name, x in super().__getstate__().items() if name not in ("cache", "reads", "index_table")}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state | {"index_table": state["table"][..., :0]})

    def bind(self) -> None:
        super().bind()
        if (index := self.pool.index) is not None:
            firsts, pages = index.firsts(), self.pages
            self.index_table = self._entered(index, self.index_table, firsts)
            held = replace(pages, slabs=index.planes(), firsts=firsts, table=self.index_table)
            self.pages = HostPages(**vars(pages), index=held)
        self._keep_blocks(self.capacity // BLOCK)

    def _keep_blocks(self, stored: int) -> None:
        """Makes room for blocks of `stored` ones."""
        self.cache = self._block_cache(stored)
        self.reads = BlockSelect(self.budget, self.cache)

    def _block_cache(self, stored: int) -> BlockCache | None:
        """The cache of blocks of `stored` ones: the present one, or a new one where it has not slots enough or is for other rows."""
        layout, cache, budget = replace(self.pool.layout, heads=1, page_size=BLOCK), self.cache, self.budget
        read = budget.blocks(stored)
        if self.grows:  # so that the addresses that are compiled into steps remain
            read = max(read, budget.blocks(-(-budget.tokens // BLOCK)))
        elif read == stored and not self.static:
            return None
        shape, slots = (len(self.numbers), self.pool.layout.heads), 2 * read if self.grows or not self.static else min(2 * read, stored)
        if cache is None or cache.blocks.shape[:2] != shape or cache.blocks.shape[2] < (read if budget.share else slots):
            count = math.prod(shape) * slots
            planes = layout.views(zeros(count * layout.nbytes, self.pool.device), count, step=layout.nbytes)
            with torch.inference_mode(False):
                held = torch.full((*shape, slots), -1, dtype=torch.int32, device=self.pool.device)
                return BlockCache.of(self.pages, planes, held, torch.zeros(shape, dtype=torch.int32, device=self.pool.device))
        return BlockCache.of(self.pages, cache.pages.slabs[0], cache.blocks, cache.hands)

    def forget(self) -> None:
        """Empties the cache of blocks: tokens are about to change."""
        if self.cache is not None:
            self.cache.blocks.fill_(-1)

    def truncate(self, length: int) -> None:
        self.forget()
        super().truncate(length)

    def select(self, rows: Sequence[int]) -> None:
        pool, cache, before = self.pool, self.cache, len(self.numbers)
        super().select(rows)
        if self.pool is not pool:
            self._copy_index(self.length, 0)
        if self.cache is None or cache is None or self.cache.blocks.shape[2] != cache.blocks.shape[2]:
            self.forget()
            return
        index = torch.tensor(rows, dtype=torch.int64, device=self.pool.device)
        for new, old in zip(self.cache.tensors, cache.tensors, strict=True):  # blocks go with their rows
            new.unflatten(0, (len(rows), -1)).copy_(old.unflatten(0, (before, -1)).index_select(0, index))

    def simulate_pages(self, width: int, count: int) -> None:
        super().simulate_pages(width, count)
        self._keep_blocks(width * PAGE // BLOCK)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors()
        if self.index_table.numel():
            yield "bookkeeping", self.index_table
        if self.cache is not None:
            yield from self.pool.layout.roles(self.cache.pages.slabs[0])
            yield from (("bookkeeping", x) for x in (self.cache.blocks, self.cache.hands))

    def _quantize(self, x: Pair, slots: Tensor | int) -> None:
        super()._quantize(x, slots)
        if isinstance(slots, int):
            self._copy_index(x[0].shape[2], slots)

    def _load_codes(self, codes: tuple[Codes, Codes]) -> None:
        super()._load_codes(codes)
        self._copy_index(self.length, 0)

    def _copy_index(self, tokens: int, begin: int) -> None:
        """Copies `tokens` tokens from `begin` on into the index, if there is one."""
        if isinstance(self.pages, HostPages) and tokens:
            self.pages.copy_of(tokens, begin)()
