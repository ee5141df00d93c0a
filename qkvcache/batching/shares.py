"""The rows of a batch whose first pages are the same pages, as samples of one prompt have: attention reads these once for several rows."""

from __future__ import annotations

import numpy

from ..kernels.pages import LEAST_SPARED, TOGETHER
from .layout import BlockLayout
from .rings import Ints


def shares_of(blocks: numpy.ndarray, lengths: Ints, layout: BlockLayout, together: int) -> numpy.ndarray | None:
    """The shares of rows with the `blocks`, int32 `[B, P]`, and `lengths` tokens in pages, `[B]`, as of `Splits.of`; None where reading
    shared pages once for `together` rows does not pay."""
    if together == 1 or layout.window is not None:
        return None
    spared, groups = _groups(blocks, lengths // layout.page_size, numpy.arange(len(lengths)), 0, together)
    if spared * layout.page_size * layout.heads < LEAST_SPARED:
        return None
    shares = numpy.zeros((len(lengths), 1 + TOGETHER), numpy.int32)
    for rows, pages in groups:
        for part in numpy.array_split(rows, -(-len(rows) // together)):
            if len(part) > 1:
                shares[part, 0], shares[part, 1:] = pages * layout.page_size, part[0]
                shares[part, 1 : 1 + len(part)] = part
    return shares


def _groups(blocks: numpy.ndarray, complete: Ints, rows: Ints, begin: int, together: int) -> tuple[int, list[tuple[Ints, int]]]:
    """Groups of `rows`, whose first `begin` pages are the same, that share more of their `complete` pages: how many pages fewer are read,
    and the rows and pages of each group. A group is divided where its parts spare more pages than the whole."""
    rows = rows[complete[rows] > begin]
    firsts = blocks[rows, begin] if len(rows) else rows
    names, counts = numpy.unique(firsts, return_counts=True)
    spared, groups = 0, list[tuple[Ints, int]]()
    for name in names[counts > 1]:
        mine = rows[firsts == name]
        end = int(complete[mine].min())
        same = (blocks[mine, begin:end] == blocks[mine[0], begin:end]).all(0)
        end = begin + (len(same) if same.all() else int(same.argmin()))
        found = (len(mine) - -(-len(mine) // together)) * end, [(mine, end)]
        parts = _groups(blocks, complete, mine, end, together)
        more, chosen = parts if parts[0] > found[0] else found
        spared, groups = spared + more, groups + chosen
    return spared, groups
