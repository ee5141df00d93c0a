"""`Policy`: the number of tokens that a layer keeps, and the order in which it evicts the others.

A policy is a frozen dataclass of options and pure functions. Its records of a token lie in the layer, beside the token.
`score` is called once for each token (for the tokens of decode steps together, before an eviction), `observe` after
each attention whose weights the policy needs, and `priority` when tokens must be evicted. Positions are ranks among the
tokens of a row that are not padding, so that padding changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

from .budget import (
    INTERVAL_OF_SHARE,
    LEAST,
    LEAST_OF_SHARE,
    Budget,
    Count,
    budgets_of,
    check_count,
    check_size,
    share_of,
    usual_interval,
)

ALL = 2**31
"""An `observation_window` of all queries."""

Given = TypeVar("Given")


class Rotation(Protocol):
    """The model's rotary embedding (`evict/rope.py`)."""

    def rotate(self, keys: Tensor, by: int | Tensor) -> Tensor:
        """Returns `keys` `[B, H, T, D]` rotated forward by `by` positions, an int or `[B]` or `[B, T]`."""


@dataclass(frozen=True)
class Arrivals:
    """The tokens of a step, with `keys` and `values` `[B, H, T, D]`. Fields that the policy does not need are None.

    is_valid: bool `[B, T]`, False for padding; None: no padding.
    positions: int32 `[B, T]`, the rank among the row's tokens that are not padding, which is also the position that
        `generate` gives to the model; -1 for padding.
    begin: the position of the first token where no row has had padding; else None.
    seen: int64 `[B, 1, 1]`, the number of tokens that the row has seen, these included and padding left out.
    queries: `[B, Hq, T, D]`, the queries of the same tokens, with `needs_queries`.
    scaling: the factor on `q k`.
    rope: with `needs_rope`.
    single: whether each token came in a separate decode step, without padding. The tokens are scored together, but
        `seen` is by token, `[B, 1, T]`.
    """

    keys: Tensor
    values: Tensor
    is_valid: Tensor | None = None
    positions: Tensor | None = None
    begin: int | None = None
    seen: Tensor | None = None
    queries: Tensor | None = None
    scaling: float | None = None
    rope: Rotation | None = None
    single: bool = False


