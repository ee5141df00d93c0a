"""A user-defined policy, as one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import ALL, Policy, Tokens


@dataclass(frozen=True, kw_only=True)
class Custom(Policy):
    """`function(tokens)` returns the priority `[B, H, T]` of `Tokens`, which has the accumulated attention (`score`), norms, positions and
    validity.

        Custom(function=lambda tokens: tokens.score * tokens.value_norm, budget=1024)
    """

    function: Callable[[Tokens], Tensor]
    observation_window: ClassVar[int] = ALL
    needs_norms: ClassVar[bool] = True
    scores_are_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must take Tokens and return their priority, got {self.function!r}")
        super().__post_init__()

    def observe(self, score: Tensor, attention_sums: Tensor, queries: Tensor | int) -> Tensor:
        return score + attention_sums

    def priority(self, tokens: Tokens) -> Tensor:
        priority = self.function(tokens)
        if not isinstance(priority, Tensor) or priority.shape != tokens.positions.shape:
            shape = tuple(priority.shape) if isinstance(priority, Tensor) else type(priority).__name__
            raise ValueError(f"the policy's function gave {shape}, expected priorities of shape {tuple(tokens.positions.shape)}")
        return priority
