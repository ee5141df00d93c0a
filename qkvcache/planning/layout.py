"""What one layer holds after so many tokens, in bytes: its storage is made on the meta device, of the size that it has come to by then.

A layer is asked for what it was built with (format, zones, policy), so that planning knows nothing that the cache does not. Left out are
counters of layers that evict and what left-padding adds to them, eight bytes a row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.cache_utils import StaticLayer as StockStaticLayer

from ..layers.compressed import CompressedLayer
from ..layers.evicting import EvictingLayer
from ..storage import MAX_GROWTH, PAGE, Chunks, Storage, growth
from .model import Shape


@dataclass(frozen=True)
class Bytes:
    """As `caches.Memory` counts them."""

    codes: int = 0
    scales: int = 0
    exact: int = 0
    bookkeeping: int = 0

    @property
    def total(self) -> int:
        return self.codes + self.scales + self.exact + self.bookkeeping

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.codes + other.codes, self.scales + other.scales, self.exact + other.exact, self.bookkeeping + other.bookkeeping)

    def __mul__(self, count: int) -> Bytes:
        return Bytes(self.codes * count, self.scales * count, self.exact * count, self.bookkeeping * count)

    def each(self, rows: int) -> Bytes:
        """The share of one of `rows` requests, rounded up."""
        return Bytes(*(-(-part // rows) for part in (self.codes, self.scales, self.exact, self.bookkeeping)))


@dataclass(frozen=True)
class Growth:
    """How many tokens are quantized after `prompt` tokens at once and others one by one.

    exact: tokens that stay at the beginning and at the end. interval: how many leave the end together. limit: quantized tokens that there
    may be when so many have been seen. stays: tokens that stay beside those, until the next come. least: slots that there are at first.
    """

    exact: int
    interval: int
    prompt: int
    limit: Callable[[int], int]
    stays: int = 0
    least: int = 0

    @classmethod
    def of(cls, layer: CompressedLayer, prompt: int, group: int = 1) -> Growth:
        if not isinstance(layer, EvictingLayer):
            return cls(layer.num_sink_tokens + layer.residual_length, group, prompt, lambda seen: seen, 1, PAGE)
        policy, budget = layer.policy, layer.budget
        outside = layer.num_sink_tokens + layer.tail + layer.interval - 1
        return cls(layer.num_sink_tokens + layer.tail, layer.interval, prompt, lambda seen: max(policy.size(budget, seen) - outside, 0))

    def left(self, seen: int) -> int:
        """Tokens that have left the end."""
        at_once = max(self._beyond(min(self.prompt, seen)) - self.stays, 0)
        if at_once < self.interval:
            at_once = 0
        return at_once + max(self._beyond(seen) - at_once - self.stays, 0) // self.interval * self.interval

    def body(self, seen: int) -> int:
        left = self.left(seen)
        when = seen - self._beyond(seen) + left  # tokens seen when the last of them left
        return min(left, self.limit(when))

    def capacity(self, seen: int) -> tuple[int, int]:
        """Slots, and chunks: one for the prompt, and those that came since."""
        at = min(self.prompt, seen)
        slots, held = max(growth(0, self.body(at)), self.least), self.body(seen)
        chunks = 1
        while slots < held:
            before = max(slots - self.interval, 0)
            if growth(before, 1) == growth(before, self.interval) == MAX_GROWTH:  # from here on all chunks are as large
                more = -((slots - held) // MAX_GROWTH)
                return slots + more * MAX_GROWTH, chunks + more
            at = bisect_left(range(seen), slots + 1, lo=at + 1, key=self.body)
            slots += growth(self.body(at - 1), self.body(at) - slots)
            chunks += 1
        return slots, chunks

    def _beyond(self, seen: int) -> int:
        return max(seen - self.exact, 0)


def kind(layer: object) -> tuple:
    """Layers of one cache that are of a kind hold as much of a shape."""
    of = ("budget", "sliding_window", "format", "residual_length", "max_cache_len", "max_length", "is_compileable")
    return type(layer), id(getattr(layer, "policy", None)), *(getattr(layer, name, None) for name in of)


def held(layer: object, shape: Shape, dtype: torch.dtype, seen: int, prompt: int, rows: int = 1) -> Bytes:
    """What `layer` holds for `rows` requests of `seen` tokens in a model of `dtype`, `prompt` of them read at once.

    A sliding layer's prompt counts as one that a step has followed: until then, transformers holds on to all of it. A layer that is
    preallocated holds as much from its first token on.
    """
    like = torch.empty(rows, shape.heads, 0, shape.head_dim, dtype=dtype, device="meta")
    if isinstance(layer, EvictingLayer):
        return _evicting(layer, like, seen, prompt)
    if isinstance(layer, CompressedLayer):
        return _bytes(_storage(layer, like, seen, prompt).tensors())
    token = rows * 2 * shape.heads * shape.head_dim * dtype.itemsize
    exact = 0
    if hasattr(layer, "conv_states"):
        exact += rows * shape.state
    if isinstance(layer, DynamicLayer):
        exact += token * min(seen, getattr(layer, "sliding_window", seen))
    if isinstance(layer, StockStaticLayer):
        exact += token * layer.max_cache_len
    return Bytes(exact=exact)


def _storage(layer: CompressedLayer, like: Tensor, seen: int, prompt: int) -> Storage:
    codecs, pair = (layer.format.key, layer.format.value), (like, like)
    storage = Storage(codecs, pair, layer.num_sink_tokens, layer.residual_length, layer.max_length, layer.is_compileable)
    if layer.max_length is None:
        slots, chunks = Growth.of(layer, prompt, storage.group).capacity(seen)
        storage.chunks = _chunks(layer, like, slots, chunks)
    return storage


def _chunks(layer: CompressedLayer, like: Tensor, slots: int, chunks: int = 1) -> Chunks:
    made = Chunks((layer.format.key, layer.format.value), (like.shape[3], like.shape[3]), per_head=isinstance(layer, EvictingLayer))
    made.rows = max(made.rows, 1 << (chunks - 1).bit_length())
    if slots:
        made.reserve(slots, (like, like))
    else:  # what is kept once is there before anything else
        made.once = layer.format.key.allocate(like, 0, True)[1], layer.format.value.allocate(like, 0, True)[1]
    return made


def _evicting(layer: EvictingLayer, like: Tensor, seen: int, prompt: int) -> Bytes:
    """A position and what the policy asks for, 4 bytes each, of every token and head; a flag of a byte; a mean key."""
    rows, heads, _, dim = like.shape
    if layer.is_compileable:
        first, body, recent = layer.num_sink_tokens, layer.slots, layer.tail + 1
        flags, slots, chunks = first + body + recent, body, 1
    else:
        growth = Growth.of(layer, prompt)
        first, body = min(seen, layer.num_sink_tokens), growth.body(seen)
        flags, recent = first, seen - first - growth.left(seen)
        slots, chunks = growth.capacity(seen)
    policy = layer.policy
    records = 1 + policy.scores + policy.norms + policy.keeps_values
    ledger = flags + 4 * heads * ((body + recent) * records + (dim if policy.mean_key else 0))
    exact = (first + recent) * 2 * heads * dim * like.itemsize
    return _bytes(_chunks(layer, like, slots, chunks).tensors()) + Bytes(exact=exact, bookkeeping=ledger) * rows


def _bytes(tensors: Iterable[tuple[str, Tensor]]) -> Bytes:
    sizes = {"codes": 0, "scales": 0, "exact": 0, "bookkeeping": 0}
    for role, x in tensors:
        sizes[role] += x.nbytes
    return Bytes(**sizes)
