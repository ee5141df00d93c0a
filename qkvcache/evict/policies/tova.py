"""Token omission via attention (arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Policy


@dataclass(frozen=True, kw_only=True)
class TOVA(Policy):
    """Evicts the token that the newest query attends to least, in each KV head by itself; the paper takes the mean over all heads of a
    layer, and protects neither first nor recent tokens (`num_sink_tokens=0, recent=0`)."""

    observation_window: ClassVar[int] = 1
    scores_are_weights: ClassVar[bool] = True

    def observe(self, score: Tensor, attention_sums: Tensor, queries: Tensor | int) -> Tensor:
        if isinstance(queries, int):
            return attention_sums.clone()  # it is a part of a larger tensor
        return torch.where(queries > 0, attention_sums, score)  # a step of padding alone has no query
