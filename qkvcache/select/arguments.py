"""How many tokens attention reads, as users say it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

from ..formats.base import check_count
from ..storage import RowPages
from .budget import WHOLE, Budget
from .dispatch import BlockSelect
from .host_storage import HostRowPages

LEAST_READ, LEAST_AUTO = 512, 2048
"""The fewest tokens that attention reads under a budget that is a share, and under "auto"."""


class AttentionBudget(Budget):
    """A budget, as caches and batches use it."""

    @functools.cached_property
    def select(self) -> BlockSelect:
        """The choice of what attention reads of pages on the device."""
        return BlockSelect(self)

    def pages(self, on_host: bool) -> Callable[..., RowPages]:
        """What makes the pages of a layer, in host memory or on the device, with the arguments of `RowPages`."""
        return functools.partial(HostRowPages, budget=self) if on_host else functools.partial(RowPages, reads=self.select)


def budget_of(attention_budget: int | float | Literal["auto"] | None) -> AttentionBudget | None:
    """The tokens that attention reads. Raises TypeError for another type, ValueError for less than a token, and for a share that is not
    between 0 and 1."""
    if attention_budget is None:
        return None
    if attention_budget == "auto":
        return AttentionBudget(LEAST_AUTO, WHOLE // 4)
    if isinstance(attention_budget, bool) or not isinstance(attention_budget, int | float):
        raise TypeError(
            f"attention_budget={attention_budget!r}: expected a number of tokens, such as 4096, a share, such as 0.125, or 'auto'"
        )
    if isinstance(attention_budget, int):
        check_count("attention_budget", attention_budget, least=1)
        return AttentionBudget(attention_budget)
    if not 0 < attention_budget < 1:
        raise ValueError(f"attention_budget={attention_budget}: a share is between 0 and 1; pass a whole number for tokens")
    return AttentionBudget(LEAST_READ, math.ceil(attention_budget * WHOLE))
