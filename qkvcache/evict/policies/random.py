"""Random eviction: the baseline that a policy must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Policy, Tokens


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """A fixed random score for each position and KV head, the same in every row, batch and chunking."""

    seed: int = 0

    def priority(self, tokens: Tokens) -> Tensor:
        head = torch.arange(tokens.positions.shape[1], device=tokens.positions.device)[None, :, None]
        x = tokens.positions.long() * 0x9E3779B1 + head * 0x85EBCA77 + self.seed * 0xC2B2AE3D
        for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):  # rounds of a 32-bit mixer
            x = x & 0xFFFFFFFF
            x = (x ^ (x >> shift)) * factor
        return (x & 0xFFFFFF).float()
