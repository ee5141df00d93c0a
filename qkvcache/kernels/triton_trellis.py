"""The trellis of `formats/trellis.py` for kernels: the search for paths, and levels of codes.

A thread has whole blocks: their 16 channels are 16 tensors, so that the search is straight code without memory. It is exact in integers,
and the order of ties is that of the reference. No step depends on more than 15 others, whatever the head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats.codebooks import TRELLIS
from ..formats.trellis import DROPPED, FINE, LIMIT, MOST
from .triton_levels import TRELLIS_WORDS, signed_levels

_LIMIT, _MOST = tl.constexpr(LIMIT), tl.constexpr(MOST)
_DROPPED = tl.constexpr((0, 0, *(DROPPED[bits] for bits in (2, 3, 4))))
_PARTS = tl.constexpr((0.0, 0.0, *(FINE / TRELLIS[bits][0] for bits in (2, 3, 4))))
TRELLIS_HALF_STEPS = tl.constexpr((0.0, 0.0, *(TRELLIS[bits][0] / 2 for bits in (2, 3, 4))))
"""By bits: half a step of the grid that levels lie on."""


def _levels(bits: int) -> tuple[int, ...]:
    """In parts of a step, ascending."""
    positive = [FINE * n + FINE // 2 for n in TRELLIS[bits][1]]
    return tuple([-n for n in reversed(positive)] + positive)


_LEVELS = tl.constexpr(((), (), _levels(2), _levels(3), _levels(4)))


@triton.jit
def subset_at(path, at):
    """Of the channel at position `at` of blocks; `path` are their 16 bits, twice."""
    return 2 * (((path >> at) ^ (path >> (at + 2))) & 1) + ((path >> (at + 1)) & 1)


@triton.jit
def _in_time(x, D: tl.constexpr, P: tl.constexpr):
    """Channels `[N, P]` to sixteen tensors `[N, P / 16]`, in the order of the path."""
    N: tl.constexpr = x.shape[0]
    if D == P:
        x = tl.permute(tl.reshape(x, [N, 2, P // 16, 4, 2]), [0, 2, 3, 1, 4])
    else:
        c = tl.arange(0, P)
        t = c % 16
        c = tl.minimum((c // 16 + t // 2 % 2 * (D // 16)) * 8 + t // 4 * 2 + t % 2, P - 1)
        x = tl.gather(x, tl.broadcast_to(c[None, :], x.shape), 1)
    tiles = (tl.reshape(x, [N, P // 16, 2, 2, 2, 2]),)
    for step in tl.static_range(4):
        first = ()
        second = ()
        for i in tl.static_range(2**step):
            left, right = tl.split(tiles[i])
            first = first + (left,)  # type: ignore[assignment]
            second = second + (right,)  # type: ignore[assignment]
        tiles = first + second  # type: ignore[assignment]
    return tiles


@triton.jit
def _errors(x, BITS: tl.constexpr):
    """Of each subset what its nearest level errs by, above 14 bits of zeros; and which of its levels these are, three bits each."""
    fine = tl.minimum(tl.maximum(tl.floor(x * _PARTS[BITS]), -_LIMIT), _LIMIT).to(tl.int32)
    errors = ()
    least = tl.full(x.shape, 0x7FFFFFFF, tl.int32)
    indices = tl.zeros(x.shape, tl.int32)
    for s in tl.static_range(4):
        nearest = tl.abs(fine - _LEVELS[BITS][s]) << 3
        for i in tl.static_range(1, 2 ** (BITS - 1)):
            nearest = tl.minimum(nearest, (tl.abs(fine - _LEVELS[BITS][4 * i + s]) << 3) + i)
        indices |= (nearest & 7) << (3 * s)
        nearest = nearest >> 3
        errors = errors + (nearest * nearest,)  # type: ignore[assignment]
        least = tl.minimum(least, errors[s])
    scaled = ()
    for s in tl.static_range(4):
        scaled = scaled + (tl.minimum((errors[s] - least) >> _DROPPED[BITS], _MOST) << 14,)  # type: ignore[assignment]
    return scaled, indices


@triton.jit
def _closed(r, NEWER: tl.constexpr, OLDER: tl.constexpr):
    """`trellis._closed`; `r[4 * t + subset]`. The states s00 to s11 are the two latest bits, the older one first."""
    first, second = r[2 * OLDER + NEWER], r[2 * (1 - OLDER) + NEWER] + 1
    s00, s01 = first + r[4 + 2 * NEWER], first + r[4 + 2 * (1 - NEWER)] + 2
    s10, s11 = second + r[5 + 2 * NEWER], second + r[5 + 2 * (1 - NEWER)] + 2
    for t in tl.static_range(2, 14):
        n00 = tl.minimum(s00 + r[4 * t], s10 + r[4 * t + 2])
        n01 = tl.minimum(s00 + r[4 * t + 2], s10 + r[4 * t]) + (1 << t)
        n10 = tl.minimum(s01 + r[4 * t + 1], s11 + r[4 * t + 3])
        n11 = tl.minimum(s01 + r[4 * t + 3], s11 + r[4 * t + 1]) + (1 << t)
        s00, s01, s10, s11 = n00, n01, n10, n11
    # The last two bits are those of the start.
    zero = tl.minimum(s00 + r[56 + 2 * OLDER], s10 + r[56 + 2 * (1 - OLDER)])
    one = tl.minimum(s01 + r[57 + 2 * OLDER], s11 + r[57 + 2 * (1 - OLDER)])
    return tl.minimum(zero + r[60 + 2 * NEWER + OLDER], one + r[60 + 2 * (1 - NEWER) + OLDER])


@triton.jit
def trellis_words(x, BITS: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Blocks of channels `[N, P]` to words `[N, P / 16]`: paths; of 4 bits which levels are negative; indices for the first half of a plane
    and (of 2 bits: none) for the second; and the sum of the squares of twice the levels, in steps of the grid."""
    tiles = _in_time(x, D, P)
    r = ()
    indices = ()
    for t in tl.static_range(16):
        errors, index = _errors(tiles[t], BITS)
        r = r + errors
        indices = indices + (index,)  # type: ignore[assignment]
    best = tl.full(tiles[0].shape, 0x7FFFFFFF, tl.int32)
    path = tl.zeros(tiles[0].shape, tl.int32)
    for start in tl.static_range(4):
        found = _closed(r, start // 2, start % 2)
        path = tl.where(found < best, ((found & 0x3FFF) << 2) | start, path)
        best = tl.minimum(found, best)
    twice = path | (path << 16)
    negatives = tl.zeros(path.shape, tl.int32)
    low = tl.zeros(path.shape, tl.int32)
    more = tl.zeros(path.shape, tl.int32)
    squares = tl.zeros(path.shape, tl.int32)
    for t in tl.static_range(16):
        subset = subset_at(twice, t)
        index = (indices[t] >> (3 * subset)) & 7
        level = signed_levels(4 * index + subset, 2**BITS, *TRELLIS_WORDS[BITS])
        squares += level * level
        if BITS == 4:
            negative = 1 - (index >> 2)
            negatives |= negative << t
            index = (index & 3) ^ (3 * negative)
        if BITS == 2:
            low |= index << (t ^ 2)
        elif t // 2 % 2 == 0:
            low |= index << (t // 4 * 4 + t % 2 * 2)
        else:
            more |= index << (t // 4 * 4 + t % 2 * 2)
    if D != P:
        squares = tl.where((tl.arange(0, P // 16) < D // 16)[None, :], squares, 0)
    return path, negatives, low, more, tl.sum(squares, 1)
