"""By the key itself, with no attention at all: its norm, or how unlike the others it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Arrivals, Policy, given


@dataclass(frozen=True, kw_only=True)
class Knorm(Policy):
    """Evicts keys of large norm, which attention tends to pass over (arXiv 2406.11430). Not for models that normalise their keys (Qwen 3,
    Gemma 3): there norms are all the same, and what is left to choose by is rounding."""

    scores: ClassVar[bool] = True

    def score(self, tokens: Arrivals) -> Tensor:
        return -torch.linalg.vector_norm(tokens.keys, dim=-1, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Keeps keys that differ most from the mean direction of all keys (arXiv 2504.15364): the best choice without attention weights.

    A token is scored once, when it comes, against the mean over all tokens seen by then; the paper scores all tokens anew against the mean
    of those held. So nothing is decoded for it, and every format keeps the same tokens.
    """

    scores: ClassVar[bool] = True

    def accumulate(self, statistics: dict[str, Tensor], tokens: Arrivals) -> dict[str, Tensor]:
        units = torch.nn.functional.normalize(tokens.keys.float(), dim=-1)
        total = (units if tokens.is_valid is None else units * tokens.is_valid[:, None, :, None]).sum(2)
        return {"key_sum": statistics["key_sum"] + total if statistics else total}

    def score(self, tokens: Arrivals) -> Tensor:
        if "key_sum" not in tokens.statistics:
            raise ValueError("KeyDiff needs the mean key")
        mean_key = tokens.statistics["key_sum"] / given(tokens.seen, "counts of tokens").clamp_min(1)
        return -torch.nn.functional.cosine_similarity(tokens.keys.float(), mean_key.unsqueeze(2), dim=-1)
