"""Derives the constants of qkvcache/formats/codebooks.py.

Lloyd-Max levels for N(0, 1), by fixed-point iteration on the exact density; the grid that they are stored on; and the levels of trellises,
by the same iteration (each level the mean of what it is chosen for) on a sample, through the encoder that ships.

python eval/derive_codebooks.py            prints them
python eval/derive_codebooks.py --check    compares them with the shipped ones
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from scipy.special import ndtr, ndtri

from qkvcache.formats.codebooks import GRID, LLOYD_MAX, TRELLIS
from qkvcache.formats.trellis import DROPPED, FINE, search

BITS = (2, 3, 4)
MOST = {2: 128, 3: 128, 4: 64}
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


TRELLIS_GRID = 64
"""Steps of the grid on either side of zero: kernels read levels as bytes whose upper bit is 0."""


def trellis(bits: int, sample: np.ndarray, rounds: int = 60) -> tuple[float, tuple[int, ...], float]:
    """`(step, counts, distortion)` as in `codebooks.TRELLIS`, for a `sample` of N(0, 1) in blocks of 16."""
    top, half = TRELLIS_GRID - 0.5, 2**bits
    x = torch.from_numpy(sample).float()

    def chosen(levels: np.ndarray, part: float) -> tuple[np.ndarray, np.ndarray]:
        """Which positive level each channel gets, and the channel, mirrored where it gets a negative one."""
        path, index = (side.numpy() for side in search(x, part, tuple(int(n) for n in np.rint(levels / part)), DROPPED[bits]))
        code = 4 * index + 2 * (path ^ np.roll(path, -2, -1)) + np.roll(path, -1, -1)
        return np.where(code < half, half - 1 - code, code - half), np.where(code < half, -sample, sample)

    levels = 1.1 * ndtri(0.5 + (np.arange(half) + 0.5) / (2 * half))
    for _ in range(rounds):
        rank, mirrored = chosen(levels, levels[-1] / top / FINE)
        mass = np.bincount(rank.ravel())
        levels = np.bincount(rank.ravel(), mirrored.ravel()) / mass

    def rounded(step: float) -> np.ndarray:
        return np.clip(np.rint(levels / step - 0.5), 0, top - 0.5)

    steps = levels[-1] / top * np.linspace(0.98, 1.1, 1201)
    step = min(steps, key=lambda step: float((mass * ((rounded(step) + 0.5) * step - levels) ** 2).sum()))
    counts = rounded(step)
    rank, mirrored = chosen((counts + 0.5) * step, step / FINE)
    return step, tuple(int(n) for n in counts), float(((mirrored - ((counts + 0.5) * step)[rank]) ** 2).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the shipped constants; exit status 1 if they differ")
    check = parser.parse_args().check
    for bits in BITS:
        levels = lloyd_max(bits)
        print(f"    {bits}: _mirrored({', '.join(repr(float(level)) for level in levels)}),  # distortion {distortion(levels):.6f}")
        if check:
            shipped = np.array(LLOYD_MAX[bits])
            off = np.abs(np.concatenate([-levels[::-1], levels]) - shipped).max()
            if off > 1e-12:
                raise SystemExit(f"the shipped {bits}-bit codebook is off by {off:.3g}: replace it with the line above")
        step, counts = grid(levels, MOST[bits])
        print(f"    {bits}: ({step:.7f}, {counts}),  # grid")
        if check and (counts != GRID[bits][1] or abs(step / GRID[bits][0] - 1) > 5e-3):
            raise SystemExit(f"the shipped {bits}-bit grid is {GRID[bits]}: replace it with the line above")

    sample = np.random.default_rng(0).standard_normal((20_000, 16))
    for bits in TRELLIS:
        step, counts, error = trellis(bits, sample)
        print(f"    {bits}: ({step:.6f}, {counts}),  # trellis, distortion {error:.5f}")
        if check and (abs(step / TRELLIS[bits][0] - 1) > 1e-3 or np.abs(np.subtract(counts, TRELLIS[bits][1])).max() > 1):
            raise SystemExit(f"the shipped {bits}-bit trellis is {TRELLIS[bits]}: replace it with the line above")


if __name__ == "__main__":
    main()
