"""Attention less redundancy, for long chains of thought (R-KV, arXiv 2505.24133)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Tokens, given
from .keys import EPSILON
from .snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class RKV(SnapKV):
    """Retains tokens that the last queries attend to and whose keys are not redundant: `attention_weight * attention - (1 -
    attention_weight) * redundancy`.

    Attention is SnapKV's score, as a share of that of all candidates. Redundancy is the mean cosine of a key to the other candidates, and
    its softmax over them. Every eviction dequantizes the stored keys. The paper exempts the newest of several similar keys from
    redundancy; here recent tokens are protected as in every policy.

    Args:
        window_size: last queries whose attention counts.
        attention_weight: from 0 (redundancy alone) to 1 (SnapKV).
    """

    window_size: int = 8
    attention_weight: float = 0.1
    recent: int | float = 0.125

    needs_stored_keys: ClassVar[bool] = True
    scores_are_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.attention_weight <= 1:
            raise ValueError(f"attention_weight={self.attention_weight!r}: must be from 0 to 1")
        super().__post_init__()

    def priority(self, tokens: Tokens) -> Tensor:
        valid = tokens.valid
        attention = super().priority(tokens).masked_fill(~valid, 0)
        attention = attention / attention.sum(-1, keepdim=True).clamp_min(torch.finfo(attention.dtype).tiny)
        keys = given(tokens.keys, "stored keys").float()
        inverse = torch.linalg.vector_norm(keys, dim=-1).clamp_min(EPSILON).reciprocal().masked_fill(~valid, 0)
        others = (valid.sum(-1, keepdim=True) - 1).clamp_min(1)
        total = inverse[:, :, None] @ keys  # of the keys' directions, [B, H, 1, D]
        cosine = ((keys @ total.mT)[..., 0] * inverse - 1) / others
        redundancy = cosine.masked_fill(~valid, -torch.inf).softmax(-1)
        return self.attention_weight * attention - (1 - self.attention_weight) * redundancy
