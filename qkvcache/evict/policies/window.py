"""Policies of positions alone: the newest tokens, with or without the first ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from .base import Policy, Tokens
from .budget import Budget, check_count, usual_interval


@dataclass(frozen=True, kw_only=True)
class SinkWindow(Policy):
    """The first `num_sink_tokens` and the newest `window_length` tokens (StreamingLLM, arXiv 2309.17453): streams in constant memory.

    Args:
        window_length: newest tokens that are retained.
        positions: "original": every token keeps its position. "cache": sinks are read at the positions right before the window, as
            in StreamingLLM: at each step their stored keys are rotated again. For streams longer than the model's context.
    """

    window_length: int = 1020
    positions: Literal["original", "cache"] = "original"
    budget: Budget = field(init=False)  # type: ignore[assignment]
    recent: int = field(init=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_count("window_length", self.window_length, 1)
        if self.positions not in ("original", "cache"):
            raise ValueError(f"positions={self.positions!r}: expected 'original' or 'cache'")
        if isinstance(self.interval, int) and self.interval > self.window_length:
            raise ValueError(f"interval={self.interval}: must not exceed window_length={self.window_length}")
        check_count("num_sink_tokens", self.num_sink_tokens, 0)
        object.__setattr__(self, "budget", Budget(tokens=self.window_length + self.num_sink_tokens))
        interval = (
            min(usual_interval(self.window_length + self.num_sink_tokens), self.window_length) if self.interval is None else self.interval
        )
        object.__setattr__(self, "recent", self.window_length - interval + 1)
        super().__post_init__()

    def priority(self, tokens: Tokens) -> Tensor:
        return tokens.positions


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(SinkWindow):
    """The newest `window_length` tokens, in a ring. Models that were not trained with such a window
    produce nonsense once their first tokens are evicted."""

    window_length: int = 4096
    num_sink_tokens: int = 0
