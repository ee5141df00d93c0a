"""`SlotPages`: the quantized tokens of one layer whose heads retain as many tokens each, but other ones.

The codes of new tokens overwrite the codes of evicted ones, separately in each head; retained tokens keep their slots."""

from __future__ import annotations

from torch import Tensor

from ..formats.base import Codec
from ..kernels import Pair
from ..storage.paged import RowPages
from .dispatch import launch_into


class SlotPages(RowPages):
    """`RowPages` in which a slot holds another token in each head."""

    def __init__(self, codecs: tuple[Codec, Codec], like: Pair):
        super().__init__(codecs, like, per_head=True)

    def replace(self, x: Pair, places: Tensor) -> None:
        """Quantizes keys and values `[B, H, T, D]` in place of the tokens `places` of each head, int64 `[B, H, T]`; negative for a
        token that is not stored."""
        if self.owned:
            self.own(0, self.numbers.shape[1])
        kind = "replace", x[0].shape, x[0].dtype
        if kind not in self.launches:
            self.launches[kind] = launch_into(self.pages, x)
        if (launch := self.launches[kind]) is not None:
            launch(x, places)
        else:
            self.store(x, self.pages.slots(places.clamp_min(0)).masked_fill(places < 0, -1))
