"""How the tokens of rows are divided among programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_SPLIT, BALANCED_SPLIT, MOST_SPLITS = 128, 512, 100
"""Fewest tokens of a split: fewer are not worth its partial outputs; fewest where the GPU has programs enough
without; most splits of a row, unless few rows are all that is read: joining more costs too much."""
SPLIT_GRAIN, WAVES = 64, 4
"""Splits begin at multiples of SPLIT_GRAIN tokens, a multiple of the tiles of all launches. WAVES: programs
that run one after another on each place of the GPU when there are many tokens, so that few places wait for
the last one."""


TOGETHER = 4
"""The most rows of a batch whose shared tokens one program reads. It takes the place of as many programs that read for one row."""


@dataclass(eq=False)
class Splits:
    """The work items of programs, where rows differ in length: the tokens of a row that each program reads.

    items       int32 `[N, 3]`: a row, the first of its tokens in the pages, and the end of them. Items of a row follow one another; the
                first of them is of its sinks and ring, and has a first token below 0. Items that are left over have no tokens
    firsts      int32 `[B + 1]`: the number of the first item of each row, and how many there are
    shared      int32 `[M, 3 + TOGETHER]`: the items of tokens that several rows share, which are no part of `items`: the first row, the
                first of the tokens, and the end of them; then these rows, with the first row in place of rows that are missing
    shares      int32 `[B, 3]`: of each row, its first item in `shared`, how many there are, and its place among the rows of the item
    """

    items: Tensor
    firsts: Tensor
    shared: Tensor | None = None
    shares: Tensor | None = None

    @staticmethod
    def of(lengths: Tensor, max_length: int, programs: int, shares: Tensor | None = None) -> Splits:
        """Divide rows with `lengths` tokens in pages, int32 `[B]`, each at most `max_length`, among
        `programs` that run at a time for a head. Splits have equal length, so that programs end together. The
        host does not wait for the device.

        shares: int32 `[B, 1 + TOGETHER]`: of each row, the first tokens that it shares, whole pages, and the rows that share them and are
            read together, in the form of `items`. None: no rows share tokens
        """
        if shares is not None:
            return _of_shared(lengths, max_length, programs, shares)
        batch = len(lengths)
        count = min(WAVES * programs + 2 * batch, (1 + min(-(-max_length // LEAST_SPLIT), MOST_SPLITS)) * batch)
        wave, longest = lengths.sum(dtype=torch.float64) / programs, lengths.amax().double()  # whatever torch's default dtype is
        each = torch.maximum(wave.clamp(LEAST_SPLIT, BALANCED_SPLIT), torch.maximum(wave / WAVES, longest / MOST_SPLITS))
        each = (each / SPLIT_GRAIN).ceil().int() * SPLIT_GRAIN
        firsts = torch.nn.functional.pad((1 + (lengths + (each - 1)) // each).cumsum(0, dtype=torch.int32), (1, 0))
        number = torch.arange(count, dtype=torch.int32, device=lengths.device)
        row = torch.searchsorted(firsts[1:], number, right=True, out_int32=True).clamp_max(batch - 1)
        begin = (number - firsts[row] - 1) * each
        return Splits(torch.stack([row, begin, torch.minimum(begin + each, lengths[row])], dim=1), firsts)


def _of_shared(lengths: Tensor, max_length: int, programs: int, shares: Tensor) -> Splits:
    """`Splits.of` rows that share tokens."""
    batch, shared, device = len(lengths), shares[:, 0], lengths.device
    own = Splits.of(lengths - shared, max_length, programs)
    beside = max(programs // TOGETHER, 1)
    row = torch.arange(batch, dtype=torch.int32, device=device)
    leads = shares[:, 1] == row
    wave = torch.where(leads, shared, 0).sum(dtype=torch.float64) / beside
    each = torch.maximum(wave.clamp_min(LEAST_SPLIT), shared.amax().double() / MOST_SPLITS)
    each = (each / SPLIT_GRAIN).ceil().int() * SPLIT_GRAIN
    pieces = (shared + (each - 1)) // each
    ends = (pieces * leads).cumsum(0, dtype=torch.int32)
    before = torch.nn.functional.pad(ends, (1, 0))
    place = (shares[:, 1:] == row[:, None]).int().argmax(1).int()
    joins = torch.stack([before[shares[:, 1].long()], pieces, place], dim=1)
    of, begin, end = own.items.unbind(1)
    after = torch.where(begin >= 0, shared[of], 0)
    items = torch.stack([of, begin + after, end + after], dim=1)
    number = torch.arange(beside + batch // 2, dtype=torch.int32, device=device)
    of = torch.searchsorted(ends, number, right=True, out_int32=True).clamp_max(batch - 1)
    begin = (number - before[of]) * each
    end = torch.where(number < ends[-1], torch.minimum(begin + each, shared[of]), begin)
    read = torch.cat([torch.stack([of, begin, end], dim=1), shares[of, 1:]], dim=1)
    return Splits(items, own.firsts, read, joins)


class Work(NamedTuple):
    """What programs read of the rows of a step, and what they read once for several rows.

    tokens      approximate sum of the lengths of all rows, where they differ much: long rows then get more splits. None: lengths are
                similar
    splits      of the rows, in place of `tokens`, for kernels that attend with one query of each row without accumulating attention
    branches    consecutive rows whose pages begin with the same `shared` tokens, a multiple of the page size; the batch is a multiple of
                them. Kernels may read these tokens once for all of them
    """

    tokens: int | None = None
    splits: Splits | None = None
    branches: int = 1
    shared: int = 0
