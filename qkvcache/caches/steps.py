"""`Steps`: the order in which a model's steps reach the layers of a cache.

A step that ends between two layers (an exception, Ctrl-C) leaves layers that hold its tokens and layers that
do not; two threads in one cache mix their tokens. Layers of transformers notice this where shapes differ.
Attention on codes takes a layer as it is, so that the first layer of a step compares the layers, by numbers
that the host has.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, LinearAttentionCacheLayerMixin

from ..layers.compressed import CompressedLayer
from ..layers.static_sliding import StaticSlidingLayer

_masks = threading.local()
"""`made`: the `Steps` for which this thread made masks last, and the `count` then."""


class Steps:
    """The steps of a cache since it was empty."""

    def __init__(self) -> None:
        self.count = 0
        """Steps that have begun."""
        self.thread: int | None = None
        """The thread of the last step."""
        self.first: int | None = None
        """The layer that steps begin with."""
        self.begun: set[str] = set()
        """Parts of the step that are written in the first layer."""
        self.last = self.top = self.known = -1
        """The layer written last, the highest layer written, and the highest when the step began."""
        self.end: int | None = None
        """The layer that the first step ended with: not the highest in models that pass layers several times
        (Inkling 2 Loop). None: not known."""

    def masked(self) -> None:
        """This thread makes masks for a step of as many tokens as the cache holds now."""
        _masks.made = self, self.count

    def enter(self, layers: Sequence[Any], index: int, what: str) -> None:
        """A step is about to write `what` into layer `index`. Raises ValueError for a step after one that ended between two layers, and
        RuntimeError for a step of another thread than the one whose step is not over."""
        if self.first is None:
            self.first = index
        thread = threading.get_ident()
        if index == self.first and (self.last != index or what in self.begun):
            if self.end is None and self.count:
                self.end = self.last
            made, _masks.made = getattr(_masks, "made", None), None
            if (self.is_torn and thread != self.thread) or (made and made[0] is self and made[1] != self.count):
                raise RuntimeError(_THREADS)
            self.check(layers)
            self.begun, self.thread, self.known, self.count = set(), thread, self.top, self.count + 1
        elif thread != self.thread:
            raise RuntimeError(_THREADS)
        if index > self.known >= 0:
            raise ValueError(
                f"layer {index} holds nothing of the steps before, which ended after layer {self.known}: call reset(), and read the whole "
                "text again"
            )
        if index == self.first:
            self.begun.add(what)

    def leave(self, index: int) -> None:
        """A step has written into layer `index`."""
        self.last, self.top = index, max(index, self.top)

    def take_over(self) -> None:
        """This thread goes on, whatever step of another thread is not over."""
        self.thread = threading.get_ident()

    @property
    def is_torn(self) -> bool:
        """Whether the last step ended elsewhere than the first one, or is not over."""
        return self.end is not None and self.last != self.end

    def check(self, layers: Sequence[Any]) -> None:
        """Raises ValueError if a step ended between two layers."""
        held = [layer for layer in layers[: self.top + 1] if counts(layer)]
        if len(held) > 1 and seen(held[0]) != seen(held[-1]):
            lengths = [layer.get_seq_length() for layer in held]  # counted by the device, where it counts
            if len(set(lengths)) > 1:
                back = f"call crop(0), which takes that step back, and go on after {min(lengths)} tokens; or "
                raise ValueError(
                    f"the step before ended between two layers, which hold {max(lengths)} and {min(lengths)} tokens: "
                    f"{back if all(getattr(layer, 'is_croppable', True) for layer in layers) else ''}call reset(), and read the whole text "
                    "again"
                )
        if self.is_torn and not all(_is_restorable(layer) for layer in layers):
            raise ValueError(
                f"the step before ended after layer {self.last} and not {self.end}, and recurrent states cannot be taken back: call "
                "reset(), and read the whole text again"
            )

    def ahead(self, layers: Sequence[Any]) -> list[int]:
        """Tokens of each layer that others do not hold, because a step ended between them."""
        lengths = [layer.get_seq_length() if i <= self.top and counts(layer) else None for i, layer in enumerate(layers)]
        shortest = min((length for length in lengths if length is not None), default=0)
        return [0 if length is None else length - shortest for length in lengths]


def _is_restorable(layer: Any) -> bool:
    """Whether `layer` can be taken back to the tokens before the last step."""
    return getattr(layer, "is_restorable", True) and not isinstance(layer, LinearAttentionCacheLayerMixin)


def counts(layer: Any) -> bool:
    """Whether `layer` holds the keys and values of tokens that it counts on the host."""
    return isinstance(layer, CompressedLayer | DynamicLayer | DynamicIndexedLayer | StaticSlidingLayer)


def seen(layer: Any) -> int:
    """The tokens that `layer` has seen, as far as the host knows."""
    return layer.tokens_on_host if isinstance(layer, CompressedLayer) else layer.get_seq_length() if counts(layer) else 0


_THREADS = (
    "two threads use this cache at once: its tokens would be mixed. Give each thread a cache of its own, such as one of cache.fork(n), "
    "or let one thread begin after the other has ended; if a thread was stopped in a step, call crop(0) or reset()"
)
