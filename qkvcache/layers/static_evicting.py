"""A layer that forgets tokens, at addresses that never change, for torch.compile and CUDA graphs.

A prompt, or several tokens at once, are read as `evicting.py` does it. What that leaves is then laid out in tensors of fixed sizes, in
which a step of one token works in place, without a number from the host:

    first   the exact first zone     body   slots for the rest of the budget     ring   the exact recent zone and the running token

The `n`th real token of a row lies in slot `n % W` of the ring. After the step's attention the oldest leaves it: to the slot of the token
that the policy likes least, or to an empty one, or nowhere if it is itself the least. So the budget is full after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..attention.handle import KVHandle
from ..kernels import Body, Exact, Packed, Payload, Side, place, prepare, slab_table
from ..policies import Arrivals
from .compressed import differ
from .counted import Counted
from .evicting import UNSEEN, EvictingLayer
from .fixed import Fixed, put, spared, take
from .ledger import Records


class StaticEvictingLayer(Counted, EvictingLayer):
    """An evicting layer whose steps compile; its policy must have `interval=1`. `max_length`: how many tokens may come, while storage is
    for the budget alone."""

    is_compileable = True

    def __init__(self, *args, max_length: int, **options):
        super().__init__(*args, **options)
        self.max_length = max_length
        self.codecs = self.format.key, self.format.value
        self.held: Fixed | None = None
        self.fixed = self.running = False
        self.start_counting()

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """As EvictingLayer's; ValueError too if `max_length` tokens are not enough, NotImplementedError for a prompt in compiled code."""
        tokens = key_states.shape[2]
        if torch.compiler.is_compiling():
            if tokens != 1 or not self.fixed:
                raise NotImplementedError(
                    "a cache that evicts reads its prompt uncompiled: leave out prefill_chunk_size, or pass disable_compile=True"
                )
            self.note(1)
            return self._update_fixed(key_states, value_states)
        self._check(key_states, value_states)
        self.count()
        self.expect(tokens)
        if self.running:
            raise NotImplementedError(UNSEEN)
        if tokens == 1 and self.fixed and self.step is None:
            self._refuse_gradients(key_states, value_states)
            with torch.no_grad():
                result = self._update_fixed(key_states, value_states)
            self.running = True
        else:
            self._loosen()
            result = super().update(key_states, value_states)
        self.advance(tokens)
        return result

    # A step in place: update, begin, finish.

    def _update_fixed(self, key_states: Tensor, value_states: Tensor) -> tuple[KVHandle, KVHandle]:
        held: Fixed = self.held  # type: ignore[assignment]
        at = held.seen % (self.tail + 1)
        for ring, new in zip(held.ring, (key_states, value_states), strict=True):
            put(ring, at, new)
        return KVHandle(held.payload, held.payload.key, watch=self), KVHandle(held.payload, held.payload.value, watch=self)

    @torch.no_grad()
    def begin(self, real: Tensor | None) -> Tensor:
        """Takes whether the running token of each row is real, bool `[B]` (None: all); returns which columns hold a token, `[B, T]`."""
        held: Fixed = self.held  # type: ignore[assignment]
        at = held.seen % (self.tail + 1)
        keys, values = (take(ring, at[:, None]) for ring in held.ring)
        positions = (held.seen.clone() if real is None else torch.where(real, held.seen, -1))[:, None, None]
        held.seen.add_(1 if real is None else real.long())
        held.columns.add_(1)
        records = self.ledger.arrived(keys, values, positions, real if real is None else real[:, None])  # type: ignore[union-attr]
        for name, new in records.items():
            put(held.recent[name], at, new)
        return torch.cat([held.valid, held.body["positions"][:, 0] >= 0, held.recent["positions"][:, 0] >= 0], dim=-1)

    @torch.no_grad()
    def finish(self, mass: Tensor | None, real: Tensor | None) -> None:
        """Takes the attention mass of all columns, `[B, H, T]`, if the policy observes; the oldest token leaves the ring."""
        held: Fixed = self.held  # type: ignore[assignment]
        if mass is not None:
            start, end = held.valid.shape[1], held.valid.shape[1] + self.slots
            for records, part in ((held.body, mass[..., start:end]), (held.recent, mass[..., end:])):
                queries = 1 if real is None else real.long()[:, None, None]
                records["score"].copy_(self.policy.observe(records["score"], part, queries))
        ring = self.tail + 1
        at = held.seen % ring  # of a row whose token is not real, that token
        keys, values = (take(x, at[:, None]) for x in held.ring)
        leaving = {name: take(x, at[:, None]) for name, x in held.recent.items()}
        if self.policy.tail:
            order = (held.seen[:, None] + torch.arange(ring, device=at.device)) % ring
            after_keys, after_values = (take(x, order) for x in held.ring)
            if (score := self.policy.score(Arrivals(keys, values, after_keys, after_values, None))) is not None:
                leaving["score"] = score.float()
        if self.exact_first:
            sink = leaving["positions"][:, 0] == torch.arange(self.exact_first, device=at.device)  # [B, E]
            for first, x in zip(held.first, (keys, values), strict=True):
                first.copy_(torch.where(sink[:, None, :, None], x, first))
            held.valid.logical_or_(sink)
            leaving["positions"] = leaving["positions"].masked_fill(sink.any(-1)[:, None, None], -1)
        if held.payload.body is not None:
            where = self._place_for(leaving)
            place(held.payload.body, (keys, values), where)
            into, taken = where.clamp_min(0)[..., None], (where >= 0)[..., None]
            for name, x in held.body.items():
                x.scatter_(-1, into, torch.where(taken, leaving[name], x.gather(-1, into)))
        put(held.recent["positions"], at, torch.full_like(leaving["positions"], -1))
        if not torch.compiler.is_compiling():
            self.running = False

    def _place_for(self, leaving: Records) -> Tensor:
        """The slot of the body for a token in each head, int64 `[B, H]`; -1: none. Empty slots go first, the same in all heads."""
        held: Fixed = self.held  # type: ignore[assignment]
        union = {name: torch.cat([x, leaving[name]], dim=-1) for name, x in held.body.items()}
        least = self.ledger.order(union).argmin(dim=-1)  # type: ignore[union-attr]  # the first of those that are empty
        return torch.where(least < self.slots, least, -1)

    # Between the tensors of any size that `EvictingLayer` works with, and those that stay in their places.

    @property
    def slots(self) -> int:
        """Tokens that the body has room for."""
        return self.policy.size(self.budget, 0) - self.exact_first - self.tail

    def settle(self) -> None:
        over = self.step is not None and self.step.observed
        super().settle()
        if over:
            self._fix()

    @torch.no_grad()
    def _fix(self) -> None:
        """Lays out what is held in the tensors that stay."""
        zones, ledger = self.zones, self.ledger
        if zones is None or ledger is None:
            return
        like = zones[0].first
        if self.held is None or differ(self.held.ring[0], like):
            with torch.inference_mode(False):  # what is made in inference mode may be written in no other
                self.held = self._make(like, zones[1].first)
            body = self.held.payload.body
            for tensor in (*self.held.tensors(), *(() if body is None else (body.table,))):
                torch._dynamo.mark_static_address(tensor)
        held, ring, recent = self.held, self.tail + 1, zones[0].recent.shape[2]
        held.seen.copy_(ledger.rows_seen()[:, 0, 0])
        place = (torch.arange(ring, device=self.device) - (held.seen - recent)[:, None]) % ring  # of each slot, among the recent
        there = (place < recent)[:, None]
        real = torch.cat([ledger.first, ledger.recent["positions"][:, 0] >= 0], dim=-1)
        place = place.clamp_max(max(recent - 1, 0))
        for zone, first, last, planes in zip(zones, held.first, held.ring, held.planes, strict=True):
            zone.body.move(planes, self.slots, torch.cat([zone.first, zone.recent], dim=2), real)
            first[:, :, : zone.first.shape[2]] = zone.first
            if recent:
                last.copy_(torch.where(there[..., None], take(zone.recent, place), 0))
            zone.first, zone.recent, zone.borrowed = first, last, False
        held.valid.copy_(torch.nn.functional.pad(ledger.first, (0, self.exact_first - ledger.first.shape[1])))
        for name, x in held.body.items():
            x.fill_(-1)[..., : ledger.body[name].shape[-1]] = ledger.body[name]
        for name, x in held.recent.items():
            x.copy_(torch.where(there, take(ledger.recent[name], place), -1) if recent else torch.full_like(x, -1))
        held.columns.fill_(ledger.columns)
        if held.key_sum is not None and ledger.key_sum is not None:
            held.key_sum.copy_(ledger.key_sum)
        ledger.first, ledger.body, ledger.recent = held.valid, dict(held.body), dict(held.recent)
        ledger.seen, ledger.key_sum, ledger.in_place = held.seen, held.key_sum, True
        self.fixed, self.in_order = True, False

    def _make(self, *like: Tensor) -> Fixed:
        batch, heads = like[0].shape[:2]
        device, slots, ring = like[0].device, self.slots, self.tail + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        firsts, rings = (tuple(zeros(heads, n, x.shape[3], dtype=x.dtype) for x in like) for n in (self.exact_first, ring))
        made = (codec.allocate(x, slots, per_head=True, make=spared) for codec, x in zip(self.codecs, like, strict=True))
        planes = [each | once for each, once in made]
        records = self.ledger.body  # type: ignore[union-attr]
        body, recent = ({name: zeros(heads, n, dtype=x.dtype) for name, x in records.items()} for n in (slots, ring))
        slabs = ((planes[0], planes[1]),)
        packed = Body(*self.codecs, slabs, slots, slab_table(slabs)) if slots else None
        sides = []
        for first, last, codec, codes in zip(firsts, rings, self.codecs, planes, strict=True):
            row = (Exact(first), Packed(codec, codes, slots, last.shape[3]), Exact(last))
            sides.append(Side.of(row, (batch, heads, self.exact_first + slots + ring, last.shape[3]), last.dtype, device))
        payload = Payload(sides[0], sides[1], packed, (*firsts, *rings))
        prepare(self.codecs, (like[0].shape[3], like[1].shape[3]), like[0].dtype, device)
        seen, columns = zeros(dtype=torch.int64), torch.zeros(1, dtype=torch.int64, device=device)
        key_sum = zeros(heads, like[0].shape[3]) if self.policy.mean_key else None
        valid = zeros(self.exact_first, dtype=torch.bool)
        return Fixed(firsts, rings, (planes[0], planes[1]), valid, body, recent, seen, columns, key_sum, payload)  # type: ignore[arg-type]

    @torch.no_grad()
    def _loosen(self) -> None:
        """Gives back to `EvictingLayer` what `_fix` laid out: recent tokens in their order, and no more of them than there are."""
        self.count()
        if not self.fixed:
            return
        ledger, held, recent = self.ledger, self.held, min(self.tail, self.seen)
        number = held.seen[:, None] - recent + torch.arange(recent, device=self.device)  # type: ignore[union-attr]
        order = number % (self.tail + 1)
        for zone in self.zones or ():
            zone.recent = take(zone.recent, order)
        ledger.recent = {name: take(x, order) for name, x in ledger.recent.items()}  # type: ignore[union-attr]
        ledger.recent["positions"] = ledger.recent["positions"].masked_fill((number < 0)[:, None], -1)  # type: ignore[union-attr]
        ledger.columns, ledger.in_place, self.fixed = self.seen, False, False  # type: ignore[union-attr]

    # What generate and users ask.

    def on_device(self) -> Tensor:
        return self.held.columns[0]  # type: ignore[union-attr]

    def read_counts(self) -> None:
        self.seen = int(self.held.columns)  # type: ignore[union-attr]

    @property
    def stored(self) -> int:
        return min(self.seen, self.policy.size(self.budget, 0)) if self.fixed else super().stored

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of a step in place, one column: of a mask only those of the running tokens count. Raises ValueError if there is no room."""
        if torch.compiler.is_compiling():
            raise NotImplementedError("masks of a cache that evicts are made outside of compiled code, as generate does")
        self.expect(query_length)
        if query_length == 1 and self.fixed:
            return 1, self.seen
        self._loosen()
        columns, offset = super().get_mask_sizes(query_length)
        return (columns, offset) if offset >= 0 else (columns + offset, 0)  # empty slots are no columns of the text

    def reset(self) -> None:
        super().reset()
        for tensor in self.held.tensors() if self.held else ():  # a nan that is hidden would show itself as nan times a weight of 0
            tensor.zero_()
        self.fixed = self.running = False
        self.start_counting()

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        fixed = self.fixed
        self._loosen()
        super()._map(fn)
        if fixed:
            self._fix()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors()
        if self.held is not None:
            yield from (("exact", x) for x in (*self.held.first, *self.held.ring))
            for codec, planes, x in zip(self.codecs, self.held.planes, self.held.ring, strict=True):
                yield from codec.roles(planes, x.shape[3])
            yield from (("bookkeeping", x) for x in self.held.tensors())  # those that were not named yet
            if self.held.payload.body is not None:
                yield "bookkeeping", self.held.payload.body.table

    def positions(self) -> Tensor:
        self.count()
        positions = super().positions()
        return positions[..., positions.shape[-1] - self.stored :]
