"""`Store`: one layer's preallocated storage, whose addresses never change and whose counts are on the device.

    first    `[B, H, E, D]`   the first `E` tokens, in the model's dtype
    ring     `[B, H, W, D]`   the last tokens, in the model's dtype: the token that comes takes the place of the oldest, which is
                              encoded into the body
    planes   `[B, H, C, width]` for each buffer of the codec: the body, in token order
    table    int64 `[1, 8]`   where the body is, for the attention kernel (`segments.py`)
    state    int32 `[4]`      tokens seen, tokens in the body, a ticket of kernels, tokens that came when the store was full

The `n`th token that has left the first zone is in slot `n % W` of the ring until it is in slot `n` of the body. `step` needs no number on
the host, so that it can be compiled and replayed as a CUDA graph; `append` takes any number of tokens where the host knows the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from .attend import attend
from .segments import CODECS, Body, Exact, Packed, Payload, Segment, Side

SEEN, BODY, TICKET, DROPPED = range(4)


@dataclass(eq=False)
class Store:
    """Keys and values of a layer; pairs are keys and values. `limit`: how many tokens may come."""

    codecs: tuple[Codec, Codec]
    first: tuple[Tensor, Tensor]
    ring: tuple[Tensor, Tensor]
    planes: tuple[Codes, Codes]
    once: tuple[Codes, Codes]
    state: Tensor
    table: Tensor
    limit: int
    arguments: tuple[list[Tensor], list[int], int] = field(init=False)
    """The store as operators of torch take it: its tensors, numbers of the codecs, the limit."""
    body: Body = field(init=False)
    """All slots of the body, as the fused kernel reads them."""

    def __post_init__(self) -> None:
        planes = [plane for codes in (*self.planes, *self.once) for plane in codes.values()]
        tensors = [*self.exact, self.state, self.table, *planes]
        slabs = ((self.planes[0] | self.once[0], self.planes[1] | self.once[1]),)
        self.body = Body(*self.codecs, slabs, self.slots, self.table)
        self.arguments = tensors, list(self.body.numbers), self.limit

    @staticmethod
    def make(codecs: tuple[Codec, Codec], like: tuple[Tensor, Tensor], first: int, ring: int, limit: int, page: int) -> Store:
        """A store for the batch, heads, head_dim, dtype and device of `like`, a body of whole pages, and zeros everywhere."""
        slots = -(-max(limit - first - ring + 1, 1) // page) * page  # one is spare

        exact = [
            tuple(torch.zeros(*x.shape[:2], tokens, x.shape[3], dtype=x.dtype, device=x.device) for x in like) for tokens in (first, ring)
        ]
        planes, once = zip(*(codec.allocate(x, slots) for codec, x in zip(codecs, like, strict=True)), strict=True)
        state = torch.zeros(4, dtype=torch.int32, device=like[0].device)
        table = torch.tensor([[0, slots, 0, 0, 0, 0, 0, 0]], device=like[0].device)
        return Store(codecs, exact[0], exact[1], planes, once, state, table, limit)  # type: ignore[arg-type]

    @property
    def slots(self) -> int:
        return next(iter(self.planes[0].values())).shape[2]

    @property
    def exact(self) -> tuple[Tensor, ...]:
        return (*self.first, *self.ring)

    @staticmethod
    def of(tensors: Sequence[Tensor], numbers: Sequence[int], limit: int) -> Store:
        """The store that these `arguments` were of."""
        codecs = CODECS[numbers[0]], CODECS[numbers[1]]
        first_k, first_v, ring_k, ring_v, state, table, *planes = tensors
        left = iter(planes)
        names = [[b for b in codec.buffers(x.shape[3])] for codec, x in zip(codecs, (ring_k, ring_v), strict=True)]
        held = [[{b.name: next(left) for b in side if b.tokens == kind} for side in names] for kind in ("each", "once")]
        return Store(codecs, (first_k, first_v), (ring_k, ring_v), tuple(held[0]), tuple(held[1]), state, table, limit)  # type: ignore[arg-type]

    def rows(self, body: int) -> Iterator[Tensor]:
        """What is used of each tensor that has a row for each sequence, where the body holds `body` tokens."""
        yield from self.exact
        for codes, once in zip(self.planes, self.once, strict=True):
            yield from (plane[:, :, :body] for plane in codes.values())
            yield from once.values()

    def map(self, fn: Callable[[Tensor], Tensor]) -> Store:
        """A store of `fn(tensor)`; `fn` may change the rows."""
        tensors, numbers, limit = self.arguments
        return Store.of([x if x is self.state or x is self.table else fn(x) for x in tensors], numbers, limit)

    def roles(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its role: `exact`, `bookkeeping`, `codes` or `scales`."""
        yield from (("exact", x) for x in self.exact)
        yield from (("bookkeeping", x) for x in (self.state, self.table))
        for codec, codes, once, x in zip(self.codecs, self.planes, self.once, self.ring, strict=True):
            yield from codec.roles(codes | once, x.shape[3])

    def fit(self, x: tuple[Tensor, Tensor], real: Tensor | None = None) -> None:
        """Fills the buffers that are kept once, from the first tokens, as far as they are `real`."""
        for codec, once, new in zip(self.codecs, self.once, x, strict=True):
            if once:
                for name, value in codec.fit(new, real).items():
                    once[name].copy_(value)

    # Where the host knows the counts.

    def counts(self, seen: int, body: int, tokens: int) -> tuple[int, int]:
        """What `seen` and `body` are after `tokens` more."""
        first, ring = self.first[0].shape[2], self.ring[0].shape[2]
        leaving = seen + tokens - first - body - ring
        return seen + tokens, body + max(leaving, 0)

    def recent(self, side: int, held: int, body: int) -> Tensor:
        """The tokens of the ring in their order, `[B, H, held, D]`, where the body holds `body`."""
        ring = self.ring[side]
        at = body % ring.shape[2]
        tail = ring[:, :, at : at + held]
        return tail if tail.shape[2] == held else torch.cat([tail, ring[:, :, : held - tail.shape[2]]], dim=2)

    def payload(self, sides: tuple[Side, Side]) -> Payload:
        """What attention over all that is stored reads, where the device knows how much it is."""
        return Payload(*sides, self.body, self.exact, self)

    def slotted(self) -> tuple[Side, Side]:
        """All slots, those without a token too, in the order of `columns`."""
        sides = []
        for first, ring, codec, codes, once in zip(self.first, self.ring, self.codecs, self.planes, self.once, strict=True):
            row = (Exact(first), Packed(codec, codes | once, self.slots, ring.shape[3]), Exact(ring))
            tokens = first.shape[2] + self.slots + ring.shape[2]
            sides.append(Side.of(row, (*ring.shape[:2], tokens, ring.shape[3]), ring.dtype, ring.device))
        return sides[0], sides[1]

    def sides(self, seen: int, body: int, block: int, recent: tuple[Tensor, Tensor] | None = None) -> tuple[Side, Side]:
        """What the torch reference reads: all tokens, in blocks of at most `block`. `recent` are the tokens after the body, if these are
        not just those of the ring."""
        first = min(seen, self.first[0].shape[2])
        recent = recent or (None, None)  # type: ignore[assignment]
        return self._side(0, first, body, block, seen, recent[0]), self._side(1, first, body, block, seen, recent[1])  # type: ignore[index]

    def _side(self, side: int, first: int, body: int, block: int, seen: int, recent: Tensor | None) -> Side:
        ring, codec, once = self.ring[side], self.codecs[side], self.once[side]
        dim = ring.shape[3]

        def build() -> tuple[Segment, ...]:
            row: list[Segment] = [Exact(self.first[side][:, :, :first])]
            for at in range(0, body, block):
                count = min(block, body - at)
                row.append(
                    Packed(codec, {name: plane[:, :, at : at + count] for name, plane in self.planes[side].items()} | once, count, dim)
                )
            row.append(Exact(self.recent(side, seen - first - body, body) if recent is None else recent))
            return tuple(segment for segment in row if segment.tokens)

        length = seen if recent is None else first + body + recent.shape[2]
        return Side(build, (*ring.shape[:2], length, dim), ring.dtype, ring.device)

    def columns(self) -> Tensor:
        """Which token is in each slot, the first zone before the body before the ring, int64 `[E + C + W]`; -1: none. On the device."""
        device, ring = self.state.device, self.ring[0].shape[2]
        seen, body = self.state[SEEN], self.state[BODY]
        first = torch.arange(self.first[0].shape[2], device=device)
        slot = torch.arange(self.slots, device=device)
        start = seen.clamp_max(first.shape[0])  # tokens of the first zone
        at = torch.arange(ring, device=device)
        number = body + (at - body) % ring  # of the tokens that have left the first zone
        inside = number < seen - start
        return torch.cat(
            [torch.where(first < seen, first, -1), torch.where(slot < body, slot + start, -1), torch.where(inside, number + start, -1)]
        )


