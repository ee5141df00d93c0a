"""What one layer holds after so many tokens, in bytes: the rules of `layers/`, counted in place of run.

A layer is asked for what it was built with (format, zones, policy), so that planning knows nothing that the cache does not. Left out are
counters and the addresses of slabs that kernels read on a GPU, a few hundred bytes a layer, and what left-padding adds, eight bytes a row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from transformers.cache_utils import DynamicLayer
from transformers.cache_utils import StaticLayer as StockStaticLayer

from ..layers.compressed import CompressedLayer
from ..layers.evicting import EvictingLayer
from ..layers.slots import MAX_GROWTH, PAGE, growth
from ..layers.static import StaticLayer
from ..layers.static_evicting import StaticEvictingLayer
from ..layers.zones import GROUP
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
class Zones:
    """How many tokens of a layer lie where, after `prompt` tokens at once and others one by one.

    first, tail: tokens that stay at the beginning and at the end. interval: how many leave the end together. limit: tokens that the body
    may hold when so many have been seen.
    """

    first: int
    tail: int
    interval: int
    prompt: int
    limit: Callable[[int], int]

    @classmethod
    def of(cls, layer: CompressedLayer, prompt: int) -> Zones:
        if not isinstance(layer, EvictingLayer):
            interval = min(GROUP, layer.exact_recent) + 1
            return cls(layer.exact_first, layer.exact_recent, interval, prompt, lambda seen: seen)
        policy, budget = layer.policy, layer.budget
        outside = layer.exact_first + layer.tail + layer.interval - 1
        return cls(layer.exact_first, layer.tail, layer.interval, prompt, lambda seen: max(policy.size(budget, seen) - outside, 0))

    def left(self, seen: int) -> int:
        """Tokens that have left the recent zone."""
        at_once = self._beyond(min(self.prompt, seen))
        if at_once < self.interval:
            at_once = 0
        return at_once + max(self._beyond(seen) - at_once, 0) // self.interval * self.interval

    def body(self, seen: int) -> int:
        left = self.left(seen)
        when = seen - self._beyond(seen) + left  # tokens seen when the last of them left
        return min(left, self.limit(when))

    def recent(self, seen: int) -> int:
        return seen - min(seen, self.first) - self.left(seen)

    def capacity(self, seen: int) -> int:
        """Slots that the body has: whole pages for the prompt, and slabs that came since."""
        at = min(self.prompt, seen)
        slots, held = growth(0, self.body(at)), self.body(seen)
        while slots < held:
            before = max(slots - self.interval, 0)
            if growth(before, 1) == growth(before, self.interval) == MAX_GROWTH:  # from here on all slabs are as large
                return slots - (slots - held) // MAX_GROWTH * MAX_GROWTH
            at = bisect_left(range(seen), slots + 1, lo=at + 1, key=self.body)
            slots += growth(self.body(at - 1), self.body(at) - slots)
        return slots

    def _beyond(self, seen: int) -> int:
        return max(seen - self.first - self.tail, 0)


def kind(layer: object) -> tuple:
    """Layers of one cache that are of a kind hold as much of a shape."""
    of = ("budget", "sliding_window", "format", "exact_recent", "max_cache_len")
    return type(layer), id(getattr(layer, "policy", None)), *(getattr(layer, name, None) for name in of)


def held(layer: object, shape: Shape, itemsize: int, seen: int, prompt: int, rows: int = 1) -> Bytes:
    """What `layer` holds for `rows` requests of `seen` tokens in a model dtype of `itemsize` bytes, `prompt` of them read at once.

    A sliding layer's prompt counts as one that a step has followed: until then, transformers holds on to all of it. A layer that is
    preallocated holds as much from its first token on.
    """
    token = 2 * shape.heads * shape.head_dim * itemsize
    if isinstance(layer, StaticEvictingLayer):
        return _static_evicting(layer, shape, itemsize) * rows
    if isinstance(layer, StaticLayer):
        return _static(layer, shape, itemsize) * rows
    if isinstance(layer, CompressedLayer):
        return _compressed(layer, shape, itemsize, seen, prompt) * rows
    exact = 0
    if hasattr(layer, "conv_states"):
        exact += shape.state
    if isinstance(layer, DynamicLayer):
        exact += token * min(seen, getattr(layer, "sliding_window", seen))
    if isinstance(layer, StockStaticLayer):
        exact += token * layer.max_cache_len
    return Bytes(exact=exact) * rows


def _compressed(layer: CompressedLayer, shape: Shape, itemsize: int, seen: int, prompt: int) -> Bytes:
    zones = Zones.of(layer, prompt)
    first, recent, body = min(seen, zones.first), zones.recent(seen), zones.body(seen)
    exact = (first + recent) * 2 * shape.heads * shape.head_dim * itemsize
    evicts, slots = isinstance(layer, EvictingLayer), zones.capacity(seen)
    sizes = _slots(layer, shape, itemsize, slots, min(slots if evicts else seen, 1), evicts)
    bookkeeping = _ledger(layer, shape, first, body + recent) if isinstance(layer, EvictingLayer) else 0
    return Bytes(**sizes, exact=exact, bookkeeping=bookkeeping)


def _static(layer: StaticLayer, shape: Shape, itemsize: int) -> Bytes:
    ring = layer.exact_recent + 1
    slots = -(-max(layer.max_length - layer.exact_first - ring + 1, 1) // PAGE) * PAGE  # as Store.make
    exact = (layer.exact_first + ring) * 2 * shape.heads * shape.head_dim * itemsize
    return Bytes(**_slots(layer, shape, itemsize, slots, 1, False), exact=exact)


def _static_evicting(layer: StaticEvictingLayer, shape: Shape, itemsize: int) -> Bytes:
    ring, body = layer.tail + 1, layer.slots
    exact = (layer.exact_first + ring) * 2 * shape.heads * shape.head_dim * itemsize
    sizes = _slots(layer, shape, itemsize, -(-body // PAGE) * PAGE, 1, True)
    return Bytes(**sizes, exact=exact, bookkeeping=_ledger(layer, shape, layer.exact_first + body + ring, body + ring))


def _slots(layer: CompressedLayer, shape: Shape, itemsize: int, slots: int, once: int, per_head: bool) -> dict[str, int]:
    """Bytes of the body by role; `once`: how many there are of the buffers kept once."""
    sizes = {"codes": 0, "scales": 0}
    for codec in (layer.format.key, layer.format.value):
        for buffer in codec.buffers(shape.head_dim):
            each = buffer.tokens == "each"
            heads = shape.heads if buffer.heads == "each" or (per_head and each) else 1
            width = (buffer.dtype.itemsize if buffer.dtype else itemsize) * buffer.width
            sizes[buffer.role] += width * heads * (slots if each else once)
    return sizes


def _ledger(layer: EvictingLayer, shape: Shape, flags: int, tokens: int) -> int:
    """A position and what the policy asks for, 4 bytes each, of every token and head; `flags` of a byte; a mean key."""
    policy = layer.policy
    records = 1 + policy.scores + policy.norms + policy.keeps_values
    return flags + 4 * shape.heads * (tokens * records + (shape.head_dim if policy.mean_key else 0))
