"""The slots that a forward pass reads and writes. They are planned on the host for all requests at once, and sent to
the device once for all layers.

A step in which every request has one token is described by transformers' block table, at fixed addresses, so that it
can be replayed as a CUDA graph: each row has a header and then its blocks. In other batches (`step_of_batch`), rows
with one token and a past are decoded together, and prompts or chunks of prompts are read together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy
import torch
from torch import Tensor

from ..kernels import Splits, gather_tiles, split_rows
from ..kernels.paged_inputs import BEGIN, COLUMNS, LENGTH, RING_ROW, RING_START, RING_TOKENS, SINK_ROW, SINKS
from ..kernels.work import TOGETHER
from .layout import BlockLayout
from .rings import Ints, Rings
from .shares import shares_of
from .varlen import Sequences

PAGE_SLOT, RING_SLOT, SINK_SLOT = range(len(COLUMNS), len(COLUMNS) + 3)
SHARES = SINK_SLOT + 1
HEADER = SHARES + 1 + TOGETHER
"""Columns of the block table before the blocks: the columns of `PagedInputs.rows`, the slots of the new token, and what
`Splits.of` has of shared tokens. Slot 0 is never read. Blocks begin at a multiple of 16 bytes as in other batches;
otherwise Triton would compile its kernels twice."""


@dataclass(slots=True)
class Batch:
    """The next tokens of requests, from `past` to `end`: one number for each request, int64 `[B]`."""

    layout: BlockLayout
    rings: Rings
    blocks: numpy.ndarray
    """The blocks of each request, int32 `[B, P]`. Rows are padded; padding is not read."""
    past: Ints
    end: Ints
    ring: Ints
    since: Ints
    """The rows of the rings, and the first token from which each ring has all, as far as it has slots."""
    tables: BlockTables | None = None
    """Finds the tokens that rows share; None: each row reads its own."""
    shares: numpy.ndarray | None = None
    """The shares of the rows of `table`, as in `shares_of`."""

    @property
    def count(self) -> Ints:
        return self.end - self.past

    @property
    def tokens(self) -> int:
        """The number of new tokens of all requests."""
        return int(self.count.sum())

    def pick(self, at: Ints | list[int]) -> Batch:
        """The requests at the indices `at` of the batch."""
        past, end, ring, since = (x[at] for x in (self.past, self.end, self.ring, self.since))
        longest = -(-int(end.max(initial=1)) // self.layout.page_size)
        return Batch(self.layout, self.rings, self.blocks[at, :longest], past, end, ring, since, self.tables)

    @property
    def past_read(self) -> Ints:
        """The number of past tokens that the new ones attend to."""
        window = self.layout.window
        return self.past if window is None else numpy.minimum(self.past, window - 1)

    def before(self) -> tuple[Ints, numpy.ndarray]:
        """The columns and the table of `PagedInputs` for the past that the new tokens read."""
        return self._read(self.past, self.past - self.past_read)

    def after(self) -> tuple[Ints, numpy.ndarray]:
        """The columns and the table of `PagedInputs` for the last token of each request, once all are written."""
        window = self.layout.window
        return self._read(self.end, 0 * self.end if window is None else numpy.maximum(self.end - window, 0))

    def _read(self, end: Ints, begin: Ints) -> tuple[Ints, numpy.ndarray]:
        """Columns `[B, 8]` and table of the tokens from `begin` to `end`. Tables of windows begin with their page."""
        layout, table = self.layout, self.blocks
        sinks = numpy.minimum(end, layout.exact)
        begin = numpy.maximum(begin, sinks)
        kept = self.rings.tokens(self.since, end, begin)
        columns = numpy.zeros((len(end), len(COLUMNS)), numpy.int64)
        columns[:, BEGIN], columns[:, SINKS], columns[:, LENGTH] = begin, sinks, end - kept
        columns[:, SINK_ROW], columns[:, RING_ROW], columns[:, RING_TOKENS] = table[:, 0], self.ring, kept
        columns[:, RING_START] = columns[:, LENGTH] % self.rings.slots
        if layout.window is not None:
            first = begin // layout.page_size
            columns[:, [BEGIN, LENGTH]] -= (first * layout.page_size)[:, None]
            at = (first[:, None] + numpy.arange(layout.pages_read)) % layout.blocks_held
            table = numpy.take_along_axis(table, numpy.minimum(at, table.shape[1] - 1), axis=1)
        return columns, table

    def writes(self) -> numpy.ndarray:
        """The slots of the new tokens in pages, in rings and among exact first tokens, int64 `[3, T]`; -1 for tokens
        that are not stored there."""
        size, sinks, slots = self.layout.page_size, self.layout.exact, self.rings.slots
        count = self.count
        of = numpy.arange(len(count)).repeat(count)
        place = numpy.arange(len(of)) + (self.past + count - count.cumsum())[of]
        kept = numpy.maximum(self.end - slots, sinks if self.rings.read else 0)[of]
        writes = numpy.empty((3, len(of)), numpy.int64)
        page = place // size if self.layout.blocks_held is None else place // size % self.layout.blocks_held
        writes[0] = self.blocks[of, page]  # int64 from here on
        writes[0] = writes[0] * size + place % size
        if self.layout.window is not None:
            writes[0, place < (self.end - self.layout.window)[of]] = -1
        writes[1] = numpy.where(place < kept, -1, self.ring[of] * slots + place % slots)
        writes[2] = self.blocks[of, 0]
        writes[2] = numpy.where(place < sinks, writes[2] * sinks + place, -1)
        return writes

    def table(self) -> numpy.ndarray:
        """The rows of the block table, int32 `[B, HEADER + P]`, for requests with one new token each."""
        columns, blocks = self.after()
        if self.tables is not None:
            self.shares = self.tables.shares(self.ring, blocks, columns[:, LENGTH], self.layout)
        table = numpy.zeros((len(columns), HEADER + blocks.shape[1]), numpy.int32)
        table[:, : len(COLUMNS)] = columns
        table[:, PAGE_SLOT : SINK_SLOT + 1] = numpy.maximum(self.writes(), 0).T
        if self.shares is not None:
            table[:, SHARES:HEADER] = self.shares
        table[:, HEADER:] = blocks
        return table


class BlockTables:
    """The blocks of requests, in one row for each ring, and the rows that share blocks. They are kept from step to step: only new blocks
    are copied, and shares change only with other rows, exchanged blocks, or another shared page that is complete."""

    def __init__(self, rings: int):
        self._blocks = numpy.zeros((rings + 1, 16), numpy.int32)
        self._known = numpy.zeros(rings + 1, numpy.int64)
        self._stale = numpy.zeros(rings + 1, bool)
        self._rows: Ints | None = None
        """The rows of the latest `shares`, or None if their blocks were exchanged since."""
        self._shared: Ints
        """For each of them, the number of first pages that others may share, and of those the complete ones."""
        self._complete: Ints
        self._shares: numpy.ndarray | None = None

    def forget(self, rows: Ints | int) -> None:
        """Copies `rows` anew at the next read, because they belong to other requests now or their blocks were exchanged."""
        self._stale[rows] = True

    def read(self, rows: Ints, lists: Sequence[list[int]]) -> numpy.ndarray:
        """The block lists of `rows` as one array, int32 `[B, P]`. Shorter lists are padded with 0, which is not read."""
        counts = numpy.fromiter(map(len, lists), numpy.int64, len(lists))
        longest = int(counts.max())
        if longest > self._blocks.shape[1]:
            self._blocks = numpy.pad(self._blocks, ((0, 0), (0, longest)))
        for i in ((counts != self._known[rows]) | self._stale[rows]).nonzero()[0]:
            row, known = rows[i], int(self._known[rows[i]])
            begin = 0 if self._stale[row] else known
            if not numpy.array_equal(self._blocks[row, begin:known], lists[i][begin:known]):
                self._rows = None
            self._blocks[row, begin : counts[i]] = lists[i][begin:]
            self._blocks[row, counts[i] :] = 0
        self._known[rows], self._stale[rows] = counts, False
        return self._blocks[rows, :longest]

    def shares(self, rows: Ints, blocks: numpy.ndarray, lengths: Ints, layout: BlockLayout) -> numpy.ndarray | None:
        """`shares_of` rows with these blocks, as they were read last, and `lengths` tokens in pages."""
        complete = lengths // layout.page_size
        if self._rows is None or not numpy.array_equal(rows, self._rows):
            uses = numpy.bincount(blocks.ravel())
            uses[0] = 0  # padding
            self._rows = rows
            self._shared = (numpy.arange(1, blocks.shape[1] + 1) * (uses > 1)[blocks]).max(1)
        elif numpy.array_equal(numpy.minimum(complete, self._shared), self._complete):
            return self._shares
        self._complete = numpy.minimum(complete, self._shared)
        self._shares = shares_of(blocks, self._complete, layout)
        return self._shares


@dataclass
class Rows:
    """Rows in the form of `PagedInputs.rows`: rows with one new token each, with their splits, or the past of chunks.

    at: indices of their queries in the batch; None: the rows are the whole batch.
    tiles: `gather_tiles` of all tokens of chunks.
    plans: plans of attention that a layer has made for the layers after it, by options.
    """

    columns: Tensor
    table: Tensor
    max_length: int
    splits: Splits | None = None
    at: slice | Tensor | None = None
    tiles: Tensor | None = None
    plans: dict[tuple, Any] = field(default_factory=dict)


class PromptChunks:
    """Consecutive prompts, or parts of prompts, in a batch: its queries `begin` to `end`. Attention reads the tokens of all of them one
    after another, only the new tokens if `past` is None. Where rings are not read, it reads the new tokens in pages, too.

    batch: the requests alone.
    tokens: number of past and new tokens.
    fits: whether the scratch has room for these tokens; a single row may have more.
    columns: the columns of their past, on the host.
    """

    sequences: Sequences
    past: Rows | None = None

    def __init__(self, batch: Batch, begin: int, scratch_tokens: int):
        self.batch, self.begin, self.end = batch, begin, begin + batch.tokens
        self.keys = batch.count + batch.past_read
        self.tokens = int(self.keys.sum())
        self.fits = self.tokens <= scratch_tokens

    def numbers(self) -> Sequence[Ints | list[int]]:
        """The numbers to send to the device: the first query of each row and, if any row has a past, also the first
        token of each row, columns, tables and tiles."""
        starts = [numpy.concatenate([[0], numbers.cumsum()]) for numbers in (self.batch.count, self.keys)]
        reads_new = self.batch.rings.read
        if reads_new and not self.batch.past_read.any():
            return starts[:1]
        self.columns, table = self.batch.before() if reads_new else self.batch.after()
        return [*starts, self.columns.ravel(), table.ravel(), gather_tiles(self.keys.tolist())]

    def receive(self, sent: Iterator[Tensor]) -> None:
        """Receives its `numbers` as tensors on the device."""
        queries, keys, starts = self.batch.count.tolist(), self.keys.tolist(), next(sent)
        alone = queries == keys and self.batch.rings.read
        self.sequences = Sequences(queries, keys, (starts, starts if alone else next(sent)))
        if not alone:
            columns, table, tiles = (next(sent) for _ in range(3))
            longest = int(self.columns[:, LENGTH].max())
            self.past = Rows(columns.view(len(keys), -1), table.view(len(keys), -1), longest, tiles=tiles.view(-1, 2))


@dataclass
class BatchStep:
    """One forward pass: the slots that it writes, as in `Batch.writes`, its rows with one token, its chunks of prompts, and its number of
    tokens without padding."""

    writes: Sequence[Tensor]
    rows: Rows | None
    chunks: list[PromptChunks] = field(default_factory=list)
    tokens: int = 0


def step_of_table(table: Tensor, layout: BlockLayout, shares: bool) -> BatchStep:
    """The step of a block table, int32 `[B, HEADER + P]`, whose rows without a request hold -1. `shares`: whether rows
    share tokens that are read once."""
    if layout.pages_read is not None:
        table = table[:, : HEADER + layout.pages_read]
    table = table.clamp_min(0)
    max_length = (table.shape[1] - HEADER) * layout.page_size
    if table.device.type == "cpu":  # the torch reference reads up to the maximum
        max_length = max(int(table[:, LENGTH].max()), 1)
    writes = table[:, PAGE_SLOT : SINK_SLOT + 1].long().unbind(1)
    return BatchStep(writes, _rows_of(table, max_length, layout, shares))


def _rows_of(table: Tensor, max_length: int, layout: BlockLayout, shares: bool, at: slice | Tensor | None = None) -> Rows:
    shared = table[:, SHARES:HEADER] if shares else None
    splits = split_rows(table[:, LENGTH], max_length, layout.codecs, layout.heads, layout.head_dim, shared)
    return Rows(table[:, : len(COLUMNS)], table[:, HEADER:], max_length, splits, at)


def step_of_batch(batch: Batch, scratch_tokens: int, tokens: int, device: torch.device) -> BatchStep:
    """The step of a batch padded at its end to `tokens` tokens. Chunks of prompts read their past through a scratch of `scratch_tokens`."""
    count = batch.count
    begins = count.cumsum() - count
    single = (count == 1) & (batch.past > 0) & batch.rings.read
    chunks = [PromptChunks(batch.pick(at), int(begins[at[0]]), scratch_tokens) for at in _joined(batch, ~single, scratch_tokens)]
    slots = numpy.full((3, tokens), -1)
    slots[:, : batch.tokens] = batch.writes()
    places = begins[single]
    *writes, indices = send([*slots, places], torch.int64, device)
    decoded = batch.pick(single)
    table = decoded.table().ravel() if len(places) else ()
    sent = iter(send([table, *(part for group in chunks for part in group.numbers())], torch.int32, device))
    on_device, rows = next(sent), None
    for group in chunks:
        group.receive(sent)
    if len(places):
        begin, end = int(places[0]), int(places[-1]) + 1
        at = slice(begin, end) if end - begin == len(places) else indices
        on_device = on_device.view(len(places), -1)
        max_length = min(int(decoded.end.max()), (on_device.shape[1] - HEADER) * batch.layout.page_size)
        rows = _rows_of(on_device, max_length, batch.layout, decoded.shares is not None, at)
    return BatchStep(writes, rows, chunks, batch.tokens)


def _joined(batch: Batch, prompts: numpy.ndarray, scratch_tokens: int) -> list[list[int]]:
    """The indices of the requests with `prompts`, those together that follow one another and fit into the scratch."""
    groups: list[list[int]] = []
    tokens, room = batch.count + batch.past_read, 0
    for at in prompts.nonzero()[0].tolist():
        if groups and groups[-1][-1] == at - 1 and tokens[at] <= room:
            groups[-1].append(at)
        else:
            groups.append([at])
            room = scratch_tokens
        room -= tokens[at]
    return groups


def send(parts: Sequence[Sequence[int] | numpy.ndarray], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Copies `parts` to the device, in one copy and without waiting, and returns them as tensors `[N]`. Each begins at
    a multiple of 16 bytes; otherwise Triton would compile its kernels twice."""
    unit = 16 // dtype.itemsize
    lengths = [len(part) for part in parts]
    begins = list(accumulate((-(-length // unit) * unit for length in lengths), initial=0))
    numbers = torch.zeros(begins[-1], dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    for begin, length, part in zip(begins, lengths, parts, strict=False):
        numbers.numpy()[begin : begin + length] = part
    tensor = numbers.to(device, non_blocking=True)
    return [tensor[begin : begin + length] for begin, length in zip(begins, lengths, strict=False)]
