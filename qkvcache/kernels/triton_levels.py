"""QuantizedValues of codes as odd integers out of constants, a byte each, so that no memory is read."""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats.codebooks import GRID


def _words(positive: tuple[int, ...]) -> tuple[int, ...]:
    """Twice the levels in steps, a byte each, as four signed words, 0 where there are no more."""
    twice = bytes(2 * n + 1 for n in positive).ljust(16, b"\0")
    return tuple(int.from_bytes(twice[at : at + 4], "little", signed=True) for at in range(0, 16, 4))


LLOYD_MAX_WORDS = tl.constexpr(tuple(_words(GRID[bits][1] if bits in GRID else ()) for bits in range(5)))
"""By bits."""


@triton.jit
def signed_levels(code, HALF: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr):
    """Twice the levels of codes below `2 * HALF`, in steps of the grid: odd integers below 256."""
    rank = tl.where(code >= HALF, code - HALF, HALF - 1 - code)
    word = tl.full(code.shape, W0, tl.int32)
    if HALF > 4:
        word = tl.where(rank < 4, word, tl.full(code.shape, W1, tl.int32))
    if HALF > 8:
        more = tl.where(rank < 12, tl.full(code.shape, W2, tl.int32), tl.full(code.shape, W3, tl.int32))
        word = tl.where(rank < 8, word, more)
    level = (word >> (8 * (rank & 3))) & 0xFF
    return tl.where(code >= HALF, level, -level)