@dataclass(frozen=True)
class Tokens:
    """Candidates for eviction in one layer. Fields that the policy does not need are None.

    positions: int32 `[B, H, T]`, the rank among the row's tokens that are not padding.
    valid: bool `[B, H, T]`; False for empty slots.
    seen: int64 `[B, 1, 1]`, the number of tokens that the row has seen, without padding.
    score: fp32 `[B, H, T]`, the result of `score` and `observe`.
    key_norm, value_norm: fp32 `[B, H, T]`, the norms of keys and of values.
    """

    positions: Tensor
    valid: Tensor
    seen: Tensor
    score: Tensor | None = None
    key_norm: Tensor | None = None
    value_norm: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The base of policies, with the options that every policy has.

    Args:
        budget: tokens (int), or share of the tokens seen (float below 1; never under 64 tokens). A `Budget` has both, and
            a part for each head; a sequence has a budget for each full-attention layer (`HeadProfile.budget`). Beside a
            share, give `recent` in tokens: if it is a share too, only as many tokens stay exact as in the smallest budget.
        compression_ratio: kvpress' word for `budget=1 - compression_ratio`, the share of the tokens that is evicted.
        num_sink_tokens: first tokens that are never evicted.
        recent: newest tokens that are not evicted: tokens (int) or share of the budget (float).
        interval: number of new tokens between evictions. At 1 the budget is full after every step; larger intervals
            take less time, and leave up to `interval - 1` places of the budget empty. None: 1 for every 128 tokens of
            the budget, at most 64, and at least 8 where the budget is a share. In a padded prompt that comes in chunks,
            padding counts as new tokens.
        alpha_safeguard: the share of the budget that each head is guaranteed, if the heads of a layer share their budgets
            (`AdaKV`), where scores are weights; None: each head has its own budget.

    Raises ValueError for sizes that exceed the budget, TypeError for other types.
    """

    budget: int | float | Budget | Sequence[int | float | Budget] = 1024
    compression_ratio: float | None = field(default=None, repr=False, compare=False)
    num_sink_tokens: int = 4
    recent: int | float = 0.5
    interval: int | None = None
    alpha_safeguard: float | None = None

    observation_window: ClassVar[int] = 0
    """The number of a step's last queries whose attention weights the policy needs."""
    needs_queries: ClassVar[bool] = False
    """Whether the policy needs `Arrivals.queries`."""
    needs_rope: ClassVar[bool] = False
    """Whether the policy needs keys or queries before RoPE. The cache is then refused for models whose RoPE is
    unknown."""
    second_reading: ClassVar[bool] = False
    """Whether scores come from a second reading of the context: the cache must be filled by its `compress`."""
    needs_norms: ClassVar[bool] = False
    """Whether norms of keys and values are stored."""
    scores_are_weights: ClassVar[bool] = False
    """Whether scores are positive weights, which heads may compare."""

    def __post_init__(self) -> None:
        if self.compression_ratio is not None:
            self._take_compression_ratio(self.compression_ratio)
        check_count("num_sink_tokens", self.num_sink_tokens, 0)
        if self.interval is not None:
            check_count("interval", self.interval, 1)
        if self.alpha_safeguard is not None:
            self._check_safeguard(self.alpha_safeguard)
        check_size("recent", self.recent)
        for budget in self.budgets:
            if budget.share or budget.heads:  # at least the protected tokens
                continue
            size = budget.tokens
            held = self.num_sink_tokens + self.recent_of(size) + (self.interval or 1) - 1
            if held > size:
                raise ValueError(
                    f"budget={size}: num_sink_tokens={self.num_sink_tokens}, recent={self.recent} and interval={self.interval} "
                    f"take {held} tokens; raise the budget or lower these"
                )

    def _check_safeguard(self, alpha: float) -> None:
        self.require_weights(f"alpha_safeguard={alpha!r}")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise TypeError(f"alpha_safeguard must be a share of the budget (float), got {alpha!r}")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha_safeguard={alpha!r}: must be a share of the budget, from 0 to 1")
        if any(budget.heads for budget in self.budgets):
            raise ValueError(f"alpha_safeguard={alpha} with Budget.heads: both divide a layer's budget; pass one of the two")

    def _take_compression_ratio(self, ratio: float) -> None:
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < 1:
            raise ValueError(f"compression_ratio={ratio!r}: must be the share of tokens to evict, above 0 and below 1")
        default = type(self).__dataclass_fields__["budget"].default
        if self.budget != default:
            raise ValueError(f"budget={self.budget!r} with compression_ratio={ratio}: both say how many tokens stay; pass one of them")
        object.__setattr__(self, "budget", 1.0 - ratio)
        object.__setattr__(self, "compression_ratio", None)  # `dataclasses.replace` would take it again

    def require_weights(self, option: str) -> None:
        """Raises ValueError unless the scores of this policy are weights, which `option` needs."""
        if not self.scores_are_weights:
            own = (kind for kind in Policy.__subclasses__() if kind.__module__.startswith(__package__))
            names = ", ".join(kind.__name__ for kind in own if kind.scores_are_weights)
            raise ValueError(f"{option}: the scores of {self.name} are not attention weights; policies whose scores are: {names}")

    @property
    def name(self) -> str:
        return type(self).__name__

    def __str__(self) -> str:
        """The policy with its size, and the options that are not their defaults."""
        options = {option.name: (getattr(self, option.name), option.default) for option in fields(self) if option.init and option.repr}
        sizes = {"budget": "by layer" if len(set(self.budgets)) > 1 else str(self.budgets[0]), "window_length": None}
        shown = (f"{name}={sizes.get(name) or value}" for name, (value, default) in options.items() if name in sizes or value != default)
        return f"{self.name}({', '.join(shown)})"

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """One budget for all layers, or one for each full-attention layer."""
        return budgets_of(self.budget)

    @property
    def differs_by_head(self) -> bool:
        """Whether heads of a layer may retain different numbers of tokens."""
        return self.alpha_safeguard is not None or any(budget.heads for budget in self.budgets)

    @property
    def shares_layers(self) -> bool:
        """Whether the heads of all layers share one budget after their scores have been compared (`KVzip`)."""
        return False

    @property
    def decay(self) -> float:
        """The factor on a query's weight for each later query."""
        return 1.0

    @property
    def has_scores(self) -> bool:
        """Whether tokens have a score."""
        return self.observation_window > 0 or self.scores_arrivals

    @property
    def scores_arrivals(self) -> bool:
        """Whether tokens get a score before any attention to them is observed."""
        return type(self).score is not Policy.score or type(self).arrive is not Policy.arrive

    def size(self, budget: Budget, seen: Count) -> Count:
        """The number of tokens that a layer may hold when `seen` have been seen; a tensor for a tensor."""
        size = budget.size(seen)
        if not budget.share and not budget.heads:
            return size
        smallest = LEAST_OF_SHARE if budget.share else LEAST
        least = max(smallest, self.num_sink_tokens + (self.recent if isinstance(self.recent, int) else 0) + self.interval_of(budget))
        return max(size, least) if isinstance(size, int) else size.clamp_min(least)

    def interval_of(self, budget: Budget) -> int:
        """The number of new tokens between evictions."""
        if self.interval is not None:
            return self.interval
        free = budget.tokens - self.num_sink_tokens - self.recent_of(budget.tokens)
        wanted = usual_interval(budget.tokens, INTERVAL_OF_SHARE if budget.share else 1)
        return wanted if budget.share or budget.heads else min(wanted, free + 1)

    def recent_of(self, size: Count) -> Count:
        """The number of protected recent tokens in a budget of `size`."""
        return share_of(self.recent, size) if isinstance(self.recent, float) else size * 0 + self.recent

    def protected_and_rest(self, budget: Budget, seen: Any) -> tuple[Any, Any]:
        """The numbers of protected tokens (sinks and recent ones) and of other tokens that a head holds after an
        eviction, when `seen` have been seen. All three are an int or int64 `[B, 1, 1]`."""
        size: Any = self.size(budget, seen)
        protected, size = self.num_sink_tokens + self.recent_of(size), size - self.interval_of(budget) + 1
        protected = protected - (protected - size) * (protected > size)
        return protected, size - protected

    def score(self, tokens: Arrivals) -> Tensor | None:
        """Returns the scores of new tokens, fp32 `[B, H, T]`; None if scores come from attention."""
        return None

    def arrive(self, statistics: dict[str, Tensor], tokens: Arrivals) -> tuple[dict[str, Tensor], Tensor | None]:
        """Returns the statistics of a layer after the tokens of a step, tensors `[B, ...]` by name, and the scores of
        these tokens. `statistics`: those before the step; empty before the first token."""
        return statistics, self.score(tokens)

    def observe(self, score: Tensor, attention_sums: Tensor, queries: Tensor | int) -> Tensor:
        """Returns the scores after a step. `attention_sums` `[B, H, T]`: the attention to each token, summed over the
        group's query heads and over the last `observation_window` queries, padding left out; `queries` (`[B, 1, 1]`):
        their number."""
        raise NotImplementedError

    def priority(self, tokens: Tokens) -> Tensor:
        """Returns priorities `[B, H, T]`. Tokens of lower priority are evicted first, and older ones first among
        equals."""
        if tokens.score is None:
            raise NotImplementedError(f"{self.name} has neither scores nor a priority")
        return tokens.score


def given(x: Given | None, what: str) -> Given:
    """Returns `x`. Raises ValueError if it is None: the layer was not given `what`."""
    if x is None:
        raise ValueError(f"this layer was not given {what}")
    return x


def AdaKV(policy: Policy, alpha_safeguard: float = 0.2) -> Policy:
    """`policy` with budgets that the heads of a layer share (AdaKV, arXiv 2407.11550): of `H * budget` tokens, each head is
    guaranteed a share, and the rest goes to the tokens of highest priority in any head.

        AdaKV(SnapKV(budget=1024))  # 1,024 tokens for each head, on average

    With tensor parallelism, the heads of each process share theirs.

    Args:
        policy: the policy that ranks the tokens.
        alpha_safeguard: share of the budget that each head is guaranteed, from 0 to 1.

    Raises ValueError for a policy whose scores are not weights, or whose heads divide a budget already (`Budget.heads`,
    `KVzip`).
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"AdaKV wraps a policy such as SnapKV(budget=1024), got {policy!r}")
    if policy.alpha_safeguard is not None:
        raise ValueError(f"AdaKV({policy.name}): its heads share their budgets already")
    return replace(policy, alpha_safeguard=alpha_safeguard)
