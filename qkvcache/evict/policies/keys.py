"""Scores of keys alone, without attention weights: their distance from the mean key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Arrivals, Policy

EPSILON = 1e-12
"""Least length of a key."""


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Keeps keys that differ most from the mean direction of all keys (arXiv 2504.15364): the best choice without attention weights.

    A token is scored once, in its own step, against the mean over all tokens seen by then; the paper scores all tokens again against the
    mean of the retained ones. Here no key is dequantized, and every format retains the same tokens.
    """

    def arrive(self, statistics: dict[str, Tensor], tokens: Arrivals) -> tuple[dict[str, Tensor], Tensor]:
        keys = tokens.keys.float()
        inverse = torch.linalg.vector_norm(keys, dim=-1).clamp_min(EPSILON).reciprocal()  # [B, H, T]
        counted = inverse if tokens.is_valid is None else inverse * tokens.is_valid[:, None]
        # The sums by the end of each step: of `n` tokens, or of one.
        total = (keys * counted[..., None]).cumsum(2) if tokens.single else counted[:, :, None] @ keys
        total = statistics["key_sum"][:, :, None] + total if statistics else total
        direction = torch.nn.functional.normalize(total, dim=-1)
        cosine = (keys * direction).sum(-1) if tokens.single else (keys @ direction.mT)[..., 0]
        return {"key_sum": total[:, :, -1]}, cosine * -inverse
