"""`Storage`: the keys and values of one layer that keeps all tokens, in three zones in token order.

    sinks      the first `num_sink_tokens` tokens, in the model's dtype
    pages      quantized tokens (`paged.py`)
    residual   the last `residual_length` tokens and the token of the step, in the model's dtype: a ring, in which a new token
               overwrites the oldest

After a step, the number of exact tokens follows from the number of tokens seen, as in batches
(`batching/rings.py`). Without a kernel, tokens of the ring are quantized in groups, ahead of the steps in
which they leave it, since quantizing them one by one would cost a CPU too much. Sinks and ring grow with the
tokens to their full size; storage that is preallocated or compiled has it at once. Counts are kept on the
host and on the device (`kernels.PagedInputs`), so that a step reads no number from the host.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.base import Codec
from ..kernels import (
    AttentionInputs,
    Exact,
    KeysOrValues,
    PagedInputs,
    Pair,
    Prepared,
    Segment,
    TokenInputs,
    Work,
    both,
    dense,
    give_handle,
    launch_of_step,
)
from ..kernels.paged_inputs import COLUMNS, CONTROL, DROPPED, LENGTH, RING_ROW, ROOM, SINK_ROW, SINKS, TOKENS
from ..kernels.segments import block_of
from .paged import GROUP, PAGE, SIDES, RowPages
from .pool import selected
from .ring import in_order, put


def check_room(seq_length: int, tokens: int, max_length: int) -> None:
    """Raises ValueError if `tokens` more than the `seq_length` tokens seen exceed `max_length`."""
    if seq_length + tokens > max_length:
        again = (
            "; with use_cache=False generate gives all tokens again at every step: pass no cache then" if 0 < seq_length < tokens else ""
        )
        raise ValueError(
            f"{seq_length} tokens and {tokens} more do not fit in max_length={max_length}: make the cache with a larger one, or call "
            f"reset() for another prompt{again}"
        )


class LayerStorage:
    """The base of `Storage`, and of the storage of rooms.

    A count on the host would be compiled into compiled code as a constant. Compiled code therefore counts on
    the device and sets `uncounted` and `counts_stale` on the host; `sync_counts` reads the device once when
    an exact count is needed.
    """

    max_length: int | None
    """The most tokens that may be seen; None: no limit."""
    seq_length: int
    """Tokens seen, as counted on the host."""
    uncounted: int
    """Tokens of a compiled step that `seq_length` does not include yet."""
    counts_stale: bool
    """Whether compiled code ran since the host last read the counts: it may have run more than once."""
    tokens: Any
    """`RowPages`, or the pages of a room."""
    num_sink_tokens: int
    sinks: Pair
    residual: Pair

    def device_length(self) -> int | Tensor:
        """Tokens seen: a 0-d tensor on the device, or an int while nothing is counted there."""
        raise NotImplementedError

    def read_counts(self) -> None:
        """Copies the counts from the device to the host."""
        raise NotImplementedError

    def advance(self, tokens: int) -> None:
        """Adds `tokens` to the counts on the host."""
        self.seq_length += tokens

    def reset_counts(self) -> None:
        self.seq_length = self.uncounted = 0
        self.counts_stale = False

    def record_compiled_step(self, tokens: int) -> None:
        self.uncounted, self.counts_stale = tokens, True

    def sync_counts(self) -> None:
        """Makes the counts on the host exact."""
        if self.counts_stale:
            self.read_counts()
            self.uncounted, self.counts_stale = 0, False

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` more. Raises ValueError if `max_length` does not allow them."""
        if self.uncounted:
            self.advance(self.uncounted)
            self.uncounted = 0
        if self.max_length is not None:
            check_room(self.seq_length, tokens, self.max_length)

    def query_offset(self) -> int | Tensor:
        """Tokens seen, without waiting for the device."""
        return self.device_length() if self.counts_stale or torch.compiler.is_compiling() else self.seq_length

    def zones(self) -> tuple[Pair, Pair]:
        """The sinks and the residual in token order, keys and values `[B, H, T, D]` each. The quantized tokens lie between them."""
        raise NotImplementedError

    def attention_inputs(self):
        raise NotImplementedError

    def dense(self) -> Pair:
        """All stored tokens in the model's dtype, keys and values `[B, H, T, D]`."""
        inputs = self.attention_inputs()
        return dense(inputs.key), dense(inputs.value)

    def snapshot(self, rows: slice) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The `rows`, as views where possible: tensors by name, `key.sinks`, `key.residual`, the same with `value`, and those of
        `PagedTokens.snapshot`; and counts that do not follow from shapes. Codes are not changed."""
        tensors = self.tokens.snapshot(rows)
        for zone, sides in zip(("sinks", "residual"), self.zones(), strict=True):
            tensors |= {f"{side}.{zone}": x[rows] for side, x in zip(SIDES, sides, strict=True)}
        return tensors, {}

    def check(self, tensors: dict[str, Tensor], numbers: dict[str, int], seen: int) -> None:
        """Raises ValueError unless these are a valid snapshot, for `restore`, of rows that have seen `seen`
        tokens. Names, dtypes and shapes must be as in this storage, which is empty and on the meta device,
        with the snapshot's number of tokens in each zone."""
        columns = next((x.shape[2] for name, x in tensors.items() if name.startswith("key.region.")), 0)
        sinks, residual = (tensors[f"key.{zone}"].shape[2] if f"key.{zone}" in tensors else 0 for zone in ("sinks", "residual"))
        expected = self.form(tensors, sinks, columns, residual)
        for name in sorted(expected.keys() | tensors.keys()):
            found, wanted = (f"{list(x[name].shape)} in {x[name].dtype}" if name in x else "missing" for x in (tensors, expected))
            if found != wanted:
                raise ValueError(f"{name!r} is {found}, expected {wanted}")
        if sinks != min(seen, self.num_sink_tokens):
            raise ValueError(f"{sinks} sinks after {seen} tokens")
        self.check_counts(tensors, numbers, seen, columns, residual)

    def form(self, tensors: dict[str, Tensor], sinks: int, columns: int, residual: int) -> dict[str, Tensor]:
        """Empty tensors of the names, dtypes and shapes of a snapshot with so many tokens in each zone.
        `tensors`: a snapshot, of which shapes that the zones do not tell are taken."""
        expected = self.tokens.form(columns)
        for side, like in zip(SIDES, self.sinks, strict=True):
            for zone, count in (("sinks", sinks), ("residual", residual)):
                expected[f"{side}.{zone}"] = like.new_empty(*like.shape[:2], count, like.shape[3])
        return expected

    def check_counts(self, tensors: dict[str, Tensor], numbers: dict[str, int], seen: int, columns: int, residual: int) -> None:
        """Raises ValueError unless the counts of a snapshot agree with each other and with `seen`. Its
        tensors have been checked. `columns`: of the codes; `residual`: of the residual."""
        raise NotImplementedError

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        """Copies the result of `snapshot` into this storage, which must be empty."""
        self.tokens.load(tensors)


