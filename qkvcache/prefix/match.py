"""`Index`: the longest stored beginning of a prompt.

A key is the name of the model followed by four bytes for each token, most significant byte first, so that keys sort as
tokens do. Among sorted keys, one of a prompt's two neighbours has the longest beginning in common with it.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy
import torch
from torch import Tensor

WIDTH = 4
"""Bytes of a token."""
NAME = 16
"""Bytes of the name before the tokens."""


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
    """How the tokens of `stored` relate to those of `key`: "exact", "shorter", "longer" or "common"."""
    if stored == key:
        return "exact"
    if key.startswith(stored):
        return "shorter"
    return "longer" if stored.startswith(key) else "common"


class Index:
    """The sorted keys of entries, with their templates. Only prompts that begin with all of its tokens can use a key
    added as `whole`."""

    def __init__(self) -> None:
        self._templates: dict[bytes, bytes] = {}
        self._sorted: list[bytes] = []
        self._whole: set[bytes] = set()

    def add(self, key: bytes, template: bytes, whole: bool) -> None:
        self.remove(key)
        self._templates[key] = template
        if whole:
            self._whole.add(key)
        else:
            insort(self._sorted, key)

    def remove(self, key: bytes) -> None:
        if self._templates.pop(key, None) is None:
            return
        if key in self._whole:
            self._whole.remove(key)
        else:
            del self._sorted[bisect_left(self._sorted, key)]

    def best(self, key: bytes, limit: int) -> tuple[bytes | None, int]:
        """The stored key with the longest beginning in common with `key`, of at most `limit` tokens, and the number of these tokens."""
        found, most = None, 0
        at = bisect_left(self._sorted, key)
        for neighbour in self._sorted[max(at - 1, 0) : at + 1]:
            tokens = min(common(neighbour, key), limit)
            if tokens > most:
                found, most = neighbour, tokens
        for size in sorted(set(map(len, self._whole)), reverse=True):
            tokens = (size - NAME) // WIDTH
            if tokens <= most:
                break
            if tokens <= limit and key[:size] in self._whole:
                return key[:size], tokens
        return found, most

    def beginnings(self, key: bytes, template: bytes) -> list[bytes]:
        """Keys of this template that can be cut and whose tokens are a proper beginning of those of `key`, the longest
        first."""
        shorter = self._sorted[: bisect_left(self._sorted, key)]
        return [x for x in reversed(shorter) if key.startswith(x) and self._templates[x] == template]

    def covering(self, key: bytes, template: bytes) -> bytes | None:
        """`key` itself, or else a key that can be cut and begins with all of its tokens. None if there is none of this
        template."""
        at = bisect_left(self._sorted, key)
        candidates = [key] if key in self._templates else self._sorted[at : at + 1]
        return next((found for found in candidates if found.startswith(key) and self._templates[found] == template), None)
