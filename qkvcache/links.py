"""The links of pages: digests that name a page by its tokens and all tokens before them, as in vLLM's prefix caching."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def links(tokens: Sequence[int], size: int, salt: bytes = b"", known: Sequence[bytes] = ()) -> list[bytes]:
    """The links of the full pages of `size` tokens, the first of which are `known`: digests of 16 bytes of a page's tokens, of all tokens
    before them and of `salt`. Who does not know the salt cannot ask for these pages."""
    found = list(known)
    for begin in range(len(found) * size, len(tokens) - size + 1, size):
        before = found[-1] if found else hashlib.blake2b(salt, digest_size=16, person=b"salt").digest()
        part = array("i", tokens[begin : begin + size]).tobytes()
        found.append(hashlib.blake2b(before + part, digest_size=16).digest())
    return found
