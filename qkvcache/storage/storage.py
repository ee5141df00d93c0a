"""`Storage`: the keys and values of one layer that keeps all tokens, in three zones in token order.

    sinks      the first `num_sink_tokens` tokens, in the model's dtype
    chunks     quantized tokens (`chunks.py`)
    residual   the last `residual_length` tokens and the token of the step, in the model's dtype: a ring, in which a new token
               overwrites the oldest

After a step, the number of exact tokens follows from the number of tokens seen, as in pages (`batching/rings.py`).
Without a kernel, tokens of the ring are quantized in groups, ahead of the steps in which they leave it, since quantizing
them one by one would cost a CPU too much. Sinks and ring grow with the tokens to their full size; storage that is
preallocated or compiled has it at once. Counts are kept on the host and on the device (`kernels.StorageTensors`), so
that a step reads no number from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.base import Codec
from ..kernels import (
    AttentionInputs,
    Exact,
    KeysOrValues,
    Pair,
    QuantizedRegion,
    Segment,
    StorageTensors,
    launch_of_step,
    on_triton,
    store_exact,
)
from ..kernels.segments import CHUNKS, CONTROL, DROPPED, ROOM
from .base import LayerStorage
from .chunks import GROUP, PAGE, ROWS, Chunks, block_of
from .head_pages import HeadPages


class Storage(LayerStorage):
    """Storage for keys and values like `like`, `[B, H, T, D]` each, with initial room for `T` tokens.

    Args:
        max_length: the most tokens; room for all is allocated at once. None: storage grows by chunks.
        static: tensors keep their addresses, which compiled code needs; chunks can still be added.
    """

    chunks: Chunks

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        like: Pair,
        num_sink_tokens: int,
        residual_length: int,
        max_length: int | None = None,
        static: bool = False,
    ):
        self.max_length, self.num_sink_tokens = max_length, num_sink_tokens
        self.static = static or max_length is not None
        self.columns = PAGE if max_length is None else max_length
        """Columns of a mask: the most tokens before the host makes room again."""
        self.slots = residual_length + 1
        """Slots of the residual's ring."""
        self.group = 1 if self.static else min(GROUP, self.slots)
        """Tokens that are quantized together in steps of one token."""
        batch, device = like[0].shape[0], like[0].device
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
            self.sinks = self.residual = like[0][:, :, :0], like[1][:, :, :0]
            self._grow(like[0].shape[2])
            self.state = torch.zeros(CONTROL + 2 * batch, dtype=torch.int32, device=device)
        self.chunks = Chunks(codecs, [x.shape[3] for x in like], rows=ROWS if max_length is None else 1, static=self.static)
        self.reset_counts()
        slots = self.overflow(like[0].shape[2]) if max_length is None else max_length - num_sink_tokens - self.slots + 1  # one is spare
        self.chunks.reserve(max(slots, 1), like)
        self.bind()

    def __getstate__(self) -> dict:
        return {name: x for name, x in self.__dict__.items() if name not in ("buffers", "launch")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self.bind()

    def bind(self) -> None:
        """Rebuilds `buffers`, which hold addresses of tensors."""
        region: QuantizedRegion = self.chunks.region  # type: ignore[assignment]
        self.buffers = StorageTensors(self.sinks, self.residual, region, self.state, self.columns)
        self.__dict__.pop("launch", None)
        zones = self.sinks[0].shape[2] + self.residual[0].shape[2]
        room = zones + self.chunks.capacity if self.max_length is None else self.max_length
        counts = numpy.array([room, len(self.chunks.chunks)], numpy.int32)
        self.state[ROOM : CHUNKS + 1].copy_(torch.from_numpy(counts), non_blocking=True)
        if self.static:
            for tensor in (*self.buffers.arguments[0], *self.buffers.arguments[1]):
                torch._dynamo.mark_static_address(tensor)

    @cached_property
    def launch(self) -> Callable[[Pair], None] | None:
        """A function that adds one token, `[B, H, 1, D]`, in one launch; None if there is no kernel. Prepared on first
        use after `bind`."""
        return launch_of_step(self.buffers, (self.residual[0][:, :, :1], self.residual[1][:, :, :1]))

    @property
    def free(self) -> int:
        """Tokens that can be added before the ring is full."""
        return self.num_sink_tokens + self.chunks.length + self.slots - self.seq_length

    # Counts.

    def device_length(self) -> Tensor:
        return self.state[CONTROL]

    def read_counts(self) -> None:
        _, dropped, _, _, self.seq_length, self.chunks.length, *_ = self.state.tolist()
        if dropped:
            limit = f"max_length={self.max_length} is too small" if self.max_length else "masks must be made outside of compiled code"
            raise ValueError(f"{dropped} tokens came when the cache was full: {limit}; call reset()")

    def advance(self, tokens: int) -> None:
        self.chunks.length += self.overflow(tokens)
        self.seq_length += tokens

    def overflow(self, tokens: int) -> int:
        """The number of tokens that leave the ring when `tokens` more are added."""
        return max(tokens - self.free, 0)

    def reserve(self, tokens: int) -> None:
        super().reserve(tokens)
        leaving = self.overflow(tokens)
        grew = leaving > 0 and self.chunks.reserve(leaving, self.residual)
        if self.seq_length + tokens > self.most:
            self._grow(self.seq_length + tokens)
            grew = True
        if self.static and self.seq_length + tokens > self.columns:
            self.columns, grew = 1 << (self.seq_length + tokens - 1).bit_length(), True
        if grew:
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
            self.reserve(prompt)
            self.advance(prompt)
            before, more = self.chunks.length, max(seq_length - prompt - self.free, 0)
            self.chunks.simulate(lambda k: before + k, more, self.residual)
            self._grow(max(prompt, seq_length))

    def set_lengths(self, seq_length: int, quantized: int) -> None:
        """Sets the counts on the host and on the device."""
        self.seq_length, self.chunks.length = seq_length, quantized
        self.state[CONTROL::2].fill_(seq_length)
        self.state[CONTROL + 1 :: 2].fill_(quantized)

    # Adding tokens in eager code, after `reserve`.

    def append_token(self, x: Pair) -> None:
        """Adds one token, `[B, H, 1, D]`: in one launch if there is a kernel."""
        if self.launch is None:
            self.append(x)
            return
        self.chunks.count(self.overflow(1))  # the launch quantizes it
        self.launch(x)
        self.seq_length += 1

    def append(self, x: Pair, exact: Pair | None = None) -> None:
        """Adds keys and values `[B, H, T, D]`. `exact`: `exact_with(x)`, if the caller has it already."""
        exact = self.exact_with(x) if exact is None else exact
        tokens, leaving, stored = x[0].shape[2], self.overflow(x[0].shape[2]), exact[0].shape[2] - x[0].shape[2]
        sinks = min(self.seq_length + tokens, self.num_sink_tokens)
        if (missing := leaving - self.chunks.ahead) > 0:
            count = missing if tokens > 1 else min(self.group, self.chunks.capacity - self.chunks.length)
            key, value = (side.narrow(2, sinks + self.chunks.ahead, count) for side in exact)
            self.chunks.write((key, value))
        self.chunks.count(leaving)
        begin = max(stored, sinks + leaving)  # the first token that is not in the ring yet
        slot = (self.chunks.length + begin - sinks - leaving) % self.slots
        self.seq_length += tokens
        store_exact(self.buffers, exact, (min(stored, sinks), sinks), begin, slot, (self.seq_length, self.chunks.length))

    def exact_with(self, x: Pair) -> Pair:
        """The sinks, the residual and `x`, `[B, H, T, D]` each, in one tensor each, which shares no memory with the storage."""
        if not self.seq_length:
            return x
        sinks = min(self.seq_length, self.num_sink_tokens)
        count, at = self.seq_length - sinks - self.chunks.length, self.chunks.length % self.slots
        tail = min(count, self.slots - at)
        key, value = (
            torch.cat([first.narrow(2, 0, sinks), ring.narrow(2, at, tail), ring.narrow(2, 0, count - tail), new], dim=2)
            for first, ring, new in zip(self.sinks, self.residual, x, strict=True)
        )
        return key, value

    def oldest(self, count: int) -> Pair:
        """The oldest `count` tokens of the ring, in token order."""
        key, value = self.residual
        return _oldest(key, self.chunks.length, count), _oldest(value, self.chunks.length, count)

    # Inputs of attention.

    def attention_inputs(self) -> AttentionInputs:
        """The inputs of attention over all tokens, by reference: valid until the next token is added."""
        key, value = self._side(0), self._side(1)
        if not on_triton(self.state.device):
            return AttentionInputs(key, value)
        self.buffers.region.tokens = self.chunks.length
        return AttentionInputs(key, value, self.buffers.region, (*self.sinks, *self.residual), self.buffers)

    def attention_inputs_with(self, exact: Pair) -> AttentionInputs:
        """The inputs of attention over all tokens and new ones that are not stored yet. `exact`: `exact_with(x)` of the
        new ones, a copy that later steps do not change."""
        sinks = min(self.seq_length, self.num_sink_tokens)
        split = sinks, exact[0].shape[2] - sinks
        (k_sinks, k_residual), (v_sinks, v_residual) = (x.split_with_sizes(split, dim=2) for x in exact)
        first, residual = (k_sinks, v_sinks), (k_residual, v_residual)
        return attention_inputs_of(first, self.chunks, residual, exact)

    def _side(self, side: int) -> KeysOrValues:
        sinks = min(self.seq_length, self.num_sink_tokens)
        count = self.seq_length - sinks - self.chunks.length
        ring = self.residual[side]
        return _side_of(self.chunks, side, self.sinks[side], sinks, ring, count, partial(_oldest, ring, self.chunks.length, count))

    def zones(self) -> tuple[Pair, Pair]:
        sinks = min(self.seq_length, self.num_sink_tokens)
        return (self.sinks[0][:, :, :sinks], self.sinks[1][:, :, :sinks]), self.oldest(self.seq_length - sinks - self.chunks.length)

    # All tokens at once.

    def truncate(self, seq_length: int) -> None:
        """Keeps the first `seq_length` tokens."""
        quantized = min(self.chunks.length, max(seq_length - self.num_sink_tokens, 0))
        before = len(self.chunks.chunks)
        if not self.static:
            self.chunks.truncate(quantized)
        self.set_lengths(seq_length, quantized)
        self.chunks.calibrated = self.chunks.calibrated and seq_length > 0
        self.state[DROPPED] = 0
        if len(self.chunks.chunks) < before:
            self.bind()

    def clear(self) -> None:
        """Removes all tokens; keeps the tensors, but only the first chunk."""
        self.reset_counts()
        self.chunks.truncate(0)
        for _, tensor in self.tensors():  # masked attention multiplies stale values by 0, and nan times 0 is nan
            if tensor is not self.chunks.table:
                tensor.zero_()
        self.truncate(0)
        self.bind()

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        sinks, residual = ((tensors[f"key.{zone}"], tensors[f"value.{zone}"]) for zone in ("sinks", "residual"))
        tokens = residual[0].shape[2]
        fits = tokens <= self.slots  # files of older releases may have more
        super().restore(tensors, numbers)
        region, zones = self.buffers.region, (self.sinks, self.residual)
        self._grow(2**62 if self.chunks.length else sinks[0].shape[2] + tokens)
        if region is not self.chunks.region or zones[0] is not self.sinks or zones[1] is not self.residual:
            self.bind()
        for first, x in zip(self.sinks, sinks, strict=True):
            first.narrow(2, 0, x.shape[2]).copy_(x)
        exact = sinks[0].shape[2] + self.chunks.length
        self.set_lengths(exact + tokens if fits else exact, self.chunks.length)
        if not fits:
            self.reserve(tokens)
            self.append(residual)
            return
        at = self.chunks.length % self.slots
        for ring, x in zip(self.residual, residual, strict=True):
            for slot, part in zip((at, 0), x.tensor_split([self.slots - at], dim=2), strict=True):
                if part.shape[2]:
                    ring.narrow(2, slot, part.shape[2]).copy_(part)

    def map(self, fn: Callable[[Tensor], Tensor], in_place: bool = False) -> None:
        """Replaces tensors by `fn(tensor)`, which may change the rows or the device. With `in_place`, `fn` only reorders rows, and tensors
        are overwritten."""
        exact = *self.sinks, *self.residual
        lengths = self.state[CONTROL:].view(-1, 2)
        self.chunks.map(fn, in_place)
        if in_place:
            for x in (*exact, lengths):
                x.copy_(fn(x))
            return
        with torch.inference_mode(False):
            k_sinks, v_sinks, k_residual, v_residual = map(fn, exact)
            lengths = fn(lengths)
            self.state = torch.cat([self.state[:CONTROL].to(lengths.device), lengths.flatten()])
        self.sinks, self.residual = (k_sinks, v_sinks), (k_residual, v_residual)
        self.bind()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its role: `exact`, `bookkeeping`, `codes` or `scales`."""
        yield from (("exact", x) for x in (*self.sinks, *self.residual))
        yield "bookkeeping", self.state
        yield from self.chunks.tensors()


def zone_room(tokens: int, most: int) -> int:
    """Slots of a zone of at most `most` tokens that holds `tokens`: in steps of a quarter or less, and few while there are few tokens."""
    step = max(GROUP, 1 << max(tokens.bit_length() - 3, 0))
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
    chunks: Chunks | HeadPages, side: int, first: Tensor, sinks: int, like: Tensor, count: int, recent: Callable[[], Tensor]
) -> KeysOrValues:
    """Keys (0) or values (1), shaped like `like` `[B, H, T, D]`: the first `sinks` tokens of `first`, the tokens now in `chunks`, and the
    `count` tokens that `recent()` returns when they are read."""
    packed = chunks.packed(side, block_of(like))

    def build() -> tuple[Segment, ...]:
        row: tuple[Segment, ...] = (Exact(first[:, :, :sinks]), *packed, Exact(recent()))
        return tuple(segment for segment in row if segment.tokens)

    batch, heads, _, dim = like.shape
    return KeysOrValues(build, (batch, heads, sinks + chunks.length + count, dim), like.dtype, like.device)


def attention_inputs_of(sinks: Pair, chunks: Chunks, residual: Pair, joined: Pair | None = None) -> AttentionInputs:
    """The inputs of attention over `sinks`, the tokens now in `chunks`, and `residual`, in this order. `joined`: sinks
    and residual in one tensor for keys and one for values, if the caller has them."""
    key, value = sides_of(sinks, chunks, residual)
    if not on_triton(residual[0].device):
        return AttentionInputs(key, value, joined=joined)
    region = chunks.region.holding(chunks.length) if chunks.length else None  # type: ignore[union-attr]
    return AttentionInputs(key, value, region, (*sinks, *residual), joined=joined)


def sides_of(sinks: Pair, chunks: Chunks | HeadPages, residual: Pair) -> tuple[KeysOrValues, KeysOrValues]:
    """The keys and the values of `sinks`, the tokens now in `chunks`, and `residual`, in this order."""
    key, value = (
        _side_of(chunks, side, first, first.shape[2], last, last.shape[2], partial(_oldest, last, 0, last.shape[2]))
        for side, (first, last) in enumerate(zip(sinks, residual, strict=True))
    )
    return key, value