class Storage(LayerStorage):
    """Storage for keys and values like `like`, `[B, H, T, D]` each, with initial room for `T` tokens.

    Args:
        max_length: the most tokens; room for all is allocated at once. None: storage grows by pages.
        static: tensors keep their addresses, which compiled code needs; pages can still be added.
        new_pages: makes the pages, with the arguments of `RowPages`.
    """

    tokens: RowPages
    ready = 0
    """Tokens seen up to which one more needs nothing of the host but counting; 0: not known."""
    token: tuple[Any, ...]
    """Shapes and dtypes of the key and the value of one token; set with `ready`."""

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        like: Pair,
        num_sink_tokens: int,
        residual_length: int,
        max_length: int | None = None,
        static: bool = False,
        new_pages: Callable[..., RowPages] = RowPages,
    ):
        self.max_length, self.num_sink_tokens = max_length, num_sink_tokens
        self.static = static or max_length is not None
        self.columns = PAGE if max_length is None else max_length
        """Columns of a mask: the most tokens before the host makes room again."""
        self.slots = residual_length + 1
        """Slots of the residual's ring."""
        self.group = 1 if self.static else min(GROUP, self.slots)
        """Tokens that are quantized together in steps of one token."""
        self.shares_zones = False
        """Whether a fork has the same sinks, residual and counts."""
        batch, device = like[0].shape[0], like[0].device
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
            self.sinks = self.residual = _without_tokens(like[0]), _without_tokens(like[1])
            self._grow(like[0].shape[2])
            self.control = torch.zeros(len(CONTROL), dtype=torch.int32, device=device)
            self.rows = torch.zeros(batch, len(COLUMNS), dtype=torch.int32, device=device)
        slots = max((max_length or like[0].shape[2]) - num_sink_tokens - self.slots, 0)
        simulated = slots and device.type == "meta"  # for planning: there may be billions of pages
        grows, room = self.static and max_length is None, 0 if simulated else slots
        self.tokens = new_pages(codecs, like, static=self.static, grows=grows, room=room)
        self.reset_counts()
        if simulated:
            self.tokens.simulate(lambda groups: slots, 0)
            self.tokens.length = 0
        self._number_rows()
        self.bind()

    def __getstate__(self) -> dict:
        """Leaves out what holds addresses."""
        return {name: x for name, x in self.__dict__.items() if name not in ("bound", "inputs", "launch")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self.bind()

    def bind(self) -> None:
        """Rebuilds `inputs`, which hold addresses of tensors."""
        self.bound, self.ready = self.tokens.pages, 0
        bound = self.columns if self.max_length is None else self.tokens.capacity
        pages = replace(self.bound, lengths=self.rows[:, LENGTH])
        zones = self.sinks, self.residual, self.rows
        work, prepared = Work(None, None, *self.tokens.branches()), Prepared(self.tokens.launches)
        self.inputs = PagedInputs(pages, *zones, bound, work, self.control, self.tokens.reads, prepared)
        """The inputs of attention for a step of one token; `max_length` is a bound on what the device counts."""
        self.__dict__.pop("launch", None)
        room = self.max_length or self.sinks[0].shape[2] + self.residual[0].shape[2] + self.tokens.capacity
        self.control[ROOM : ROOM + 1].copy_(torch.from_numpy(numpy.array([room], numpy.int32)), non_blocking=True)
        if self.static and not self.rows.is_meta:
            give_handle(self.inputs)

    def _number_rows(self) -> None:
        """Says that row `b` has row `b` of the sinks and of the residual."""
        number = torch.arange(len(self.rows), dtype=torch.int32, device=self.rows.device)
        self.rows[:, SINK_ROW : RING_ROW + 1] = number[:, None]

    @cached_property
    def launch(self) -> Callable[[Pair], None] | None:
        """A function that adds one token, `[B, H, 1, D]`, in one launch; None if there is no kernel. Prepared
        on first use after `bind`."""
        return launch_of_step(self.inputs, (self.residual[0][:, :, :1], self.residual[1][:, :, :1]))

    @property
    def free(self) -> int:
        """Tokens that can be added before the ring is full."""
        return self.num_sink_tokens + self.tokens.length + self.slots - self.seq_length

    # Counts.

    def device_length(self) -> Tensor:
        return self.rows[0, TOKENS]

    def read_counts(self) -> None:
        dropped, self.tokens.length, self.seq_length = torch.stack(
            [self.control[DROPPED], self.rows[0, LENGTH], self.rows[0, TOKENS]]
        ).tolist()
        if dropped:
            limit = f"max_length={self.max_length} is too small" if self.max_length else "masks must be made outside of compiled code"
            raise ValueError(f"{dropped} tokens came when the cache was full: {limit}; call reset()")

    def advance(self, tokens: int) -> None:
        self.tokens.length += self.overflow(tokens)
        self.seq_length += tokens

    def overflow(self, tokens: int) -> int:
        """The number of tokens that leave the ring when `tokens` more are added."""
        return max(self.seq_length + tokens - self.num_sink_tokens - self.slots - self.tokens.length, 0)

    def reserve(self, tokens: int) -> None:
        super().reserve(tokens)
        leaving, changed = self.overflow(tokens), self.shares_zones
        self._own_zones()
        if leaving > 0:
            changed |= self.tokens.reserve(leaving)
        if self.seq_length + tokens > self.most:
            self._grow(self.seq_length + tokens)
            changed = True
        if self.static and self.seq_length + tokens > self.columns:
            self.columns, changed = 1 << (self.seq_length + tokens - 1).bit_length(), True
        if changed or self.bound is not self.tokens.pages:  # after an interruption
            self.bind()

    @torch.inference_mode(False)
    def _grow(self, tokens: int) -> None:
        """Makes room in the sinks and in the ring for what they hold of `tokens`. No token has left a ring that is not of full size."""
        full = self.num_sink_tokens, self.slots
        sinks, ring = full if self.static else map(zone_room, (tokens, max(tokens - self.num_sink_tokens, 1)), full)
        self.sinks, self.residual = extended(self.sinks, sinks), extended(self.residual, ring)
        grown = sinks < self.num_sink_tokens, ring < self.slots
        self.most = sinks if grown[0] else sinks + ring if grown[1] else 2**62
        """Tokens for which the sinks and the ring are large enough."""

    def simulate(self, prompt: int, seq_length: int, query_heads: int) -> None:
        """Allocates the storage of `seq_length` tokens, of which `prompt` came at once and the others one by
        one. Nothing is stored: for planning, on the meta device."""
        if self.max_length is None:
            before, after = self.overflow(prompt), self.overflow(max(prompt, seq_length))
            self.tokens.simulate(lambda k: before + k, after - before)
            self._grow(max(prompt, seq_length))

    def record_compiled_step(self, tokens: int) -> None:
        super().record_compiled_step(tokens)
        self.ready = 0

    def set_lengths(self, seq_length: int, quantized: int) -> None:
        """Sets the counts on the host and on the device."""
        self.seq_length, self.tokens.length, self.ready = seq_length, quantized, 0
        self.rows[:, SINKS:].copy_(torch.from_numpy(numpy.array(self._counts(), numpy.int32)), non_blocking=True)

    def _counts(self) -> tuple[int, ...]:
        """The columns of `rows` from SINKS on."""
        (sinks, recent), quantized = self.exact_counts, self.tokens.length
        return sinks, quantized % self.slots, recent, quantized, self.seq_length

    @property
    def exact_counts(self) -> tuple[int, int]:
        """Tokens of the sinks, and of the ring."""
        sinks = min(self.seq_length, self.num_sink_tokens)
        return sinks, self.seq_length - sinks - self.tokens.length

    # Adding tokens in eager code.

    def add_token(self, x: Pair) -> AttentionInputs:
        """`add` of one token."""
        if self.seq_length >= self.ready:
            self._make_ready()
            if not self.ready:
                self.append(x)
                return self.attention_inputs()
        tokens, seq_length = self.tokens, self.seq_length
        if seq_length == self.num_sink_tokens + tokens.length + self.slots:  # the oldest leaves the ring
            tokens.length += 1
        self.launch(x)  # type: ignore[misc]
        self.seq_length = seq_length + 1
        return self.attention_inputs()

    def _make_ready(self) -> None:
        """Makes room for one more token, and finds out for how many there is room, if they are stored by a kernel."""
        self.sync_counts()
        self.reserve(1)
        if self.launch is None or not self.tokens.calibrated:
            return
        exact, tokens = self.num_sink_tokens + self.slots, self.tokens
        limits = [exact + tokens.capacity, self.most]
        limits += [self.columns] if self.static else []
        if tokens.length // PAGE < tokens.owned:  # the page of the next token that leaves the ring is shared
            limits.append(exact + tokens.length)
        self.ready = min(limits)
        key, value = self.residual
        self.token = *(torch.Size((*x.shape[:2], 1, x.shape[3])) for x in (key, value)), key.dtype, value.dtype

    def add(self, x: Pair) -> AttentionInputs:
        """Adds the tokens of a step, `[B, H, T, D]`, and returns the inputs of attention over all tokens: one
        token reads what is stored then; several read what was stored before, and themselves. Raises
        ValueError if `max_length` does not allow them."""
        if x[0].shape[2] == 1:
            return self.add_token(x)
        self.sync_counts()
        self.reserve(x[0].shape[2])
        inputs = self.inputs_with(x)
        self.append(x, inputs.joined)
        return inputs

    def inputs_with(self, x: Pair) -> AttentionInputs:
        """The inputs of attention over the tokens that are stored now and keys and values `x` `[B, H, T, D]`. Stores nothing."""
        exact, sinks = self._exact_with(x), self.exact_counts[0]
        first, residual = both(lambda side: side[:, :, :sinks], exact), both(lambda side: side[:, :, sinks:], exact)
        return attention_inputs_of(first, self.tokens, residual, exact)

    def append(self, x: Pair, exact: Pair | None = None, is_valid: Tensor | None = None) -> None:
        """Adds keys and values `[B, H, T, D]`, for which there is room, in one launch if there is a kernel. `exact`: `_exact_with(x)`, if
        the caller has it. `is_valid`: the tokens that are not padding, bool `[B, T]`; None: all."""
        self.tokens.calibrate(x, is_valid)
        tokens = x[0].shape[2]
        leaving, launch = self.overflow(tokens), self.launch if tokens == 1 else launch_of_step(self.inputs, x)
        if launch is not None:
            self.tokens.count(leaving)  # the launch quantizes them
            launch(x)
            self.seq_length += tokens
            return
        exact = self._exact_with(x) if exact is None else exact
        stored, sinks = exact[0].shape[2] - tokens, min(self.seq_length + tokens, self.num_sink_tokens)
        if (missing := leaving - self.tokens.ahead) > 0:
            count = missing if tokens > 1 else min(self.group, self.tokens.capacity - self.tokens.length)
            self.tokens.write(both(lambda side: side.narrow(2, sinks + self.tokens.ahead, count), exact))
            if self.bound is not self.tokens.pages:
                self.bind()
        self.tokens.count(leaving)
        begin, opening = max(stored, sinks + leaving), min(stored, sinks)  # the first tokens that are not in the ring, in the sinks yet
        slot = self.tokens.length + begin - sinks - leaving
        for side, first, ring in zip(exact, self.sinks, self.residual, strict=True):
            first[:, :, opening:sinks] = side[:, :, opening:sinks]
            put(ring, slot, side[:, :, begin:])
        self.set_lengths(self.seq_length + tokens, self.tokens.length)

    def _exact_with(self, x: Pair) -> Pair:
        """The sinks, the residual and `x`, `[B, H, T, D]` each, in one tensor each, which shares no memory with the storage."""
        if not self.seq_length:
            return x
        (sinks, count), at = self.exact_counts, self.tokens.length % self.slots
        tail = min(count, self.slots - at)
        key, value = (
            torch.cat([first.narrow(2, 0, sinks), ring.narrow(2, at, tail), ring.narrow(2, 0, count - tail), new], dim=2)
            for first, ring, new in zip(self.sinks, self.residual, x, strict=True)
        )
        return key, value

    # Inputs of attention.

    def attention_inputs(self) -> AttentionInputs:
        """The inputs of attention over all tokens, by reference: valid until the next token is added."""
        stored, seq_length = self.tokens.length, self.seq_length
        by_page = self.bound.by_page or self.tokens.reads is not None
        paged = self.inputs.twin(max_length=stored) if by_page else None
        return TokenInputs(partial(self._sides, stored, seq_length), paged, seq_length)

    def _sides(self, stored: int, seq_length: int) -> tuple[KeysOrValues, KeysOrValues]:
        """The keys and the values when `stored` tokens were quantized of `seq_length`."""
        sinks = min(seq_length, self.num_sink_tokens)
        return sides_of(self.sinks, self.tokens, self.residual, (sinks, stored, seq_length - sinks - stored), stored)

    def compiled_inputs(self, x: Pair) -> AttentionInputs:
        """The inputs of attention for a compiled step of one token, `x` `[B, H, 1, D]`, sized for `columns` tokens."""
        key, value = both(lambda side: KeysOrValues.of((), (*side.shape[:2], self.columns, side.shape[3]), side.dtype, side.device), x)
        return AttentionInputs(key, value, self.inputs)

    def zones(self) -> tuple[Pair, Pair]:
        sinks, count = self.exact_counts
        return both(lambda x: x[:, :, :sinks], self.sinks), both(lambda x: in_order(x, self.tokens.length, count), self.residual)

    # All tokens at once.

    def truncate(self, seq_length: int) -> None:
        """Keeps the first `seq_length` tokens."""
        self._own_zones()
        quantized = min(self.tokens.length, max(seq_length - self.num_sink_tokens, 0))
        self.tokens.truncate(quantized)
        self.set_lengths(seq_length, quantized)
        if not seq_length:
            self.tokens.uncalibrate()
        self.control[DROPPED] = 0
        if self.bound is not self.tokens.pages or self.inputs.work.shared > quantized:
            self.bind()

    def clear(self) -> None:
        """Removes all tokens; keeps the tensors."""
        self.reset_counts()
        self.tokens.clear()
        for tensor in (*self.sinks, *self.residual, *self.tokens.statistics[0].values(), *self.tokens.statistics[1].values()):
            tensor.zero_()  # masked attention multiplies stale values by 0, and nan times 0 is nan
        self.control.zero_()
        self.truncate(0)
        self.bind()

    def check_counts(self, tensors: dict[str, Tensor], numbers: dict[str, int], seen: int, columns: int, residual: int) -> None:
        if numbers or residual > self.slots or columns + residual != max(seen - self.num_sink_tokens, 0):
            raise ValueError(f"{columns} quantized and {residual} last tokens and counts {numbers}, after {seen} tokens")

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        super().restore(tensors, numbers)
        sinks, tokens = (tensors[f"key.{zone}"].shape[2] for zone in ("sinks", "residual"))
        self._grow(2**62 if self.tokens.length else sinks + tokens)
        self.set_lengths(sinks + self.tokens.length + tokens, self.tokens.length)
        for side, first, ring in zip(SIDES, self.sinks, self.residual, strict=True):
            first[:, :, :sinks] = tensors[f"{side}.sinks"]
            put(ring, self.tokens.length, tensors[f"{side}.residual"])
        if self.bound is not self.tokens.pages or self.inputs.sinks is not self.sinks or self.inputs.ring is not self.residual:
            self.bind()

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices; a row that occurs several times is repeated. Pages are shared
        until they are written; if tensors keep their addresses, those with as many rows are overwritten."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.rows.device)
        in_place = self.static and len(rows) == len(self.rows)
        self._change(lambda x: selected(x, index, in_place))
        self._number_rows()
        self.tokens.select(rows)
        if self.static:  # compiled steps write without asking
            self.tokens.own((self.tokens.length + self.tokens.ahead) // PAGE, -(-(self.tokens.length + self.tokens.ahead) // PAGE))
        self.bind()

    def fork(self) -> Storage:
        """Returns a copy that shares pages, sinks and residual until one of the two writes them. Storage at fixed addresses is copied."""
        if self.static:
            return copy.deepcopy(self)
        twin = copy.copy(self)
        twin.tokens = self.tokens.fork()  # type: ignore[assignment]
        self.shares_zones = twin.shares_zones = True
        self.ready = 0
        twin.bind()
        return twin

    def _own_zones(self) -> None:
        """Gives a fork its own sinks, residual and counts."""
        if self.shares_zones:
            self._change(Tensor.clone)
            self.control = self.control.clone()

    @torch.inference_mode(False)
    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces each tensor of sinks, residual and `rows` by `change(tensor)`."""
        self.sinks, self.residual = both(change, self.sinks), both(change, self.residual)
        self.rows, self.shares_zones = change(self.rows), False

    def move(self, device: torch.device, move: Callable[[Tensor], Tensor]) -> None:
        """Moves every tensor to `device` by `move(tensor)`."""
        self._change(move)
        self.control = move(self.control)
        self.tokens.move(device, move)
        self.tokens.bind()
        self.bind()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its role: `exact`, `bookkeeping`, `codes` or `scales`."""
        yield from (("exact", x) for x in (*self.sinks, *self.residual))
        yield from (("bookkeeping", x) for x in (self.rows, self.control))
        yield from self.tokens.tensors()


def _without_tokens(x: Tensor) -> Tensor:
    """`[B, H, 0, D]`, which shares no memory with `x` `[B, H, T, D]`."""
    return x.new_empty(*x.shape[:2], 0, x.shape[3])


def zone_room(tokens: int, most: int) -> int:
    """Slots of a zone of at most `most` tokens that holds `tokens`: in steps of 4 tokens, or of an eighth or less."""
    step = max(4, 1 << max(tokens.bit_length() - 4, 0))
    return min(-(-tokens // step) * step, most)


def extended(x: Pair, tokens: int) -> Pair:
    """Keys and values `[B, H, T, D]` with zeros up to `tokens` tokens."""
    missing = 0, 0, 0, tokens - x[0].shape[2]
    return x if missing[3] <= 0 else (F.pad(x[0], missing), F.pad(x[1], missing))


def attention_inputs_of(sinks: Pair, tokens: RowPages, residual: Pair, joined: Pair | None = None) -> AttentionInputs:
    """The inputs of attention over `sinks`, the tokens now in `tokens`, and `residual`, in this order.
    `joined`: sinks and residual in one tensor for keys and one for values, if the caller has them."""
    key, value = sides_of(sinks, tokens, residual)
    paged = None
    if tokens.pages.by_page or tokens.reads is not None:
        paged = PagedInputs(tokens.pages, sinks, residual, None, tokens.length, select=tokens.reads, prepared=Prepared(tokens.launches))
    return AttentionInputs(key, value, paged, joined)


def sides_of(
    sinks: Pair, tokens: Any, residual: Pair, counts: tuple[int, int, int] | None = None, start: int = 0
) -> tuple[KeysOrValues, KeysOrValues]:
    """The keys and the values of `sinks`, the tokens in `tokens`, and `residual`, in this order. `counts`: of
    the three, the residual being a ring whose oldest token is in slot `start % R`; None: all that are there
    now, and a residual in token order."""
    return both(lambda side: _side_of(sinks[side], tokens, residual[side], side, counts, start), (0, 1))


def _side_of(first: Tensor, tokens: Any, last: Tensor, side: int, counts: tuple[int, int, int] | None, start: int) -> KeysOrValues:
    sinks, stored, recent = counts or (first.shape[2], tokens.length, last.shape[2])

    def build() -> tuple[Segment, ...]:
        packed = tokens.packed(side, block_of(last), stored)
        row: tuple[Segment, ...] = (Exact(first[:, :, :sinks]), *packed, Exact(in_order(last, start, recent)))
        return tuple(segment for segment in row if segment.tokens)

    batch, heads, _, dim = last.shape
    return KeysOrValues(build, (batch, heads, sinks + stored + recent, dim), last.dtype, last.device)
