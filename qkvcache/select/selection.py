"""The blocks that were chosen, and attention over the pages that hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.base import Codes
from ..kernels.pages import BLOCK, Pages


@dataclass(eq=False)
class Selection:
    """The blocks of quantized tokens that attention reads (`select_blocks.py`).

    blocks   int32 `[B, H, N]`: their indices in the row's pages, ascending, in the first entries
    entries  `[B, H, N]`: the entries of their pages, in the table's dtype
    lengths  int32 `[B, H]`: tokens in these blocks; the last block of a row may have fewer than `BLOCK`. Tokens of the first block that
             come before BEGIN are counted, and not read
    """

    blocks: Tensor
    entries: Tensor
    lengths: Tensor

    def places(self) -> Tensor:
        """The index of each token in its row's pages, int64 `[B, H, N * BLOCK]`, -1 beyond `lengths`."""
        offset = torch.arange(BLOCK, device=self.blocks.device)
        places = (self.blocks[..., None].long() * BLOCK + offset).flatten(2)
        inside = torch.arange(places.shape[2], device=places.device) < self.lengths[..., None]
        return places.masked_fill(~inside, -1)


class ChosenPages(Pages):
    """`pages`, of which attention reads the blocks of a selection."""

    def __init__(self, pages: Pages, selection: Selection) -> None:
        self.selection = selection
        chosen = {"table": selection.entries, "chosen": (selection.blocks, selection.lengths)}
        self.__dict__ |= pages.__dict__ | chosen  # `dataclasses.replace` takes five times as long, at every step

    @property
    def per_head(self) -> bool:
        return False

    def read(self, side: int, most: int) -> tuple[Codes, Tensor]:
        places, size = self.selection.places(), self.page_size
        first = places[:, :, ::BLOCK]
        slots = torch.where(first < 0, self.firsts[0] * size, self.table.long() * size + first % size)
        codes = self.take(side, slots, BLOCK)
        for x in codes.values():
            x.view(torch.uint8).masked_fill_(places[..., None] < 0, 0)
        return codes | self.statistics[side], places
