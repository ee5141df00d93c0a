"""Lloyd-Max levels for N(0, 1): of all quantizers with `2**bits` levels, the one with the least mean squared error.

A rotation spreads a vector evenly: each coordinate of a Hadamard-rotated unit vector of D channels is a sum
of D terms of mixed sign, and so about N(0, 1/D) whatever the vector was. Times sqrt(D), these levels suit
every head of every model, and no calibration is needed. (The exact law of a coordinate on the sphere would
save 0.1 % of the error at D = 128, 0.4 % at 64.)

Formats store the nearest points of a grid (`GRID`), so that a kernel can look levels up as bytes, or compute
them at 2 bits. That costs .6 % of the error at 4 bits, .002 % at 3 and 1.2 % at 2.

`eval/derive_codebooks.py` derives the constants; with `--check` it compares them with these. Distortion: .1175, .03455, .009501.
"""

from __future__ import annotations

import functools


def _mirrored(*positive: float) -> tuple[float, ...]:
    return tuple(-level for level in reversed(positive)) + positive


LLOYD_MAX: dict[int, tuple[float, ...]] = {
    2: _mirrored(0.45278003463649297, 1.5104176084990975),
    3: _mirrored(0.24509417894422345, 0.7560052812058815, 1.3439092785050055, 2.151945704536993),
    4: _mirrored(
        0.12839502985114984,
        0.3880482994902982,
        0.656759118532477,
        0.9423404564869786,
        1.2562311973471987,
        1.6180463860219056,
        2.0690172265314097,
        2.732589570995186,
    ),
}
"""Bits to levels, ascending: a code is an index into them."""


UPPER: int = 21
"""The distance of the levels that the upper two bits of a code of 4 bits stand for, in steps of `GRID`. The
means of the four levels of each are nearly evenly spaced; levels that are need no table."""


GRID: dict[int, tuple[float, tuple[int, ...]]] = {
    2: (UPPER * 0.0511193, (0, 1)),
    3: (0.0196437, (12, 38, 68, 109)),
    4: (0.0511193, (2, 7, 12, 18, 24, 31, 40, 53)),
}
"""Bits to a step and the positive levels in steps, less one half: level = (n + 1/2) * step. Below 64 at 4
bits, below 128 at 3. Those of 2 bits are evenly spaced, so that no table is needed; their step, which scales
make up for, is the step of the upper halves of 4 bits."""


@functools.cache
def grid_levels(bits: int) -> tuple[float, ...]:
    """The levels that are stored, ascending."""
    return tuple((n + 0.5) * GRID[bits][0] for n in grid_steps(GRID[bits][1]))


@functools.cache
def grid_steps(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Levels in steps less one half, ascending, of the positive ones."""
    return *(-1 - n for n in reversed(counts)), *counts


@functools.cache
def midpoints(bits: int) -> tuple[float, ...]:
    """The midpoints between neighbouring levels, ascending."""
    levels = LLOYD_MAX[bits]
    return tuple((low + high) / 2 for low, high in zip(levels, levels[1:], strict=False))
