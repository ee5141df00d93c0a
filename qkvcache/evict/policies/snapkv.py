"""The attention of an observation window, pooled (arXiv 2404.14469), while decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Policy, Tokens
from .budget import check_count
from .ranking import ascending


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Retains the tokens that the last queries attend to, and their neighbours.

    At the prompt the last `window_size` queries count alike, as in the paper; at decode, which the paper does not cover, older ones decay
    at the rate `1 / window_size`. Scores are averaged over `kernel_size` neighbours in the text, among the retained tokens.
    """

    window_size: int = 32
    kernel_size: int = 7

    scores_are_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("window_size", self.window_size, 1)
        if not isinstance(self.kernel_size, int) or self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size!r}: must be an odd number of tokens")
        super().__post_init__()

    @property
    def observation_window(self) -> int:  # type: ignore[override]
        return self.window_size

    def observe(self, score: Tensor, attention_sums: Tensor, queries: Tensor | int) -> Tensor:
        rate = 1 - 1 / self.window_size
        if isinstance(queries, int):  # the same for all rows
            return torch.add(attention_sums, score, alpha=rate**queries)
        return torch.addcmul(attention_sums, score, rate**queries)

    def priority(self, tokens: Tokens) -> Tensor:
        # Slots are in no order. Empty ones are sorted first, so that they are no neighbours.
        order = ascending(tokens.positions)
        valid = tokens.valid.gather(-1, order).float()
        score = tokens.score.gather(-1, order) * valid  # type: ignore[union-attr]
        total, count = F.avg_pool1d(torch.cat([score, valid]), self.kernel_size, stride=1, padding=self.kernel_size // 2).chunk(2)
        return torch.empty_like(score).scatter_(-1, order, total / count.clamp_min(1e-6))
