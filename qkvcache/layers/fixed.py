"""What a layer that forgets tokens holds at fixed addresses: `kernels/retire.py` says where."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..formats.base import Codes
from ..kernels import Payload
from .ledger import Records


@dataclass(eq=False)
class Fixed:
    """The tensors that stay in their places; pairs are keys and values."""

    first: tuple[Tensor, Tensor]
    ring: tuple[Tensor, Tensor]
    planes: tuple[Codes, Codes]
    records: Records
    """Of all slots of the body and then of the ring, `[B, H, S + W]`."""
    shown: Tensor
    """Which columns hold a token, `[B, E + S + W]`."""
    seen: Tensor
    """Real tokens of each row, int64 `[B]`."""
    columns: Tensor
    """Tokens of a row with its padding, int64 `[1]`."""
    key_sum: Tensor | None
    payload: Payload
    """What attention reads of a step in place: all columns."""

    @property
    def slots(self) -> int:
        return self.records["positions"].shape[2] - self.ring[0].shape[2]

    @property
    def body(self) -> Records:
        return {name: x[..., : self.slots] for name, x in self.records.items()}

    @property
    def recent(self) -> Records:
        return {name: x[..., self.slots :] for name, x in self.records.items()}

    @property
    def valid(self) -> Tensor:
        """Which columns of the first zone hold a token, `[B, E]`."""
        return self.shown[:, : self.first[0].shape[2]]

    def tensors(self) -> list[Tensor]:
        planes = (plane for side in self.planes for plane in side.values())
        counts = (self.shown, self.seen, self.columns, *(() if self.key_sum is None else (self.key_sum,)))
        return [*self.first, *self.ring, *planes, *self.records.values(), *counts]
