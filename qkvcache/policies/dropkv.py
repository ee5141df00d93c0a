"""The exact change of the layer's attention output without the token (DropKV)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import ObservedAttention, Policy, check_count


@dataclass(frozen=True, kw_only=True)
class DropKV(Policy):
    """Evicts the token whose removal changes the outputs of the last queries least.

    Without a token of weight `p` and value `v`, the other weights grow by `1 / (1 - p)`, and an output `o` changes by exactly
    `p / (1 - p) * (o - v)`. The score is the squared norm of that change, summed over the last `window_size` queries and the query heads of
    the group: a token that receives attention, but whose value equals the output, costs nothing. The costs of several tokens do not add up
    exactly. As in SnapKV, older queries decay at decode at the rate `1 / window_size`.

    The weights and outputs of the observed queries are computed in torch, over dequantized keys and values: slower than other policies.
    """

    window_size: int = 32

    scores: ClassVar[bool] = True
    reduces_attention: ClassVar[bool] = True
    needs_attention_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("window_size", self.window_size, 1, of="queries")
        super().__post_init__()

    @property
    def observation_window(self) -> int:  # type: ignore[override]
        return self.window_size

    def reduce_attention(self, attention: ObservedAttention) -> Tensor:
        weights, outputs, values = attention.weights, attention.outputs, attention.values.float()
        rest = (1 - weights).clamp_min(torch.finfo(weights.dtype).eps)
        apart = (
            values.square().sum(-1)[:, :, None, None] - 2 * outputs @ values.mT[:, :, None] + outputs.square().sum(-1, keepdim=True)
        ).clamp_min(0)
        return torch.einsum("bhgqt,bq->bht", (weights / rest).square() * apart, attention.observed)

    def observe(self, score: Tensor, attention_sums: Tensor, queries: Tensor | int) -> Tensor:
        return score * (1 - 1 / self.window_size) ** queries + attention_sums
