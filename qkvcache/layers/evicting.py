"""One model layer's cache that forgets tokens: exact zones around quantized tokens within a budget (`storage/evicting.py`).

After each step's attention, tokens beyond the residual are offered to the budget, which holds after every step, prompts included: a prompt
is cut after its own attention. Exact zones hold only tokens that the policy protects, so that the tokens kept do not depend on the format.

Where steps are compiled, a step of one token works in place; a prompt, or several tokens at once, are read as where they are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention.handle import KVHandle
from ..attention.rope import Rope
from ..formats import Format, Identity
from ..kernels import Exact, Pair, Payload
from ..policies import Budget, Policy
from ..storage import EvictingStorage, check_room, differ, slots_of
from .compressed import CompressedLayer

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
        max_length: how many tokens may come, while storage is for the budget alone; None: any number.
        compile: whether steps of one token are compiled, for policies with `interval=1`; with `max_length` they always are.
    """

    is_croppable = False
    storage: EvictingStorage | None  # type: ignore[assignment]

    def __init__(
        self,
        format: Format,
        policy: Policy,
        budget: Budget,
        num_sink_tokens: int = 4,
        residual_length: int = 64,
        *,
        rope: Rope | None = None,
        deferred: bool = False,
        max_length: int | None = None,
        compile: bool = False,
    ):
        if max_length is not None:  # no storage for tokens that cannot come
            budget = Budget(min(budget.tokens, max(max_length, policy.num_sink_tokens + policy.tail + 1)))
        exact = isinstance(format, Identity)
        first = 0 if exact else min(num_sink_tokens, policy.num_sink_tokens)
        super().__init__(format, policy.num_sink_tokens if rope else first, 0 if exact else residual_length, max_length, compile)
        self.supports_early_init = False
        self.policy, self.budget, self.rope, self.deferred = policy, budget, rope, deferred
        self.interval = policy.interval_of(budget)
        least = policy.size(budget, 0)
        # For a share too, as many at every length: rows of a batch differ in theirs, and must not depend on one another.
        self.tail = max(policy.tail, min(self.residual_length, policy.recent_of(least), least - self.num_sink_tokens - self.interval + 1))
        self._forget()

    def _forget(self) -> None:
        self.step: Step | None = None
        self.arriving: Pair | None = None
        """Keys and values of a step in place, until its attention begins."""
        self.running = False
        """Whether a step in place waits for the end of its attention."""

    def __repr__(self) -> str:
        return f"EvictingLayer({self.policy.name}, {self.format.name}, tokens={self.get_seq_length()}, stored={self.stored})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.format.check(key_states.shape[3], value_states.shape[3])
        self.dtype, self.device = key_states.dtype, key_states.device
        like = key_states, value_states
        if self.storage is None or any(map(differ, self.storage.residual, like)):
            codecs, in_order = (self.format.key, self.format.value), not self.num_sink_tokens and isinstance(self.format, Identity)
            self.storage = EvictingStorage(
                codecs, like, self.policy, self.budget, self.num_sink_tokens, self.tail, self.interval, in_order, self.max_length
            )
        self.is_initialized = True

    # A step: update, enter, observe, settle.

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[KVHandle, KVHandle]:  # type: ignore[override]
        """Stores `[B, H, T, D]` keys and values; returns handles that report the attention on them to this layer.

        Raises ValueError as CompressedLayer does; NotImplementedError if the attention of the step before was not reported, which a model
        with attention of its own does not, if keys or values require a gradient, and for a prompt in compiled code.
        """
        tokens = key_states.shape[2]
        if torch.compiler.is_compiling():
            if tokens != 1 or not self.fixed:
                raise NotImplementedError(
                    "a cache that evicts reads its prompt uncompiled: leave out prefill_chunk_size, or pass disable_compile=True"
                )
            self.storage.note(1)  # type: ignore[union-attr]
            return self._update_in_place(key_states, value_states)
        self._check(key_states, value_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise NotImplementedError("a cache that evicts tokens has no gradients: run the model under torch.no_grad()")
        if self.running or self.step is not None and not self.step.observed:
            raise NotImplementedError(UNSEEN)
        self.settle()
        if self.fresh:
            if self.max_length is not None:
                check_room(0, tokens, self.max_length)
            self.lazy_initialization(key_states, value_states)
        storage: EvictingStorage = self.storage  # type: ignore[assignment]
        storage.count()
        storage.expect(tokens)
        self.fresh = False
        if tokens == 1 and storage.is_static:
            with torch.no_grad():
                result = self._update_in_place(key_states, value_states)
            self.running = True
        else:
            storage.extend((key_states, value_states))
            self.step = Step(tokens)
            result = self._handles(self._payload(storage, tokens))
        storage.advance(tokens)
        return result

    def _handles(self, payload: Payload) -> tuple[KVHandle, KVHandle]:
        return KVHandle(payload, payload.key, watch=self), KVHandle(payload, payload.value, watch=self)

    def _payload(self, storage: EvictingStorage, running: int) -> Payload:
        payload = storage.payload()
        if self.rope is None or not storage.sinks[0].shape[2]:
            return payload
        turned = self.rope.turn(storage.sinks[0], storage.evicted(running))
        side = replace(payload.key, build=lambda: (Exact(turned), *payload.key.segments[1:]))
        return replace(payload, key=side, exact=(turned, *payload.exact[1:]) if payload.exact else ())

    @property
    def observes(self) -> int:
        return self.policy.observes

    @property
    def fades(self) -> float:
        return self.policy.fades

    @property
    def in_order(self) -> bool:
        return self.storage is not None and self.storage.in_order

    def seen_before(self) -> Tensor:
        """Real tokens of each row before the step, `[B]`."""
        step, storage = self._running()
        new = 0 if not step.entered else step.queries if step.real is None else step.real.sum(-1)
        return storage.ledger.rows_seen()[:, 0, 0] - new

    @torch.no_grad()
    def enter(self, real: Tensor | None) -> Tensor | None:
        step, storage = self._running()
        if not step.entered:
            step.stored = storage.ledger.valid()
            key, value = (x[:, :, -step.queries :] for x in storage.residual)
            storage.ledger.enter(key, value, real)
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

    def _running(self) -> tuple[Step, EvictingStorage]:
        if self.step is None or self.storage is None:
            raise ValueError("no step is running: attention was given the keys of a step that is over")
        return self.step, self.storage

    @torch.no_grad()
    def settle(self) -> None:
        """Ends a step whose attention is over."""
        step, storage = self.step, self.storage
        if step is None or storage is None or not step.observed:
            return
        self.step = None
        if step.mass is not None:
            storage.ledger.observe(step.mass, step.queries if step.real is None else step.real.sum(-1)[:, None, None])
        storage.settle()
        if self.is_compileable:
            storage.to_static()

    # A step in place: update, begin, finish.

    @property
    def fixed(self) -> bool:
        """Whether a step of one token works in place."""
        return self.storage is not None and self.storage.is_static

    def _update_in_place(self, key_states: Tensor, value_states: Tensor) -> tuple[KVHandle, KVHandle]:
        self.arriving = key_states, value_states
        return self._handles(self.storage.static.payload)  # type: ignore[union-attr]

    @torch.no_grad()
    def begin(self, real: Tensor | None) -> Tensor:
        """Takes whether the running token of each row is real, bool `[B]` (None: all); returns which columns hold a token, `[B, T]`."""
        keys, values = self.arriving  # type: ignore[misc]
        self.arriving = None
        return self.storage.append(keys, values, real)  # type: ignore[union-attr]

    @torch.no_grad()
    def finish(self, mass: Tensor | None, real: Tensor | None) -> None:
        """Takes the attention mass of all columns, `[B, H, T]`, if the policy observes; a token is evicted."""
        self.storage.evict(mass, real)  # type: ignore[union-attr]
        if not torch.compiler.is_compiling():
            self.running = False

    # What generate asks.

    @property
    def slots(self) -> int:
        """Quantized tokens that there is room for where steps work in place."""
        return slots_of(self.policy, self.budget, self.num_sink_tokens, self.tail)

    @property
    def stored(self) -> int:
        """Columns that attention reads before the tokens of the step."""
        return 0 if self.storage is None else self.storage.stored - (self.step.queries if self.step else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of a step in place, one column: of a mask only those of the running tokens count. Raises ValueError if there is no room."""
        if torch.compiler.is_compiling() and self.is_compileable:
            raise NotImplementedError("masks of a cache that evicts are made outside of compiled code, as generate does")
        self.expect(query_length)
        storage = self.storage
        if storage is None:
            return query_length, 0
        if query_length == 1 and storage.is_static:
            return 1, storage.seen
        storage.to_dynamic()
        seen = self.get_seq_length()
        stored = min(self.stored, seen)  # empty slots are no columns of the text
        return stored + query_length, seen - stored

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
        self._forget()

    def positions(self) -> Tensor:
        """Positions of the tokens held, ascending, int32 `[B, H, T]`; -1 where a row holds fewer than `T`."""
        self.settle()
        if self.fresh or self.storage is None:
            raise ValueError("the layer is empty")
        self.storage.count()
        ledger = self.storage.ledger
        body, recent = ledger.body["positions"], ledger.recent["positions"]
        first = torch.arange(ledger.first.shape[1], dtype=torch.int32, device=body.device).where(ledger.first, -1)
        positions = torch.cat([first[:, None].expand(-1, body.shape[1], -1), body, recent], dim=-1).sort(-1).values
        return positions[..., positions.shape[-1] - self.stored :]
