"""How tokens come into a body that is full: the policy ranks what is held together with what comes, and codes are written over codes.

Survivors stay where they are, bit for bit. All that comes is encoded before some of it is taken, so that formats that share a scale among
heads see the same token in all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import Pair
from .chunks import Chunks
from .ledger import Ledger, Records


def admit(body: Chunks, ledger: Ledger, arrived: Pair, records: Records, limit: int, own: Tensor | None) -> bool:
    """Takes keys and values `[B, H, N, D]` with their records into the body; whether they were only appended.

    The body may hold `limit` tokens, and each row `own` `[B, 1, 1]` of them, where these differ.
    """
    held, count = body.length, records["positions"].shape[-1]
    if held + count <= limit and own is None:
        body.append(arrived)
        ledger.body = {name: torch.cat([x, records[name]], dim=-1) for name, x in ledger.body.items()}
        return True
    size = min(limit, held + count)
    stays = _stays(ledger, records, size, own)
    places = min(count, size)
    if not places:
        return False
    new = _first_of([stays[..., held:]], places)
    accepted = stays[..., held:].gather(-1, new)
    # In the place of tokens that go, then into empty slots, so that these stay the same in all heads. New ones and places are both in
    # ascending order, so that what comes into an empty body lies there in the order of the text.
    occupied = F.pad(ledger.body["positions"] >= 0, (0, size - held))
    stays = F.pad(stays[..., :held], (0, size - held))
    where = _first_of([occupied & ~stays, ~occupied], places)
    _write(body, arrived, new, where, accepted, size - held)
    for name, x in ledger.body.items():
        x = F.pad(x, (0, size - held), value=-1)
        x = x.masked_fill(~stays, -1) if name == "positions" else x
        ledger.body[name] = x.scatter(-1, where, torch.where(accepted, records[name].gather(-1, new), x.gather(-1, where)))
    return False


def _stays(ledger: Ledger, records: Records, size: int, own: Tensor | None) -> Tensor:
    """Which of the tokens held and then of those that come stay, bool `[B, H, T]`."""
    union = {name: torch.cat([x, records[name]], dim=-1) for name, x in ledger.body.items()}
    order = ledger.order(union)
    if own is not None:
        stays = order.argsort(dim=-1, descending=True).argsort(dim=-1) < own.clamp(0, size)
    else:
        goes = order.topk(order.shape[-1] - size, dim=-1, largest=False).indices
        stays = torch.ones_like(order, dtype=torch.bool).scatter_(-1, goes, False)
    return stays & (union["positions"] >= 0)


def _write(body: Chunks, arrived: Pair, new: Tensor, where: Tensor, accepted: Tensor, more: int) -> None:
    """Quantizes what arrived, adds `more` slots, and puts the tokens `new` `[B, H, N]` into the slots `where`."""
    body.grow(more, arrived)
    body.fit(arrived)
    fresh = Chunks(body.codecs, body.dims)
    fresh.reserve(arrived[0].shape[2], arrived)
    fresh.once, fresh.fitted = body.once, True
    fresh.append(arrived)
    body.put(where, accepted, fresh.take(new))


def _first_of(classes: list[Tensor], count: int) -> Tensor:
    """Indices `[B, H, count]` of the entries that are true, ascending, those of the first mask before those of the next, then others."""
    size = classes[0].shape[-1]
    place = torch.arange(size, device=classes[0].device)
    rank = place + size * len(classes)
    for number, mask in reversed(list(enumerate(classes))):
        rank = torch.where(mask, place + size * number, rank)
    return rank.topk(count, dim=-1, largest=False, sorted=True).indices
