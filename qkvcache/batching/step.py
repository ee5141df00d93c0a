"""The slots that a forward pass reads and writes, planned on the host for all requests at once, and sent to the device once for all layers.

Steps in which every request has one token are described by transformers' block table, at fixed addresses, so that they can be replayed as
CUDA graphs: a header for each row, and then its blocks. In other batches (`step_of_batch`), rows with one token and a past are decoded
together, and prompts, or chunks of them, are read together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy
import torch
from torch import Tensor

from ..attention.varlen import Sequences
from ..kernels import Splits, split_rows
from ..kernels.pages import BEGIN, COLUMNS, RING_ROW, RING_START, RING_TOKENS, SINK_ROW, SINKS, gather_tiles
from .layout import PageLayout
from .rings import Ints, Rings

LENGTH, PAGE_SLOT, RING_SLOT, SINK_SLOT = range(8, 12)
HEADER = SINK_SLOT + 1
"""Columns of the block table before the blocks: those of `PagedInputs.rows`, tokens in the pages, and the slots of the new token; slot 0 is
never read. Lengths and blocks begin at multiples of 16 bytes, as those of other batches do, for which Triton would compile
its kernels again otherwise."""


@dataclass(slots=True)
class Row:
    """The next tokens, `past` to `end`, of a request with these blocks, of a prompt or of a part of it."""

    blocks: list[int]
    past: int
    end: int
    past_sinks: int
    """First tokens of the past that are exact."""
    slots: int
    """Slots of its ring."""
    ring: int
    """The row of its ring."""
    past_ring_tokens: int
    """Tokens of the past that are read from the ring."""

    @property
    def count(self) -> int:
        return self.end - self.past

    @property
    def past_quantized(self) -> int:
        """Tokens of the past that are read from the pages, or as exact first tokens."""
        return self.past - self.past_ring_tokens

    def past_columns(self) -> list[int]:
        """The columns of `PagedInputs` before the new tokens are written."""
        sinks = self.past_sinks
        return [sinks, self.blocks[0], sinks, self.ring, self.past_quantized % self.slots, self.past_ring_tokens]


@dataclass(slots=True)
class Batch:
    """The next tokens, `past` to `end`, of all requests of a batch: numbers of each, int64 `[B]`."""

    layout: PageLayout
    rings: Rings
    blocks: numpy.ndarray
    """Int32 `[B, P]`; those of requests with fewer than others are followed by any numbers."""
    past: Ints
    end: Ints
    ring: Ints
    since: Ints
    """Rows of the rings, and the first token of which they have all that follow, as far as there are slots."""

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return int((self.end - self.past).sum())

    def pick(self, at: Ints) -> Batch:
        """The requests at these places of the batch."""
        past, end, ring, since = (x[at] for x in (self.past, self.end, self.ring, self.since))
        longest = -(-int(end.max(initial=1)) // self.layout.page_size)
        return Batch(self.layout, self.rings, self.blocks[at, :longest], past, end, ring, since)

    def row(self, at: int) -> Row:
        """The request at this place of the batch."""
        past, end, ring = (int(x[at]) for x in (self.past, self.end, self.ring))
        blocks, sinks = self.blocks[at, : -(-end // self.layout.page_size)].tolist(), self.layout.num_sink_tokens
        read = int(self.rings.tokens(self.since[at], self.past[at], sinks))
        return Row(blocks, past, end, min(past, sinks), self.rings.slots, ring, read)

    def writes(self) -> numpy.ndarray:
        """Slots of the new tokens, int64 `[3, T]`: of pages, of rings, and of first tokens; -1 for tokens that are not stored there."""
        size, sinks, slots = self.layout.page_size, self.layout.num_sink_tokens, self.rings.slots
        count = self.end - self.past
        of = numpy.arange(len(count)).repeat(count)
        place = numpy.arange(len(of)) + (self.past + count - count.cumsum())[of]
        kept = numpy.maximum(self.end - slots, sinks)[of]
        writes = numpy.empty((3, len(of)), numpy.int64)
        writes[0] = self.blocks[of, place // size]  # int64 from here on
        writes[0] = writes[0] * size + place % size
        writes[1] = numpy.where(place < kept, -1, self.ring[of] * slots + place % slots)
        writes[2] = self.blocks[of, 0]
        writes[2] = numpy.where(place < sinks, writes[2] * sinks + place, -1)
        return writes

    def columns(self) -> Ints:
        """The columns up to LENGTH, `[B, LENGTH + 1]`, after the new tokens are written."""
        sinks = self.layout.num_sink_tokens
        kept = self.rings.tokens(self.since, self.end, sinks)
        columns = numpy.zeros((len(self.end), LENGTH + 1), numpy.int64)
        columns[:, BEGIN] = columns[:, SINKS] = numpy.minimum(self.end, sinks)
        columns[:, SINK_ROW], columns[:, RING_ROW], columns[:, RING_TOKENS] = self.blocks[:, 0], self.ring, kept
        columns[:, LENGTH] = length = self.end - kept
        columns[:, RING_START] = length % self.rings.slots
        return columns

    def table(self) -> numpy.ndarray:
        """The rows of the block table, int32 `[B, HEADER + P]`, of requests with one new token each."""
        table = numpy.empty((len(self.end), HEADER + self.blocks.shape[1]), numpy.int32)
        table[:, : LENGTH + 1] = self.columns()
        table[:, PAGE_SLOT:HEADER] = numpy.maximum(self.writes(), 0).T
        table[:, HEADER:] = self.blocks
        return table


class Tables:
    """The blocks of requests, a row for each ring, kept from step to step: of a list that grew, what is new is copied."""

    def __init__(self, rings: int):
        self._blocks = numpy.zeros((rings + 1, 16), numpy.int32)
        self._known = numpy.zeros(rings + 1, numpy.int64)

    def forget(self, rows: Ints | int) -> None:
        """These rows are other requests' now, or blocks were exchanged for others."""
        self._known[rows] = 0

    def read(self, rows: Ints, lists: Sequence[list[int]]) -> numpy.ndarray:
        """These lists, which belong to these rows, int32 `[B, P]`; after those that are shorter than others come any numbers."""
        counts = numpy.fromiter(map(len, lists), numpy.int64, len(lists))
        longest = int(counts.max())
        if longest > self._blocks.shape[1]:
            self._blocks = numpy.pad(self._blocks, ((0, 0), (0, longest)))
        for i in (counts != self._known[rows]).nonzero()[0]:
            row, known = rows[i], int(self._known[rows[i]])
            self._blocks[row, known : counts[i]] = lists[i][known:]
            self._known[row] = counts[i]
        return self._blocks[rows, :longest]


