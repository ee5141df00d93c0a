"""`BlockLayout`: the bytes of a page of a block.

    page    planes of the keys and of the values (`storage/pool.py`), then the exact keys and values of the first tokens `[H, S, D]`
    block   a page for each layer

The exact first tokens of a request are in its first block, so that they are copied, shared and offloaded with it. Layers with a sliding
window leave their space empty: pages of all layers have the same size, so that transformers' sectors stay small.
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
    window: int | None = None
    """The sliding window of the layers in tokens; None: they attend to all tokens."""

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
    def exact(self) -> int:
        """First tokens of a request that are exact: none where they leave the window."""
        return self.num_sink_tokens if self.window is None else 0

    @property
    def blocks_held(self) -> int | None:
        """The most blocks of a request with a window, which page `n` of its tokens takes in turn: `n % blocks_held`."""
        return None if self.window is None else -(-self.window // self.page_size)

    @property
    def pages_read(self) -> int | None:
        """The most pages in which the tokens of a window are."""
        return None if self.window is None else (self.window + self.page_size - 2) // self.page_size + 1

    @property
    def nbytes(self) -> int:
        """Bytes of a page and its exact tokens."""
        return aligned(self.page.nbytes + self._nbytes_of(self.num_sink_tokens), PAGE_ALIGNMENT)

    def ring_bytes(self, residual_length: int) -> int:
        """Bytes of the last `residual_length` tokens of a request, and of the new one, in the model's dtype."""
        return self._nbytes_of(residual_length + 1)

    def _nbytes_of(self, tokens: int) -> int:
        return 2 * self.heads * tokens * self.head_dim * self.dtype.itemsize

    def views(self, pool: Tensor, page: int, pages_per_block: int) -> tuple[tuple[Codes, Codes], Pair]:
        """Views of page number `page` of all `N` blocks of `pool`, uint8 `[bytes]`: planes `[N, H', PAGE, width]` of
        keys and of values, and the exact first tokens `[N, H, S, D]` of both."""
        step, begin = self.nbytes * pages_per_block, page * self.nbytes
        first, shape = begin + self.page.nbytes, (2, self.heads, self.num_sink_tokens, self.head_dim)
        blocks = pool.view(-1, step)
        key, value = blocks[:, first : first + self._nbytes_of(self.num_sink_tokens)].view(self.dtype).unflatten(1, shape).unbind(1)
        return self.page.views(pool, len(blocks), step=step, begin=begin), (key, value)
