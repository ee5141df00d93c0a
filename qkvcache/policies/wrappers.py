"""Wrappers of a policy, as kvpress has them: `AdaKV(SnapKV(budget=0.5))`. A wrapped policy must have scores that are
weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .base import KEPT, Policy, Tokens, given
from .budget import Budget, share_of
from .ranking import highest, total_order


class Wrapper(Policy if TYPE_CHECKING else object):  # type: ignore[misc]
    """A policy that has the options and does the work of `policy`, except for what the wrapper defines."""

    policy: Policy

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise TypeError(f"{type(self).__name__} wraps a policy such as SnapKV(budget=1024), got {self.policy!r}")
        self.policy.require_weights(type(self).__name__)

    def __getattr__(self, name: str) -> Any:
        if name == "policy" or name.startswith("__"):  # there are no fields yet while a copy is made
            raise AttributeError(name)
        return getattr(self.policy, name)

    def with_options(self, **options: Any) -> Policy:
        return replace(self, policy=self.policy.with_options(**options))

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.policy.name})"


Policy.register(Wrapper)  # in place of a subclass, which would have the options once more


@dataclass(frozen=True)
class AdaKV(Wrapper):
    """The heads of a layer share their budgets (AdaKV, arXiv 2407.11550): of `H * budget` tokens, each head is
    guaranteed a share, and the rest goes to the tokens of highest priority in any head.

        AdaKV(SnapKV(budget=1024))  # 1,024 tokens for each head, on average

    With tensor parallelism, the heads of each process share theirs.

    Args:
        policy: the policy that ranks the tokens.
        alpha_safeguard: share of the budget that each head is guaranteed, from 0 to 1.

    Raises ValueError for a policy whose scores are not weights, whose heads divide a budget already (`Budget.heads`,
    `KVzip`), or that ranks in two stages (`CriticalKV`).
    """

    policy: Policy
    alpha_safeguard: float = 0.2

    differs_by_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy.differs_by_head:
            raise ValueError(f"{self.name}: its heads divide the budget of a layer already; pass one of the two")
        if self.policy.needs_output_projection:
            raise ValueError(f"{self.name}: the second stage compares tokens of one head only; pass one of the two")
        check_safeguard(self.alpha_safeguard)


@dataclass(frozen=True)
class CriticalKV(Wrapper):
    """Tokens are selected in two stages (CriticalKV, arXiv 2502.03805): a share of the budget goes to the highest
    scores, and the others compete by their share of all scores times the norm of their value in the layer's output.

        CriticalKV(H2O(budget=0.5, recent=64))

    The authors take the 1-norm; here it is the 2-norm, which takes a `D x D` matrix for each head.

    Args:
        policy: the policy whose scores count.
        epsilon: added to each token's share of all scores in the second stage.
        first_stage_ratio: share of the budget for the highest scores, from 0 to below 1.

    Raises ValueError for a policy whose scores are not weights or have the norms of values in them, or whose heads
    share budgets (`AdaKV`, `KVzip` without `alpha_safeguard=None`).
    """

    policy: Policy
    epsilon: float = 1e-4
    first_stage_ratio: float = 0.5

    needs_output_projection: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.first_stage_ratio < 1:
            raise ValueError(f"first_stage_ratio={self.first_stage_ratio!r}: must be a share of the budget, from 0 to below 1")
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon={self.epsilon!r}: must be 0 or more")
        if self.policy.alpha_safeguard is not None:
            raise ValueError(f"{self.name}: the second stage compares tokens of one head only; pass one of the two")
        for option in ("value_norm", "kvzip_plus_normalization"):
            if getattr(self.policy, option, False):
                raise ValueError(f"{self.name} with {option}=True: both weigh scores by values; leave out {option}")
        if self.policy.needs_output_projection:
            raise ValueError(f"{self.name}: it has two stages already")

    def rank(self, tokens: Tokens, budget: Budget) -> Tensor:
        rank = self.policy.rank(tokens, budget)
        size: Any = self.policy.size(budget, tokens.seen) if budget.share else self.policy.size(budget, 0)
        free = rank.isfinite() & (rank < KEPT)
        weights = rank.masked_fill(~free, 0)
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        second = (weights + self.epsilon) * given(tokens.output_norm, "norms of outputs")
        first = highest(total_order(rank, tokens.positions), share_of(self.first_stage_ratio, size))
        return torch.where(free, torch.where(first, KEPT, second), rank)


def check_safeguard(alpha: float) -> None:
    """Raises TypeError or ValueError unless `alpha` is a share of a budget."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise TypeError(f"alpha_safeguard must be a share of the budget (float), got {alpha!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha_safeguard={alpha!r}: must be a share of the budget, from 0 to 1")
