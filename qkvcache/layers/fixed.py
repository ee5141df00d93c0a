"""What a layer that forgets tokens holds at fixed addresses, and how its columns are read and written, in each row apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats.base import Codes
from ..kernels import Payload
from .ledger import Records
from .slots import PAGE


@dataclass(eq=False)
class Fixed:
    """The tensors that stay in their places; pairs are keys and values."""

    first: tuple[Tensor, Tensor]
    ring: tuple[Tensor, Tensor]
    planes: tuple[Codes, Codes]
    valid: Tensor
    """Which columns of the first zone hold a token, `[B, E]`."""
    body: Records
    recent: Records
    seen: Tensor
    """Real tokens of each row, int64 `[B]`."""
    columns: Tensor
    """Tokens of a row with its padding, int64 `[1]`."""
    key_sum: Tensor | None
    payload: Payload
    """What attention reads of a step in place: all columns."""

    def tensors(self) -> list[Tensor]:
        records = (*self.body.values(), *self.recent.values(), self.valid, self.seen, self.columns)
        planes = (plane for side in self.planes for plane in side.values())
        return [*self.first, *self.ring, *planes, *records, *(() if self.key_sum is None else (self.key_sum,))]


def take(x: Tensor, index: Tensor) -> Tensor:
    """Columns `index` `[B, N]` of each row of `x` `[B, H, T]` or `[B, H, T, D]`."""
    index = index.unsqueeze(1) if x.dim() == 3 else index[:, None, :, None]
    return x.gather(2, index.expand(*x.shape[:2], index.shape[2], *x.shape[3:]))


def put(x: Tensor, at: Tensor, new: Tensor) -> None:
    """Writes `new` `[B, H, 1]` or `[B, H, 1, D]` into column `at` `[B]` of each row."""
    x.scatter_(2, at.view(-1, *[1] * (x.dim() - 1)).expand_as(new), new)


def spared(shape: tuple[int, ...], **options: Any) -> Tensor:
    """Zeros `[B, H, T, width]` with room behind them: kernels read whole tiles."""
    size = math.prod(shape)
    return torch.zeros(size + PAGE * shape[-1], **options)[:size].view(shape)
