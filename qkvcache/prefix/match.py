"""`Index`: the longest stored beginning of a prompt.

A key is the names of the model and of the cache template followed by four bytes for each token, most significant byte first, so that keys
sort as tokens do. Among sorted keys, one of a prompt's two neighbours has the longest beginning in common with it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from .media import unbroken

WIDTH = 4
"""Bytes of a token."""
NAME = 32
"""Bytes of the names before the tokens."""
Cuts = Sequence[int] | None
"""The numbers of first tokens to which an entry can be cut, ascending; None: any."""


def encode(name: bytes, ids: Tensor) -> bytes:
    """The key of `ids` `[T]`."""
    return name + ids.numpy().astype(">u4").tobytes()


def decode(key: bytes) -> Tensor:
    """The token ids of a key, int64 `[T]`."""
    return torch.from_numpy(numpy.frombuffer(key[NAME:], dtype=">u4").astype("int64"))


def length(key: bytes) -> int:
    """The number of tokens of a key."""
    return (len(key) - NAME) // WIDTH


def common(a: bytes, b: bytes) -> int:
    """The number of tokens that both keys begin with; 0 if their names differ."""
    low, high = 0, min(len(a), len(b)) + 1
    while high - low > 1:  # invariant: a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return max((low - NAME) // WIDTH, 0)


def kind(stored: bytes, key: bytes) -> str:
    """The relation of the tokens of `stored` to those of `key`: "exact", "shorter", "longer" or "common"."""
    if stored == key:
        return "exact"
    if key.startswith(stored):
        return "shorter"
    return "longer" if stored.startswith(key) else "common"


def longest_cut(cuts: Cuts, tokens: int) -> int:
    """The most first tokens, at most `tokens`, to which an entry can be cut; 0 if there are none."""
    return tokens if cuts is None else max((cut for cut in cuts if cut <= tokens), default=0)


class Index:
    """The sorted keys of entries, with the numbers of tokens to which they can be cut."""

    def __init__(self) -> None:
        self._cuts: dict[bytes, Cuts] = {}
        self._sorted: list[bytes] = []

    def add(self, key: bytes, cuts: Cuts) -> None:
        if key not in self._cuts:
            insort(self._sorted, key)
        self._cuts[key] = cuts

    def remove(self, key: bytes) -> None:
        if key in self._cuts:
            del self._cuts[key], self._sorted[bisect_left(self._sorted, key)]

    def best(self, key: bytes, limit: int) -> tuple[bytes, int]:
        """The stored key that can be cut to the longest beginning of `key`, of at most `limit` tokens, and the number of these tokens; 0
        if there is none. A beginning does not end within an image."""
        found, most, words = b"", 0, decode(key)
        at = bisect_left(self._sorted, key)
        for side in (range(at - 1, -1, -1), range(at, len(self._sorted))):
            for neighbour in map(self._sorted.__getitem__, side):  # each has at most as much in common as the one before
                if (shared := unbroken(words, min(common(neighbour, key), limit))) <= most:
                    break
                if (tokens := longest_cut(self._cuts[neighbour], shared)) > most:
                    found, most = neighbour, tokens
        return found, most

    def replaced(self, key: bytes, cuts: Cuts) -> list[bytes]:
        """The keys, the longest first, that a new `key` with these `cuts` serves in place of: proper beginnings of it."""
        shorter = [x for x in reversed(self._sorted[: bisect_left(self._sorted, key)]) if key.startswith(x)]
        return [x for x in shorter if cuts is None or (own := self._cuts[x]) is not None and set(own) <= set(cuts)]

    def covering(self, key: bytes) -> bytes | None:
        """`key` itself, or else a key that begins with all of its tokens and can be cut to them; None if there is none."""
        following = itertools.islice(self._sorted, bisect_left(self._sorted, key), None)
        candidates, tokens = itertools.takewhile(lambda x: x.startswith(key), following), length(key)
        return next((x for x in candidates if longest_cut(self._cuts[x], tokens) == tokens), None)

    def related(self, key: bytes) -> list[bytes]:
        """The stored keys next to `key`, which have the longest beginnings in common with it."""
        at = bisect_left(self._sorted, key)
        return self._sorted[max(at - 1, 0) : at + 1]
