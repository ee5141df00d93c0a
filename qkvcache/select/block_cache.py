"""`BlockCache`: the blocks of pages in host memory that the device keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..formats.base import Codes
from ..kernels.pages import BLOCK, Pages


@dataclass(eq=False)
class BlockCache:
    """For each row and head, the blocks that attention read last.

    pages     the slots, pages of `BLOCK` tokens: `(b * H + h) * S + s` is the entry of slot `s` of head `h` of row `b`
    blocks    int32 `[B, H, S]`: the block in each slot; -1: none that counts
    hands     int32 `[B, H]`: the slot from which on a free one is looked for
    launches  arguments that kernels reuse, as `Prepared.of_layer`
    """

    pages: Pages
    blocks: Tensor
    hands: Tensor
    launches: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def of(pages: Pages, slots: tuple[Codes, Codes], blocks: Tensor, hands: Tensor) -> BlockCache:
        """The cache of blocks of `pages`, in the planes `slots` `[B * H * S, 1, BLOCK, width]`."""
        held = Pages(pages.codecs, [slots], [0], BLOCK, pages.statistics, pages.table, pages.lengths, pages.by_page)
        return BlockCache(held, blocks, hands)

    @property
    def tensors(self) -> list[Tensor]:
        return [*(x for side in self.pages.slabs[0] for x in side.values()), self.blocks, self.hands]
