"""Levels of codes as odd integers out of constants, a byte each, so that no memory is read."""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats.codebooks import GRID, TRELLIS


def _words(positive: tuple[int, ...]) -> tuple[int, int]:
    """Twice the levels in steps, a byte each, as two signed words; the second is 0 where four are all."""
    twice = bytes(2 * n + 1 for n in positive).ljust(8, b"\0")
    return int.from_bytes(twice[:4], "little", signed=True), int.from_bytes(twice[4:], "little", signed=True)


LLOYD_MAX_WORDS = tl.constexpr(tuple(_words(GRID[bits][1] if bits in GRID else ()) for bits in range(5)))
TRELLIS_WORDS = tl.constexpr(tuple(_words(TRELLIS[bits][1] if bits in TRELLIS else ()) for bits in range(4)))
"""By bits."""


@triton.jit
def signed_levels(code, HALF: tl.constexpr, FIRST: tl.constexpr, MORE: tl.constexpr):
    """Twice the levels of codes below `2 * HALF`, in steps of the grid: odd integers below 256."""
    rank = tl.where(code >= HALF, code - HALF, HALF - 1 - code)
    word = tl.full(code.shape, FIRST, tl.int32)
    if HALF > 4:
        word = tl.where(rank < 4, word, tl.full(code.shape, MORE, tl.int32))
    level = (word >> (8 * (rank & 3))) & 0xFF
    return tl.where(code >= HALF, level, -level)
