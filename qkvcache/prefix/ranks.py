"""Tensor parallelism: each process stores its own heads, and all processes must continue from the same token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import distributed
from transformers import PreTrainedModel

Store = TypeVar("Store")


class Ranks:
    """The processes that share `model`; a single one without tensor parallelism."""

    def __init__(self, model: PreTrainedModel):
        mesh = getattr(model, "_device_mesh", None)
        self.size = (getattr(model, "_tp_size", None) or 1) if distributed.is_available() and distributed.is_initialized() else 1
        self.rank = distributed.get_rank() % self.size if self.size > 1 else 0
        self._group = mesh.get_group() if mesh is not None and mesh.ndim == 1 else None
        self._device = model.device

    def agree(self, find: Callable[[int], tuple[Store, bytes, int] | None], limit: int) -> tuple[Store, bytes, int] | None:
        """The result of `find(limit)` for the highest limit at which its last item, a number of tokens, is the same on
        all ranks."""
        while True:
            agreed = find(limit)
            tokens = agreed[2] if agreed else 0
            limit = self.least(tokens)
            if self.least(-tokens) == -limit:  # the maximum equals the minimum
                return agreed

    def least(self, value: int) -> int:
        """The minimum of `value` over all processes, each of which must call this."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, device=self._device)
        distributed.all_reduce(shared, distributed.ReduceOp.MIN, self._group)
        return int(shared)
