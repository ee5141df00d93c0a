"""Derives the constants of qkvcache/formats/codebooks.py.

Lloyd-Max levels for N(0, 1), by fixed-point iteration on the exact density, and the grid that they are stored on.

python eval/derive_codebooks.py            prints them
python eval/derive_codebooks.py --check    compares them with the shipped ones
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.special import ndtr

from qkvcache.formats.codebooks import GRID, LLOYD_MAX, UPPER

BITS = (2, 3, 4)
MOST = {3: 128, 4: 64}
"""Counts of the grid stay below: kernels read levels as bytes, at 4 bits as bytes whose upper bit is 0."""


def ends_and_masses(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the intervals of positive `levels` begin and end, and how much of N(0, 1) each holds."""
    ends = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    return ends, -np.diff(ndtr(-ends))


def lloyd_max(bits: int) -> np.ndarray:
    """The positive half of the `2**bits` levels: each the mean of N(0, 1) between the midpoints to its neighbours.

    One half is enough, by symmetry, and its upper tail keeps full precision where a cumulative distribution near 1 would not.
    """
    levels = np.linspace(0.5, 2.5, 2 ** (bits - 1))
    for _ in range(10_000):
        ends, masses = ends_and_masses(levels)
        density = np.exp(-(ends**2) / 2) / np.sqrt(2 * np.pi)
        updated = -np.diff(density) / masses  # the mean on an interval: by how much the density drops, over the mass
        if np.abs(updated - levels).max() < 1e-15:
            break
        levels = updated
    return levels


def distortion(levels: np.ndarray) -> float:
    """Mean squared error on N(0, 1). At the fixed point it is 1 minus the levels' own variance."""
    return float(1 - 2 * (ends_and_masses(levels)[1] * levels**2).sum())


def grid(levels: np.ndarray, most: int) -> tuple[float, tuple[int, ...]]:
    """Step and counts below `most` as in `codebooks.GRID`: of all grids the one whose points are nearest to `levels`, by what each is
    chosen for. A format scales its levels to keep a vector's length, so that counts matter and the step hardly does."""
    masses = ends_and_masses(levels)[1]

    def nearest(step: float) -> np.ndarray:
        return np.rint(levels / step - 0.5)

    least = levels[-1] / (most - 0.5)
    steps = np.linspace(least, 2 * least, 200_001)
    off = [float((masses * ((nearest(step) + 0.5) * step - levels) ** 2).sum()) for step in steps]
    step = steps[int(np.argmin(off))]
    return float(step), tuple(int(n) for n in nearest(step))


def upper(levels: np.ndarray, step: float) -> int:
    """`codebooks.UPPER`: the distance of two positive levels, each for four of `levels`, with the least error."""
    masses, factors = ends_and_masses(levels)[1], np.repeat([0.5, 1.5], 4)
    return round(float((masses * factors * levels).sum() / (masses * factors**2).sum()) / step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the shipped constants; exit status 1 if they differ")
    check = parser.parse_args().check

    def compare(same: bool, shipped: str) -> None:
        if check and not same:
            raise SystemExit(f"{shipped}: replace it with the line above")

    for bits in BITS:
        levels = lloyd_max(bits)
        print(f"    {bits}: _mirrored({', '.join(repr(float(level)) for level in levels)}),  # distortion {distortion(levels):.6f}")
        off = np.abs(np.concatenate([-levels[::-1], levels]) - LLOYD_MAX[bits]).max()
        compare(off <= 1e-12, f"the shipped {bits}-bit codebook is off by {off:.3g}")
        if bits not in MOST:
            continue
        step, counts = grid(levels, MOST[bits])
        print(f"    {bits}: ({step:.7f}, {counts}),  # grid")
        compare(counts == GRID[bits][1] and abs(step / GRID[bits][0] - 1) <= 5e-3, f"the shipped {bits}-bit grid is {GRID[bits]}")
    apart = upper(lloyd_max(4), GRID[4][0])
    print(f"    {apart}  # upper two of 4 bits")
    compare(apart == UPPER, f"the shipped levels of upper halves are {UPPER} steps apart")


if __name__ == "__main__":
    main()
