"""Heavy hitters: the tokens with the most accumulated attention (arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from .base import ALL, Policy, Tokens


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Half of the budget for the newest tokens, the rest for those with the most accumulated attention, of each layer, row and KV head.

    The attention of all queries, with the prompt's and without padding, is summed in fp32 over the query heads of the group.
    H2O retains the tokens that the text so far attended to: it recalls few facts that are asked for only later (README).

    Args:
        reduce: "mean" divides by the number of queries that could attend to the token, so that older tokens have no advantage; "sum" is the
            paper's, where only the recent zone protects new tokens.
        decay: factor on the accumulated attention at each query; 1: no decay.
    """

    num_sink_tokens: int = 0
    reduce: Literal["sum", "mean"] = "mean"
    decay: float = 1.0

    observation_window: ClassVar[int] = ALL
    scores_are_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduce not in ("sum", "mean"):
            raise ValueError(f"reduce={self.reduce!r}: expected 'sum' or 'mean'")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay!r}: must be above 0 and at most 1")

    def observe(self, score: Tensor, attention_sums: Tensor, queries: Tensor | int) -> Tensor:
        return (score if self.decay == 1 else score * self.decay**queries) + attention_sums

    def priority(self, tokens: Tokens) -> Tensor:
        score = super().priority(tokens)
        if self.reduce == "sum":
            return score
        queries = (tokens.seen - tokens.positions).clamp_min(1).float()
        return score / (queries if self.decay == 1 else (1 - self.decay**queries) / (1 - self.decay))
