"""`Policy`: the number of tokens that a layer keeps, and the order in which it evicts the others.

A policy is a frozen dataclass of options and pure functions. Its records of a token lie in the layer, beside the token.
`score` is called once for each token (for the tokens of decode steps together, before an eviction), `observe` after
each attention whose weights the policy needs, and `priority` when tokens must be evicted. Positions are ranks among the
tokens of a row that are not padding, so that padding changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from .ranking import at_rank, highest, total_order

ALL = 2**31
"""An `observation_window` of all queries."""
LEAST = 8
"""The smallest size of a budget that is a share, in tokens."""
TOKENS_PER_INTERVAL, MOST_INTERVAL = 128, 64
EPSILON = 1e-4
"""The share of all scores that is added to each token's score in the second stage of CriticalKV, as by its authors."""
BLOCK = 2**25
"""Elements of queries, or of products with queries, in memory at a time."""
KEPT = 1e30
"""Priority of a token that is kept for its value; sinks and recent tokens go before even it."""

Count = TypeVar("Count", int, Tensor)
Given = TypeVar("Given")


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
        return self.tokens + share_of(self.share, seen)


ONE = 2**32
"""1.0 in the fixed-point format of shares."""


def share_of(share: float, count: Any) -> Any:
    """`share` of `count`, rounded down, the same for numbers and tensors and without fp64, which not all devices have."""
    return times(count, round(share * ONE))


def times(count: Any, weight: Any) -> Any:
    """`count * weight / ONE`, rounded down, for whole numbers and int64 tensors. A weight may be too small by its
    rounding."""
    return (count * weight + 2**22) >> 32


def pyramid(budget: int | float, layers: int, *, steepness: float = 20.0) -> tuple[int | float, ...]:
    """Budgets that fall evenly with depth and have the mean `budget` (PyramidKV, arXiv 2406.02069), for `Policy.budget`.

    Args:
        budget: the mean over layers: tokens (int) or share of the tokens seen (float).
        layers: full-attention layers of the model that are compressed.
        steepness: the last layer has `budget / steepness`, the first `budget * (2 - 1 / steepness)`. At 1, all have
            `budget`.

    Raises ValueError for a steepness below 1, and if the share of the first layer would exceed 1; TypeError for other
    types.
    """
    check_count("layers", layers, 1, of="layers")
    _check_size("budget", budget, 1)
    if not steepness >= 1:
        raise ValueError(f"steepness={steepness!r}: must be 1 or more")
    last = budget / steepness
    first = 2 * budget - last
    if isinstance(budget, float) and first > 1:
        raise ValueError(f"budget={budget} with steepness={steepness}: the first layer's share would be {first:.3g}; lower one of the two")
    places = [i / max(layers - 1, 1) for i in range(layers)]
    sizes = [budget] if layers == 1 else [first + (last - first) * place for place in places]
    if isinstance(budget, float):
        return tuple(sizes)
    ends = [round(total) for total in itertools.accumulate(sizes)]  # so that they sum to `budget * layers`
    return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))


