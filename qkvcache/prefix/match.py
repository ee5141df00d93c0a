"""Keys of entries, and the longest stored beginning of a prompt.

A key is the names of the model and of the cache template followed by four bytes for each token. Entries are compared one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
Entries = Mapping[bytes, Cuts]
"""The cuts of stored entries by key."""


def encode(name: bytes, ids: Tensor) -> bytes:
    """The key of `ids` `[T]`."""
    return name + ids.numpy().astype("<u4").tobytes()


def decode(key: bytes) -> Tensor:
    """The token ids of a key, int64 `[T]`."""
    return torch.from_numpy(numpy.frombuffer(key[NAME:], dtype="<u4").astype("int64"))


def length(key: bytes) -> int:
    """The number of tokens of a key."""
    return (len(key) - NAME) // WIDTH


def common(a: bytes, b: bytes) -> int:
    """The number of tokens that both keys begin with; 0 if their names differ."""
    if a[: NAME + WIDTH] != b[: NAME + WIDTH]:
        return 0
    tokens = min(length(a), length(b))
    differ = numpy.frombuffer(a, "<u4", tokens, NAME) != numpy.frombuffer(b, "<u4", tokens, NAME)
    return int(differ.argmax()) if differ.any() else tokens


def kind(stored: bytes, key: bytes) -> str:
    """The relation of the tokens of `stored` to the tokens of `key`: "exact", "shorter", "longer" or "common"."""
    if stored == key:
        return "exact"
    if key.startswith(stored):
        return "shorter"
    return "longer" if stored.startswith(key) else "common"


def longest_cut(cuts: Cuts, tokens: int) -> int:
    """The most first tokens, at most `tokens`, to which an entry can be cut; 0 if there are none."""
    return tokens if cuts is None else max((cut for cut in cuts if cut <= tokens), default=0)


def best(entries: Entries, key: bytes, limit: int) -> tuple[bytes, int]:
    """The entry that can be cut to the longest beginning of `key`, of at most `limit` tokens, and the number of these tokens; 0 if there is
    none. A beginning does not end within an image."""
    found, most, words = b"", 0, decode(key)
    for stored, cuts in entries.items():
        shared = min(common(stored, key), limit)
        if shared > most and (tokens := longest_cut(cuts, unbroken(words, shared))) > most:
            found, most = stored, tokens
    return found, most


def covering(entries: Entries, key: bytes) -> bytes | None:
    """`key` itself, or else an entry that begins with all of its tokens and can be cut to them; None if there is none."""
    tokens = length(key)
    longer = (stored for stored, cuts in entries.items() if stored.startswith(key) and longest_cut(cuts, tokens) == tokens)
    return key if key in entries else next(longer, None)


def replaced(entries: Entries, key: bytes, cuts: Cuts) -> list[bytes]:
    """The entries that a new `key` with these `cuts` serves in place of: proper beginnings of it."""
    shorter = [(stored, own) for stored, own in entries.items() if stored != key and key.startswith(stored)]
    return [stored for stored, own in shorter if cuts is None or own is not None and set(own) <= set(cuts)]
