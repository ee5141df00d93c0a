"""`Storage`: the keys and values of one layer that keeps all tokens, in three zones in token order.

    sinks      the first `num_sink_tokens` tokens, in the model's dtype
    pages      quantized tokens (`paged.py`)
    residual   the last `residual_length` tokens and the token of the step, in the model's dtype: a ring, in which a new token
               overwrites the oldest

After a step, the number of exact tokens follows from the number of tokens seen, as in batches (`batching/rings.py`).
Without a kernel, tokens of the ring are quantized in groups, ahead of the steps in which they leave it, since quantizing
them one by one would cost a CPU too much. Sinks and ring grow with the tokens to their full size; storage that is
preallocated or compiled has it at once. Counts are kept on the host and on the device (`kernels.PagedInputs`), so
that a step reads no number from the host.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import (
    AttentionBudget,
    AttentionInputs,
    Exact,
    KeysOrValues,
    PagedInputs,
    Pair,
    Segment,
    dense,
    give_handle,
    launch_of_step,
)
from ..kernels.pages import COLUMNS, CONTROL, DROPPED, LENGTH, RING_ROW, ROOM, SINK_ROW, SINKS, TOKENS, block_of
from .head_pages import HeadPages
from .paged import GROUP, PAGE, RowPages

SIDES = ("key", "value")


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
    """The base of `Storage` and `EvictingStorage`.

    A count on the host would be compiled into compiled code as a constant. Compiled code therefore counts on the device
    and sets `uncounted` and `counts_stale` on the host; `sync_counts` reads the device once when an exact count is
    needed.
    """

    max_length: int | None
    """The most tokens that may be seen; None: no limit."""
    seq_length: int
    """Tokens seen, as counted on the host."""
    uncounted: int
    """Tokens of a compiled step that `seq_length` does not include yet."""
    counts_stale: bool
    """Whether compiled code ran since the host last read the counts: it may have run more than once."""
    tokens: RowPages | HeadPages
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

    def snapshot(self, row: int) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Row `row`, as views where possible.

        Returns tensors of one row named `key.sinks`, `key.region.<buffer>`, `key.statistics.<buffer>`, `key.residual`,
        and the same names with `value`, and counts that do not follow from shapes. Codes are not changed.
        """
        (sinks, residual), rows = self.zones(), slice(row, row + 1)
        region = self.tokens.snapshot(row)
        tensors: dict[str, Tensor] = {}
        for side, first, codes, statistics, last in zip(SIDES, sinks, region, self.tokens.statistics, residual, strict=True):
            tensors[f"{side}.sinks"] = first[rows]
            tensors |= {f"{side}.region.{name}": x for name, x in codes.items()}
            if self.tokens.calibrated:
                tensors |= {f"{side}.statistics.{name}": x[rows] for name, x in statistics.items()}
            tensors[f"{side}.residual"] = last[rows]
        return tensors, {}

    def check(self, tensors: dict[str, Tensor], numbers: dict[str, int], seen: int) -> None:
        """Raises ValueError unless these are a valid snapshot, for `restore`, of a row that has seen `seen` tokens.
        Names, dtypes and shapes must be those of this storage, which is empty and on the meta device, with the
        snapshot's number of tokens in each zone."""
        like, codes = self.sinks, next((x for name, x in tensors.items() if name.startswith("key.region.")), None)
        region: tuple[Codes, Codes] = ({}, {}) if codes is None else self.tokens.form(codes)
        expected: dict[str, Tensor] = {}
        for side, statistics, x, planes in zip(SIDES, self.tokens.statistics, like, region, strict=True):
            for zone in ("sinks", "residual"):
                expected[f"{side}.{zone}"] = x.new_empty(*x.shape[:2], tensors[f"key.{zone}"].shape[2], x.shape[3])
            expected |= {f"{side}.region.{name}": plane for name, plane in planes.items()}
            expected |= {f"{side}.statistics.{name}": plane for name, plane in statistics.items()}
        expected |= self.metadata_form(tensors, codes)
        for name in sorted(expected.keys() | tensors.keys()):
            found, wanted = (f"{list(x[name].shape)} in {x[name].dtype}" if name in x else "missing" for x in (tensors, expected))
            if found != wanted:
                raise ValueError(f"{name!r} is {found}, expected {wanted}")
        sinks, residual = (tensors[f"key.{zone}"].shape[2] for zone in ("sinks", "residual"))
        if sinks != min(seen, self.num_sink_tokens):
            raise ValueError(f"{sinks} sinks after {seen} tokens")
        self.check_counts(tensors, numbers, seen, residual if codes is None else residual + codes.shape[2])

    def metadata_form(self, tensors: dict[str, Tensor], codes: Tensor | None) -> dict[str, Tensor]:
        """Empty tensors of the shapes and dtypes of a snapshot's metadata. `codes`: a plane of codes of the
        snapshot."""
        return {}

    def check_counts(self, tensors: dict[str, Tensor], numbers: dict[str, int], seen: int, stored: int) -> None:
        """Raises ValueError unless the counts of a snapshot agree with each other and with `seen`. Its tensors have
        been checked. `stored`: columns of the region and of the residual."""
        if numbers or stored != max(seen - self.num_sink_tokens, 0):
            raise ValueError(f"{stored} tokens and counts {numbers}, after {seen} tokens")

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        """Copies the result of `snapshot` into this storage, which must be empty."""
        codes, statistics = ((_named(tensors, f"key.{zone}."), _named(tensors, f"value.{zone}.")) for zone in ("region", "statistics"))
        self.tokens.load(codes, statistics)


