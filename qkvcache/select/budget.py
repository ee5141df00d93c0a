"""`Budget`: how many of the quantized tokens a query reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from torch import Tensor

from ..kernels.pages import BLOCK

WHOLE = 2**16
"""The share that is everything."""
LEAST_SKIPPED = 2**19
"""The fewest vectors, tokens times KV heads of all rows, that must be left out so that a GPU gains by it."""


@dataclass(frozen=True)
class Budget:
    """The quantized tokens that a query and KV head read: at least `tokens`, and at least `share` of those stored, in parts of `WHOLE`; in
    whole blocks."""

    tokens: int
    share: int = 0

    def blocks(self, stored: int) -> int:
        """The blocks that are read of `stored` blocks."""
        return min(max(-(-self.tokens // BLOCK), -(-self.share * stored // WHOLE)), stored)

    def pays(self, skipped: int, ring: Tensor) -> bool:
        """Whether not reading `skipped` tokens of all rows takes less time than choosing blocks. `ring`: `[F, H, R, D]`."""
        return skipped > 0 and (ring.device.type != "cuda" or skipped * ring.shape[1] >= LEAST_SKIPPED)

    def pays_in_rows(self, lengths: numpy.ndarray, ring: Tensor) -> bool:
        """`pays` for rows of `lengths` tokens `[B]`."""
        skipped = lengths - numpy.maximum(lengths * self.share // WHOLE, self.tokens)
        return self.pays(int(skipped.clip(0).sum()), ring)
