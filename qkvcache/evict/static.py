"""A decode step of a cache that evicts: appending one token and evicting one, in tensors at fixed addresses, with counts on the device.

    sinks        `[B, H, E, D]`           the first tokens, in the model's dtype
    ring         `[B, H, W, D]`           the last tokens, in the model's dtype
    pages        `S` slots of each row    quantized tokens, different ones in each head
    records      `[B, H, S + W]`          an entry for each slot of the pages, then of the ring. The first record is the positions, int32
                                          (-1: no token); up to three in fp32 follow
    column_mask  bool `[B, E + S + W]`    which columns hold a token: sinks, pages, ring
    row_lengths  int64 `[B]`              tokens of each row without padding
    columns      int64 `[1]`              tokens of a row with padding

Token `n` of a row is in column `n % W` of the ring. `append_token` is called before attention. `evict_token` is called after it and removes
the oldest token from the ring; its column stays empty until the next step. All heads have the same empty slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.paged_inputs import PagedInputs
from ..kernels.segments import Pair
from ..kernels.store.reference import quantize_into


@dataclass(eq=False)
class StaticTensors:
    """The tensors of the table above; `inputs` are the inputs of attention over sinks, pages and ring."""

    inputs: PagedInputs
    records: dict[str, Tensor]
    column_mask: Tensor
    row_lengths: Tensor
    columns: Tensor

    @property
    def ring(self) -> Pair:
        return self.inputs.ring

    @property
    def slots(self) -> int:
        return self.records["positions"].shape[2] - self.ring[0].shape[2]

    @property
    def arguments(self) -> tuple:
        """The arguments of the torch operators after the handle of the inputs, in the order of `dispatch.STATIC`. `of` makes a
        StaticTensors of them; the records after the positions lose their names."""
        return list(self.records.values()), self.column_mask, self.row_lengths, self.columns

    def tensors(self) -> list[Tensor]:
        """All tensors at fixed addresses, except the pages and their table."""
        return [*self.inputs.sinks, *self.ring, *self.records.values(), self.column_mask, self.row_lengths, self.columns]

    @classmethod
    def of(cls, inputs: PagedInputs, records: Sequence[Tensor], *counts: Tensor) -> StaticTensors:
        named = {str(i) if i else "positions": record for i, record in enumerate(records)}
        return cls(inputs, named, *counts)


def gather_columns(x: Tensor, index: Tensor) -> Tensor:
    """Columns `index` `[B, N]` of each row of `x` `[B, H, T]` or `[B, H, T, D]`."""
    index = index.unsqueeze(1) if x.dim() == 3 else index[:, None, :, None]
    return x.gather(2, index.expand(*x.shape[:2], index.shape[2], *x.shape[3:]))


def append_token(static: StaticTensors, x: Pair, new: Sequence[Tensor | None], is_valid: Tensor | None) -> None:
    """Writes one token of each row into the ring.

    Args:
        x: keys and values `[B, H, 1, D]`.
        new: `[B, H, 1]`, the value of each record after the positions; None: 0.
        is_valid: bool `[B]`, False for padding, which the next token overwrites; None: no padding.
    """
    ring, row_lengths, column_mask, (positions, *others) = static.ring, static.row_lengths, static.column_mask, static.records.values()
    at = row_lengths % ring[0].shape[2]
    position = row_lengths.clone() if is_valid is None else torch.where(is_valid, row_lengths, -1)
    for tokens, token in zip(ring, x, strict=True):
        _put(tokens, at, token)
    in_records = static.slots + at
    _put(positions, in_records, position.int()[:, None, None].expand(*positions.shape[:2], 1))
    for record, value in zip(others, new, strict=True):
        _put(record, in_records, record.new_zeros(*record.shape[:2], 1) if value is None else value)
    column_mask.scatter_(1, (column_mask.shape[1] - ring[0].shape[2] + at)[:, None], (position >= 0)[:, None])
    row_lengths.add_(1 if is_valid is None else is_valid.long())
    static.columns.add_(1)


def evict_token(static: StaticTensors, order: Tensor) -> Tensor:
    """Removes the token in column `row_lengths % W` from the ring. It becomes a sink if its position is below `E`. Otherwise each head
    evicts the token of lowest rank among its pages and this token. If that is a token of the pages, this token is quantized into its slot.

    Args:
        order: ranks, int64 `[B, H, S + 1]`: of the slots of the pages, then of the token itself. The first of equal ones is the lowest.

    Returns the slot, int64 `[B, H]`; -1 where the token is evicted, `-2 - e` where it became sink `e`.
    """
    ring, column_mask, records, sinks = static.ring, static.column_mask, list(static.records.values()), static.inputs.sinks
    slots, exact = static.slots, sinks[0].shape[2]
    at = static.row_lengths % ring[0].shape[2]
    token = gather_columns(ring[0], at[:, None]), gather_columns(ring[1], at[:, None])
    in_records = (slots + at)[:, None]
    position = gather_columns(records[0], in_records)[..., 0].long()
    least = order.argmin(-1)
    where = torch.where(least < slots, least, -1)
    where = torch.where((position >= 0) & (position < exact), -2 - position, where)
    is_sink = where[:, 0] < -1
    for zone, x in zip(sinks, token, strict=True):
        sink = where[..., None] == -2 - torch.arange(exact, device=where.device)
        zone.copy_(torch.where(sink[..., None], x, zone))
    if slots:
        into, stored = where.clamp_min(0)[..., None], (where >= 0)[..., None]
        quantize_into(static.inputs.pages, token, static.inputs.pages.slots(into).masked_fill(~stored, -1))
        for record in records:
            record.scatter_(2, into, torch.where(stored, gather_columns(record, in_records), record.gather(2, into)))
    goes = torch.where(is_sink, -2 - where[:, 0], exact + where[:, 0].clamp_min(0))[:, None]
    column_mask.scatter_(1, goes, torch.where(where[:, :1] == -1, column_mask.gather(1, goes), is_sink[:, None] | (position[:, :1] >= 0)))
    column_mask.scatter_(1, (exact + in_records), torch.zeros_like(is_sink[:, None]))
    _put(records[0], in_records[:, 0], torch.full_like(records[0][..., :1], -1))
    return where


def _put(x: Tensor, at: Tensor, new: Tensor) -> None:
    """Writes `new` `[B, H, 1]` or `[B, H, 1, D]` into column `at` `[B]` of each row."""
    x.scatter_(2, at.view(-1, *[1] * (x.dim() - 1)).expand_as(new), new)
