"""`PageLayout`: the offsets of the planes in the bytes of a page.

    page    planes of the keys `[H', PAGE, width]`, planes of the values, the exact keys and values of the first tokens `[H, S, D]`
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

ALIGNMENT = 64
"""The alignment that kernels require of planes, in bytes."""
PAGE_ALIGNMENT = 128
"""The alignment that transformers requires of blocks, in bytes."""


@dataclass(frozen=True)
class PageLayout:
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
    def places(self) -> tuple[list[tuple[int, str, torch.dtype, int, int, int]], int, int]:
        """The side (0: keys), buffer, dtype, heads, width and first byte of each plane; the first byte of the exact
        tokens; and the bytes of a page."""
        planes, at = [], 0
        for side, codec in enumerate(self.codecs):
            for buffer in codec.buffers(self.head_dim):
                if buffer.tokens == "each":
                    dtype, heads = buffer.dtype or self.dtype, self.heads if buffer.heads == "each" else 1
                    planes.append((side, buffer.name, dtype, heads, buffer.width, at))
                    at += _aligned(heads * self.page_size * buffer.width * dtype.itemsize, ALIGNMENT)
        exact = 2 * self.heads * self.num_sink_tokens * self.head_dim * self.dtype.itemsize
        return planes, at, _aligned(at + exact, PAGE_ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return self.places[2]

    def views(self, pool: Tensor, page: int, pages_per_block: int) -> tuple[tuple[Codes, Codes], Pair]:
        """Views of page number `page` of all `N` blocks of `pool`, uint8 `[bytes]`: planes `[N, H', PAGE, width]` of
        keys and of values, and the exact first tokens `[N, H, S, D]` of both."""
        stride = self.nbytes * pages_per_block
        blocks = pool.numel() // stride

        def view(dtype: torch.dtype, heads: int, tokens: int, width: int, at: int) -> Tensor:
            size, shape = dtype.itemsize, (blocks, heads, tokens, width)
            strides = (stride // size, tokens * width, width, 1)
            return pool.view(dtype).as_strided(shape, strides, (page * self.nbytes + at) // size)

        planes, at, _ = self.places
        sides: tuple[Codes, Codes] = ({}, {})
        for side, name, dtype, heads, width, begin in planes:
            sides[side][name] = view(dtype, heads, self.page_size, width, begin)
        size = self.heads * self.num_sink_tokens * self.head_dim * self.dtype.itemsize
        key, value = (view(self.dtype, self.heads, self.num_sink_tokens, self.head_dim, at + side * size) for side in (0, 1))
        return sides, (key, value)


def _aligned(count: int, to: int) -> int:
    return -(-count // to) * to
