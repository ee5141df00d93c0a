"""What a policy is: how many tokens a layer keeps, and in which order it forgets them.

A policy is a frozen dataclass of options and pure functions; what it remembers of a token lies in the layer, beside the token. It is asked
once for each token (`score`), after each attention whose weights it wants (`observe`), and when tokens
must go (`priority`). Positions are ranks among the real tokens of a row, so that padding changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

ALL = 2**31
"""Queries: as many as there are."""
LEAST = 8
"""Tokens that a share never goes under, nor under the tokens that are protected."""
TOKENS_PER_INTERVAL, MOST_INTERVAL = 128, 32
KEPT = 1e30
"""Priority of a token that is kept for its value; sinks and recent tokens go before even it."""

Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True)
class Budget:
    """`tokens`, and `share` of the tokens seen on top of them."""

    tokens: int = 0
    share: float = 0.0

    def size(self, seen: Count) -> Count:
        """Tokens that may be held when `seen` have been seen; a tensor for a tensor."""
        return self.tokens + share_of(self.share, seen)


def share_of(share: float, count: Count) -> Count:
    """`share` of `count`, rounded down, the same for numbers and tensors and without fp64, which not all devices have."""
    return (count * round(share * 2**32) + 2**22) >> 32  # type: ignore[return-value]


def usual_interval(tokens: int) -> int:
    return min(max(tokens // TOKENS_PER_INTERVAL, 1), MOST_INTERVAL)


@dataclass(frozen=True)
class Arrivals:
    """Tokens to score, `keys` and `values` `[B, H, T, D]`: those of a step, or with a `tail` those that leave it; `after_keys` and
    `after_values` `[B, H, T + N, D]` are they and the tokens after them. `mean_key` `[B, H, D]`: mean direction of all keys seen, where the
    policy asks for it."""

    keys: Tensor
    values: Tensor
    after_keys: Tensor
    after_values: Tensor
    mean_key: Tensor | None


@dataclass(frozen=True)
class Tokens:
    """Candidates for eviction in one layer. What the policy does not ask for is None.

    positions: int32 `[B, H, T]`, the rank among the row's real tokens.
    valid: bool `[B, H, T]`; False where a slot holds nothing.
    seen: int64 `[B, 1, 1]`, real tokens that the row has seen.
    score: fp32 `[B, H, T]`, what `score` and `observe` made it.
    key_norm, value_norm: fp32 `[B, H, T]`.
    """

    positions: Tensor
    valid: Tensor
    seen: Tensor
    score: Tensor | None = None
    key_norm: Tensor | None = None
    value_norm: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Options that every policy has.

    Args:
        budget: tokens (int), share of the tokens seen (float; never under 8), both (`Budget`), or one of them for each full-attention
            layer. With a share, give `recent` in tokens: of a share of a share only those of the smallest budget are kept exact.
        num_sink_tokens: first tokens that are never evicted.
        recent: newest tokens that are not evicted: tokens (int) or share of the budget (float).
        interval: tokens that come in before some go. At 1 the budget is full after every step; more cost less time, and leave up to
            `interval - 1` places of the budget empty. None: 1 for every 128 tokens of the budget, at most 32. Where a padded prompt comes
            in chunks, rows count padding as tokens that come in.
        value_norm: weigh a token's score by the norm of its value (VATP, arXiv 2406.12335), where scores are weights.
        protect_values: share of the budget for the tokens with the largest values (VaSE, arXiv 2606.03928).

    Raises ValueError for sizes that do not fit into the budget, TypeError for other types.
    """

    budget: int | float | Budget | Sequence[int | float | Budget] = 1024
    num_sink_tokens: int = 4
    recent: int | float = 0.5
    interval: int | None = None
    value_norm: bool = False
    protect_values: float = 0.0

    observes: ClassVar[int] = 0
    """Of how many of a step's last queries the attention weights are wanted."""
    scores: ClassVar[bool] = False
    """Whether tokens have a score."""
    mean_key: ClassVar[bool] = False
    norms: ClassVar[bool] = False
    """Whether norms of keys and values are kept."""
    weighs: ClassVar[bool] = False
    """Whether scores are positive weights, which a value's norm may multiply."""

    def __post_init__(self) -> None:
        check_count("num_sink_tokens", self.num_sink_tokens, 0)
        if self.interval is not None:
            check_count("interval", self.interval, 1)
        if not 0 <= self.protect_values < 1:
            raise ValueError(f"protect_values={self.protect_values!r}: must be a share of the budget, from 0 to below 1")
        if self.value_norm and not self.weighs:
            raise ValueError(f"value_norm=True: the scores of {type(self).__name__} are no weights; H2O, TOVA, SnapKV and LagKV have such")
        _check_size("recent", self.recent)
        for budget in self.budgets:
            if budget.share:
                continue
            size = budget.tokens
            held = self.num_sink_tokens + self.recent_of(size) + share_of(self.protect_values, size) + (self.interval or 1) - 1
            if held > size:
                raise ValueError(
                    f"budget={size}: num_sink_tokens={self.num_sink_tokens}, recent={self.recent}, interval={self.interval} and "
                    f"protect_values={self.protect_values} take {held} tokens; raise the budget or lower these"
                )

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """One, or one for each full-attention layer."""
        several = self.budget if isinstance(self.budget, Sequence) and not isinstance(self.budget, str) else (self.budget,)
        if not several:
            raise ValueError(f"budget={self.budget!r}: holds none; pass one for all layers, or one for each full-attention layer")
        return tuple(_budget(one) for one in several)

    @property
    def tail(self) -> int:
        """Tokens after it that a token waits for, exact, before it gets its `score`."""
        return 0

    @property
    def fades(self) -> float:
        """Factor on the weight of a query for each one after it."""
        return 1.0

    @property
    def keeps_values(self) -> bool:
        """Whether the norms of values are looked at."""
        return self.norms or self.value_norm or self.protect_values > 0

    def size(self, budget: Budget, seen: Count) -> Count:
        """Tokens that a layer may hold when `seen` have been seen; a tensor for a tensor."""
        size = budget.size(seen)
        if not budget.share:
            return size
        least = max(LEAST, self.num_sink_tokens + (self.recent if isinstance(self.recent, int) else 0) + self.interval_of(budget))
        return max(size, least) if isinstance(size, int) else size.clamp_min(least)

    def interval_of(self, budget: Budget) -> int:
        """Tokens that come in before some go."""
        if self.interval is not None:
            return self.interval
        free = budget.tokens - self.num_sink_tokens - self.recent_of(budget.tokens) - share_of(self.protect_values, budget.tokens)
        wanted = usual_interval(budget.tokens)
        return wanted if budget.share else min(wanted, free + 1)

    def recent_of(self, size: Count) -> Count:
        """Protected recent tokens in a budget of `size`."""
        return share_of(self.recent, size) if isinstance(self.recent, float) else size * 0 + self.recent

    def score(self, tokens: Arrivals) -> Tensor | None:
        """fp32 `[B, H, T]`; None where scores are from attention."""
        return None

    def observe(self, score: Tensor, mass: Tensor, queries: Tensor | int) -> Tensor:
        """The score after a step: `mass` `[B, H, T]` is the attention that the group's query heads gave the token, summed over the last
        `observes` real queries, of which there were `queries` (`[B, 1, 1]`)."""
        raise NotImplementedError

    def priority(self, tokens: Tokens) -> Tensor:
        """`[B, H, T]`: tokens of lower priority are evicted first, and of equal ones the older."""
        if tokens.score is None:
            raise NotImplementedError(f"{self.name} has neither scores nor a priority")
        return tokens.score

    def rank(self, tokens: Tokens, budget: Budget) -> Tensor:
        """`priority` with sinks, recent tokens and large values protected, fp32; -inf where there is no token."""
        rank = self.priority(tokens).float()
        size = self.size(budget, tokens.seen)
        if self.value_norm:
            rank = rank * _given(tokens.value_norm)
        rank = rank.nan_to_num(nan=torch.finfo(rank.dtype).min)  # what has no place in an order goes first
        protected = (tokens.positions < self.num_sink_tokens) | (tokens.positions >= tokens.seen - self.recent_of(size))
        if self.protect_values:
            norms = _given(tokens.value_norm).masked_fill(~tokens.valid | protected, -1)
            count = share_of(self.protect_values, size).clamp(1, norms.shape[-1])
            least = norms.sort(-1, descending=True).values.gather(-1, (count - 1).expand(*norms.shape[:2], 1))
            rank = rank.masked_fill(norms >= least, KEPT)
        rank = rank.masked_fill(protected, torch.inf)
        return rank.masked_fill(~tokens.valid, -torch.inf)


