"""`Storage`: the keys and values of one layer that keeps all tokens, in three zones in token order.

    sinks      the first `num_sink_tokens` tokens, in the model's dtype (attention sinks live there)
    chunks     quantized tokens (`chunks.py`)
    residual   at least the last `residual_length` tokens, in the model's dtype: a ring at a fixed address, in which a token that comes
               takes the place of the oldest

When the ring is full, the oldest tokens leave it for the chunks, so that `residual_length + 1` stay: one at a time where steps are compiled
or storage is preallocated, `group` where quantizing one by one would cost a CPU too much. A token is quantized once. The counts are on the
host and on the device (`kernels.Buffers`), so that a step needs no number from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import Body, Buffers, Exact, Pair, Payload, Segment, Side, dense, launch_of_step, on_triton
from ..kernels.segments import CHUNKS, CONTROL, DROPPED, ROOM
from .chunks import GROUP, PAGE, ROWS, Chunks, block_of
from .counter import Counter


def differ(held: Tensor, given: Tensor) -> bool:
    """Whether two `[B, H, T, D]` differ in more than tokens."""
    a, b = held.shape, given.shape
    return a[0] != b[0] or a[1] != b[1] or a[3] != b[3] or held.dtype is not given.dtype


class Storage(Counter):
    """Room for keys and values like `like`, `[B, H, T, D]` each, and so many of them at first.

    Args:
        max_length: tokens that may come; room for them is taken at once. None grows by chunks.
        fixed: what there is stays at its address, for compiled code; chunks may join.
    """

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        like: Pair,
        num_sink_tokens: int,
        residual_length: int,
        max_length: int | None = None,
        fixed: bool = False,
    ):
        self.max_length, self.num_sink_tokens = max_length, num_sink_tokens
        self.fixed = fixed or max_length is not None
        self.group = 1 if self.fixed else group_of(residual_length)
        self.columns = PAGE if max_length is None else max_length
        """Of masks: for all tokens that there may be before the host is asked again."""
        batch, device = like[0].shape[0], like[0].device
        with torch.inference_mode(False):  # what is made in inference mode may be written in no other
            self.sinks, self.residual = (_zeros(like, tokens) for tokens in (num_sink_tokens, residual_length + self.group))
            self.state = torch.zeros(CONTROL + 2 * batch, dtype=torch.int32, device=device)
        self.chunks = Chunks(codecs, [x.shape[3] for x in like], rows=ROWS if max_length is None else 1, fixed=self.fixed)
        self.start_counting()
        least = self.leaving(like[0].shape[2]) if max_length is None else max_length - num_sink_tokens - self.slots + 1  # one is spare
        self.chunks.reserve(max(least, 1), like)
        self.bind()

    def __getstate__(self) -> dict:
        return {name: x for name, x in self.__dict__.items() if name not in ("buffers", "views", "launch")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self.bind()

    def bind(self) -> None:
        """Renews what is derived from where tensors are."""
        body: Body = self.chunks.body  # type: ignore[assignment]
        self.buffers = Buffers(self.sinks, self.residual, body, self.state, self.columns)
        self.views = self.state[CONTROL::2], self.state[CONTROL + 1 :: 2]
        self.launch = launch_of_step(self.buffers, (self.residual[0][:, :, :1], self.residual[1][:, :, :1]))
        self.state[ROOM] = self.room
        self.state[CHUNKS] = len(self.chunks.chunks)
        if self.fixed:
            for tensor in (*self.buffers.arguments[0], *self.buffers.arguments[1]):
                torch._dynamo.mark_static_address(tensor)

    @property
    def slots(self) -> int:
        """Of the ring."""
        return self.residual[0].shape[2]

    @property
    def free(self) -> int:
        """Tokens that come before others leave the ring."""
        return self.num_sink_tokens + self.chunks.length + self.slots - self.seen

    @property
    def room(self) -> int:
        """Tokens that there is room for."""
        return self.num_sink_tokens + self.chunks.capacity + self.slots if self.max_length is None else self.max_length

    @property
    def quantized(self) -> int:
        """Tokens in the chunks."""
        return self.chunks.length

    # Counts.

    def on_device(self) -> Tensor:
        return self.state[CONTROL]

    def read_counts(self) -> None:
        _, dropped, _, _, self.seen, self.chunks.length, *_ = self.state.tolist()
        if dropped:
            limit = f"max_length={self.max_length} is too small" if self.max_length else "masks must be made outside of compiled code"
            raise ValueError(f"{dropped} tokens came when the cache was full: {limit}; call reset()")

    def advance(self, tokens: int) -> None:
        self.chunks.length += self.leaving(tokens)
        self.seen += tokens

    def leaving(self, tokens: int) -> int:
        """How many leave the ring when `tokens` more come."""
        excess = tokens - self.free
        return excess + self.group - 1 if excess > 0 else 0

    def expect(self, tokens: int) -> None:
        """Makes room for so many more. Raises ValueError if `max_length` does not allow them."""
        super().expect(tokens)
        leaving = self.leaving(tokens)
        grew = leaving > 0 and self.chunks.reserve(leaving, self.residual)
        if self.seen + tokens > self.columns:
            self.columns, grew = 1 << (self.seen + tokens - 1).bit_length(), True
        if grew:
            self.bind()

    def set_lengths(self, seen: int, quantized: int) -> None:
        """On the host and on the device."""
        self.seen, self.chunks.length = seen, quantized
        self.views[0].fill_(seen)
        self.views[1].fill_(quantized)

    # Tokens come, where the host knows the counts. `expect` has made room.

    def step(self, x: Pair) -> None:
        """Takes one token, `[B, H, 1, D]`: in one launch where there is a kernel."""
        if self.launch is None:
            self.append(x)
            return
        if self.group > 1 and (leaving := self.leaving(1)):
            self.chunks.append(self.recent(leaving))
            self.views[1].fill_(self.chunks.length)
        self.launch(x)
        self.advance(1)

    def append(self, x: Pair) -> None:
        """Takes any number of tokens, `[B, H, T, D]`."""
        sinks, tokens = min(self.seen, self.num_sink_tokens), x[0].shape[2]
        opening = min(self.num_sink_tokens - sinks, tokens)
        exact, leaving = self.seen - sinks - self.chunks.length, self.leaving(tokens)
        old, passing = min(leaving, exact), max(leaving - exact, 0)  # of the ring, and of those that come
        if old:
            self.chunks.append(self.recent(old))
        if passing:
            self.chunks.append((x[0][:, :, opening : opening + passing], x[1][:, :, opening : opening + passing]))
        at = (self.chunks.length + exact - old) % self.slots
        for first, ring, new in zip(self.sinks, self.residual, x, strict=True):
            if opening:
                first[:, :, sinks : sinks + opening] = new[:, :, :opening]
            new = new[:, :, opening + passing :]
            end = min(self.slots - at, new.shape[2])
            ring[:, :, at : at + end] = new[:, :, :end]
            if end < new.shape[2]:
                ring[:, :, : new.shape[2] - end] = new[:, :, end:]
        self.set_lengths(self.seen + tokens, self.chunks.length)

    def recent(self, count: int) -> Pair:
        """The oldest `count` tokens of the ring, in their order."""
        key, value = self.residual
        return oldest(key, self.chunks.length, count), oldest(value, self.chunks.length, count)

    # What attention reads.

    def payload(self) -> Payload:
        """All tokens, where they are: until the next ones come."""
        key, value = self._side(0), self._side(1)
        if not on_triton(self.state.device):
            return Payload(key, value)
        self.buffers.body.tokens = self.chunks.length
        return Payload(key, value, self.buffers.body, (*self.sinks, *self.residual), self.buffers)

    def payload_with(self, new: Pair) -> Payload:
        """All tokens and then `new`, which are not stored yet. It stays as it is when they are."""
        sinks = min(self.seen, self.num_sink_tokens)
        held = self.recent(self.seen - sinks - self.chunks.length)
        recent = torch.cat([held[0], new[0]], dim=2), torch.cat([held[1], new[1]], dim=2)
        return payload_of((self.sinks[0][:, :, :sinks], self.sinks[1][:, :, :sinks]), self.chunks, recent)

    def _side(self, side: int) -> Side:
        sinks = min(self.seen, self.num_sink_tokens)
        count = self.seen - sinks - self.chunks.length
        ring = self.residual[side]
        return side_of(self.chunks, side, self.sinks[side], sinks, ring, count, partial(oldest, ring, self.chunks.length, count))

    def dense(self) -> Pair:
        """All tokens, `[B, H, T, D]`."""
        return dense(self._side(0)), dense(self._side(1))

    # All tokens at once.

    def truncate(self, seen: int) -> None:
        """Keeps the first `seen` tokens."""
        quantized = min(self.chunks.length, max(seen - self.num_sink_tokens, 0))
        before = len(self.chunks.chunks)
        if not self.fixed:
            self.chunks.truncate(quantized)
        self.set_lengths(seen, quantized)
        self.chunks.fitted = self.chunks.fitted and seen > 0
        self.state[DROPPED] = 0
        if len(self.chunks.chunks) < before:
            self.bind()

    def clear(self) -> None:
        """Forgets all tokens and keeps the storage, of chunks the first."""
        self.stale, self.taken = False, 0
        self.chunks.truncate(0)
        for _, tensor in self.tensors():  # a nan that is hidden would show itself as nan times a weight of 0
            if tensor is not self.chunks.table:
                tensor.zero_()
        self.truncate(0)
        self.bind()

    def zones(self) -> tuple[Pair, Chunks, Pair]:
        """Sinks, chunks and the residual in its order, of the tokens that there are."""
        sinks = min(self.seen, self.num_sink_tokens)
        return (self.sinks[0][:, :, :sinks], self.sinks[1][:, :, :sinks]), self.chunks, self.recent(self.seen - sinks - self.chunks.length)

    def load(self, sinks: Pair, codes: tuple[Codes, Codes], once: tuple[Codes, Codes], recent: Pair, copy: Callable) -> None:
        """Takes copies of what `zones` gave, into an empty storage. A residual that is too long for it is quantized."""
        self.chunks.load(codes, once, sinks, copy)
        for first, x in zip(self.sinks, sinks, strict=True):
            first[:, :, : x.shape[2]] = x
        self.set_lengths(sinks[0].shape[2] + self.chunks.length, self.chunks.length)
        self.expect(recent[0].shape[2])
        self.bind()
        self.append(recent)

    def map(self, fn: Callable[[Tensor], Tensor], in_place: bool = False) -> None:
        """Replaces tensors by `fn(tensor)`, which may change rows or the device, or writes it `in_place`, where it changes the order of
        rows."""
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


def _zeros(like: Pair, tokens: int) -> Pair:
    key, value = (x.new_zeros(*x.shape[:2], tokens, x.shape[3]) for x in like)
    return key, value


def oldest(ring: Tensor, quantized: int, count: int) -> Tensor:
    """The oldest `count` tokens of a ring `[B, H, R, D]` in their order, where `quantized` have left it."""
    at = quantized % max(ring.shape[2], 1)
    tail = ring[:, :, at : at + count]
    return tail if tail.shape[2] == count else torch.cat([tail, ring[:, :, : count - tail.shape[2]]], dim=2)


def side_of(chunks: Chunks, side: int, first: Tensor, sinks: int, like: Tensor, count: int, recent: Callable[[], Tensor]) -> Side:
    """Keys (0) or values (1): the `sinks` first tokens of `first`, those in chunks now, and the `count` that `recent` makes when they are
    asked for, like `like`."""
    packed = chunks.packed(side, block_of(like))

    def build() -> tuple[Segment, ...]:
        row: tuple[Segment, ...] = (Exact(first[:, :, :sinks]), *packed, Exact(recent()))
        return tuple(segment for segment in row if segment.tokens)

    batch, heads, _, dim = like.shape
    return Side(build, (batch, heads, sinks + chunks.length + count, dim), like.dtype, like.device)


def payload_of(sinks: Pair, chunks: Chunks, recent: Pair) -> Payload:
    """Exact tokens, those that chunks hold now, and exact tokens, in this order."""
    key, value = (
        side_of(chunks, side, first, first.shape[2], last, last.shape[2], partial(oldest, last, 0, last.shape[2]))
        for side, (first, last) in enumerate(zip(sinks, recent, strict=True))
    )
    if not on_triton(recent[0].device):
        return Payload(key, value)
    body = replace(chunks.body, tokens=chunks.length) if chunks.length else None  # type: ignore[type-var]
    return Payload(key, value, body, (*sinks, *recent))


def group_of(residual_length: int) -> int:
    """Tokens that leave a residual of such length together, where storage grows and nothing is compiled."""
    return max(min(GROUP, residual_length), 1)