@dataclass
class Rows:
    """Rows as `PagedInputs` describes them: those with one new token each, with their splits, or the past of chunks.

    at: indices of their queries in the batch; None: they are the whole batch. tiles: `gather_tiles` of all tokens of chunks.
    """

    columns: Tensor
    lengths: Tensor
    table: Tensor
    max_length: int
    splits: Splits | None = None
    at: slice | Tensor | None = None
    tiles: Tensor | None = None


@dataclass
class Chunks:
    """Prompts, or parts of them, that follow one another in the batch: its queries `begin` to `end`. Attention reads the tokens of all
    of them one after another: the new ones alone if `past` is None."""

    rows: list[Row]
    begin: int
    end: int
    tokens: int
    """Those of the pasts, and new ones."""
    fits: bool
    """Whether the scratch has room for them; those of one row may be more."""
    sequences: Sequences = field(init=False)
    past: Rows | None = None

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.end, self.tokens = self.end + row.count, self.tokens + row.end

    def numbers(self) -> list[list[int]]:
        """What the device needs to know: the first query of each row and, if any row has a past, the first token; columns, lengths, tables
        and tiles."""
        starts = [[0, *accumulate(numbers)] for numbers in ((row.count for row in self.rows), (row.end for row in self.rows))]
        if not any(row.past for row in self.rows):
            return starts[:1]
        columns = [n for row in self.rows for n in row.past_columns()]
        lengths = [row.past_quantized for row in self.rows]
        return [*starts, columns, lengths, blocks_of(self.rows), gather_tiles([row.end for row in self.rows])]

    def receive(self, sent: Iterator[Tensor]) -> None:
        """Takes its `numbers` on the device."""
        queries, keys = [row.count for row in self.rows], [row.end for row in self.rows]
        starts = next(sent)
        if queries == keys:
            self.sequences = Sequences(queries, keys, (starts, starts))
            return
        self.sequences = Sequences(queries, keys, (starts, next(sent)))
        columns, lengths, table, tiles = (next(sent) for _ in range(4))
        longest = max(row.past_quantized for row in self.rows)
        self.past = Rows(columns.view(-1, len(COLUMNS)), lengths, table.view(len(lengths), -1), longest, tiles=tiles.view(-1, 2))