def append(store: Store, x: tuple[Tensor, Tensor], seen: int, body: int, encode: Callable[[tuple[Tensor, Tensor], int], None]) -> None:
    """Takes any number of tokens `[B, H, T, D]` where the host knows the counts; `encode` writes tokens into the body from a slot on."""
    first, ring, tokens = store.first[0].shape[2], store.ring[0].shape[2], x[0].shape[2]
    start = min(seen, first)
    opening = min(first - start, tokens)
    held = seen - start - body
    total, now = store.counts(seen, body, tokens)
    leaving = now - body
    old, passing = min(leaving, held), max(leaving - held, 0)  # of the ring, and of those that come
    if old:
        encode((store.recent(0, old, body), store.recent(1, old, body)), body)
    if passing:
        encode((x[0][:, :, opening : opening + passing], x[1][:, :, opening : opening + passing]), body + old)
    at = torch.arange(body + held + passing, body + held + tokens - opening, device=store.state.device) % ring
    for side, new in enumerate(x):
        store.first[side][:, :, start : start + opening] = new[:, :, :opening]
        store.ring[side].index_copy_(2, at, new[:, :, opening + passing :])
    store.state[SEEN].fill_(total)
    store.state[BODY].fill_(now)


def step(store: Store, x: tuple[Tensor, Tensor]) -> None:
    """Takes up to as many tokens as the ring holds, `[B, H, T, D]`, counting on the device. None is taken where not all have room."""
    first, ring = store.first[0].shape[2], store.ring[0].shape[2]
    tokens, device = x[0].shape[2], store.state.device
    state = store.state.long()
    seen, body = state[SEEN], state[BODY]
    fits = seen + tokens <= store.limit
    i = torch.arange(tokens, device=device)
    held = seen - seen.clamp_max(first) - body
    rank = i - (first - seen).clamp(0, tokens)  # among those that enter the ring; less than 0: the first zone
    slot = (body + held + rank) % ring
    leaves = (rank + held >= ring) & fits
    into = torch.where(leaves, body + held + rank - ring, store.slots - 1)
    place = torch.arange(first, device=device) - seen
    opening = ((place >= 0) & (place < tokens) & fits)[:, None]
    for side, new in enumerate(x):
        old = store.ring[side].index_select(2, slot)
        # Where tokens share a scale, those that stay have no part in it: if any leaves, the last one does.
        codes = store.codecs[side].encode(torch.where(leaves[:, None], old, old[:, :, -1:]), store.once[side])
        for name, plane in store.planes[side].items():
            plane.index_copy_(2, into, codes[name])
        store.ring[side].index_copy_(2, slot, torch.where(((rank >= 0) & fits)[:, None], new, old))
        if first:
            start = new.index_select(2, place.clamp(0, tokens - 1))
            store.first[side].copy_(torch.where(opening, start, store.first[side]))
    zero = torch.zeros_like(seen)
    store.state.add_(torch.stack([tokens * fits, leaves.sum(), zero, tokens * ~fits]).int())


