"""Derives the constants of qkvcache/formats/codebooks.py: Lloyd-Max for N(0, 1), by fixed-point iteration on the exact density.

python eval/derive_codebooks.py            prints them
python eval/derive_codebooks.py --check    compares them with the shipped ones
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.special import ndtr

BITS = (2, 3, 4)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the shipped constants; exit status 1 if they differ")
    check = parser.parse_args().check
    for bits in BITS:
        levels = lloyd_max(bits)
        print(f"    {bits}: _mirrored({', '.join(repr(float(level)) for level in levels)}),  # distortion {distortion(levels):.6f}")
        if check:
            from qkvcache.formats.codebooks import LLOYD_MAX

            shipped = np.array(LLOYD_MAX[bits])
            off = np.abs(np.concatenate([-levels[::-1], levels]) - shipped).max()
            if off > 1e-12:
                raise SystemExit(f"the shipped {bits}-bit codebook is off by {off:.3g}: replace it with the line above")


if __name__ == "__main__":
    main()
