"""Addition of tokens to a quantized region within its budget: the policy ranks stored and new tokens together, and the
codes of retained new tokens overwrite the codes of evicted tokens.

Retained tokens keep their codes, bit for bit, and also their slots unless heads share the budget (`head_pages.py`). All
new tokens are quantized before some are selected, so that formats with one scale for all heads see the same token in
each head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import Pair, both
from .dispatch import replace_lowest
from .head_pages import HeadPages
from .metadata import TokenFields, TokenMetadata
from .policies.ranking import first_of, highest
from .slot_pages import SlotPages


def append_and_evict(
    region: SlotPages, metadata: TokenMetadata, new: Pair, fields: TokenFields, limit: int, row_limits: Tensor | None
) -> bool:
    """Adds keys and values `new` `[B, H, N, D]` with their `fields` to `region`; returns whether all were appended and
    no token was evicted.

    Args:
        limit: tokens that the region may hold.
        row_limits: int64 `[B, 1, 1]`, tokens that each row may hold, if these differ.
    """
    stored, count = region.length, fields["positions"].shape[-1]
    union = {name: torch.cat([x, fields[name]], dim=-1) for name, x in metadata.region.items()}
    if stored + count <= limit and row_limits is None:
        region.append(new)
        metadata.region = union
        return True
    size = min(limit, stored + count)
    order = metadata.order(union)
    retained = highest(order, size if row_limits is None else row_limits.clamp(0, size)) & (union["positions"] >= 0)
    selected = min(count, size)
    if not selected:
        return False
    chosen = retained[..., stored:]
    index = first_of([chosen, ~chosen], selected)
    accepted = chosen.gather(-1, index)
    # Slots of evicted tokens first, then empty ones, so that the latter stay the same in all heads. Both new tokens and slots are in
    # ascending order, so that tokens added to an empty region are in token order.
    added = size - stored
    occupied = F.pad(metadata.region["positions"] >= 0, (0, added))
    retained = F.pad(retained[..., :stored], (0, added))
    slots = first_of([occupied & ~retained, ~occupied, occupied & retained], selected)
    into = torch.full_like(slots, -1)[..., :1].expand(*slots.shape[:2], count)
    into = into.scatter(-1, index, torch.where(accepted, slots, -1))
    region.reserve(added)
    region.count(added)
    region.replace(new, into)
    for name, x in metadata.region.items():
        x = F.pad(x, (0, added), value=-1)
        x = x.masked_fill(~retained, -1) if name == "positions" else x
        metadata.region[name] = x.scatter(-1, slots, torch.where(accepted, fields[name].gather(-1, index), x.gather(-1, slots)))
    return False


def append_and_replace(region: SlotPages, metadata: TokenMetadata, new: Pair, fields: TokenFields, limit: int) -> None:
    """`append_and_evict` for few new tokens: as many as fit are appended, and the others replace the last tokens in the order of
    retention. All rows may hold `limit` tokens."""
    fits, held = limit - region.length, metadata.region
    if fits > 0:
        region.append(both(lambda x: x[:, :, :fits], new))
        for name, x in fields.items():
            held[name] = torch.cat([held[name], x[..., :fits]], dim=-1)
        new, fields = both(lambda x: x[:, :, fits:], new), {name: x[..., fits:] for name, x in fields.items()}
    union = dict[str, Tensor]()
    for name, x in held.items():
        union[name] = torch.cat([x, fields[name]], dim=-1)
    priority, num_sinks, first_recent = metadata.ranking(union)
    region.replace(new, replace_lowest(priority, union, held, num_sinks, first_recent))


def append_and_share(
    region: HeadPages,
    metadata: TokenMetadata,
    new: Pair,
    fields: TokenFields,
    limit: int,
    row_limits: Tensor | None,
    guaranteed: int | Tensor,
    in_order: bool,
    least: int | None,
    most: Tensor | None,
) -> bool:
    """`append_and_evict` for heads that retain different numbers of tokens, together at most `H * limit`.

    Args:
        guaranteed: tokens that each head may always have, an int or int64 `[1 or B, 1 or H, 1]`; over all heads at most
            the budget.
        in_order: whether columns are in token order so far; while they are, padding is stored too.
        least: the minimum of `guaranteed`, if no head may have more than it is guaranteed; None: heads share the rest
            of the budget.
        most: the most tokens of all heads of a row together, an int64 scalar; None: `H * limit`.
    """
    stored, count = region.length, fields["positions"].shape[-1]
    union = {name: torch.cat([x, fields[name]], dim=-1) for name, x in metadata.region.items()}
    valid, heads = union["positions"] >= 0, union["positions"].shape[1]
    fits = not metadata.ragged and row_limits is None and stored + count <= (limit if least is None else least)
    in_order = in_order and fits
    if fits:
        retained = torch.ones_like(valid) if in_order else valid
    else:
        order = metadata.order(union)
        if least is not None:
            retained = highest(order, guaranteed) & valid
        else:
            limits = limit if row_limits is None else row_limits.clamp(0, limit)[:, 0]
            retained = _shared(order, valid, heads * limits, guaranteed)
    region.retain(retained[..., :stored], new, retained[..., stored:], union, heads * limit if most is None else most)
    metadata.ragged = not in_order
    return in_order


def _shared(order: Tensor, valid: Tensor, total: int | Tensor, guaranteed: int | Tensor) -> Tensor:
    """Selects, as bool `[B, H, T]`, the `total` tokens (an int or `[B, 1]`) of highest `order` `[B, H, T]` over all
    heads of a row. Each head keeps its first `guaranteed` tokens (an int or `[1 or B, 1 or H, 1]`); at equal order the
    first heads win. `valid`: the columns that hold a token, bool `[B, H, T]`."""
    shape = order.shape
    order = order.masked_fill(highest(order, guaranteed) & valid, torch.iinfo(order.dtype).max).flatten(1)
    descending = order.argsort(dim=-1, descending=True, stable=True)
    chosen = (torch.arange(order.shape[1], device=order.device) < total).expand_as(order)
    return torch.zeros_like(chosen).scatter_(1, descending, chosen).view(shape) & valid
