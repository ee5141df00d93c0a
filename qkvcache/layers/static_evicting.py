"""A layer that forgets tokens, at addresses that never change, for torch.compile and CUDA graphs.

A prompt, or several tokens at once, are read as `evicting.py` does it. What that leaves is then laid out in tensors of fixed sizes, in
which a step of one token works in place, without a number from the host:

    first   the exact first zone     body   slots for the rest of the budget     ring   the exact recent zone and the running token

The `n`th real token of a row lies in slot `n % W` of the ring. After the step's attention the oldest leaves it: to the slot of the token
that the policy likes least, or to an empty one, or nowhere if it is itself the least. So the budget is full after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..attention.handle import KVHandle
from ..kernels import Exact, Packed, Payload, Side, arrive, number, prepare, retire, take
from ..policies import Arrivals
from ..storage import PAGE, Counter, differ
from .evicting import UNSEEN, EvictingLayer
from .fixed import Fixed


class StaticEvictingLayer(Counter, EvictingLayer):
    """An evicting layer whose steps compile; its policy must have `interval=1`. `max_length`: how many tokens may come, while storage is
    for the budget alone."""

    def __init__(self, *args, max_length: int, **options):
        super().__init__(*args, **options)
        self.max_length, self.is_compileable = max_length, True
        self.codecs = self.format.key, self.format.value
        self.held: Fixed | None = None
        self.arriving: tuple[Tensor, Tensor] | None = None
        """Keys and values of a step in place, until its attention begins."""
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
        self.arriving = key_states, value_states
        payload = self.held.payload  # type: ignore[union-attr]
        return KVHandle(payload, payload.key, watch=self), KVHandle(payload, payload.value, watch=self)

    @torch.no_grad()
    def begin(self, real: Tensor | None) -> Tensor:
        """Takes whether the running token of each row is real, bool `[B]` (None: all); returns which columns hold a token, `[B, T]`."""
        held: Fixed = self.held  # type: ignore[assignment]
        keys, values = self.arriving  # type: ignore[misc]
        self.arriving = None
        seen = (held.seen + (1 if real is None else real.long()))[:, None, None]
        records = self.ledger.arrived(keys, values, real if real is None else real[:, None], seen)  # type: ignore[union-attr]
        new = [records[name] for name in held.records if name != "positions"]
        arrive(held, (keys, values), new, real)
        return held.shown

    @torch.no_grad()
    def finish(self, mass: Tensor | None, real: Tensor | None) -> None:
        """Takes the attention mass of all columns, `[B, H, T]`, if the policy observes; the oldest token leaves the ring."""
        held: Fixed = self.held  # type: ignore[assignment]
        ring, slots = self.tail + 1, self.slots
        at = (held.seen % ring)[:, None]  # of a row whose token is not real, that token
        queries = 1 if real is None else real.long()[:, None, None]
        mass = None if mass is None else mass[..., self.exact_first :]
        records = dict(held.records)
        if mass is not None:
            records["score"] = self.policy.observe(records["score"], mass, queries)
        leaving = {name: take(x, slots + at) for name, x in records.items()}
        score = self._score_leaving(at) if self.policy.tail else None
        if score is not None:
            leaving["score"] = score
        order = self.ledger.order({name: torch.cat([x[..., :slots], leaving[name]], dim=-1) for name, x in records.items()})  # type: ignore[union-attr]
        where = retire(held, order)
        if "score" in records:  # where it lies now
            moved, scores = where[..., None] == torch.arange(slots + ring, device=at.device), held.records["score"]
            if mass is not None:
                scores.copy_(self.policy.observe(scores, torch.where(moved, take(mass, slots + at), mass), queries))
            if score is not None:
                scores.copy_(torch.where(moved, score, scores))
        if not torch.compiler.is_compiling():
            self.running = False

    def _score_leaving(self, at: Tensor) -> Tensor | None:
        """Of the token in column `at` `[B, 1]` of the ring, fp32 `[B, H, 1]`, from the tokens after it."""
        held: Fixed = self.held  # type: ignore[assignment]
        order = (at + torch.arange(self.tail + 1, device=at.device)) % (self.tail + 1)
        after = [take(x, order) for x in held.ring]
        score = self.policy.score(Arrivals(after[0][:, :, :1], after[1][:, :, :1], after[0], after[1], None))
        return None if score is None else score.float()

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
        body, ledger = self.body, self.ledger
        if body is None or ledger is None:
            return
        like, made = self.first[0], False
        if self.held is None or differ(self.held.ring[0], like):
            with torch.inference_mode(False):  # what is made in inference mode may be written in no other
                self.held = self._make(*self.first)
            made = True
        held, ring, recent = self.held, self.tail + 1, self.recent[0].shape[2]
        held.seen.copy_(ledger.rows_seen()[:, 0, 0])
        place = (torch.arange(ring, device=self.device) - (held.seen - recent)[:, None]) % ring  # of each slot, among the recent
        there = (place < recent)[:, None]
        real = torch.cat([ledger.first, ledger.recent["positions"][:, 0] >= 0], dim=-1)
        place = place.clamp_max(max(recent - 1, 0))
        tokens = [torch.cat(zones, dim=2) for zones in zip(self.first, self.recent, strict=True)]
        if held.payload.body is not None:
            body.table = held.payload.body.table  # which stays in its place, too
        body.move(held.planes, self.slots, (tokens[0], tokens[1]), real)
        if made:
            held.payload = replace(held.payload, body=body.body if self.slots else None)
            for tensor in (*held.tensors(), *([] if body.table is None else [body.table])):
                torch._dynamo.mark_static_address(tensor)
        for exact, x in zip(held.first, self.first, strict=True):
            exact[:, :, : x.shape[2]] = x
        for last, x in zip(held.ring, self.recent, strict=True):
            if recent:
                last.copy_(torch.where(there[..., None], take(x, place), 0))
        self.first, self.recent, self.borrowed = held.first, held.ring, False
        valid = torch.nn.functional.pad(ledger.first, (0, self.exact_first - ledger.first.shape[1]))
        for name, x in held.body.items():
            x.fill_(-1)[..., : ledger.body[name].shape[-1]] = ledger.body[name]
        for name, x in held.recent.items():
            x.copy_(torch.where(there, take(ledger.recent[name], place), -1) if recent else torch.full_like(x, -1))
        held.shown.copy_(torch.cat([valid, held.records["positions"][:, 0] >= 0], dim=-1))
        held.columns.fill_(ledger.columns)
        if held.key_sum is not None and ledger.key_sum is not None:
            held.key_sum.copy_(ledger.key_sum)
        ledger.first, ledger.body, ledger.recent = held.valid, held.body, held.recent
        ledger.seen, ledger.key_sum, ledger.in_place = held.seen, held.key_sum, True
        self.fixed, self.in_order = True, False

    def _make(self, *like: Tensor) -> Fixed:
        batch, heads = like[0].shape[:2]
        device, slots, ring = like[0].device, self.slots, self.tail + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        firsts, rings = (tuple(zeros(heads, n, x.shape[3], dtype=x.dtype) for x in like) for n in (self.exact_first, ring))
        room = -(-slots // PAGE) * PAGE  # kernels read whole tiles, each at an aligned address
        made = [codec.allocate(x, room, per_head=True) for codec, x in zip(self.codecs, like, strict=True)]
        planes = [each | once for each, once in made]
        records = {name: zeros(heads, slots + ring, dtype=x.dtype) for name, x in self.ledger.body.items()}  # type: ignore[union-attr]
        sides = []
        for first, last, codec, (each, once) in zip(firsts, rings, self.codecs, made, strict=True):
            codes = {name: plane[:, :, :slots] for name, plane in each.items()} | once
            row = (Exact(first), Packed(codec, codes, slots, last.shape[3]), Exact(last))
            sides.append(Side.of(row, (batch, heads, self.exact_first + slots + ring, last.shape[3]), last.dtype, device))
        payload = Payload(sides[0], sides[1], None, (*firsts, *rings))
        prepare(self.codecs, (like[0].shape[3], like[1].shape[3]), like[0].dtype, device)
        seen, columns = zeros(dtype=torch.int64), torch.zeros(1, dtype=torch.int64, device=device)
        key_sum = zeros(heads, like[0].shape[3]) if self.policy.mean_key else None
        shown = zeros(self.exact_first + slots + ring, dtype=torch.bool)
        numbers = number(self.codecs[0]), number(self.codecs[1])
        return Fixed(numbers, (planes[0], planes[1]), firsts, rings, records, shown, seen, columns, key_sum, payload)  # type: ignore[arg-type]

    @torch.no_grad()
    def _loosen(self) -> None:
        """Gives back to `EvictingLayer` what `_fix` laid out: recent tokens in their order, and no more of them than there are."""
        self.count()
        if not self.fixed:
            return
        ledger, held, recent = self.ledger, self.held, min(self.tail, self.seen)
        number = held.seen[:, None] - recent + torch.arange(recent, device=self.device)  # type: ignore[union-attr]
        order = number % (self.tail + 1)
        self.recent = take(self.recent[0], order), take(self.recent[1], order)
        ledger.recent = {name: take(x, order) for name, x in ledger.recent.items()}  # type: ignore[union-attr]
        ledger.recent["positions"] = ledger.recent["positions"].masked_fill((number < 0)[:, None], -1)  # type: ignore[union-attr]
        ledger.columns, ledger.in_place, self.fixed = self.seen, False, False  # type: ignore[union-attr]

    # What generate and users ask.

    def on_device(self) -> Tensor:
        return self.held.columns[0]  # type: ignore[union-attr]

    def read_counts(self) -> None:
        self.seen = int(self.held.columns)  # type: ignore[union-attr]

    def get_seq_length(self) -> int:
        self.count()
        return self.seen

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
        self.arriving, self.fixed, self.running = None, False, False
        self.start_counting()

    def _map(self, fn: Callable[[Tensor], Tensor], in_place: bool = False) -> None:
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
