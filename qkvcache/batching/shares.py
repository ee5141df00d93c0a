"""The rows of a batch whose first pages are the same pages, as samples of one prompt have: attention reads these once for several rows."""

from __future__ import annotations

import numpy

from ..kernels.work import TOGETHER
from .layout import BlockLayout
from .rings import Ints

LEAST_SPARED = 3 * 2**16
"""Tokens times KV heads that are not read again, from which on another launch pays (`eval/bench_branches.py --samples` on an H100)."""
COST = 2
"""The number of rows that read their tokens by themselves in the time in which the tokens of several rows are read together."""


def shares_of(blocks: numpy.ndarray, complete: Ints, layout: BlockLayout) -> numpy.ndarray | None:
    """The shares of rows with the `blocks`, int32 `[B, P]`, and so many `complete` pages, `[B]`, as in `Splits.of`; None where reading
    shared pages once for several rows does not pay."""
    spared, groups = _groups(blocks, complete, numpy.arange(len(complete)), 0)
    if spared * layout.page_size * layout.heads < LEAST_SPARED:
        return None
    shares = numpy.zeros((len(complete), 1 + TOGETHER), numpy.int32)
    for rows, pages in groups:
        for part in numpy.array_split(rows, -(-len(rows) // TOGETHER)):
            shares[part, 0], shares[part, 1:] = pages * layout.page_size, part[0]
            shares[part, 1 : 1 + len(part)] = part
    return shares


def _groups(blocks: numpy.ndarray, complete: Ints, rows: Ints, begin: int) -> tuple[int, list[tuple[Ints, int]]]:
    """Groups of `rows`, whose first `begin` pages are the same, that share more of their `complete` pages: how many pages fewer are read,
    and the rows and pages of each group. A group is divided where its parts spare more pages than the whole."""
    rows = rows[complete[rows] > begin]
    if len(rows) <= COST:
        return 0, []
    firsts = blocks[rows, begin]
    names, counts = numpy.unique(firsts, return_counts=True)
    spared, groups = 0, list[tuple[Ints, int]]()
    for name in names[counts > COST]:
        mine = rows[firsts == name]
        end = int(complete[mine].min())
        same = (blocks[mine, begin:end] == blocks[mine[0], begin:end]).all(0)
        end = begin + (len(same) if same.all() else int(same.argmin()))
        fewer = (len(mine) - COST * -(-len(mine) // TOGETHER)) * end
        found = (fewer, [(mine, end)]) if fewer > 0 else (0, [])
        parts = _groups(blocks, complete, mine, end)
        more, chosen = parts if parts[0] > found[0] else found
        spared, groups = spared + more, groups + chosen
    return spared, groups
