"""Budgets: how many tokens a layer, or each of its heads, may hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from ...formats.base import check_count

LEAST, LEAST_OF_SHARE = 8, 64
"""The smallest sizes of a budget by head and of a share, in tokens. Tokens that stay exact must be recent in the smallest budget."""
TOKENS_PER_INTERVAL, MOST_INTERVAL = 128, 64
INTERVAL_OF_SHARE = 8
"""The least interval of a budget with a share, whose tokens are not known. With 1, HumanEval took 22 s in place of 14 (`eval/tasks.py`)."""
Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True)
class Budget:
    """The budget of each head: `tokens`, plus a `share` of the tokens seen.

    heads: a part for each KV head of a layer, relative to the others; (): all parts are equal. All heads hold the sinks
        and recent tokens; the rest of the heads' common budget is divided in proportion to their parts.
        `HeadProfile.budget` makes the parts.
    """

    tokens: int = 0
    share: float = 0.0
    heads: tuple[float, ...] = ()

    def size(self, seen: Count) -> Count:
        """The number of tokens that may be held when `seen` have been seen; a tensor for a tensor."""
        return self.tokens if not self.share and isinstance(seen, int) else self.tokens + share_of(self.share, seen)

    def __str__(self) -> str:
        """The option in short: `256`, `0.25`, `516 + 0.2`, and "by head" if heads differ."""
        sizes = " + ".join(str(size) for size in (self.tokens, self.share) if size)
        return f"{sizes} by head" if self.heads else sizes


ONE = 2**32
"""1.0 in the fixed-point format of shares."""


def share_of(share: float, count: Any) -> Any:
    """`share` of `count`, rounded down, the same for numbers and tensors and without fp64, which not all devices have."""
    return (count * round(share * ONE) + 2**22) >> 32


def times(count: Any, weight: Any) -> Any:
    """`count * weight / ONE`, rounded down, for whole numbers and int64 tensors. A weight may be too small by its
    rounding."""
    return (count * weight + 2**22) >> 32


def usual_interval(tokens: int, least: int = 1) -> int:
    return min(max(tokens // TOKENS_PER_INTERVAL, least), MOST_INTERVAL)


def budgets_of(budget: int | float | Budget | Sequence[int | float | Budget]) -> tuple[Budget, ...]:
    """The budgets of `Policy.budget`: one for all layers, or one for each full-attention layer."""
    several = budget if isinstance(budget, Sequence) and not isinstance(budget, str) else (budget,)
    if not several:
        raise ValueError(f"budget={budget!r}: holds none; pass one for all layers, or one for each full-attention layer")
    return tuple(map(_budget_of, several))


def _budget_of(budget: int | float | Budget) -> Budget:
    if isinstance(budget, Budget):
        check_count("Budget.tokens", budget.tokens, 0)
        if not 0 <= budget.share <= 1 or not (budget.tokens or budget.share):
            raise ValueError(f"{budget!r}: share must be from 0 to 1, and one of the two above 0")
        if budget.heads and not (all(0 <= part < math.inf for part in budget.heads) and sum(budget.heads) > 0):
            raise ValueError(f"Budget.heads={budget.heads}: parts must be 0 or more, and one of them above 0")
        return budget
    check_size("budget", budget, 1)
    if isinstance(budget, float) and budget == 1:
        raise ValueError(
            "budget=1.0: a share of 1 evicts nothing; leave the policy out, or pass a number of tokens (int) or a share below 1"
        )
    return Budget(share=budget) if isinstance(budget, float) else Budget(tokens=budget)


def check_size(name: str, size: int | float, least: int = 0) -> None:
    """`least` or more tokens, or a share, which is above 0 where `least` is."""
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise TypeError(f"{name} must be a number of tokens (int) or a share (float), got {size!r}")
    if size < 0 or (least and not size) or (isinstance(size, float) and not size <= 1):
        shares = "above 0 and below 1" if least else "from 0 to 1"
        raise ValueError(f"{name}={size!r}: must be {least} or more tokens (int), or a share {shares} (float)")
