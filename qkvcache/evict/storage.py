"""`EvictingStorage`: the keys and values of one layer that evicts tokens, and the metadata that its policy needs
(`metadata.py`).

    sinks       the first tokens of each row, in the model's dtype; never evicted
    pages       quantized tokens, different ones in each head, in slots without order; the same number in each head or,
                if heads share the budget (`Policy.alpha_safeguard`), in pages of each head (`head_pages.py`)
    tail        the last tokens, in the model's dtype, in a ring (`tail.py`)

`evict` follows each step's attention. It is the only place where tokens are scored, ranked and moved. Tokens that leave the
tail are quantized into the pages. When the budget is full, stored and new tokens are ranked together, and the codes of retained
new tokens overwrite the codes of evicted tokens (`eviction.py`). Retained tokens are neither moved nor requantized. Between
evictions, a step of one token writes the token into the ring and counts it, on the device too if there is a kernel (`inputs`).

For compiled steps, `to_static` makes pages for the whole budget and copies everything else into tensors at fixed addresses
(`StaticLayout`), in which a step of one token reads no number from the host: token `n` of a row, padding not counted, is in slot `n % W` of
a ring. After attention the oldest token of the ring overwrites the token of lowest priority, or fills an empty slot, or is evicted itself
if its own priority is lowest. `to_dynamic` returns to tensors that grow, for steps of several tokens.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.base import Codec
from ..kernels import (
    AttentionInputs,
    PagedInputs,
    Pages,
    Pair,
    Prepared,
    TokenInputs,
    both,
    differ,
    give_handle,
    launch_of_step,
)
from ..kernels.paged_inputs import COLUMNS, LENGTH, RING_ROW, RING_START, RING_TOKENS, SINK_ROW
from ..storage.storage import LayerStorage, attention_inputs_of, extended, sides_of, zone_room
from .dispatch import append_token, evict_token
from .eviction import append_and_evict, append_and_replace
from .head_pages import HeadPages
from .metadata import TokenMetadata, no_tokens
from .policies import Arrivals, Budget, Policy, Rotation
from .policies.budget import Count
from .slot_pages import SlotPages
from .static import StaticTensors, gather_columns
from .tail import Tail, TokenFields


@dataclass(eq=False)
class StaticLayout(StaticTensors):
    """The tensors of an evicting layer at fixed addresses. `records` are the metadata of the pages' slots and then of the ring's."""

    statistics: dict[str, Tensor]
    attention_inputs: AttentionInputs
    """The inputs of attention in a step of one token: all columns."""

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.statistics.values()]

    def fields(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The metadata of the slots and of the ring, as views."""
        parts = slice(self.slots), slice(self.slots, None)
        region, ring = ({name: x[..., part] for name, x in self.records.items()} for part in parts)
        return region, ring


