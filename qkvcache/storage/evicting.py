"""`EvictingStorage`: the keys and values of one layer that forgets tokens, and what a policy remembers of them (`ledger.py`).

    sinks      exact tokens that stay          chunks     quantized tokens, in each head others          residual   the last tokens, exact

Tokens beyond the residual are offered to the chunks. When these are full, the policy ranks what they hold together with what comes, and the
codes of those that stay among the new are written over the codes of those that go (`admission.py`). Survivors stay where they are, bit for
bit; slots are in no order.

For steps that are compiled, `to_static` lays all of it out in tensors that stay in their places (`StaticState`), in which a step of one
token needs no number from the host: token `n` of a row, padding not counted, lies in slot `n % W` of a ring, and the oldest leaves it after
attention: to the slot of the token that the policy likes least, or to an empty one, or nowhere if it is itself the least. `to_dynamic`
takes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import Exact, Packed, Pair, Payload, Places, Side, arrive, dense, number, prepare, retire, take
from ..policies import Arrivals, Budget, Policy
from .admission import admit
from .chunks import PAGE, Chunks
from .counter import Counter
from .ledger import Ledger, Records
from .storage import differ, payload_of


@dataclass(eq=False)
class StaticState(Places):
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
        """Which columns of the sinks hold a token, `[B, E]`."""
        return self.shown[:, : self.first[0].shape[2]]

    def tensors(self) -> list[Tensor]:
        return super().tensors() + ([] if self.key_sum is None else [self.key_sum])


class EvictingStorage(Counter):
    """Room for what `policy` keeps within `budget` of keys and values like `like`, `[B, H, T, D]` each.

    Args:
        tail: the last tokens, which stay exact; beyond it tokens leave by `interval` at least.
        in_order: whether tokens lie column by column as they came, as long as none goes.
    """

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        like: Pair,
        policy: Policy,
        budget: Budget,
        num_sink_tokens: int,
        tail: int,
        interval: int,
        in_order: bool,
        max_length: int | None = None,
    ):
        self.codecs, self.policy, self.budget, self.max_length = codecs, policy, budget, max_length
        self.num_sink_tokens, self.tail, self.interval = num_sink_tokens, tail, interval
        self.ordered = in_order
        self.static: StaticState | None = None
        self._start((like[0][:, :, :0].detach().clone(), like[1][:, :, :0].detach().clone()))

    def _start(self, empty: Pair) -> None:
        self.sinks = self.residual = empty
        self.borrowed = False
        """Whether the residual is the caller's."""
        self.chunks = Chunks(self.codecs, [x.shape[3] for x in empty], per_head=True)
        self.ledger = Ledger(self.policy, self.budget, empty[0])
        self.in_order, self.sinks_taken = self.ordered, not self.num_sink_tokens
        self.is_static = False
        """Whether a step of one token works in place."""
        self.start_counting()

    @property
    def device(self) -> torch.device:
        return self.sinks[0].device

    @property
    def slots(self) -> int:
        """Quantized tokens that there is room for in place."""
        return slots_of(self.policy, self.budget, self.num_sink_tokens, self.tail)

    @property
    def stored(self) -> int:
        """Columns that hold tokens, those of a running step among them."""
        if self.is_static:
            return min(self.seen, self.policy.size(self.budget, 0))
        return self.sinks[0].shape[2] + self.chunks.length + self.residual[0].shape[2]

    # Steps of any size.

    def extend(self, new: Pair) -> None:
        """Takes the tokens of a step, `[B, H, Q, D]`, into the residual."""
        self.to_dynamic()
        self.borrowed = not self.residual[0].shape[2]
        if not self.borrowed:
            new = torch.cat([self.residual[0], new[0]], dim=2), torch.cat([self.residual[1], new[1]], dim=2)
        self.residual = new

    def payload(self) -> Payload:
        return payload_of(self.sinks, self.chunks, self.residual)

    def dense(self) -> Pair:
        payload = self.payload()
        return dense(payload.key), dense(payload.value)

    def evicted(self, running: int) -> int | Tensor:
        """How many tokens of each row are gone, `[B]` where rows differ, when a step of `running` tokens begins."""
        ledger, valid = self.ledger, self.ledger.valid()
        return ledger.columns - self.stored + running if valid is None or ledger.seen is None else ledger.seen - valid.sum(-1)

    def settle(self) -> None:
        """Moves the tokens of a step whose attention is over to where they belong, and evicts what the budget does not hold."""
        if not self.chunks.fitted:
            self.chunks.fit(self.residual, None if self.ledger.seen is None else self.ledger.recent["positions"][:, 0] >= 0)
        if not self.sinks_taken:
            self._take_sinks()
        if self.ledger.seen is not None and (self.tail or self.num_sink_tokens):
            self._align()
        leaving = self.residual[0].shape[2] - self.tail
        if leaving >= self.interval:
            self._leave(leaving)
        # What came in is the caller's, and what is left may be a view of something larger.
        if self.borrowed or any(x.untyped_storage().nbytes() > x.nbytes for x in self.residual):
            self.residual = self.residual[0].clone(), self.residual[1].clone()

    def _take_sinks(self) -> None:
        """The first real tokens of each row become sinks."""
        ledger = self.ledger
        had = ledger.first.shape[1]
        missing = min(self.num_sink_tokens, ledger.columns) - had
        ledger.first = F.pad(ledger.first, (0, missing))
        positions = ledger.recent["positions"][:, 0]
        hits = positions[:, None] == torch.arange(had + missing, device=positions.device)[None, :, None]  # [B, E, T]
        found, at = hits.any(-1), hits.int().argmax(-1)
        grown = []
        for first, recent in zip(self.sinks, self.residual, strict=True):
            first = F.pad(first, (0, 0, 0, missing))
            taken = recent.gather(2, at[:, None, :, None].expand(*first.shape[:2], -1, first.shape[3]))
            grown.append(torch.where(found[:, None, :, None], taken, first))
        self.sinks = grown[0], grown[1]
        ledger.first = ledger.first | found
        self.sinks_taken = ledger.first.shape[1] == self.num_sink_tokens and (ledger.seen is None or bool(ledger.first.all()))
        if ledger.seen is None:  # they are the oldest of the recent
            self._cut(missing)
        else:
            taken = (positions >= 0) & (positions < had + missing)
            ledger.recent["positions"] = ledger.recent["positions"].masked_fill(taken[:, None], -1)

    def _cut(self, count: int) -> None:
        """Drops the oldest `count` columns of the residual."""
        self.residual = self.residual[0][:, :, count:], self.residual[1][:, :, count:]
        records = self.ledger.recent
        for name in records:
            records[name] = records[name][..., count:].clone()  # a view would hold on to what was cut

    def _align(self) -> None:
        """Recent tokens to the right in each row, in their order; columns without a token to the left."""
        records = self.ledger.recent
        order = (records["positions"][:, 0] >= 0).int().argsort(dim=-1, stable=True)
        self.residual, self.borrowed = (take(self.residual[0], order), take(self.residual[1], order)), False
        for name in records:
            records[name] = take(records[name], order)

    def _leave(self, count: int) -> None:
        """The oldest `count` columns of the residual go to the chunks, as far as the budget goes and in the place of others where they
        must, or nowhere."""
        ledger, after = self.ledger, self.residual
        leaving = after[0][:, :, :count], after[1][:, :, :count]
        records = {name: x[..., :count] for name, x in ledger.recent.items()}
        if self.policy.tail and (score := self.policy.score(Arrivals(*leaving, *after, None))) is not None:
            records["score"] = score.float()
        outside = ledger.first.shape[1] + self.tail + self.interval - 1
        limit = max(self.policy.size(self.budget, ledger.columns) - outside, self.chunks.length)
        own = None
        if self.budget.share and ledger.seen is not None:  # rows whose budgets differ
            own = self.policy.size(self.budget, ledger.rows_seen()) - outside
        appended = admit(self.chunks, ledger, leaving, records, limit, own)
        self.in_order = self.in_order and appended
        self._cut(count)

    # A step of one token in place.

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None) -> Tensor:
        """Takes the running tokens `[B, H, 1, D]`, and which of them are real, bool `[B]` (None: all); returns which columns hold a token,
        `[B, T]`."""
        held: StaticState = self.static  # type: ignore[assignment]
        seen = (held.seen + (1 if real is None else real.long()))[:, None, None]
        records = self.ledger.arrived(keys, values, real if real is None else real[:, None], seen)
        arrive(held, (keys, values), [records[name] for name in held.records if name != "positions"], real)
        return held.shown

    def evict(self, mass: Tensor | None, real: Tensor | None) -> None:
        """Takes the attention mass of all columns, `[B, H, T]`, if the policy observes; the oldest token leaves the ring."""
        held: StaticState = self.static  # type: ignore[assignment]
        ring, slots = self.tail + 1, self.slots
        at = (held.seen % ring)[:, None]  # of a row whose token is not real, that token
        queries = 1 if real is None else real.long()[:, None, None]
        mass = None if mass is None else mass[..., self.num_sink_tokens :]
        records = dict(held.records)
        if mass is not None:
            records["score"] = self.policy.observe(records["score"], mass, queries)
        leaving = {name: take(x, slots + at) for name, x in records.items()}
        score = self._score_leaving(held, at) if self.policy.tail else None
        if score is not None:
            leaving["score"] = score
        order = self.ledger.order({name: torch.cat([x[..., :slots], leaving[name]], dim=-1) for name, x in records.items()})
        where = retire(held, order)
        if "score" in records:  # where it lies now
            moved, scores = where[..., None] == torch.arange(slots + ring, device=at.device), held.records["score"]
            if mass is not None:
                scores.copy_(self.policy.observe(scores, torch.where(moved, take(mass, slots + at), mass), queries))
            if score is not None:
                scores.copy_(torch.where(moved, score, scores))

    def _score_leaving(self, held: StaticState, at: Tensor) -> Tensor | None:
        """Of the token in column `at` `[B, 1]` of the ring, fp32 `[B, H, 1]`, from the tokens after it."""
        order = (at + torch.arange(self.tail + 1, device=at.device)) % (self.tail + 1)
        after = [take(x, order) for x in held.ring]
        score = self.policy.score(Arrivals(after[0][:, :, :1], after[1][:, :, :1], after[0], after[1], None))
        return None if score is None else score.float()

    @torch.no_grad()
    def to_static(self) -> None:
        """Lays out what is held in the tensors that stay."""
        ledger, made = self.ledger, False
        if self.static is None or differ(self.static.ring[0], self.sinks[0]):
            with torch.inference_mode(False):  # what is made in inference mode may be written in no other
                self.static = self._make(self.sinks)
            made = True
        held, ring, recent = self.static, self.tail + 1, self.residual[0].shape[2]
        held.seen.copy_(ledger.rows_seen()[:, 0, 0])
        place = (torch.arange(ring, device=self.device) - (held.seen - recent)[:, None]) % ring  # of each slot, among the recent
        there = (place < recent)[:, None]
        place = place.clamp_max(max(recent - 1, 0))
        if held.payload.body is not None:
            self.chunks.table = held.payload.body.table  # which stays in its place, too
        self.chunks.move(held.planes, self.slots)
        table = self.chunks.table
        if made:
            held.payload = replace(held.payload, body=self.chunks.body)
            for tensor in (*held.tensors(), *([] if table is None else [table])):
                torch._dynamo.mark_static_address(tensor)
        for exact, x in zip(held.first, self.sinks, strict=True):
            exact[:, :, : x.shape[2]] = x
        for last, x in zip(held.ring, self.residual, strict=True):
            if recent:
                last.copy_(torch.where(there[..., None], take(x, place), 0))
        self.sinks, self.residual, self.borrowed = held.first, held.ring, False
        valid = F.pad(ledger.first, (0, self.num_sink_tokens - ledger.first.shape[1]))
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
        self.is_static, self.in_order = True, False

    def _make(self, like: Pair) -> StaticState:
        batch, heads = like[0].shape[:2]
        device, slots, ring = self.device, self.slots, self.tail + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        firsts, rings = (tuple(zeros(heads, n, x.shape[3], dtype=x.dtype) for x in like) for n in (self.num_sink_tokens, ring))
        room = -(-slots // PAGE) * PAGE  # kernels read whole tiles, each at an aligned address
        made = [codec.allocate(x, room, per_head=True) for codec, x in zip(self.codecs, like, strict=True)]
        planes = [each | once for each, once in made]
        records = {name: zeros(heads, slots + ring, dtype=x.dtype) for name, x in self.ledger.body.items()}
        sides = []
        for first, last, codec, (each, once) in zip(firsts, rings, self.codecs, made, strict=True):
            codes = {name: plane[:, :, :slots] for name, plane in each.items()} | once
            row = (Exact(first), Packed(codec, codes, slots, last.shape[3]), Exact(last))
            sides.append(Side.of(row, (batch, heads, self.num_sink_tokens + slots + ring, last.shape[3]), last.dtype, device))
        payload = Payload(sides[0], sides[1], None, (*firsts, *rings))
        prepare(self.codecs, (like[0].shape[3], like[1].shape[3]), like[0].dtype, device)
        seen, columns = zeros(dtype=torch.int64), torch.zeros(1, dtype=torch.int64, device=device)
        key_sum = zeros(heads, like[0].shape[3]) if self.policy.mean_key else None
        shown = zeros(self.num_sink_tokens + slots + ring, dtype=torch.bool)
        numbers = number(self.codecs[0]), number(self.codecs[1])
        return StaticState(numbers, (planes[0], planes[1]), firsts, rings, records, shown, seen, columns, key_sum, payload)  # type: ignore[arg-type]

    @torch.no_grad()
    def to_dynamic(self) -> None:
        """Takes back what `to_static` laid out: recent tokens in their order, and no more of them than there are."""
        if not self.is_static:
            return
        self.count()
        ledger, recent = self.ledger, min(self.tail, self.seen)
        number = self.static.seen[:, None] - recent + torch.arange(recent, device=self.device)  # type: ignore[union-attr]
        order = number % (self.tail + 1)
        self.residual = take(self.residual[0], order), take(self.residual[1], order)
        ledger.recent = {name: take(x, order) for name, x in ledger.recent.items()}
        ledger.recent["positions"] = ledger.recent["positions"].masked_fill((number < 0)[:, None], -1)
        ledger.columns, ledger.in_place, self.is_static = self.seen, False, False

    # All tokens at once.

    def on_device(self) -> int | Tensor:
        return self.seen if self.static is None else self.static.columns[0]

    def read_counts(self) -> None:
        self.seen = int(self.static.columns)  # type: ignore[union-attr]

    def clear(self) -> None:
        """Forgets all tokens and keeps what stays in its place."""
        for tensor in self.static.tensors() if self.static else ():  # a nan that is hidden would show itself as nan times a weight of 0
            tensor.zero_()
        self._start((self.sinks[0][:, :, :0].clone(), self.sinks[1][:, :, :0].clone()))
        if self.static is not None:
            self.ledger.key_sum = self.static.key_sum

    def map(self, fn: Callable[[Tensor], Tensor], in_place: bool = False) -> None:
        """Replaces every tensor by `fn(tensor)`, which may change the rows; those that stay in their places are written."""
        was_static = self.is_static
        self.to_dynamic()
        self.chunks.map(fn)
        self.ledger.map(fn)
        k_sinks, v_sinks, keys, values = map(fn, (*self.sinks, *self.residual))
        self.sinks, self.residual = (k_sinks, v_sinks), (keys, values)
        if was_static:
            self.to_static()

    def zones(self) -> tuple[Pair, Chunks, Pair]:
        return self.sinks, self.chunks, self.residual

    def load(self, sinks: Pair, codes: tuple[Codes, Codes], once: tuple[Codes, Codes], recent: Pair, copy: Callable) -> None:
        """Takes what `zones` gave, into an empty storage; codes are copied. The ledger is filled by itself."""
        self.chunks.load(codes, once, sinks, copy)
        self.sinks, self.residual = sinks, recent

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its role: `exact`, `bookkeeping`, `codes` or `scales`."""
        held = self.static
        yield from (("exact", x) for x in (*self.sinks, *self.residual, *((*held.first, *held.ring) if held else ())))
        yield from self.chunks.tensors()
        yield from (("bookkeeping", x) for x in self.ledger.tensors())
        if held is not None:
            for codec, planes, x in zip(self.codecs, held.planes, held.ring, strict=True):
                yield from codec.roles(planes, x.shape[3])
            yield from (("bookkeeping", x) for x in held.tensors())  # those that were not named yet
            if held.payload.body is not None:
                yield "bookkeeping", held.payload.body.table


def slots_of(policy: Policy, budget: Budget, num_sink_tokens: int, tail: int) -> int:
    return policy.size(budget, 0) - num_sink_tokens - tail
