"""One model layer's cache that forgets tokens: exact zones around a body of bounded size.

After each step's attention, tokens beyond the recent zone are offered to the body. Is it full, the policy ranks what it holds together with
what comes, and the codes of those that stay among the new are written over the codes of those that go. Survivors stay where they are, bit
for bit; slots are in no order. The budget holds after every step, prompts included: a prompt is cut after its own attention.

Exact zones hold only tokens that the policy protects, so that the tokens kept do not depend on the format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention.handle import KVHandle
from ..attention.rope import Rope
from ..formats import Format, Identity
from ..kernels import Exact, Pair, Payload, dense
from ..policies import Arrivals, Budget, Policy
from ..storage import Chunks, payload_of
from .admission import admit
from .compressed import CompressedLayer
from .ledger import Ledger, Records

UNSEEN = (
    "the attention of the step before was not seen: eviction works with models whose attention goes through transformers' "
    "AttentionInterface, and a step that failed must be followed by reset()"
)


@dataclass
class Step:
    """A step whose attention has not been settled: its tokens, which of them are real, and which columns before them are."""

    queries: int
    entered: bool = False
    observed: bool = False
    real: Tensor | None = None
    stored: Tensor | None = None
    mass: Tensor | None = None


class EvictingLayer(CompressedLayer):
    """A layer that keeps what `policy` keeps within `budget`, in `format`.

    Args:
        rope: how keys are turned, for sinks that are read at positions of the cache.
        deferred: other layers read this one's keys after its own attention, so that eviction waits for the next step.
    """

    is_croppable = False
    fixed = False
    """Whether a step of one token works in place (`static_evicting.py`)."""

    def __init__(
        self,
        format: Format,
        policy: Policy,
        budget: Budget,
        exact_first: int = 4,
        exact_recent: int = 64,
        *,
        rope: Rope | None = None,
        deferred: bool = False,
    ):
        exact = isinstance(format, Identity)
        first = 0 if exact else min(exact_first, policy.sinks)
        super().__init__(format, policy.sinks if rope else first, 0 if exact else exact_recent)
        self.policy, self.budget, self.rope, self.deferred = policy, budget, rope, deferred
        self.interval = policy.interval_of(budget)
        least = policy.size(budget, 0)
        # For a share too, as many at every length: rows of a batch differ in theirs, and must not depend on one another.
        self.tail = max(policy.tail, min(self.exact_recent, policy.recent_of(least), least - self.exact_first - self.interval + 1))
        self._reset()

    def _reset(self) -> None:
        self.body: Chunks | None = None
        self.first: Pair
        self.recent: Pair
        self.ledger: Ledger | None = None
        self.step: Step | None = None
        self.in_order = not self.exact_first and isinstance(self.format, Identity)
        self.sinks_taken = not self.exact_first

    def __repr__(self) -> str:
        return f"EvictingLayer({self.policy.name}, {self.format.name}, tokens={self.get_seq_length()}, stored={self.stored})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.format.check(key_states.shape[3], value_states.shape[3])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.first = self.recent = key_states[:, :, :0].detach().clone(), value_states[:, :, :0].detach().clone()
        self.body = Chunks((self.format.key, self.format.value), (key_states.shape[3], value_states.shape[3]), per_head=True)
        self.ledger = Ledger(self.policy, self.budget, key_states)
        self.is_initialized = True

    # A step: update, enter, observe, settle.

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Stores `[B, H, T, D]` keys and values; returns handles that report the attention on them to this layer.

        Raises ValueError as CompressedLayer does; NotImplementedError if the attention of the step before was not reported, which a model
        with attention of its own does not, and if keys or values require a gradient.
        """
        self._check(key_states, value_states)
        self._refuse_gradients(key_states, value_states)
        if self.step is not None and not self.step.observed:
            raise NotImplementedError(UNSEEN)
        self.settle()
        if self.body is None:
            self.lazy_initialization(key_states, value_states)
        new = key_states, value_states
        self.borrowed = not self.recent[0].shape[2]
        if not self.borrowed:
            new = torch.cat([self.recent[0], key_states], dim=2), torch.cat([self.recent[1], value_states], dim=2)
        self.recent = new
        self.step = Step(key_states.shape[2])
        payload = self._payload()
        return KVHandle(payload, payload.key, watch=self), KVHandle(payload, payload.value, watch=self)

    def _refuse_gradients(self, *x: Tensor) -> None:
        if torch.is_grad_enabled() and any(new.requires_grad for new in x):
            raise NotImplementedError("a cache that evicts tokens has no gradients: run the model under torch.no_grad()")

    def _payload(self) -> Payload:
        payload = payload_of(self.first, self.body, self.recent)  # type: ignore[arg-type]
        if self.rope is None or not self.first[0].shape[2]:
            return payload
        turned = self.rope.turn(self.first[0], self._evicted())
        side = replace(payload.key, build=lambda: (Exact(turned), *payload.key.segments[1:]))
        return replace(payload, key=side, exact=(turned, *payload.exact[1:]) if payload.exact else ())

    def _evicted(self) -> int | Tensor:
        """How many tokens of each row are gone, `[B]` where rows differ."""
        ledger: Ledger = self.ledger  # type: ignore[assignment]
        valid = ledger.valid()
        return ledger.columns - self.stored if valid is None or ledger.seen is None else ledger.seen - valid.sum(-1)

    @property
    def observes(self) -> int:
        return self.policy.observes

    @property
    def fades(self) -> float:
        return self.policy.fades

    @torch.no_grad()
    def enter(self, real: Tensor | None) -> Tensor | None:
        step, ledger = self._running()
        if not step.entered:
            step.stored = ledger.valid()
            key, value = (x[:, :, -step.queries :] for x in self.recent)
            ledger.enter(key, value, real)
            step.real = real
            step.entered = True
        return step.stored

    def observe(self, mass: Tensor | None) -> None:
        step, _ = self._running()
        if mass is not None:  # of other layers too, if they read these keys
            step.mass = mass.detach() if step.mass is None else step.mass + mass.detach()
        step.observed = True
        if not self.deferred:
            self.settle()

    def _running(self) -> tuple[Step, Ledger]:
        if self.step is None or self.ledger is None:
            raise ValueError("no step is running: attention was given the keys of a step that is over")
        return self.step, self.ledger

    @torch.no_grad()
    def settle(self) -> None:
        """Moves the tokens of a step whose attention is over to where they belong, and evicts what the budget does not hold."""
        step, ledger = self.step, self.ledger
        if step is None or ledger is None or not step.observed:
            return
        self.step = None
        if step.mass is not None:
            ledger.observe(step.mass, step.queries if step.real is None else step.real.sum(-1)[:, None, None])
        if not self.sinks_taken:
            self._take_sinks()
        if ledger.seen is not None and (self.tail or self.exact_first):
            self._align()
        leaving = self.recent[0].shape[2] - self.tail
        if leaving >= self.interval:
            self._leave(leaving)
        # What came in is the caller's, and what is left may be a view of something larger.
        if self.borrowed or any(x.untyped_storage().nbytes() > x.nbytes for x in self.recent):
            self.recent = self.recent[0].clone(), self.recent[1].clone()

    def _take_sinks(self) -> None:
        """The first real tokens of each row go to the first zone."""
        ledger: Ledger = self.ledger  # type: ignore[assignment]
        had = ledger.first.shape[1]
        missing = min(self.exact_first, ledger.columns) - had
        ledger.first = torch.nn.functional.pad(ledger.first, (0, missing))
        positions = ledger.recent["positions"][:, 0]
        hits = positions[:, None] == torch.arange(had + missing, device=positions.device)[None, :, None]  # [B, E, T]
        found, at = hits.any(-1), hits.int().argmax(-1)
        grown = []
        for first, recent in zip(self.first, self.recent, strict=True):
            first = torch.nn.functional.pad(first, (0, 0, 0, missing))
            taken = recent.gather(2, at[:, None, :, None].expand(*first.shape[:2], -1, first.shape[3]))
            grown.append(torch.where(found[:, None, :, None], taken, first))
        self.first = grown[0], grown[1]
        ledger.first = ledger.first | found
        self.sinks_taken = ledger.first.shape[1] == self.exact_first and (ledger.seen is None or bool(ledger.first.all()))
        if ledger.seen is None:  # they are the oldest of the recent
            self._cut(missing)
        else:
            taken = (positions >= 0) & (positions < had + missing)
            ledger.recent["positions"] = ledger.recent["positions"].masked_fill(taken[:, None], -1)

    def _cut(self, count: int) -> None:
        """Drops the oldest `count` columns of the recent zone."""
        self.recent = self.recent[0][:, :, count:], self.recent[1][:, :, count:]
        records = self.ledger.recent  # type: ignore[union-attr]
        for name in records:
            records[name] = records[name][..., count:].clone()  # a view would hold on to what was cut

    def _align(self) -> None:
        """Recent tokens to the right in each row, in their order; columns without a token to the left."""
        records = self.ledger.recent  # type: ignore[union-attr]
        order = (records["positions"][:, 0] >= 0).int().argsort(dim=-1, stable=True)[:, None]
        key, value = (x.gather(2, order[..., None].expand(*x.shape[:2], -1, x.shape[3])) for x in self.recent)
        self.recent, self.borrowed = (key, value), False
        for name in records:
            records[name] = records[name].gather(-1, order.expand(records[name].shape))

    def _leave(self, count: int) -> None:
        """The oldest `count` columns of the recent zone go to the body, or nowhere."""
        ledger: Ledger = self.ledger  # type: ignore[assignment]
        after_keys, after_values = self.recent
        keys, values = after_keys[:, :, :count], after_values[:, :, :count]
        arriving = {name: x[..., :count] for name, x in ledger.recent.items()}
        if self.policy.tail and (score := self.policy.score(Arrivals(keys, values, after_keys, after_values, None))) is not None:
            arriving["score"] = score.float()
        self._offer((keys, values), arriving)
        self._cut(count)

    def _offer(self, arrived: Pair, records: Records) -> None:
        """Takes tokens into the body as far as the budget goes, in the place of others where it must."""
        ledger: Ledger = self.ledger  # type: ignore[assignment]
        body: Chunks = self.body  # type: ignore[assignment]
        outside = ledger.first.shape[1] + self.tail + self.interval - 1
        limit = max(self.policy.size(self.budget, ledger.columns) - outside, body.length)
        own = None
        if self.budget.share and ledger.seen is not None:  # rows whose budgets differ
            own = self.policy.size(self.budget, ledger.rows_seen()) - outside
        appended = admit(body, ledger, arrived, records, limit, own)
        self.in_order = self.in_order and appended

    # What generate asks.

    @property
    def stored(self) -> int:
        """Columns that attention reads before the tokens of the step."""
        if self.body is None:
            return 0
        return self.first[0].shape[2] + self.body.length + self.recent[0].shape[2] - (self.step.queries if self.step else 0)

    def get_seq_length(self) -> int:
        return self.ledger.columns + (self.step.queries if self.step and not self.step.entered else 0) if self.ledger else 0

    def query_offset(self) -> int | Tensor:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.settle()
        return self.stored + query_length, self.get_seq_length() - self.stored

    def crop(self, tokens_to_remove: int) -> None:
        """Raises NotImplementedError for anything but 0: what was evicted for the tokens that would go is gone."""
        if tokens_to_remove > 0:
            super().crop(tokens_to_remove)
        if tokens_to_remove:
            raise NotImplementedError(
                f"crop({tokens_to_remove}): a cache that evicts tokens cannot take steps back, as assisted and prompt-lookup decoding do; "
                "use a cache without a policy for these"
            )

    def reset(self) -> None:
        super().reset()
        self._reset()

    def _map(self, fn: Callable[[Tensor], Tensor], in_place: bool = False) -> None:
        self.settle()
        if self.body is None or self.ledger is None:
            return
        self.body.map(fn)
        self.ledger.map(fn)
        first_keys, first_values, keys, values = map(fn, (*self.first, *self.recent))
        self.first, self.recent = (first_keys, first_values), (keys, values)

    def _held(self) -> tuple[Tensor, ...]:
        return () if self.body is None else self.first

    def dense(self) -> Pair:
        if self.body is None:
            raise ValueError("the layer is empty")
        self.settle()
        payload = payload_of(self.first, self.body, self.recent)
        return dense(payload.key), dense(payload.value)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        self.settle()
        if self.body is not None and self.ledger is not None:
            yield from (("exact", x) for x in (*self.first, *self.recent))
            yield from self.body.tensors()
            yield from (("bookkeeping", x) for x in self.ledger.tensors())

    def positions(self) -> Tensor:
        """Positions of the tokens held, ascending, int32 `[B, H, T]`; -1 where a row holds fewer than `T`."""
        self.settle()
        if self.ledger is None:
            raise ValueError("the layer is empty")
        body, recent = self.ledger.body["positions"], self.ledger.recent["positions"]
        first = torch.arange(self.ledger.first.shape[1], dtype=torch.int32, device=body.device).where(self.ledger.first, -1)
        return torch.cat([first[:, None].expand(-1, body.shape[1], -1), body, recent], dim=-1).sort(-1).values
