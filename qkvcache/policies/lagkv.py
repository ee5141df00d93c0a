"""The spread of a token within the range of the tokens after it (arXiv 2504.04704)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..kernels import lag_spread
from .base import Arrivals, Policy
from .budget import check_count


@dataclass(frozen=True, kw_only=True)
class LagKV(Policy):
    """Keeps tokens whose channels, scaled to the range of the `lag_size` tokens after them, spread most; keys and values count alike.

    The paper cuts the text into parts of `lag_size` tokens and takes the next part as the range of the whole part. Here
    each token has its own range, so that the retained tokens do not depend on chunks or padding of a prompt. The last
    `lag_size` tokens stay exact.
    """

    lag_size: int = 128
    recent: int | float = 128

    has_scores: ClassVar[bool] = True
    scores_are_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("lag_size", self.lag_size, 2)
        super().__post_init__()
        for budget in self.budgets:
            if self.recent_of(self.size(budget, 0)) < self.lag_size:
                raise ValueError(
                    f"recent={self.recent}: must be at least lag_size={self.lag_size} tokens, which are the range of those before"
                )

    @property
    def lag_length(self) -> int:
        return self.lag_size

    def score(self, tokens: Arrivals) -> Tensor:
        count = tokens.keys.shape[2]
        return lag_spread(tokens.after_keys, count, self.lag_size) + lag_spread(tokens.after_values, count, self.lag_size)
