"""By position alone: the newest tokens, with or without the first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from .base import Budget, Policy, Tokens, check_count, usual_interval


@dataclass(frozen=True, kw_only=True)
class SinkWindow(Policy):
    """The first `sinks` tokens and the newest `window` ones (StreamingLLM, arXiv 2309.17453): constant memory on endless streams.

    Args:
        window: newest tokens that are kept.
        positions: "original": every token keeps its position. "cache": sinks are read as if they stood right before the window, as
            StreamingLLM does it, turned anew from their stored keys at each step: for streams longer than the model's context.
    """

    window: int = 1020
    positions: Literal["original", "cache"] = "original"
    budget: Budget = field(init=False)  # type: ignore[assignment]
    recent: int = field(init=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_count("window", self.window, 1)
        if self.positions not in ("original", "cache"):
            raise ValueError(f"positions={self.positions!r}: expected 'original' or 'cache'")
        if isinstance(self.interval, int) and self.interval > self.window:
            raise ValueError(f"interval={self.interval}: must not exceed window={self.window}")
        check_count("sinks", self.sinks, 0)
        object.__setattr__(self, "budget", Budget(tokens=self.window + self.sinks))
        interval = min(usual_interval(self.window + self.sinks), self.window) if self.interval is None else self.interval
        object.__setattr__(self, "recent", self.window - interval + 1)
        super().__post_init__()

    def priority(self, tokens: Tokens) -> Tensor:
        return tokens.positions


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(SinkWindow):
    """The newest `window` tokens, in a ring. Models that were not trained for it fall apart once their first tokens are gone."""

    window: int = 4096
    sinks: int = 0
