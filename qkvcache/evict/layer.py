"""`EvictingLayer`: the cache of one model layer that evicts tokens beyond a budget (`evict/storage.py`).

Tokens are evicted after each step's attention, so that a prompt is read whole and the budget holds after every step,
prompts included. Exact zones hold only tokens that the policy protects, so that the retained tokens do not depend on
the format.

If steps are compiled, a step of one token runs in the static layout; prompts and steps of several tokens run as in a growing cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor

from ..attention.compressed_kv import CompressedKV
from ..autocast import without_autocast
from ..formats import Format, Identity
from ..kernels import AttentionInputs, Pair
from ..kernels.host.dispatch import module
from ..layers.compressed import CompressedLayer
from ..storage import check_room
from .by_head import StorageByHead
from .observe import KEYS, once
from .observer import attend_observed
from .policies import Arrivals, Budget, Policy
from .rope import Rope
from .storage import EvictingStorage, StaticLayout

ATTENTION_UNREPORTED = (
    "the attention of the step before was not seen: eviction works with models whose attention goes through transformers' "
    "AttentionInterface, and a step that failed must be followed by reset()"
)
STEP_OVER = "no step is running: attention was given the keys of a step that is over"


@dataclass
class Step:
    """A step between `update` and the eviction that follows its attention."""

    keys: Tensor
    values: Tensor
    static: bool
    """Whether the step runs in the static layout."""
    begun: bool = False
    is_valid: Tensor | None = None
    """The step's tokens that are not padding, bool `[B, Q]`; None: all."""
    attention_sums: Tensor | None = None
    observed: bool = False