@dataclass
class Writes:
    """Slots of the new tokens, int64 `[T]` each: of pages, of rings, and of first tokens; negative for tokens that are not stored there."""

    pages: Tensor
    ring: Tensor
    sinks: Tensor


@dataclass
class Step:
    """One forward pass: the slots that it writes, its rows with one token, and its chunks of prompts; tokens without padding."""

    writes: Writes
    rows: Rows | None
    chunks: list[Chunks] = field(default_factory=list)
    tokens: int = 0


def step_of_table(table: Tensor, layout: PageLayout) -> Step:
    """The step of a block table, int32 `[B, HEADER + P]`, whose rows without a request hold -1."""
    table = table.clamp_min(0)
    max_length = (table.shape[1] - HEADER) * layout.page_size
    if table.device.type == "cpu":  # the torch reference reads up to the maximum
        max_length = max(int(table[:, LENGTH].max()), 1)
    columns = table[:, : len(COLUMNS)].contiguous()
    lengths = table[:, LENGTH]
    rows = Rows(columns, lengths, table[:, HEADER:], max_length, split_rows(lengths, max_length, layout.heads))
    return Step(Writes(*table[:, PAGE_SLOT : SINK_SLOT + 1].long().unbind(1)), rows)


def step_of_batch(batch: Batch, scratch_tokens: int, tokens: int, device: torch.device) -> Step:
    """The step of a batch of `tokens` tokens, the last of which may be padding; chunks of prompts read their past through a scratch of
    `scratch_tokens`."""
    count = batch.end - batch.past
    begins = count.cumsum() - count
    single = (count == 1) & (batch.past > 0)
    chunks: list[Chunks] = []
    for at in (~single).nonzero()[0]:
        row, begin = batch.row(at), int(begins[at])
        if chunks and chunks[-1].end == begin and chunks[-1].tokens + row.end <= scratch_tokens:
            chunks[-1].add(row)
        else:
            chunks.append(Chunks([row], begin, begin + row.count, row.end, row.end <= scratch_tokens))
    slots = numpy.full((3, tokens), -1)
    slots[:, : batch.tokens] = batch.writes()
    decoded, places = batch.pick(single), begins[single]
    *writes, indices = send([*slots, places], torch.int64, device)
    columns = decoded.columns()
    wanted: list[Sequence[int] | numpy.ndarray] = [
        columns[:, : len(COLUMNS)].ravel(),
        columns[:, LENGTH],
        decoded.blocks.ravel(),
        *(part for group in chunks for part in group.numbers()),
    ]
    sent = iter(send(wanted, torch.int32, device))
    columns_sent, lengths, table = (next(sent) for _ in range(3))
    for group in chunks:
        group.receive(sent)
    together = None
    if len(places):
        begin, end = int(places[0]), int(places[-1]) + 1
        at = slice(begin, end) if end - begin == len(places) else indices
        max_length = int(decoded.end.max())
        splits = split_rows(lengths, max_length, batch.layout.heads)
        together = Rows(columns_sent.view(-1, len(COLUMNS)), lengths, table.view(len(places), -1), max_length, splits, at)
    return Step(Writes(*writes), together, chunks, batch.tokens)


def blocks_of(rows: list[Row]) -> list[int]:
    """Their tables, each as long as the longest."""
    width = max((len(row.blocks) for row in rows), default=0)
    return [n for row in rows for n in (*row.blocks, *[0] * (width - len(row.blocks)))]


def send(parts: Sequence[Sequence[int] | numpy.ndarray], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Tensors `[N]` on the device, copied at once and without waiting. Each begins at a multiple of 16 bytes: for others Triton would
    compile its kernels again."""
    unit = 16 // dtype.itemsize
    lengths = [len(part) for part in parts]
    begins = list(accumulate((-(-length // unit) * unit for length in lengths), initial=0))
    numbers = torch.zeros(begins[-1], dtype=dtype, pin_memory=device.type == "cuda")
    for begin, length, part in zip(begins, lengths, parts, strict=False):
        numbers.numpy()[begin : begin + length] = part
    tensor = numbers.to(device, non_blocking=True)
    return [tensor[begin : begin + length] for begin, length in zip(begins, lengths, strict=False)]
