"""What a layer that forgets tokens holds at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..kernels import Payload, Places
from .ledger import Records


@dataclass(eq=False)
class Fixed(Places):
    """All that stays in its place; the records have the ledger's names."""

    key_sum: Tensor | None
    payload: Payload
    """What attention reads of a step in place: all columns."""

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
        return super().tensors() + ([] if self.key_sum is None else [self.key_sum])
