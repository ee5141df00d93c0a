"""`replace.replace_lowest` in one launch.

Little data moves: the cost is the number of launches. One program for each head bisects the order of retention until it knows
the last tokens, and writes the new tokens over them."""

from __future__ import annotations

import functools
from itertools import repeat

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.host.launch import Held, Launcher

LARGEST = 4096
"""Columns that a program compares at once."""
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_MOST, _LEAST = tl.constexpr(2**63 - 1), tl.constexpr(-(2**63))
UNION, REGION = ("new_0", "new_1", "new_2", "new_3"), ("held_0", "held_1", "held_2", "held_3")


def replace_lowest(
    priority: Tensor, union: dict[str, Tensor], region: dict[str, Tensor], num_sinks: int, first_recent: int | Tensor
) -> Tensor:
    """`replace.replace_lowest`, in place."""
    for name, x in region.items():
        if x.stride() != (x.stride(1) * x.shape[1], x.stride(1), 1):
            region[name] = x.contiguous()
    batch, heads, columns = priority.shape
    stored = region["positions"].shape[2]
    priority = priority.float().contiguous()
    into = torch.empty(batch, heads, columns - stored, dtype=torch.int64, device=priority.device)
    steps = tuple(map(Tensor.stride, region.values(), repeat(1)))
    recent, by_row, first = (first_recent, True, 0) if isinstance(first_recent, Tensor) else (priority, False, first_recent)
    none = (priority,) * (len(UNION) - len(union))
    run = _launcher(priority.device, triton.next_power_of_2(columns), triton.next_power_of_2(columns - stored), len(union), by_row)
    held = Held(stored=stored, count=columns - stored, heads=heads, num_sinks=num_sinks, first=first, steps=steps)
    run((heads, batch, 1), priority, recent, into, *union.values(), *none, *region.values(), *none, held=(held,))
    return into


@functools.lru_cache(maxsize=64)
def _launcher(device: torch.device, columns: int, most: int, fields: int, by_row: bool) -> Launcher:
    block = min(columns, LARGEST)
    given = "priority", "recent", "into", *UNION, *REGION
    return Launcher(
        _replace_kernel, device, given, ("stored", "count", "heads", "num_sinks", "first", "steps"),
        FIELDS=fields, BY_ROW=by_row, BLOCK=block, MOST=most, num_warps=max(min(block // 256, 8), 1),
    )  # fmt: skip


@triton.jit
def _order(priority, positions, row, column, columns, num_sinks, first):
    """`replace.total_order` of some columns of a row of `columns`, and whether there are as many."""
    live = column < columns
    rank = tl.load(priority + row + column, mask=live, other=0.0)
    position = tl.load(positions + row + column, mask=live, other=-1)
    rank = tl.where(rank != rank, _LOWEST, tl.minimum(tl.maximum(rank, _LOWEST), -_LOWEST))
    rank = tl.where((position < num_sinks) | (position >= first), float("inf"), rank)
    rank = tl.where(position < 0, float("-inf"), tl.where(rank == 0.0, 0.0, rank))  # -0.0 equals 0.0
    bits = rank.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = (bits.to(tl.int64) << 32) + tl.where(position < 0, -1 - column, position)
    return tl.where(live, order, _MOST), live


@triton.jit(do_not_specialize=["stored", "count", "heads", "num_sinks", "first"])
def _replace_kernel(
    priority, recent, into, new_0, new_1, new_2, new_3, held_0, held_1, held_2, held_3, stored, count, heads, num_sinks, first, steps,
    FIELDS: tl.constexpr, BY_ROW: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Grid (H, B). Tensors are contiguous, but for the held ones.

    priority   fp32 [B, H, stored + count]: of the slots, then of the new tokens
    recent     int64 [B], the first protected position of each row; read if BY_ROW, else `first` counts
    into       int64 [B, H, count]: output, the slot of each new token, -1 if it is not stored
    new_0      int32 [B, H, stored + count], the positions of the slots and of the new tokens; new_1 to new_3 fp32 likewise, other fields
    held_0     int32 [B, H, stored], the positions of the slots: output; held_1 to held_3 fp32 likewise. `steps`: elements from each head to
               the next one, of which the rows of the batch have H
    heads      H                num_sinks   positions below are protected
    FIELDS     fields that there are, the positions among them
    BLOCK      columns that are compared at once             MOST   at least `count`
    """
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    columns = stored + count
    row = (b * heads + h) * columns
    first_recent = tl.load(recent + b) if BY_ROW else first
    low, high = _MOST, _LEAST
    for begin in range(0, columns, BLOCK):
        order, live = _order(priority, new_0, row, begin + tl.arange(0, BLOCK), columns, num_sinks, first_recent)
        low = tl.minimum(low, tl.min(order, 0))
        high = tl.maximum(high, tl.max(tl.where(live, order, _LEAST), 0))
    while low < high:  # to the highest of the `count` last ones
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        below = 0
        for begin in range(0, columns, BLOCK):
            order, live = _order(priority, new_0, row, begin + tl.arange(0, BLOCK), columns, num_sinks, first_recent)
            below += tl.sum(((order <= middle) & live).to(tl.int32), 0)
        low, high = tl.where(below >= count, low, middle + 1), tl.where(below >= count, middle, high)
    slots = into + (b * heads + h) * count
    freed = 0
    for begin in range(0, stored, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        order, _ = _order(priority, new_0, row, column, columns, num_sinks, first_recent)
        free = (column < stored) & (order <= low)
        nth = freed + tl.cumsum(free.to(tl.int32), 0) - 1
        tl.store(slots + nth, column.to(tl.int64), mask=free)
        freed += tl.sum(free.to(tl.int32), 0)
    tl.debug_barrier()  # other threads of this program wrote the slots
    n = tl.arange(0, MOST)
    order, live = _order(priority, new_0, row, stored + n, columns, num_sinks, first_recent)
    accepted = live & (order > low)
    slot = tl.load(slots + tl.cumsum(accepted.to(tl.int32), 0) - 1, mask=accepted, other=-1)
    tl.debug_barrier()
    tl.store(slots + n, slot, mask=live)
    source = row + stored + n
    new, held = (new_0, new_1, new_2, new_3), (held_0, held_1, held_2, held_3)
    for i in tl.static_range(FIELDS):
        tl.store(held[i] + ((b * heads + h) * steps[i] + slot), tl.load(new[i] + source, mask=accepted), mask=accepted)