class EvictingStorage(LayerStorage):
    """Storage for the tokens that `policy` retains within `budget`, with keys and values like `like`, `[B, H, T, D]`
    each.

    Args:
        residual_length: number of last tokens that stay exact; tokens leave the residual in groups of at least `interval`.
        in_order: columns are in token order while nothing has been evicted.
        max_length: the most tokens that may be seen.
        rope: the model's rotary embedding, for policies that need it.
    """

    tokens: Any
    """`SlotPages`; `HeadPages` in `StorageByHead`."""

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        like: Pair,
        policy: Policy,
        budget: Budget,
        num_sink_tokens: int,
        residual_length: int,
        interval: int,
        in_order: bool,
        max_length: int | None = None,
        rope: Rotation | None = None,
    ):
        self.rope = rope
        self.codecs, self.policy, self.budget, self.max_length = codecs, policy, budget, max_length
        self.num_sink_tokens, self.residual_length, self.interval = num_sink_tokens, residual_length, interval
        self.ordered = in_order
        self.room = residual_length + interval
        """Slots of the tail: all tokens that wait for an eviction fit, and the one of a step."""
        self.static: StaticLayout | None = None
        self._start(both(lambda x: x[:, :, :0].detach().clone(), like))

    def __getstate__(self) -> dict:
        """Leaves out what holds addresses. Pickling does not keep which tensors share memory."""
        layout = self.static
        state = {name: x for name, x in self.__dict__.items() if name not in ("rows", "inputs", "launch", "token", "bound")}
        if layout is None:
            return state
        kept: Any = replace(layout, inputs=None, attention_inputs=None)  # type: ignore[arg-type]
        return state | {"static": kept, "zones": (layout.inputs.sinks, layout.ring)}

    def __setstate__(self, state: dict) -> None:
        zones = state.pop("zones", None)
        self.__dict__ |= state
        self.unbind()
        if self.static is not None and zones is not None:
            self._bind(self.static, *zones)
            if self.is_static:
                self._enter(self.static)

    def _start(self, empty: Pair) -> None:
        self.sinks = empty
        self.tail = Tail(empty, no_tokens(self.policy, empty[0]))
        self.tokens = self._new_pages(empty)
        self.metadata = TokenMetadata(self.policy, self.budget, self.tail, self.rope, self.pages_of_heads)
        self.in_order, self.sinks_full = self.ordered, not self.num_sink_tokens
        self.limit = None if self.budget.share else self._region_limit(0)
        """Quantized tokens within the budget, if it is the same for all lengths."""
        self.is_static = False
        """Whether the tokens are in `static`."""
        self.unbind()
        self.reset_counts()

    def unbind(self) -> None:
        """Forgets what depends on where tokens lie: for steps of one token it is found again (`bind`)."""
        self.token: tuple[Any, ...] = ()
        """Shapes and dtypes of the key and the value of a step that needs nothing but `add_token`; empty: not known."""
        self.bound: Pages | None = None
        self.rows: Tensor | None = None
        """`PagedInputs.rows` of the sinks and the tail."""
        self.inputs: PagedInputs | None = None
        """The inputs of attention in a step of one token, if the device counts them."""
        self.launch: Callable[[Pair], None] | None = None
        """Stores a token in one launch and counts it in `rows`."""

    @property
    def pages_of_heads(self) -> HeadPages | None:
        """The pages in which the metadata of tokens lies, if each head has pages of its own (`by_head.py`)."""
        return None

    def _new_pages(self, like: Pair) -> Any:
        return SlotPages(self.codecs, both(lambda x: x[:, :, :0], like))

    def change_codecs(self, codecs: tuple[Codec, Codec]) -> None:
        """Quantizes all tokens by other codecs. No token may be quantized yet."""
        self.codecs = codecs
        self.tokens = self._new_pages(self.tail.sides)
        self.unbind()
        self.metadata.pages = self.pages_of_heads

    @property
    def device(self) -> torch.device:
        return self.sinks[0].device

    @property
    def slots(self) -> int:
        """Slots for quantized tokens in the static layout."""
        return self.policy.size(self.budget, 0) - self.num_sink_tokens - self.residual_length

    @property
    def stored(self) -> int:
        """Columns that hold tokens, with the tokens of a running step."""
        if self.is_static:
            return min(self.seq_length, self.policy.size(self.budget, 0))
        return self.sinks[0].shape[2] + self.tokens.length + self.tail.count

    @property
    def residual(self) -> Pair:  # type: ignore[override]
        """The ring of the tail."""
        return self.tail.sides

    # Steps of one token.

    def add_token(self, x: Pair) -> None:
        """Adds the token of a step, `[B, H, 1, D]`, to the tail."""
        tail = self.tail
        if tail.count == tail.slots:
            tail.resize(zone_room(tail.count + 1, max(self.room, tail.count + 1)))
            self.unbind()
        if not self.token or (self.inputs is not None and self.bound is not self.tokens.pages):
            self.bind()
        if self.launch is not None:
            self.launch(x)
        else:
            for ring, new in zip(tail.sides, x, strict=True):
                tail.write(ring, tail.count, new)
            if self.rows is not None:
                self.rows[:, RING_TOKENS].add_(1)
        tail.count += 1

    def bind(self) -> None:
        """Prepares steps of one token for the tensors that there are now."""
        tail, pages, sinks = self.tail, self.tokens.pages, self.sinks[0].shape[2]
        self.unbind()
        if self.pages_of_heads is None and pages.by_page:
            self.bound = pages
            batch, device = len(self.sinks[0]), self.device
            counts = 0, 0, 0, sinks, tail.start, tail.count, tail.start, tail.start + sinks + tail.count
            with torch.inference_mode(False):
                self.rows = torch.tensor([counts] * batch, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
                self.rows[:, SINK_ROW : RING_ROW + 1] = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
                lengths = torch.full((batch,), self.tokens.length, dtype=torch.int32, device=device)
                control = torch.tensor([0, 0, 2**31 - 1], dtype=torch.int32, device="cpu").to(device, non_blocking=True)
            zones, prepared = (self.sinks, tail.sides, self.rows), Prepared(self.tokens.launches)
            self.inputs = PagedInputs(replace(pages, lengths=lengths), *zones, self.tokens.length, control=control, prepared=prepared)
            self.launch = launch_of_step(self.inputs, both(lambda x: x[:, :, :1], tail.sides))
        key, value = tail.sides
        self.token = *(torch.Size((*x.shape[:2], 1, x.shape[3])) for x in (key, value)), key.dtype, value.dtype

    @property
    def shares_plan(self) -> bool:
        """Whether attention to the last token may be planned for all layers that are alike: all columns hold a token, and the device counts
        them."""
        return self.launch is not None and not self.metadata.has_holes and not self.in_order

    def token_inputs(self, sinks: Pair | None = None) -> AttentionInputs:
        """The inputs of attention after `add_token`. `sinks`: in place of the stored sinks."""
        tail, inputs, first = self.tail, self.inputs, self.sinks if sinks is None else sinks
        if inputs is not None:
            inputs = inputs.twin(max_length=self.tokens.length)
        if inputs is not None and sinks is not None:
            inputs = inputs.anew(sinks=sinks)
        counts = first[0].shape[2], self.tokens.length, tail.count
        return TokenInputs(partial(sides_of, first, self.tokens, tail.sides, counts, tail.start), inputs, sum(counts))

    def _count_left(self, count: int) -> None:
        """Counts on the device the tokens that leave the tail, whose oldest token is in slot `start` now."""
        if self.rows is not None:
            wraps = self.tail.start < count
            self.rows.add_(_left(count, count - wraps * self.tail.slots, self.rows.device))

    # Steps of any number of tokens.

    def append(self, new: Pair) -> None:
        """Adds the tokens of a step, `[B, H, Q, D]`, to the tail."""
        self.to_dynamic()
        self.metadata.describe()
        self.tail.extend(new)
        self.unbind()

    def attention_inputs(self, sinks: Pair | None = None) -> AttentionInputs:
        """The inputs of attention after `append`. `sinks`: in place of the stored sinks."""
        return attention_inputs_of(self.sinks if sinks is None else sinks, self.tokens, self.tail.tokens())

    def num_evicted(self, running: int) -> int | Tensor:
        """The number of tokens that each row evicted before a step of `running` tokens; `[B]` if rows differ."""
        metadata, lengths = self.metadata, self.metadata.row_lengths
        if lengths is None:
            return metadata.columns - self.stored + running
        valid = metadata.is_valid(running)
        return lengths - (self.stored - running if valid is None else valid.sum(-1))

    def evict(self) -> None:
        """Moves tokens from the tail to their zones after a step's attention, and evicts tokens beyond the
        budget."""
        metadata, tail = self.metadata, self.tail
        if not self.tokens.calibrated:
            self.tokens.calibrate(tail.tokens(), self.valid_residual())
            self.tokens.calibrated = self.tokens.calibrated or bool(self.tokens.begun.all())
        if not self.sinks_full:
            self._fill_sinks()
        if metadata.has_gaps and (self.residual_length or self.num_sink_tokens or metadata.ragged):
            self._align_right()
        leaving = tail.count - self.residual_length
        if leaving >= self.interval:
            metadata.describe()
            limit: int = self.limit if self.limit is not None else self._region_limit(metadata.columns)
            row_limits = None
            if self.budget.share and metadata.padding is not None:
                row_limits = self._region_limit(metadata.lengths())
            self._move(*tail.part(0, leaving), limit, row_limits)
            tail.drop(leaving)
            self._count_left(leaving)
        if tail.slots > self.room or not self.token:  # after a step of several tokens, whose tensors may be the caller's
            self._shrink()

    def _shrink(self) -> None:
        """Copies the tail into a ring: a whole one, if a token has left it."""
        has_left = self.metadata.columns > self.sinks[0].shape[2] + self.tail.count
        self.tail.resize(self.room if has_left else zone_room(self.tail.count, self.room))
        self.unbind()

    def valid_residual(self) -> Tensor | None:
        """The columns of the residual that hold a token, bool `[B, T]`; None: all."""
        self.metadata.describe()
        return None if self.metadata.row_lengths is None else self.metadata.residual["positions"][:, 0] >= 0

    def _fill_sinks(self) -> None:
        """Moves the first tokens of each row, padding left out, to the sinks."""
        metadata, tail = self.metadata, self.tail
        metadata.describe()
        before = metadata.sinks.shape[1]
        missing = min(self.num_sink_tokens, metadata.columns) - before
        metadata.sinks = F.pad(metadata.sinks, (0, missing))
        positions = metadata.residual["positions"][:, 0]
        hits = positions[:, None] == torch.arange(before + missing, device=positions.device)[None, :, None]  # [B, S, T]
        found, at = hits.any(-1), hits.int().argmax(-1)
        grown = []
        for sinks, residual in zip(self.sinks, tail.tokens(), strict=True):
            sinks = F.pad(sinks, (0, 0, 0, missing))
            new = residual.gather(2, at[:, None, :, None].expand(*sinks.shape[:2], -1, sinks.shape[3]))
            grown.append(torch.where(found[:, None, :, None], new, sinks))
        self.sinks = grown[0], grown[1]
        metadata.sinks = metadata.sinks | found
        self.sinks_full = metadata.sinks.shape[1] == self.num_sink_tokens and (metadata.padding is None or bool(metadata.sinks.all()))
        if metadata.padding is None:  # they are the oldest of the tail
            tail.drop(missing)
        else:
            moved = (positions >= 0) & (positions < before + missing)
            tail.write(tail.fields["positions"], 0, metadata.residual["positions"].masked_fill(moved[:, None], -1))
            metadata.has_gaps = metadata.has_holes = True
        self.unbind()

    def _align_right(self) -> None:
        """Moves the columns of the tail without a token to the left of each row."""
        metadata, tail = self.metadata, self.tail
        metadata.describe()
        fields, metadata.has_gaps = metadata.residual, False
        order = (fields["positions"][:, 0] >= 0).int().argsort(dim=-1, stable=True)
        tail.set(both(lambda x: gather_columns(x, order), tail.tokens()), {name: gather_columns(x, order) for name, x in fields.items()})
        self.unbind()

    def _move(self, leaving: Pair, fields: TokenFields, limit: int, row_limits: Tensor | None) -> None:
        """Moves the oldest tokens of the tail, with their fields, to the pages, and evicts tokens beyond the budget.

        Args:
            limit: quantized tokens that a row may hold.
            row_limits: int64 `[B, 1, 1]`, tokens that each row may hold, if these differ.
        """
        tokens, metadata, stored, count = self.tokens, self.metadata, self.tokens.length, leaving[0].shape[2]
        limit = max(limit, stored)
        if row_limits is None and count <= stored and limit < stored + count:
            append_and_replace(tokens, metadata, leaving, fields, limit)
            self.in_order = False
        else:
            self.in_order = append_and_evict(tokens, metadata, leaving, fields, limit, row_limits) and self.in_order
        if self.inputs is not None and tokens.length > stored:
            self.inputs.pages.lengths.fill_(tokens.length)  # type: ignore[union-attr]
        if metadata.has_holes:
            metadata.find_holes(self.stored)

    def _region_limit(self, seq_length: Count) -> Count:
        """Quantized tokens within the budget after `seq_length` tokens; a tensor for a tensor."""
        return self.policy.size(self.budget, seq_length) - (self.num_sink_tokens + self.residual_length + self.interval - 1)

    def simulate(self, prompt: int, seq_length: int, query_heads: int) -> None:
        """Allocates the storage of `seq_length` tokens, of which `prompt` came at once and the others one by one. If
        heads share a budget, it is the largest that they may need; if layers share one, the largest mean over all
        layers. Nothing is stored: for planning, on the meta device."""
        exact, interval = self.num_sink_tokens + self.residual_length, self.interval
        first = prompt - exact if prompt - exact >= interval else 0  # tokens that the prompt moves out of the residual
        groups = max(seq_length - exact - first, 0) // interval

        sinks = min(seq_length, self.num_sink_tokens)
        residual = seq_length - sinks - first - groups * interval
        self._simulate_pages(first, groups)
        slots = self.room if first + groups else zone_room(residual, self.room)
        self.sinks = extended(self.sinks, sinks)
        self.metadata.simulate(self.sinks, query_heads, sinks, self.tokens.length, slots)

    def _simulate_pages(self, first: int, groups: int) -> None:
        """Allocates the pages of `first` tokens and of `groups` groups of `interval` tokens after them."""
        exact = self.num_sink_tokens + self.residual_length

        def length(k: int) -> int:
            left = first + k * self.interval
            return min(left, max(self._region_limit(exact + left), 0))

        self.tokens.simulate(length, groups)

    # Steps of one token in the static layout.

    def append_token(self, tokens: Arrivals) -> Tensor:
        """Adds the running tokens, one of each row; returns the columns that hold a token, bool `[B, T]`. Does not read
        `positions` and `seen` of `tokens`."""
        layout: StaticLayout = self.static  # type: ignore[assignment]
        valid = None if tokens.is_valid is None else tokens.is_valid[:, 0]
        lengths = (layout.row_lengths + (1 if valid is None else valid.long()))[:, None, None]
        positions = layout.row_lengths[:, None].int()
        positions = positions if tokens.is_valid is None else torch.where(tokens.is_valid, positions, -1)
        fields = self.metadata.new_fields(replace(tokens, positions=positions, seen=lengths))
        append_token(layout, (tokens.keys, tokens.values), [fields[name] for name in layout.records if name != "positions"], valid)
        return layout.column_mask

    def evict_token(self, attention_sums: Tensor | None, is_valid: Tensor | None) -> None:
        """Moves the oldest token out of the ring, and evicts a token if the budget is full. `attention_sums`: the
        accumulated attention of all columns, `[B, H, T]`, if the policy observes attention. `is_valid`: as in the
        step's `append_token`."""
        layout: StaticLayout = self.static  # type: ignore[assignment]
        ring, slots = self.residual_length + 1, self.slots
        at = (layout.row_lengths % ring)[:, None]  # the token itself in a row whose token is padding
        queries = 1 if is_valid is None else is_valid.float()[:, :, None]
        attention_sums = None if attention_sums is None else attention_sums[..., self.num_sink_tokens :]
        fields = dict(layout.records)
        if attention_sums is not None:
            fields["score"] = self.policy.observe(fields["score"], attention_sums, queries)
        leaving = {name: gather_columns(x, slots + at) for name, x in fields.items()}
        order = self.metadata.order({name: torch.cat([x[..., :slots], leaving[name]], dim=-1) for name, x in fields.items()})
        slot = evict_token(layout, order)
        if attention_sums is not None:
            moved, scores = slot[..., None] == torch.arange(slots + ring, device=at.device), layout.records["score"]
            sums = torch.where(moved, gather_columns(attention_sums, slots + at), attention_sums)
            scores.copy_(self.policy.observe(scores, sums, queries))

    @torch.no_grad()
    def to_static(self) -> None:
        """Makes pages for the budget, and copies everything else into the static layout."""
        metadata, tokens, columns = self.metadata, self.tokens, self.metadata.region["positions"].shape[-1]
        metadata.describe()
        tokens.own(0, tokens.numbers.shape[1])  # type: ignore[union-attr]
        if missing := self.slots - tokens.length:
            tokens.reserve(missing)  # type: ignore[union-attr]
        tokens.length, tokens.static = self.slots, True
        if self.static is None or differ(self.static.ring[0], self.sinks[0]):
            self.static = self._allocate()
        layout, tail, ring, residual = self.static, self.tail, self.residual_length + 1, self.tail.count
        if layout.inputs.pages is not tokens.pages:
            self._bind(layout, layout.inputs.sinks, layout.ring)
        layout.row_lengths.copy_(metadata.lengths()[:, 0, 0])
        index = (torch.arange(ring, device=self.device) - (layout.row_lengths - residual)[:, None]) % ring  # columns of the residual
        used = (index < residual)[:, None]
        index = index.clamp_max(max(residual - 1, 0))
        for exact, x in zip(layout.inputs.sinks, self.sinks, strict=True):
            exact[:, :, : x.shape[2]] = x
        for last, x in zip(layout.ring, tail.tokens(), strict=True):
            if residual:
                last.copy_(torch.where(used[..., None], gather_columns(x, index), 0))
        valid = F.pad(metadata.sinks, (0, self.num_sink_tokens - metadata.sinks.shape[1]))
        region, fields = layout.fields()
        residual_fields = metadata.residual
        for name, x in region.items():
            x.fill_(-1)[..., :columns] = metadata.region[name]
        for name, x in fields.items():
            x.copy_(torch.where(used, gather_columns(residual_fields[name], index), -1) if residual else torch.full_like(x, -1))
        layout.column_mask.copy_(torch.cat([valid, layout.records["positions"][:, 0] >= 0], dim=-1))
        layout.columns.fill_(metadata.columns)
        for name, x in metadata.statistics.items():
            layout.statistics[name].copy_(x)
        self._enter(layout)

    def _enter(self, layout: StaticLayout) -> None:
        """Uses the tensors of `layout` in the storage and in its metadata."""
        metadata = self.metadata
        self.sinks = layout.inputs.sinks
        metadata.sinks = layout.column_mask[:, : self.num_sink_tokens]
        metadata.region, fields = layout.fields()
        self.tail.set(layout.ring, fields)
        self.unbind()
        metadata.counted, metadata.statistics, metadata.static = layout.row_lengths, layout.statistics, True
        self.is_static, self.in_order = True, False

    def _bind(self, layout: StaticLayout, sinks: Pair, ring: Pair) -> None:
        """Rebuilds the inputs of `layout`, which hold addresses of its tensors and of the pages."""
        layout.attention_inputs = self.static_inputs(sinks, ring)
        layout.inputs = layout.attention_inputs.paged  # type: ignore[assignment]
        for tensor in layout.tensors():
            torch._dynamo.mark_static_address(tensor)
        give_handle(layout.inputs)

    def static_inputs(self, sinks: Pair, ring: Pair) -> AttentionInputs:
        """The inputs of attention over all slots, those without a token too."""
        paged = PagedInputs(self.tokens.pages, sinks, ring, None, self.slots, prepared=Prepared(self.tokens.launches))
        return AttentionInputs(*sides_of(sinks, self.tokens, ring), paged)

    @torch.inference_mode(False)  # tensors made in inference mode cannot be written outside of it
    def _allocate(self) -> StaticLayout:
        def zeros(tokens: int) -> Pair:
            return both(lambda x: x.new_zeros(*x.shape[:2], tokens, x.shape[3]), self.sinks)

        sinks, ring, columns = zeros(self.num_sink_tokens), zeros(self.residual_length + 1), self.slots + self.residual_length + 1
        records = {name: x.new_zeros(*x.shape[:2], columns) for name, x in self.metadata.region.items()}
        mask = self.metadata.sinks.new_zeros(len(sinks[0]), self.num_sink_tokens + columns)
        row_lengths, seen = (torch.zeros(count, dtype=torch.int64, device=self.device) for count in (len(mask), 1))
        statistics = {name: torch.zeros_like(x) for name, x in self.metadata.statistics.items()}
        layout = StaticLayout(None, records, mask, row_lengths, seen, statistics, None)  # type: ignore[arg-type]
        self._bind(layout, sinks, ring)
        return layout

    @torch.no_grad()
    def to_dynamic(self) -> None:
        """Undoes `to_static`: puts the residual in token order again, without empty columns."""
        if not self.is_static:
            return
        self.sync_counts()
        metadata, residual = self.metadata, min(self.residual_length, self.seq_length)
        number = self.static.row_lengths[:, None] - residual + torch.arange(residual, device=self.device)  # type: ignore[union-attr]
        order = number % (self.residual_length + 1)
        fields = {name: gather_columns(x, order) for name, x in self.tail.fields.items()}
        fields["positions"] = fields["positions"].masked_fill((number < 0)[:, None], -1)
        self.tail.set(both(lambda x: gather_columns(x, order), self.tail.sides), fields)
        metadata.region = {name: x.clone() for name, x in metadata.region.items()}
        metadata.columns, metadata.static, self.is_static = self.seq_length, False, False
        metadata.padding, metadata.counted, metadata.has_holes = self.seq_length - self.static.row_lengths, None, True  # type: ignore[union-attr]

    # All tokens at once.

    def device_length(self) -> int | Tensor:
        return self.seq_length if self.static is None else self.static.columns[0]

    def read_counts(self) -> None:
        self.seq_length = int(self.static.columns)  # type: ignore[union-attr]

    def clear(self) -> None:
        """Removes all tokens; keeps the static layout."""
        kept = self.tokens
        self._start(both(lambda x: x[:, :, :0].clone(), self.sinks))
        if self.static is not None:
            for tensor in self.static.tensors():  # a stale nan would stay a nan under a mask
                tensor.zero_()
            kept.clear()  # type: ignore[union-attr]
            self.tokens = kept

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices; a row that occurs several times is repeated. Tensors of the static layout are overwritten."""
        was_static = self.is_static
        self.unbind()
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self.to_dynamic()
        self.tokens.select(rows)
        self.metadata.map(lambda x: x.index_select(0, index))
        self.sinks = both(lambda x: x.index_select(0, index), self.sinks)
        tail = self.tail
        tail.sides = both(lambda x: x.index_select(0, index), tail.sides)
        tail.fields = {name: x.index_select(0, index) for name, x in tail.fields.items()}
        if was_static:
            self.to_static()

    def fork(self) -> EvictingStorage:
        """Returns a copy that shares the pages until one of the two evicts. Storage at fixed addresses is copied."""
        if self.static is not None:
            return copy.deepcopy(self)
        tokens = self.tokens.fork()
        return copy.deepcopy(self, {id(self.tokens): tokens})

    def zones(self) -> tuple[Pair, Pair]:
        return self.sinks, self.tail.tokens()

    def snapshot(self, rows: slice) -> tuple[dict[str, Tensor], dict[str, int]]:
        self.metadata.describe()
        tensors, _ = super().snapshot(rows)
        tensors |= {name: x[rows] for name, x in self.metadata.named_tensors()}
        return tensors, {"seen": self.seq_length, "in_order": int(self.in_order)}

    def form(self, tensors: dict[str, Tensor], sinks: int, columns: int, residual: int) -> dict[str, Tensor]:
        metadata, heads = self.metadata, self.sinks[0].shape[1]
        given = [x.shape[1] for name, x in tensors.items() if name.startswith("metadata.statistics.") and x.ndim > 1]
        query_heads = max((count for count in given if count % heads == 0), default=heads)
        metadata.simulate(self.sinks, query_heads, sinks, columns, residual)
        if "metadata.head_weights" not in tensors:  # only `compress` sets them
            metadata.head_weights = None
        return super().form(tensors, sinks, columns, residual) | dict(metadata.named_tensors())

    def check_counts(self, tensors: dict[str, Tensor], numbers: dict[str, int], seen: int, columns: int, residual: int) -> None:
        stored = columns + residual
        complete = self.in_order and self.num_sink_tokens + stored == seen
        if numbers.keys() != {"seen", "in_order"} or numbers["seen"] != seen or numbers["in_order"] > complete:
            raise ValueError(f"counts {numbers} after {seen} tokens")
        self._check_lengths(tensors, stored, seen)
        positions = [x for name, x in tensors.items() if name.endswith(".positions") and x.numel()]
        if any(x.min() < -1 or x.max() >= seen for x in positions):
            raise ValueError(f"positions beyond the {seen} tokens seen")

    def _check_lengths(self, tensors: dict[str, Tensor], stored: int, seen: int) -> None:
        """Raises ValueError unless a row that has seen `seen` tokens may hold `stored` ones besides its sinks."""
        if stored > max(seen - self.num_sink_tokens, 0):
            raise ValueError(f"{stored} tokens besides sinks, after {seen} tokens")

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        super().restore(tensors, numbers)
        self.seq_length = numbers["seen"]
        self.sinks, residual = ((tensors[f"key.{zone}"], tensors[f"value.{zone}"]) for zone in ("sinks", "residual"))
        self.tail.set(residual, self.metadata.load(tensors, self.seq_length))
        self._shrink()
        self.in_order, self.sinks_full = bool(numbers["in_order"]), self.seq_length >= self.num_sink_tokens

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its role: `exact`, `bookkeeping`, `codes` or `scales`. Some tensors occur twice."""
        layout = self.static
        yield from (("exact", x) for x in (*self.sinks, *self.tail.sides, *((*layout.inputs.sinks, *layout.ring) if layout else ())))
        yield from self.tokens.tensors()
        fields = self.tail.fields
        own = (x for name, x in self.metadata.named_tensors() if not name.startswith("metadata.residual."))
        yield from (("bookkeeping", x) for x in (*own, *fields.values()))
        if self.rows is not None:
            yield "bookkeeping", self.rows
        if layout is not None:
            yield from (("bookkeeping", x) for x in layout.tensors())


@functools.lru_cache(maxsize=64)
def _left(count: int, step: int, device: torch.device) -> Tensor:
    """The change of `PagedInputs.rows` when `count` tokens have left the ring, whose oldest token is `step` slots further on, int32
    `[8]`."""
    changes = [0] * len(COLUMNS)
    changes[RING_START], changes[RING_TOKENS], changes[LENGTH] = step, -count, count
    with torch.inference_mode(False):
        return torch.tensor(changes, dtype=torch.int32, device="cpu").to(device)
