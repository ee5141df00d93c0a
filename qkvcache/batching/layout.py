"""`BlockLayout`: the bytes of a page of a block.

    page    planes of the keys and of the values (`storage/pool.py`), then the exact keys and values of the first tokens `[H, S, D]`
    block   a page for each layer

The exact first tokens of a request are in its first block, so that they are copied, shared and offloaded with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..formats import Codec, Codes, Format
from ..kernels import Pair
from ..storage import PageLayout, aligned

PAGE_ALIGNMENT = 128
"""The alignment that transformers requires of blocks, in bytes."""


@dataclass(frozen=True)
class BlockLayout:
    """Pages of `page_size` tokens of `heads` heads with `head_dim` channels.

    Raises ValueError if the format cannot hold `head_dim`, or kernels cannot read pages of this size.
    """

    format: Format
    heads: int
    head_dim: int
    page_size: int
    num_sink_tokens: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.format.check(self.head_dim)
        if self.page_size < 64 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size={self.page_size}: compressed pages hold a power of two of tokens, 64 or more")

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return self.format.key, self.format.value

    @cached_property
    def page(self) -> PageLayout:
        return PageLayout(self.codecs, (self.head_dim, self.head_dim), self.heads, self.page_size, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of a page and its exact tokens."""
        exact = 2 * self.heads * self.num_sink_tokens * self.head_dim * self.dtype.itemsize
        return aligned(self.page.nbytes + exact, PAGE_ALIGNMENT)

    def views(self, pool: Tensor, page: int, pages_per_block: int) -> tuple[tuple[Codes, Codes], Pair]:
        """Views of page number `page` of all `N` blocks of `pool`, uint8 `[bytes]`: planes `[N, H', PAGE, width]` of
        keys and of values, and the exact first tokens `[N, H, S, D]` of both."""
        step, begin, size = self.nbytes * pages_per_block, page * self.nbytes, self.dtype.itemsize
        blocks, count = pool.numel() // step, self.num_sink_tokens * self.head_dim
        strides = step // size, count, self.head_dim, 1
        key, value = (
            pool.view(self.dtype).as_strided(
                (blocks, self.heads, self.num_sink_tokens, self.head_dim),
                strides,
                (begin + self.page.nbytes) // size + side * self.heads * count,
            )
            for side in (0, 1)
        )
        return self.page.views(pool, blocks, step=step, begin=begin), (key, value)
