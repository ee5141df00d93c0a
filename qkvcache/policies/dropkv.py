"""The exact change of the layer's attention output without the token (DropKV)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import matmul_fp32
from .base import ObservedAttention, Policy, check_count
from .snapkv import faded


@dataclass(frozen=True, kw_only=True)
class DropKV(Policy):
    """Evicts the token whose removal changes the outputs of the last queries least.

    Without a token of weight `p` and value `v`, the other weights grow by `1 / (1 - p)`, and an output `o` changes by exactly
    `p / (1 - p) * (o - v)`. The score is the squared norm of that change, summed over the last `window_size` queries and the query heads of
    the group: a token that receives attention, but whose value equals the output, costs nothing. The costs of several tokens do not add up
    exactly. As in SnapKV, older queries decay at decode at the rate `1 / window_size`.

    The weights of the observed queries are computed in torch, over dequantized keys and values: of decode steps once an interval.
    """

    window_size: int = 32

    has_scores: ClassVar[bool] = True
    reduces_attention: ClassVar[bool] = True
    scores_are_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("window_size", self.window_size, 1, of="queries")
        super().__post_init__()

    @property
    def observation_window(self) -> int:  # type: ignore[override]
        return self.window_size

    @property
    def decode_decay(self) -> float:
        return 1 - 1 / self.window_size

    def reduce_attention(self, attention: ObservedAttention) -> Tensor:
        weights, outputs, values = attention.weights, attention.outputs, attention.values
        odds = weights / (1 + torch.finfo(weights.dtype).eps - weights)
        apart = matmul_fp32(outputs.flatten(2, 3), values.mT).view_as(odds).mul_(-2)  # |o - v|^2 = |o|^2 + |v|^2 - 2 o v
        apart.add_(_squared(values)[:, :, None, None]).add_(_squared(outputs)[..., None])
        costs = odds.square_().mul_(apart).flatten(2, 3)
        observed = attention.observed[:, None, None].expand(-1, -1, weights.shape[2], -1).flatten(2)  # [B, 1, G * Q]
        return (observed[:, :, None] @ costs)[:, :, 0].clamp_min(0)

    def observe(self, score: Tensor, attention_sums: Tensor, queries: Tensor | int) -> Tensor:
        return faded(score, self.decode_decay, attention_sums, queries)


def _squared(x: Tensor) -> Tensor:
    """The squared lengths of vectors `[..., D]`, fp32 `[...]`."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square()