def _given(x: Tensor | None) -> Tensor:
    if x is None:
        raise ValueError("the norms of values are not kept by this layer")
    return x


def _budget(budget: int | float | Budget) -> Budget:
    if isinstance(budget, Budget):
        check_count("Budget.tokens", budget.tokens, 0)
        if not 0 <= budget.share <= 1 or not (budget.tokens or budget.share):
            raise ValueError(f"{budget}: share must be from 0 to 1, and one of the two above 0")
        return budget
    _check_size("budget", budget, 1)
    return Budget(share=budget) if isinstance(budget, float) else Budget(tokens=budget)


def _check_size(name: str, size: int | float, least: int = 0) -> None:
    """`least` or more tokens, or a share, which is above 0 where `least` is."""
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise TypeError(f"{name} must be a number of tokens (int) or a share (float), got {size!r}")
    if size < 0 or (least and not size) or (isinstance(size, float) and not size <= 1):
        shares = "above 0 and up to 1" if least else "from 0 to 1"
        raise ValueError(f"{name}={size!r}: must be {least} or more tokens (int), or a share {shares} (float)")


def check_count(name: str, value: int, least: int = 0, of: str = "tokens") -> None:
    """Raises TypeError or ValueError unless `value` is a whole number, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a number of {of}, got {value!r}")
    if value < least:
        raise ValueError(f"{name}={value}: must be {least} or more {of}")