def attend_on_slots(query: Tensor, store: Store, mask: Tensor | None, **options: Any) -> Tensor:
    """`attend` for one query a row over all slots, those without a token hidden: slower than over the tokens, but counted on the device."""
    columns = store.columns()
    shown = columns >= 0
    if mask is None:
        mask = shown
    else:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask.expand(*mask.shape[:3], store.limit) if mask.shape[3] == 1 else mask
        mask = mask.index_select(3, columns.clamp(0, mask.shape[3] - 1))
        mask = mask & shown if mask.dtype == torch.bool else mask.masked_fill(~shown, torch.finfo(mask.dtype).min)
    return attend(query, Payload(*store.slotted()), mask, **options)


def unfold(store: Store, new: tuple[Tensor, Tensor] | None, dense: Callable[[Side], Tensor] = Side.dense) -> tuple[Tensor, Tensor]:
    """All tokens at their columns, `[B, H, limit, D]` each, and then those of `new`, which are not stored yet. Columns without a token hold
    zeros. Counts on the device; `dense` decodes."""
    columns = store.columns()
    out = []
    for side, slots in enumerate(store.slotted()):
        ring = store.ring[side]
        parts, at = [dense(slots)], columns
        if new is not None:
            parts.append(new[side])
            at = torch.cat([columns, store.state[SEEN] + torch.arange(new[side].shape[2], device=at.device)])
        whole = ring.new_zeros(*ring.shape[:2], store.limit + 1, ring.shape[3])
        at = torch.where((at >= 0) & (at < store.limit), at, store.limit)
        out.append(whole.index_copy_(2, at, torch.cat(parts, dim=2))[:, :, : store.limit])
    return out[0], out[1]