class Storage(LayerStorage):
    """Storage for keys and values like `like`, `[B, H, T, D]` each, with initial room for `T` tokens.

    Args:
        max_length: the most tokens; room for all is allocated at once. None: storage grows by pages.
        static: tensors keep their addresses, which compiled code needs; pages can still be added.
        budget: of quantized tokens that attention reads; None: all.
        offload_pages: pages lie in host memory.
    """

    tokens: RowPages

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        like: Pair,
        num_sink_tokens: int,
        residual_length: int,
        max_length: int | None = None,
        static: bool = False,
        budget: AttentionBudget | None = None,
        offload_pages: bool = False,
    ):
        self.max_length, self.num_sink_tokens, self.budget = max_length, num_sink_tokens, budget
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
            self.sinks = self.residual = like[0][:, :, :0], like[1][:, :, :0]
            self._grow(like[0].shape[2])
            self.control = torch.zeros(len(CONTROL), dtype=torch.int32, device=device)
            self.rows = torch.zeros(batch, len(COLUMNS), dtype=torch.int32, device=device)
        offloads = budget if offload_pages else None
        self.tokens = RowPages(codecs, like, static=self.static, grows=self.static and max_length is None, offloads=offloads)
        self.reset_counts()
        slots = self.overflow(like[0].shape[2]) if max_length is None else max(max_length - num_sink_tokens - self.slots, 0)
        if slots and device.type == "meta":  # for planning: there may be billions of pages
            self.tokens.simulate(lambda groups: slots, 0)
            self.tokens.length = 0
        elif slots:
            self.tokens.reserve(slots)
        self._number_rows()
        self.bind()

    def __getstate__(self) -> dict:
        return {name: x for name, x in self.__dict__.items() if name not in ("inputs", "launch")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self.bind()

    def bind(self) -> None:
        """Rebuilds `inputs`, which hold addresses of tensors."""
        self.bound = self.tokens.pages
        bound = self.columns if self.max_length is None else self.tokens.capacity
        pages = replace(self.bound, lengths=self.rows[:, LENGTH])
        zones = self.sinks, self.residual, self.rows
        cache, launches, (branches, shared) = self.tokens.cache, self.tokens.launches, self.tokens.branches()
        self.inputs = PagedInputs(
            pages, *zones, bound, control=self.control, budget=self.budget, cache=cache, branches=branches, shared=shared, launches=launches
        )
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
        """A function that adds one token, `[B, H, 1, D]`, in one launch; None if there is no kernel. Prepared on first
        use after `bind`."""
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
        return max(tokens - self.free, 0)

    def reserve(self, tokens: int) -> None:
        super().reserve(tokens)
        leaving, changed = self.overflow(tokens), self.shares_zones
        if self.shares_zones:
            self._copy_zones()
        if leaving > 0:
            changed |= self.tokens.reserve(leaving)
        if self.seq_length + tokens > self.most:
            self._grow(self.seq_length + tokens)
            changed = True
        if self.static and self.seq_length + tokens > self.columns:
            self.columns, changed = 1 << (self.seq_length + tokens - 1).bit_length(), True
        if changed:
            self.bind()

    def _grow(self, tokens: int) -> None:
        """Makes room in the sinks and in the ring for what they hold of `tokens`. No token has left a ring that is not of full size."""
        full = self.num_sink_tokens, self.slots
        sinks, ring = full if self.static else map(zone_room, (tokens, max(tokens - self.num_sink_tokens, 1)), full)
        with torch.inference_mode(False):
            self.sinks, self.residual = extended(self.sinks, sinks), extended(self.residual, ring)
        grown = sinks < self.num_sink_tokens, ring < self.slots
        self.most = sinks if grown[0] else sinks + ring if grown[1] else 2**62
        """Tokens for which the sinks and the ring are large enough."""

    def simulate(self, prompt: int, seq_length: int, query_heads: int) -> None:
        """Allocates the storage of `seq_length` tokens, of which `prompt` came at once and the others one by one.
        Nothing is stored: for planning, on the meta device."""
        if self.max_length is None:
            before, after = self.overflow(prompt), self.overflow(max(prompt, seq_length))
            self.tokens.simulate(lambda k: before + k, after - before)
            self._grow(max(prompt, seq_length))

    def set_lengths(self, seq_length: int, quantized: int) -> None:
        """Sets the counts on the host and on the device."""
        self.seq_length, self.tokens.length = seq_length, quantized
        self.rows[:, SINKS:].copy_(torch.from_numpy(numpy.array(self._counts(), numpy.int32)), non_blocking=True)

    def _counts(self) -> tuple[int, ...]:
        """The columns of `rows` from SINKS on."""
        quantized, sinks = self.tokens.length, min(self.seq_length, self.num_sink_tokens)
        return sinks, quantized % self.slots, self.seq_length - sinks - quantized, quantized, self.seq_length

    # Adding tokens in eager code, after `reserve`.

    def append(self, x: Pair, exact: Pair | None = None) -> None:
        """Adds keys and values `[B, H, T, D]`: in one launch if there is a kernel. `exact`: `exact_with(x)`, if the caller has it."""
        tokens = x[0].shape[2]
        leaving, launch = self.overflow(tokens), self.launch if tokens == 1 else launch_of_step(self.inputs, x)
        if launch is not None:
            self.tokens.calibrate(x)
            self.tokens.count(leaving)  # the launch quantizes them
            launch(x)
            self.seq_length += tokens
            return
        exact = self.exact_with(x) if exact is None else exact
        stored, sinks = exact[0].shape[2] - tokens, min(self.seq_length + tokens, self.num_sink_tokens)
        if (missing := leaving - self.tokens.ahead) > 0:
            count = missing if tokens > 1 else min(self.group, self.tokens.capacity - self.tokens.length)
            key, value = (side.narrow(2, sinks + self.tokens.ahead, count) for side in exact)
            self.tokens.write((key, value))
            if self.bound is not self.tokens.pages:
                self.bind()
        self.tokens.count(leaving)
        begin, opening = max(stored, sinks + leaving), min(stored, sinks)  # the first tokens that are not in the ring, in the sinks yet
        slot = (self.tokens.length + begin - sinks - leaving) % self.slots
        for side, first, ring in zip(exact, self.sinks, self.residual, strict=True):
            first[:, :, opening:sinks] = side[:, :, opening:sinks]
            end = min(begin + ring.shape[2] - slot, side.shape[2])
            ring[:, :, slot : slot + end - begin] = side[:, :, begin:end]
            ring[:, :, : side.shape[2] - end] = side[:, :, end:]
        self.set_lengths(self.seq_length + tokens, self.tokens.length)

    def exact_with(self, x: Pair) -> Pair:
        """The sinks, the residual and `x`, `[B, H, T, D]` each, in one tensor each, which shares no memory with the storage."""
        if not self.seq_length:
            return x
        sinks = min(self.seq_length, self.num_sink_tokens)
        count, at = self.seq_length - sinks - self.tokens.length, self.tokens.length % self.slots
        tail = min(count, self.slots - at)
        key, value = (
            torch.cat([first.narrow(2, 0, sinks), ring.narrow(2, at, tail), ring.narrow(2, 0, count - tail), new], dim=2)
            for first, ring, new in zip(self.sinks, self.residual, x, strict=True)
        )
        return key, value

    def oldest(self, count: int) -> Pair:
        """The oldest `count` tokens of the ring, in token order."""
        key, value = self.residual
        return _oldest(key, self.tokens.length, count), _oldest(value, self.tokens.length, count)

    # Inputs of attention.

    def attention_inputs(self) -> AttentionInputs:
        """The inputs of attention over all tokens, by reference: valid until the next token is added."""
        key, value = self._side(0), self._side(1)
        if not self.bound.by_page and self.budget is None:
            return AttentionInputs(key, value)
        return AttentionInputs(key, value, self.inputs.twin(max_length=self.tokens.length))

    def compiled_inputs(self, x: Pair) -> AttentionInputs:
        """The inputs of attention for a compiled step of one token, `x` `[B, H, 1, D]`, sized for `columns` tokens."""
        shapes = ((*side.shape[:2], self.columns, side.shape[3]) for side in x)
        key, value = (KeysOrValues.of((), shape, side.dtype, side.device) for shape, side in zip(shapes, x, strict=True))
        return AttentionInputs(key, value, self.inputs)

    def attention_inputs_with(self, exact: Pair) -> AttentionInputs:
        """The inputs of attention over all tokens and new ones that are not stored yet. `exact`: `exact_with(x)` of the
        new ones, a copy that later steps do not change."""
        sinks = min(self.seq_length, self.num_sink_tokens)
        split = sinks, exact[0].shape[2] - sinks
        (k_sinks, k_residual), (v_sinks, v_residual) = (x.split_with_sizes(split, dim=2) for x in exact)
        first, residual = (k_sinks, v_sinks), (k_residual, v_residual)
        return attention_inputs_of(first, self.tokens, residual, exact, self.budget)

    def _side(self, side: int) -> KeysOrValues:
        sinks = min(self.seq_length, self.num_sink_tokens)
        count = self.seq_length - sinks - self.tokens.length
        ring = self.residual[side]
        return _side_of(self.tokens, side, self.sinks[side], sinks, ring, count, partial(_oldest, ring, self.tokens.length, count))

    def zones(self) -> tuple[Pair, Pair]:
        sinks = min(self.seq_length, self.num_sink_tokens)
        return (self.sinks[0][:, :, :sinks], self.sinks[1][:, :, :sinks]), self.oldest(self.seq_length - sinks - self.tokens.length)

    # All tokens at once.

    def truncate(self, seq_length: int) -> None:
        """Keeps the first `seq_length` tokens."""
        if self.shares_zones:
            self._copy_zones()
        quantized = min(self.tokens.length, max(seq_length - self.num_sink_tokens, 0))
        self.tokens.truncate(quantized)
        self.set_lengths(seq_length, quantized)
        self.tokens.calibrated = self.tokens.calibrated and seq_length > 0
        self.control[DROPPED] = 0
        if self.bound is not self.tokens.pages or self.inputs.shared > quantized:
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

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        sinks, residual = ((tensors[f"key.{zone}"], tensors[f"value.{zone}"]) for zone in ("sinks", "residual"))
        tokens = residual[0].shape[2]
        fits = tokens <= self.slots  # files of older releases may have more
        super().restore(tensors, numbers)
        zones = self.sinks, self.residual
        self._grow(2**62 if self.tokens.length else sinks[0].shape[2] + tokens)
        if self.bound is not self.tokens.pages or zones[0] is not self.sinks or zones[1] is not self.residual:
            self.bind()
        for first, x in zip(self.sinks, sinks, strict=True):
            first.narrow(2, 0, x.shape[2]).copy_(x)
        exact = sinks[0].shape[2] + self.tokens.length
        self.set_lengths(exact + tokens if fits else exact, self.tokens.length)
        if not fits:
            self.reserve(tokens)
            self.append(residual)
            return
        at = self.tokens.length % self.slots
        for ring, x in zip(self.residual, residual, strict=True):
            for slot, part in zip((at, 0), x.tensor_split([self.slots - at], dim=2), strict=True):
                if part.shape[2]:
                    ring.narrow(2, slot, part.shape[2]).copy_(part)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices; a row that occurs several times is repeated. Pages are shared until they are written; if
        tensors keep their addresses, those with as many rows are overwritten."""
        index = torch.tensor(rows, device=self.rows.device)
        in_place = self.static and len(rows) == len(self.rows)
        with torch.inference_mode(False):
            k_sinks, v_sinks, k_residual, v_residual, counts = (
                x.copy_(x.index_select(0, index)) if in_place else x.index_select(0, index)
                for x in (*self.sinks, *self.residual, self.rows)
            )
        self.sinks, self.residual, self.rows, self.shares_zones = (k_sinks, v_sinks), (k_residual, v_residual), counts, False
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
        twin.bind()
        return twin

    def _copy_zones(self) -> None:
        """Gives this fork its own sinks, residual and counts."""
        with torch.inference_mode(False):
            k_sinks, v_sinks, k_residual, v_residual = (x.clone() for x in (*self.sinks, *self.residual))
            self.rows, self.control = self.rows.clone(), self.control.clone()
        self.sinks, self.residual, self.shares_zones = (k_sinks, v_sinks), (k_residual, v_residual), False

    def move(self, device: torch.device, move: Callable[[Tensor], Tensor]) -> None:
        """Moves every tensor to `device` by `move(tensor)`."""
        with torch.inference_mode(False):
            k_sinks, v_sinks, k_residual, v_residual, self.rows, self.control = map(
                move, (*self.sinks, *self.residual, self.rows, self.control)
            )
        self.sinks, self.residual = (k_sinks, v_sinks), (k_residual, v_residual)
        self.tokens.move(device, move)
        self.tokens.bind()
        self.bind()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its role: `exact`, `bookkeeping`, `codes` or `scales`."""
        yield from (("exact", x) for x in (*self.sinks, *self.residual))
        yield from (("bookkeeping", x) for x in (self.rows, self.control))
        yield from self.tokens.tensors()


def zone_room(tokens: int, most: int) -> int:
    """Slots of a zone of at most `most` tokens that holds `tokens`: in steps of 4 tokens, or of an eighth or less."""
    step = max(4, 1 << max(tokens.bit_length() - 4, 0))
    return min(-(-tokens // step) * step, most)


def extended(x: Pair, tokens: int) -> Pair:
    """Keys and values `[B, H, T, D]` with zeros up to `tokens` tokens."""
    if not x[0].shape[2]:
        return zeros(x, tokens)
    if x[0].shape[2] >= tokens:
        return x
    key, value = (F.pad(side, (0, 0, 0, tokens - side.shape[2])) for side in x)
    return key, value


def zeros(like: Pair, tokens: int) -> Pair:
    """Keys and values `[B, H, tokens, D]` like `like` `[B, H, T, D]`."""
    key, value = (x.new_zeros(*x.shape[:2], tokens, x.shape[3]) for x in like)
    return key, value


def _oldest(ring: Tensor, quantized: int, count: int) -> Tensor:
    """The oldest `count` tokens of a ring `[B, H, R, D]` in token order, after `quantized` tokens have left it."""
    at = quantized % max(ring.shape[2], 1)
    tail = ring[:, :, at : at + count]
    return tail if tail.shape[2] == count else torch.cat([tail, ring[:, :, : count - tail.shape[2]]], dim=2)


def _side_of(
    tokens: RowPages | HeadPages, side: int, first: Tensor, sinks: int, like: Tensor, count: int, recent: Callable[[], Tensor]
) -> KeysOrValues:
    """Keys (0) or values (1), shaped like `like` `[B, H, T, D]`: the first `sinks` tokens of `first`, the tokens now in `tokens`, and the
    `count` tokens that `recent()` returns when they are read."""
    packed = tokens.packed(side, block_of(like))

    def build() -> tuple[Segment, ...]:
        row: tuple[Segment, ...] = (Exact(first[:, :, :sinks]), *packed, Exact(recent()))
        return tuple(segment for segment in row if segment.tokens)

    batch, heads, _, dim = like.shape
    return KeysOrValues(build, (batch, heads, sinks + tokens.length + count, dim), like.dtype, like.device)


def attention_inputs_of(
    sinks: Pair, tokens: RowPages, residual: Pair, joined: Pair | None = None, budget: AttentionBudget | None = None
) -> AttentionInputs:
    """The inputs of attention over `sinks`, the tokens now in `tokens`, and `residual`, in this order. `joined`: sinks
    and residual in one tensor for keys and one for values, if the caller has them. `budget`: of the tokens that are read."""
    key, value = sides_of(sinks, tokens, residual)
    paged = None
    if tokens.pages.by_page or budget is not None:
        cache, launches = tokens.cache, tokens.launches
        paged = PagedInputs(tokens.pages, sinks, residual, None, tokens.length, budget=budget, cache=cache, launches=launches)
    return AttentionInputs(key, value, paged, joined)


def sides_of(sinks: Pair, tokens: RowPages | HeadPages, residual: Pair) -> tuple[KeysOrValues, KeysOrValues]:
    """The keys and the values of `sinks`, the tokens now in `tokens`, and `residual`, in this order."""
    key, value = (
        _side_of(tokens, side, first, first.shape[2], last, last.shape[2], partial(_oldest, last, 0, last.shape[2]))
        for side, (first, last) in enumerate(zip(sinks, residual, strict=True))
    )
    return key, value


def _named(tensors: dict[str, Tensor], prefix: str) -> Codes:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
