"""A step of one token where tokens are forgotten: how one comes in and one goes, in tensors that never move, counting on the device.

    first    `[B, H, E, D]`      exact tokens that stay           planes   `[B, H, S, width]`  encoded tokens, one in each slot of the body
    ring     `[B, H, W, D]`      the last tokens, exact           records  `[B, H, S + W]`     of the body's slots and the ring's: positions
    shown    bool `[B, E + S + W]`  which columns hold a token             int32 (-1: no token), then up to three in fp32
    seen     int64 `[B]`         real tokens of each row          columns  int64 `[1]`         tokens of a row with its padding

The `n`th real token of a row lies in column `n % W` of the ring. `append_token` comes before attention, `evict_token` after it, when the
oldest token leaves the ring; between the steps the column that it had is empty. Which slots are empty is the same in all heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from .segments import CODECS, Pair


@dataclass(eq=False)
class StaticTensors:
    """The tensors of the table above."""

    numbers: tuple[int, int]
    """The codecs, as `segments.number` counts them."""
    planes: tuple[Codes, Codes]
    """Those kept once among them."""
    first: Pair
    ring: Pair
    records: dict[str, Tensor]
    shown: Tensor
    seen: Tensor
    columns: Tensor

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return CODECS[self.numbers[0]], CODECS[self.numbers[1]]

    @property
    def slots(self) -> int:
        return self.records["positions"].shape[2] - self.ring[0].shape[2]

    @property
    def arguments(self) -> tuple:
        """What an operator takes for this; `of` puts it together again, where records but the positions have no names."""
        planes = [plane for side in self.planes for plane in side.values()]
        groups = (self.numbers, planes, self.first, self.ring, self.records.values())
        return *[list(group) for group in groups], self.shown, self.seen, self.columns

    def tensors(self) -> list[Tensor]:
        _, *groups, shown, seen, columns = self.arguments
        return [*itertools.chain(*groups), shown, seen, columns]

    @classmethod
    def of(
        cls,
        numbers: Sequence[int],
        planes: Sequence[Tensor],
        first: Sequence[Tensor],
        ring: Sequence[Tensor],
        records: Sequence[Tensor],
        *counts: Tensor,
    ) -> StaticTensors:
        left = iter(planes)
        sides = [{b.name: next(left) for b in CODECS[n].buffers(x.shape[3])} for n, x in zip(numbers, ring, strict=True)]
        named = {str(i) if i else "positions": record for i, record in enumerate(records)}
        return cls((numbers[0], numbers[1]), (sides[0], sides[1]), (first[0], first[1]), (ring[0], ring[1]), named, *counts)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Columns `index` `[B, N]` of each row of `x` `[B, H, T]` or `[B, H, T, D]`."""
    index = index.unsqueeze(1) if x.dim() == 3 else index[:, None, :, None]
    return x.gather(2, index.expand(*x.shape[:2], index.shape[2], *x.shape[3:]))


def append_token(static: StaticTensors, x: Pair, new: Sequence[Tensor | None], is_valid: Tensor | None) -> None:
    """Takes keys and values `x` `[B, H, 1, D]`, `new` `[B, H, 1]` of each record after the positions (None: zero), and which rows' tokens
    are `is_valid`, bool `[B]` (None: all). What is not real is overwritten by what comes next."""
    ring, seen, shown, (positions, *others) = static.ring, static.seen, static.shown, static.records.values()
    at = seen % ring[0].shape[2]
    position = seen.clone() if is_valid is None else torch.where(is_valid, seen, -1)
    for tokens, token in zip(ring, x, strict=True):
        _put(tokens, at, token)
    in_records = static.slots + at
    _put(positions, in_records, position.int()[:, None, None].expand(*positions.shape[:2], 1))
    for record, value in zip(others, new, strict=True):
        _put(record, in_records, record.new_zeros(*record.shape[:2], 1) if value is None else value)
    shown.scatter_(1, (shown.shape[1] - ring[0].shape[2] + at)[:, None], (position >= 0)[:, None])
    seen.add_(1 if is_valid is None else is_valid.long())
    static.columns.add_(1)


def evict_token(static: StaticTensors, order: Tensor) -> Tensor:
    """The token in column `seen % W` of the ring leaves it: to the first zone if its position is there, and else, in each head, to the slot
    of the body that is least in `order`, int64 `[B, H, S + 1]`, the first of equal ones. Its own place in the order is the last; if that is
    least, it is forgotten.

    Returns the slot, int64 `[B, H]`; -1 where it is forgotten, `-2 - e` where it went to column `e` of the first zone.
    """
    ring, shown, records, slots, exact = static.ring, static.shown, list(static.records.values()), static.slots, static.first[0].shape[2]
    at = static.seen % ring[0].shape[2]
    token = take(ring[0], at[:, None]), take(ring[1], at[:, None])
    in_records = (slots + at)[:, None]
    position = take(records[0], in_records)[..., 0].long()
    least = order.argmin(-1)
    where = torch.where(least < slots, least, -1)
    where = torch.where((position >= 0) & (position < exact), -2 - position, where)
    there = where[:, 0] < -1
    for first, x in zip(static.first, token, strict=True):
        sink = where[..., None] == -2 - torch.arange(exact, device=where.device)
        first.copy_(torch.where(sink[..., None], x, first))
    if slots:
        into, taken = where.clamp_min(0)[..., None], (where >= 0)[..., None]
        for codec, side, x in zip(static.codecs, static.planes, token, strict=True):
            names = [b.name for b in codec.buffers(x.shape[3]) if b.tokens == "each"]
            codes = codec.quantize(x, {name: plane for name, plane in side.items() if name not in names})
            for name in names:
                plane = side[name]
                index = into[..., None].expand(*where.shape, 1, plane.shape[3])
                plane.scatter_(2, index, torch.where(taken[..., None], codes[name], plane.gather(2, index)))
        for record in records:
            record.scatter_(2, into, torch.where(taken, take(record, in_records), record.gather(2, into)))
    goes = torch.where(there, -2 - where[:, 0], exact + where[:, 0].clamp_min(0))[:, None]
    shown.scatter_(1, goes, torch.where(where[:, :1] == -1, shown.gather(1, goes), there[:, None] | (position[:, :1] >= 0)))
    shown.scatter_(1, (exact + in_records), torch.zeros_like(there[:, None]))
    _put(records[0], in_records[:, 0], torch.full_like(records[0][..., :1], -1))
    return where


def _put(x: Tensor, at: Tensor, new: Tensor) -> None:
    """Writes `new` `[B, H, 1]` or `[B, H, 1, D]` into column `at` `[B]` of each row."""
    x.scatter_(2, at.view(-1, *[1] * (x.dim() - 1)).expand_as(new), new)