def usual_interval(tokens: int) -> int:
    return min(max(tokens // TOKENS_PER_INTERVAL, 1), MOST_INTERVAL)


class Rotation(Protocol):
    """The model's rotary embedding (`attention/rope.py`)."""

    def rotate(self, keys: Tensor, by: int | Tensor) -> Tensor:
        """`[B, H, T, D]` rotated forward by `by` positions, an int or `[B]` or `[B, T]`."""


@dataclass(frozen=True)
class Arrivals:
    """Tokens to score, with `keys` and `values` `[B, H, T, D]`: the tokens of a step, or with a `lag_length` those that
    leave the residual. Fields that the policy does not need are None.

    after_keys, after_values: `[B, H, T + N, D]`, keys and values of these tokens and of the tokens after them.
    is_valid: bool `[B, T]`, False for padding; None: no padding. positions: int32 `[B, T]`, the rank among the row's
        tokens that are not padding, which is also the position that `generate` gives to the model; -1 for padding. None
        with a `lag_length`.
    begin: the position of the first token where no row has had padding; else None.
    seen: int64 `[B, 1, 1]`, the number of tokens that the row has seen, these included and padding left out.
    size: tokens that the layer may hold when it has seen them; int64 `[B, 1, 1]` for a share.
    queries: `[B, Hq, T, D]`, the queries of the same tokens, with `needs_queries`.
    scaling: the factor on `q k`.
    rope: with `needs_rope`.
    output_gram: fp32 `[Hq, D, D]`, with `needs_output_projection`: `W W^T` of each query head's rows `W` `[D, hidden]` of the transposed
        output projection. A value `v` contributes a vector of norm `sqrt(v W W^T v)` to the layer's output. single:
        whether each token came in a separate decode step, without padding. The tokens are scored together, but `seen`,
        and `size` for a share, are by token, `[B, 1, T]`.
    """

    keys: Tensor
    values: Tensor
    after_keys: Tensor
    after_values: Tensor
    is_valid: Tensor | None = None
    positions: Tensor | None = None
    begin: int | None = None
    seen: Tensor | None = None
    size: int | Tensor | None = None
    queries: Tensor | None = None
    scaling: float | None = None
    rope: Rotation | None = None
    output_gram: Tensor | None = None
    single: bool = False

    @property
    def unrotated_keys(self) -> Tensor:
        """The keys before RoPE, `[B, H, T, D]`, in their dtype; computed at each access."""
        return self._unrotated(self.keys, slice(None))

    def unrotated_queries(self, first: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Yields the queries before RoPE from token `first` on, in blocks of bounded memory, `[B, Hq, t, D]` in their
        dtype, with the tokens of each block."""
        queries = given(self.queries, "queries")
        block = max(BLOCK // (queries.shape[0] * queries.shape[1] * queries.shape[3]), 1)
        for begin in range(first, queries.shape[2], block):
            part = slice(begin, begin + block)
            yield part, self._unrotated(queries[:, :, part], part)

    def _unrotated(self, x: Tensor, part: slice) -> Tensor:
        positions = given(self.positions, "positions")[:, part].clamp_min(0)
        return given(self.rope, "the model's rotary embedding").rotate(x, -positions)

    def valid(self) -> Tensor:
        """`is_valid`, bool `[B, T]`, never None."""
        x = self.keys
        return torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device) if self.is_valid is None else self.is_valid


@dataclass(frozen=True)
class Tokens:
    """Candidates for eviction in one layer. Fields that the policy does not need are None.

    positions: int32 `[B, H, T]`, the rank among the row's tokens that are not padding.
    valid: bool `[B, H, T]`; False for empty slots.
    seen: int64 `[B, 1, 1]`, the number of tokens that the row has seen, without padding.
    score: fp32 `[B, H, T]`, the result of `score` and `observe`. key_norm, value_norm: fp32 `[B, H, T]`.
    output_norm: fp32 `[B, H, T]`, the norm of a value in the layer's output, as the mean over the group's query heads.
    """

    positions: Tensor
    valid: Tensor
    seen: Tensor
    score: Tensor | None = None
    key_norm: Tensor | None = None
    value_norm: Tensor | None = None
    output_norm: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The base of policies, with the options that every policy has.

    Args:
        budget: tokens (int), share of the tokens seen (float below 1; never under 8 tokens), both, or with a part for
            each head (`Budget`), or one of them for each full-attention layer (`pyramid`, `HeadProfile.budget`). With a
            share, give `recent` in tokens: with `recent` as a share too, only as many stay exact as in the smallest
        budget. compression_ratio: kvpress' word for `budget=1 - compression_ratio`, the share of the tokens that is
        evicted. num_sink_tokens: first tokens that are never evicted. recent: newest tokens that are not evicted:
        tokens (int) or share of the budget (float). interval: number of new tokens between evictions. At 1 the budget
        is full after every step; larger intervals take less time, and leave up to `interval - 1` places of the budget
        empty. None: 1 for every 128 tokens of the budget, at most 64. In a padded prompt that comes in chunks, padding
        counts as new tokens. value_norm: weigh a token's score by the norm of its value (VATP, arXiv 2406.12335), where
        scores are weights. protect_values: share of the budget for the tokens with the largest values (VaSE, arXiv
        2606.03928). first_stage_ratio: share of the budget for the tokens with the highest scores, where scores are
        weights. The others compete by their share of all scores times the norm of their value in the layer's output
        (CriticalKV, arXiv 2502.03805, where the ratio is .5 and the norm is the 1-norm; here it is the 2-norm, which
        takes a `D x D` matrix for each head). 0: all by scores. alpha_safeguard: share of the budget that each head is
        guaranteed, where scores are weights. The rest of the heads' common budget, `H * budget` tokens in a layer, goes
        to the tokens of highest priority in any head (AdaKV, arXiv 2407.11550, where it is .2). None: heads do not
        share budgets. With tensor parallelism, the heads of each process share theirs.

    Raises ValueError for sizes that exceed the budget, TypeError for other types.
    """

    budget: int | float | Budget | Sequence[int | float | Budget] = 1024
    compression_ratio: float | None = field(default=None, repr=False, compare=False)
    num_sink_tokens: int = 4
    recent: int | float = 0.5
    interval: int | None = None
    value_norm: bool = False
    protect_values: float = 0.0
    first_stage_ratio: float = 0.0
    alpha_safeguard: float | None = None

    observation_window: ClassVar[int] = 0
    """The number of a step's last queries whose attention weights the policy needs."""
    has_scores: ClassVar[bool] = False
    """Whether tokens have a score."""
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
    """Whether scores are positive weights, which may be multiplied by a value's norm."""

    def __post_init__(self) -> None:
        if self.compression_ratio is not None:
            self._take_compression_ratio(self.compression_ratio)
        check_count("num_sink_tokens", self.num_sink_tokens, 0)
        if self.interval is not None:
            check_count("interval", self.interval, 1)
        if not 0 <= self.protect_values < 1:
            raise ValueError(f"protect_values={self.protect_values!r}: must be a share of the budget, from 0 to below 1")
        if self.value_norm:
            self._require_weights("value_norm=True")
        if not 0 <= self.first_stage_ratio < 1:
            raise ValueError(f"first_stage_ratio={self.first_stage_ratio!r}: must be a share of the budget, from 0 to below 1")
        if self.first_stage_ratio:
            self._require_weights(f"first_stage_ratio={self.first_stage_ratio}")
        if self.first_stage_ratio and self.value_norm:
            raise ValueError(
                f"value_norm=True with first_stage_ratio={self.first_stage_ratio}: both weigh scores by values; leave out value_norm"
            )
        self._check_alpha_safeguard()
        _check_size("recent", self.recent)
        for budget in self.budgets:
            if budget.share or budget.heads:  # at least the protected tokens
                continue
            size = budget.tokens
            held = self.num_sink_tokens + self.recent_of(size) + share_of(self.protect_values, size) + (self.interval or 1) - 1
            if held > size:
                raise ValueError(
                    f"budget={size}: num_sink_tokens={self.num_sink_tokens}, recent={self.recent}, interval={self.interval} and "
                    f"protect_values={self.protect_values} take {held} tokens; raise the budget or lower these"
                )

    def _take_compression_ratio(self, ratio: float) -> None:
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < 1:
            raise ValueError(f"compression_ratio={ratio!r}: must be the share of tokens to evict, above 0 and below 1")
        default = type(self).__dataclass_fields__["budget"].default
        if self.budget != default:
            raise ValueError(f"budget={self.budget!r} with compression_ratio={ratio}: both say how many tokens stay; pass one of them")
        object.__setattr__(self, "budget", 1.0 - ratio)
        object.__setattr__(self, "compression_ratio", None)  # `dataclasses.replace` would take it again

    def _require_weights(self, option: str) -> None:
        """Raises ValueError unless the scores of this policy are weights, which `option` needs."""
        if not self.scores_are_weights:
            names = ", ".join(kind.__name__ for kind in _kinds(Policy) if kind.scores_are_weights)
            raise ValueError(f"{option}: the scores of {self.name} are not attention weights; policies whose scores are: {names}")

    def _check_alpha_safeguard(self) -> None:
        alpha = self.alpha_safeguard
        if alpha is None:
            return
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise TypeError(f"alpha_safeguard must be a share of the budget (float) or None, got {alpha!r}")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha_safeguard={alpha!r}: must be a share of the budget, from 0 to 1")
        self._require_weights(f"alpha_safeguard={alpha}")
        if any(budget.heads for budget in self.budgets):
            raise ValueError(f"alpha_safeguard={alpha} with Budget.heads: both divide a layer's budget; pass alpha_safeguard=None")
        if self.first_stage_ratio:
            raise ValueError(
                f"alpha_safeguard={alpha} with first_stage_ratio={self.first_stage_ratio}: the second stage compares tokens of one head "
                "only; leave out one of the two (alpha_safeguard=None)"
            )

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """One budget for all layers, or one for each full-attention layer."""
        several = self.budget if isinstance(self.budget, Sequence) and not isinstance(self.budget, str) else (self.budget,)
        if not several:
            raise ValueError(f"budget={self.budget!r}: holds none; pass one for all layers, or one for each full-attention layer")
        return tuple(_budget(one) for one in several)

    @property
    def differs_by_head(self) -> bool:
        """Whether heads of a layer may retain different numbers of tokens."""
        return self.alpha_safeguard is not None or any(budget.heads for budget in self.budgets)

    @property
    def shares_layers(self) -> bool:
        """Whether the heads of all layers share one budget after their scores have been compared (`KVzip`)."""
        return False

    @property
    def lag_length(self) -> int:
        """The number of later tokens for which a token waits, exact, before it gets its `score`."""
        return 0

    @property
    def decay(self) -> float:
        """The factor on a query's weight for each later query."""
        return 1.0

    @property
    def needs_value_norms(self) -> bool:
        """Whether the policy reads the norms of values."""
        return self.needs_norms or self.value_norm or self.protect_values > 0

    @property
    def scores_arrivals(self) -> bool:
        """Whether tokens get a score before any attention to them is observed."""
        return type(self).score is not Policy.score or type(self).arrive is not Policy.arrive

    @property
    def needs_output_projection(self) -> bool:
        """Whether the policy needs `Arrivals.output_gram` and `Tokens.output_norm`."""
        return self.first_stage_ratio > 0

    def size(self, budget: Budget, seen: Count) -> Count:
        """The number of tokens that a layer may hold when `seen` have been seen; a tensor for a tensor."""
        size = budget.size(seen)
        if not budget.share and not budget.heads:
            return size
        least = max(LEAST, self.num_sink_tokens + (self.recent if isinstance(self.recent, int) else 0) + self.interval_of(budget))
        return max(size, least) if isinstance(size, int) else size.clamp_min(least)

    def interval_of(self, budget: Budget) -> int:
        """The number of new tokens between evictions."""
        if self.interval is not None:
            return self.interval
        free = budget.tokens - self.num_sink_tokens - self.recent_of(budget.tokens) - share_of(self.protect_values, budget.tokens)
        wanted = usual_interval(budget.tokens)
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
        """Returns the statistics of a layer after the tokens of a step, tensors `[B, ...]` by name, and without a
        `lag_length` the scores of these tokens. `statistics`: those before the step; empty before the first token."""
        return statistics, None if self.lag_length else self.score(tokens)

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

    def rank(self, tokens: Tokens, budget: Budget) -> Tensor:
        """`priority` with sinks, recent tokens and large values protected, fp32; -inf where there is no token."""
        rank = self.priority(tokens).float()
        size: Any = self.size(budget, tokens.seen) if budget.share else self.size(budget, 0)
        if self.value_norm:
            rank = rank * given(tokens.value_norm, "norms of values")
        rank = rank.nan_to_num(nan=torch.finfo(rank.dtype).min)  # NaN scores are evicted first
        protected = (tokens.positions < self.num_sink_tokens) | (tokens.positions >= tokens.seen - self.recent_of(size))
        if self.protect_values:
            norms = given(tokens.value_norm, "norms of values").masked_fill(~tokens.valid | protected, -1)
            rank = rank.masked_fill(norms >= at_rank(norms, share_of(self.protect_values, size)), KEPT)
        rank = rank.masked_fill(protected, torch.inf).masked_fill(~tokens.valid, -torch.inf)
        return self._in_two_stages(rank, tokens, size) if self.first_stage_ratio else rank

    def _in_two_stages(self, rank: Tensor, tokens: Tokens, size: int | Tensor) -> Tensor:
        """The rank in two stages: beyond the first `first_stage_ratio` of the budget, tokens rank by their share of all
        scores times the norm of their value."""
        count = share_of(self.first_stage_ratio, size)
        free = rank.isfinite() & (rank < KEPT)
        weights = rank.masked_fill(~free, 0)
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        second = (weights + EPSILON) * given(tokens.output_norm, "norms of outputs")
        first = highest(total_order(rank, tokens.positions), count)
        return torch.where(free, torch.where(first, KEPT, second), rank)


def given(x: Given | None, what: str) -> Given:
    """`x`. Raises ValueError if the layer does not have `what`."""
    if x is None:
        raise ValueError(f"this layer was not given {what}")
    return x


def _kinds(kind: type[Policy]) -> Iterator[type[Policy]]:
    """The classes of this library that inherit from `kind`."""
    for inherited in kind.__subclasses__():
        if inherited.__module__.startswith(__package__):
            yield inherited
        yield from _kinds(inherited)


def _budget(budget: int | float | Budget) -> Budget:
    if isinstance(budget, Budget):
        check_count("Budget.tokens", budget.tokens, 0)
        if not 0 <= budget.share <= 1 or not (budget.tokens or budget.share):
            raise ValueError(f"{budget}: share must be from 0 to 1, and one of the two above 0")
        if budget.heads and not (all(0 <= part < math.inf for part in budget.heads) and sum(budget.heads) > 0):
            raise ValueError(f"Budget.heads={budget.heads}: parts must be 0 or more, and one of them above 0")
        return budget
    _check_size("budget", budget, 1)
    if isinstance(budget, float) and budget == 1:
        raise ValueError(
            "budget=1.0: a share of 1 evicts nothing; leave the policy out, or pass a number of tokens (int) or a share below 1"
        )
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
