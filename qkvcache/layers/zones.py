"""The three zones of one side of a layer, in token order: the exact first tokens, the body that is compressed, the exact recent tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..formats.base import Codec
from ..kernels import Exact, Packed, Segment, Side
from .slots import PAGE, Slots

BLOCK = 2**20
"""Elements that are encoded, or decoded by the torch reference, at a time: the bound on temporaries (4 MiB in fp32). Fewer cost a CPU more
in calls than they save in cache."""
GROUP = 32
"""Tokens that leave the recent zone together, if it is at least that long."""


def block_of(like: Tensor) -> int:
    """Tokens `[B, H, T, D]` in a block, a whole number of pages."""
    batch, heads, _, dim = like.shape
    return max(BLOCK // (batch * heads * dim) // PAGE, 1) * PAGE


class Zones:
    """The three zones of one side. Exact tensors are `[B, H, T, D]`, empty (`T` = 0) where there is nothing.

    A step is `extend`, `side`, `leave`, `keep`: new tokens join the recent zone, attention reads, the oldest of them leave, the rest stay.
    """

    def __init__(self, codec: Codec, like: Tensor, exact_first: int, exact_recent: int):
        self.exact_first, self.exact_recent = exact_first, exact_recent
        self.first = self.recent = like[:, :, :0].detach().clone()
        self.body = Slots(codec, like.shape[3])

    @property
    def length(self) -> int:
        return self.first.shape[2] + self.body.length + self.recent.shape[2]

    @property
    def block(self) -> int:
        return block_of(self.first)

    def extend(self, new: Tensor) -> None:
        self.borrowed = not self.recent.shape[2]
        self.recent = new if self.borrowed else torch.cat([self.recent, new], dim=2)

    def side(self) -> Side:
        """What attention over everything stored reads."""
        batch, heads, _, dim = self.first.shape
        first, recent, codec, blocks = self.first, self.recent, self.body.codec, self.body.blocks(self.block)

        def build() -> tuple[Segment, ...]:
            packed = (Packed(codec, codes, count, dim) for codes, count in blocks)
            row: tuple[Segment, ...] = (Exact(first), *packed, Exact(recent))
            return tuple(segment for segment in row if segment.tokens)

        return Side(build, (batch, heads, self.length, dim), first.dtype, first.device)

    def leave(self) -> Tensor | None:
        """Fills the first zone; returns the oldest recent tokens, for the body, if enough of them are there."""
        recent = self.recent.detach()
        missing = self.exact_first - self.first.shape[2]
        if missing > 0:  # the body is empty then
            self.first = torch.cat([self.first, recent[:, :, :missing]], dim=2)
            recent = recent[:, :, missing:]
        self.recent = recent
        leaving = recent.shape[2] - self.exact_recent
        if leaving <= min(GROUP, self.exact_recent):
            return None
        self.recent = recent[:, :, leaving:]
        return recent[:, :, :leaving]

    def keep(self) -> None:
        """Makes the recent zone a copy of its own: what came in is the caller's, and what is left may be a view of something larger."""
        own = not self.borrowed and self.recent.untyped_storage().nbytes() == self.recent.numel() * self.recent.itemsize
        if not own:
            self.recent = self.recent.clone()

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        length = min(max(length, 0), self.length)
        body = length - self.first.shape[2]
        recent = body - self.body.length
        self.recent = self.recent[:, :, : max(recent, 0)]
        self.body.truncate(max(body, 0))
        self.first = self.first[:, :, :length]

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.first, self.recent = fn(self.first), fn(self.recent)
        self.body.map(fn)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("exact", self.first), ("exact", self.recent))
        yield from self.body.tensors()
