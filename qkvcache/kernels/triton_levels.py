"""Lloyd-Max levels as odd integers, kept in constants of one byte each, so that dequantizing loads no table."""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats.codebooks import GRID


def _words(positive: tuple[int, ...]) -> tuple[int, ...]:
    """Twice the positive levels in steps of the grid, one byte each, as four signed words of 32 bits; missing levels are 0."""
    twice = bytes(2 * n + 1 for n in positive).ljust(16, b"\0")
    return tuple(int.from_bytes(twice[at : at + 4], "little", signed=True) for at in range(0, 16, 4))


LLOYD_MAX_WORDS = tl.constexpr(tuple(_words(GRID[bits][1] if bits in GRID else ()) for bits in range(5)))
"""By bits."""


@triton.jit
def signed_levels(code, HALF: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr):
    """Twice the levels of `code`, int32 of any shape and below `2 * HALF`, in steps of the grid: odd int32 between -255 and 255. W0 to W3
    are the words of `LLOYD_MAX_WORDS`."""
    rank = tl.where(code >= HALF, code - HALF, HALF - 1 - code)
    word = tl.full(code.shape, W0, tl.int32)
    if HALF > 4:
        word = tl.where(rank < 4, word, tl.full(code.shape, W1, tl.int32))
    if HALF > 8:
        more = tl.where(rank < 12, tl.full(code.shape, W2, tl.int32), tl.full(code.shape, W3, tl.int32))
        word = tl.where(rank < 8, word, more)
    level = (word >> (8 * (rank & 3))) & 0xFF
    return tl.where(code >= HALF, level, -level)