class EvictingLayer(CompressedLayer):
    """A layer that retains the tokens selected by `policy` within `budget`, quantized in `format`.

    Args:
        rope: the model's rotary embedding, for policies that need it and for sinks that are read at positions in the cache.
        deferred: eviction waits for the next step, because other layers read this layer's keys after its own attention.
        max_length: the most tokens that may be seen. Storage is for the budget alone.
        compile: whether steps of one token can be compiled, for policies with `interval=1`; with `max_length` they always can.
    """

    is_croppable = False
    snapshot_kind = "evicting"
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
            budget = Budget(min(budget.tokens, max(max_length, policy.num_sink_tokens + 1)))
        exact = isinstance(format, Identity)
        self.rotates_sinks = getattr(policy, "positions", "original") == "cache"
        sinks = 0 if exact else min(num_sink_tokens, policy.num_sink_tokens)
        super().__init__(
            format, policy.num_sink_tokens if self.rotates_sinks else sinks, 0 if exact else residual_length, max_length, compile
        )
        self.supports_early_init = False
        self.policy, self.budget, self.rope, self.deferred = policy, budget, rope, deferred
        self.interval = policy.interval_of(budget)
        smallest = policy.size(budget, 0)  # also for a share: rows differ in length and must not depend on one another
        self.residual_length = min(self.residual_length, policy.recent_of(smallest), smallest - self.num_sink_tokens - self.interval + 1)
        self.step: Step | None = None
        self.read_twice = False
        """Whether the next tokens come with the scores of a second reading."""

    def make_storage(self, like: Pair) -> EvictingStorage:  # type: ignore[override]
        codecs, in_order = (self.format.key, self.format.value), not self.num_sink_tokens and isinstance(self.format, Identity)
        sizes = self.num_sink_tokens, self.residual_length, self.interval
        by_head = self.policy.alpha_safeguard is not None or self.budget.heads
        kind = StorageByHead if by_head else EvictingStorage
        return kind(codecs, like, self.policy, self.budget, *sizes, in_order, self.max_length, self.rope)

    def simulated(self, like: Pair, prompt: int, seq_length: int, query_heads: int) -> EvictingStorage:  # type: ignore[override]
        storage = self.make_storage(like)
        if self.is_compileable:
            storage.metadata.simulate(like, query_heads)
            storage.to_static()
        else:
            storage.simulate(prompt, seq_length, query_heads)
        return storage

    @without_autocast("key_states", "value_states")
    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[CompressedKV, CompressedKV]:  # type: ignore[override]
        """Stores keys and values `[B, H, T, D]`; returns what attention reads, and reports to this layer.

        Raises ValueError as CompressedLayer does. Raises NotImplementedError if attention did not report the step
        before (the model computes attention itself), if keys or values require a gradient, and for a prompt in compiled
        code.
        """
        storage: EvictingStorage = self._storage  # type: ignore[assignment]
        if storage is not None and self._is_plain_step(storage, key_states, value_states):
            self.step = Step(key_states, value_states, static=False)
            inputs = self._add_token(storage, (key_states, value_states))
            storage.seq_length += 1
            return CompressedKV(inputs, True, inputs.tokens, self), CompressedKV(inputs, False, inputs.tokens, self)
        tokens, compiling = key_states.shape[2], torch.compiler.is_compiling()
        if compiling:
            if tokens != 1 or not self.is_static:
                raise NotImplementedError(
                    "a cache that evicts reads its prompt uncompiled: leave out prefill_chunk_size, or pass disable_compile=True"
                )
            self.storage.record_compiled_step(1)  # type: ignore[union-attr]
        else:
            self._prepare_step(key_states, value_states)
        storage = self.storage  # type: ignore[assignment]
        self.step = Step(key_states, value_states, static=tokens == 1 and self.is_static)
        if self.step.static:
            layout: StaticLayout = storage.static  # type: ignore[assignment]
            inputs = layout.attention_inputs if compiling else storage.static_inputs(layout.inputs.sinks, layout.ring)
        elif tokens == 1 and not self.empty:
            storage.to_dynamic()
            inputs = self._add_token(storage, (key_states, value_states), self._rotated_sinks(storage, 0))
        else:
            storage.append((key_states, value_states))
            inputs = storage.attention_inputs(self._rotated_sinks(storage, tokens))
        self.empty = False
        if not compiling:
            storage.advance(tokens)
        return CompressedKV(inputs, True, inputs.tokens, self), CompressedKV(inputs, False, inputs.tokens, self)

    def _add_token(self, storage: EvictingStorage, token: Pair, sinks: Pair | None = None) -> AttentionInputs:
        """Adds a token to the tail; returns the inputs of attention. `sinks`: in place of the stored sinks."""
        storage.add_token(token)
        inputs = storage.token_inputs(sinks)
        if sinks is None and storage.shares_plan:
            inputs.running = self.running
        return inputs

    def _is_plain_step(self, storage: EvictingStorage, key: Tensor, value: Tensor) -> bool:
        """Whether a step is like the one before it, of one token, and needs no preparation."""
        return (
            (key.shape, value.shape, key.dtype, value.dtype) == storage.token
            and self.step is None
            and not storage.is_static
            and not (self.rotates_sinks or key.requires_grad or value.requires_grad or torch.compiler.is_compiling())
            and (self.max_length is None or storage.seq_length < self.max_length)
        )

    def _prepare_step(self, key_states: Tensor, value_states: Tensor) -> None:
        """Checks a step outside of compiled code, ends the step before, and makes room."""
        self._check(key_states, value_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise NotImplementedError("a cache that evicts tokens has no gradients: run the model under torch.no_grad()")
        if self.step is not None and not self.step.observed:
            raise NotImplementedError(ATTENTION_UNREPORTED)
        if self.policy.second_reading and self.empty and not self.read_twice:
            raise ValueError(
                f"{self.policy.name} scores a context by reading it twice: call cache.compress(model, ids) with the context, before "
                "generate with all ids"
            )
        self.commit()
        tokens, parts = key_states.shape[2], len(self.budget.heads)
        if parts not in (0, key_states.shape[1]):
            raise ValueError(f"a budget for {parts} heads: the keys {list(key_states.shape)} have {key_states.shape[1]}")
        if self.empty:
            if self.max_length is not None:
                check_room(0, tokens, self.max_length)
            self.lazy_initialization(key_states, value_states)
        self.storage.sync_counts()  # type: ignore[union-attr]
        self.storage.reserve(tokens)  # type: ignore[union-attr]

    def _rotated_sinks(self, storage: EvictingStorage, running: int) -> Pair | None:
        """The sinks at positions in the cache, for a step of `running` tokens; None if they are read as they are stored."""
        if self.rope is None or not self.rotates_sinks or not storage.sinks[0].shape[2]:
            return None
        return self.rope.rotate(storage.sinks[0], storage.num_evicted(running)), storage.sinks[1]

    # Calls from attention (`evict/observer.py`): for each step `begin_attention`, then perhaps `valid_columns`, then `end_attention`.

    @property
    def in_order(self) -> bool:
        """Whether columns are in token order, as the model's mask assumes."""
        return self.storage is not None and self.storage.in_order

    @property
    def is_static(self) -> bool:
        """Whether a step of one token runs in the static layout."""
        return self.storage is not None and self.storage.is_static

    def tokens_before(self) -> Tensor:
        """Tokens of each row before the running step, padding not counted, `[B]`."""
        step, storage = self._running()
        new = 0 if not step.begun else step.keys.shape[2] if step.is_valid is None else step.is_valid.sum(-1)
        return storage.metadata.lengths()[:, 0, 0] - new

    @torch.no_grad()
    @without_autocast()
    def begin_attention(self, is_valid: Tensor | None, query: Tensor | None = None, scaling: float | None = None) -> Tensor | None:
        """Receives the step's tokens that are not padding, bool `[B, Q]` (None: all), and for policies that need them the queries
        `[B, Hq, Q, D]` and the factor on `q k`. For a step in the static layout, returns the columns that hold a token, bool
        `[B, T]`."""
        step, storage = self._running()
        if step.begun:  # by a layer that shares its keys with others
            return None
        step.begun, step.is_valid = True, is_valid
        if is_valid is None and step.keys.shape[2] == 1 and storage.metadata.counts:
            storage.metadata.wait()
            return None
        tokens = self._arrivals(step, query, scaling)
        if step.static:
            return storage.append_token(tokens)
        storage.metadata.append(tokens)
        return None

    def valid_columns(self) -> Tensor | None:
        """The columns that hold a token, with the tokens of the step, bool `[B, T]`, or `[B, H, T]` where heads have pages of their own;
        None: all."""
        return self._running()[1].metadata.is_valid()

    def _arrivals(self, step: Step, query: Tensor | None, scaling: float | None) -> Arrivals:
        """The step's tokens, with the inputs that the policy needs."""
        policy = self.policy
        if policy.needs_queries and query is None:
            raise NotImplementedError(f"{policy.name} needs the queries of each step, which this attention did not report")
        queries = query.detach() if policy.needs_queries and query is not None else None
        rope = self.rope if policy.needs_rope else None
        return Arrivals(step.keys, step.values, step.is_valid, queries=queries, scaling=scaling, rope=rope)

    @torch.no_grad()
    @without_autocast()
    def end_attention(self, attention_sums: Tensor | None, by_slot: bool = False) -> None:
        """Receives the attention weights of all columns, `[B, H, T]`: their sum over queries and over the query heads of a KV head; None
        if the policy's `observation_window` is 0. `by_slot`: of each slot of the tail."""
        step, storage = self._running()
        if step.static:
            storage.evict_token(attention_sums, step.is_valid)
            self.step = None
            return
        if attention_sums is not None and not by_slot:
            attention_sums = storage.tail.by_slot(attention_sums)
        self._note(step, attention_sums)

    @torch.no_grad()
    def observe(self, query: Tensor, plan: Any, lse: Tensor, arguments: Any) -> None:
        """`begin_attention` and `end_attention` of a step whose attention was planned (`attention/plan.py`): of one token, which is no
        padding in any row. `lse`, `arguments`: as `plan.run` returned them."""
        step: Step | None = self.step
        storage: EvictingStorage = self._storage  # type: ignore[assignment]
        if step is None:
            raise ValueError(STEP_OVER)
        if not step.begun:
            step.begun = True
            if storage.metadata.counts:
                storage.metadata.wait()
            else:
                storage.metadata.append(self._arrivals(step, query, plan.scaling))
        observed = once(len(query), query.device) if storage.metadata.observes else None
        self._note(step, None if observed is None else module(KEYS).sum_keys(plan, lse, arguments, observed))

    def _note(self, step: Step, attention_sums: Tensor | None) -> None:
        """Ends the attention of `step`, with sums by slot."""
        if attention_sums is not None:  # several layers may read these keys
            step.attention_sums = attention_sums if step.attention_sums is None else step.attention_sums + attention_sums
        step.observed = True
        if not self.deferred:
            self.commit()

    def _running(self) -> tuple[Step, EvictingStorage]:
        if self.step is None or self.storage is None:
            raise ValueError(STEP_OVER)
        return self.step, self.storage

    @torch.no_grad()
    @without_autocast()
    def commit(self, is_valid: Tensor | None = None) -> None:
        """Evicts after a step whose attention has been observed, and which has told what is padding."""
        step = self.step
        if step is None or not step.observed:
            return
        storage: EvictingStorage = self._storage  # type: ignore[assignment]
        step.observed = False  # until the end, so that the step after an interruption is refused
        if step.attention_sums is not None:
            queries = step.keys.shape[2] if step.is_valid is None else step.is_valid.sum(-1, dtype=torch.float32)[:, None, None]
            storage.metadata.observe(step.attention_sums, queries)
        early = storage.static is None and not storage.tokens.length
        if early and self.choose_format(storage.tail.tokens()[0], storage.valid_residual()):
            storage.change_codecs((self.format.key, self.format.value))
        storage.evict()
        if self.is_compileable and storage.tokens.calibrated:
            storage.to_static()
        self.step = None

    def _choose_format_late(self, new: Pair | None = None) -> None:
        """Nothing: `commit` chooses, by the exact tokens after a step's attention."""

    def attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Attention over the layer (`evict/observer.py`)."""
        return attend_observed(*args, **kwargs)

    def refuse(self, what: str) -> Never:
        """Raises NotImplementedError for `what` a model does."""
        raise NotImplementedError(
            f"{what}, and a cache that evicts tokens must see attention to them as it returned them: leave out the policy"
        )

    def end_prompt(self, is_valid: Tensor | None) -> None:
        self.begin_attention(is_valid)
        self.end_attention(None)

    # The interface of `generate`.

    @property
    def stored(self) -> int:
        """Columns that attention reads before the tokens of the running step."""
        running = self.step.keys.shape[2] if self.step and not self.step.static else 0
        return 0 if self.storage is None else self.storage.stored - running

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of columns of a mask, and the position of the first. A step in the static layout has one column,
        since attention reads only the running token's column. Raises ValueError if there is no room."""
        if torch.compiler.is_compiling() and self.is_compileable:
            raise NotImplementedError("masks of a cache that evicts are made outside of compiled code, as generate does")
        self.reserve(query_length)
        storage = self.storage
        if storage is None:
            return query_length, 0
        if query_length == 1 and storage.is_static:
            return 1, storage.seq_length
        storage.to_dynamic()
        seq_length = self.get_seq_length()
        stored = min(self.stored, seq_length)  # empty slots have no position
        return stored + query_length, seq_length - stored

    def stored_length(self) -> int:
        self.commit()
        return self.stored

    def why_not_taken(self) -> str | None:
        if self.is_compileable:
            return f"the contents of a preallocated {type(self).__name__} cannot be taken out"
        if self.step is not None:
            return "a step of an evicting layer is running"
        padded = self.storage is not None and self.storage.metadata.row_lengths is not None
        return "an evicting layer whose rows were padded" if padded else None

    def crop(self, tokens_to_remove: int) -> None:
        """Raises NotImplementedError for anything but 0: tokens that were evicted cannot be restored."""
        if tokens_to_remove > 0:
            super().crop(tokens_to_remove)
        self.check_crop(tokens_to_remove)

    def check_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError(
                f"crop({tokens_to_remove}): a cache that evicts tokens cannot take steps back, as assisted and prompt-lookup decoding do; "
                "use a cache without a policy for these"
            )

    @property
    def rule(self) -> str:  # type: ignore[override]
        return type(self.policy).__name__

    def identity(self) -> str:
        return f"{super().identity()}, {self.policy!r}, {self.budget!r}, {self.rope is not None}"

    def reset(self) -> None:
        super().reset()
        self.step, self.read_twice = None, False

    def positions(self) -> Tensor:
        """Positions of the retained tokens, ascending, int32 `[B, H, T]`; -1 in rows and heads that retain fewer than `T`."""
        self.commit()
        if self.empty or self.storage is None:
            raise ValueError("the layer is empty")
        self.storage.sync_counts()
        metadata = self.storage.metadata
        metadata.describe()
        region, residual = metadata.region["positions"], metadata.residual["positions"]
        sinks = torch.arange(metadata.sinks.shape[1], dtype=torch.int32, device=region.device).where(metadata.sinks, -1)
        positions = torch.cat([sinks[:, None].expand(-1, region.shape[1], -1), region, residual], dim=-1).sort(-1).values
        return positions[..., positions.shape[-1] - self.stored :]
