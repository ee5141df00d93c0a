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

import numpy
import torch
from torch import Tensor

from ..attention.full import Sequences
from ..kernels import Splits, split_rows
from ..kernels.pages import BEGIN, COLUMNS, LENGTH, RING_ROW, RING_START, RING_TOKENS, SINK_ROW, SINKS, gather_tiles
from .layout import BlockLayout
from .rings import Ints, Rings

PAGE_SLOT, RING_SLOT, SINK_SLOT = range(len(COLUMNS), len(COLUMNS) + 3)
HEADER = SINK_SLOT + 2
"""Columns of the block table before the blocks: those of `PagedInputs.rows`, and the slots of the new token. Slot 0 is
never read. Blocks begin at a multiple of 16 bytes as in other batches; otherwise Triton would compile its kernels
twice."""


@dataclass(slots=True)
class Row:
    """The next tokens of one request, from `past` to `end`: a prompt or a part of it. `blocks`: the request's
    blocks."""

    blocks: list[int]
    past: int
    end: int
    past_sinks: int
    """Number of first tokens of the past that are exact."""
    slots: int
    """Slots of its ring."""
    ring: int
    """The row of its ring."""
    past_ring_tokens: int
    """Number of tokens of the past that are read from the ring."""

    @property
    def count(self) -> int:
        return self.end - self.past

    @property
    def past_quantized(self) -> int:
        """Number of tokens of the past that are read from the pages or as exact first tokens."""
        return self.past - self.past_ring_tokens

    def past_columns(self) -> list[int]:
        """The columns of `PagedInputs.rows` before the new tokens are written."""
        sinks = self.past_sinks
        start = self.past_quantized % self.slots
        return [sinks, self.blocks[0], self.ring, sinks, start, self.past_ring_tokens, self.past_quantized, self.past]


@dataclass(slots=True)
class Batch:
    """The next tokens of all requests of a batch, from `past` to `end`: one number for each request, int64 `[B]`."""

    layout: BlockLayout
    rings: Rings
    blocks: numpy.ndarray
    """The blocks of each request, int32 `[B, P]`. Rows are padded; padding is not read."""
    past: Ints
    end: Ints
    ring: Ints
    since: Ints
    """The rows of the rings, and the first token from which each ring has all, as far as it has slots."""

    @property
    def tokens(self) -> int:
        """The number of new tokens of all requests."""
        return int((self.end - self.past).sum())

    def pick(self, at: Ints) -> Batch:
        """The requests at the indices `at` of the batch."""
        past, end, ring, since = (x[at] for x in (self.past, self.end, self.ring, self.since))
        longest = -(-int(end.max(initial=1)) // self.layout.page_size)
        return Batch(self.layout, self.rings, self.blocks[at, :longest], past, end, ring, since)

    def row(self, at: int) -> Row:
        """The request at the index `at` of the batch."""
        past, end, ring = (int(x[at]) for x in (self.past, self.end, self.ring))
        blocks, sinks = self.blocks[at, : -(-end // self.layout.page_size)].tolist(), self.layout.num_sink_tokens
        read = int(self.rings.tokens(self.since[at], self.past[at], sinks))
        return Row(blocks, past, end, min(past, sinks), self.rings.slots, ring, read)

    def writes(self) -> numpy.ndarray:
        """The slots of the new tokens in pages, in rings and among exact first tokens, int64 `[3, T]`; -1 for tokens
        that are not stored there."""
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
        """The columns of `PagedInputs.rows`, `[B, 8]`, after the new tokens are written."""
        sinks = self.layout.num_sink_tokens
        kept = self.rings.tokens(self.since, self.end, sinks)
        columns = numpy.zeros((len(self.end), len(COLUMNS)), numpy.int64)
        columns[:, BEGIN] = columns[:, SINKS] = numpy.minimum(self.end, sinks)
        columns[:, SINK_ROW], columns[:, RING_ROW], columns[:, RING_TOKENS] = self.blocks[:, 0], self.ring, kept
        columns[:, LENGTH] = length = self.end - kept
        columns[:, RING_START] = length % self.rings.slots
        return columns

    def table(self) -> numpy.ndarray:
        """The rows of the block table, int32 `[B, HEADER + P]`, for requests with one new token each."""
        table = numpy.zeros((len(self.end), HEADER + self.blocks.shape[1]), numpy.int32)
        table[:, : len(COLUMNS)] = self.columns()
        table[:, PAGE_SLOT : SINK_SLOT + 1] = numpy.maximum(self.writes(), 0).T
        table[:, HEADER:] = self.blocks
        return table


class BlockTables:
    """The blocks of requests, in one row for each ring. They are kept from step to step, and only new blocks are
    copied."""

    def __init__(self, rings: int):
        self._blocks = numpy.zeros((rings + 1, 16), numpy.int32)
        self._known = numpy.zeros(rings + 1, numpy.int64)

    def forget(self, rows: Ints | int) -> None:
        """Copies `rows` anew at the next read, because they belong to other requests now or their blocks were
        exchanged."""
        self._known[rows] = 0

    def read(self, rows: Ints, lists: Sequence[list[int]]) -> numpy.ndarray:
        """The block lists of `rows` as one array, int32 `[B, P]`. Shorter lists are padded; padding is not read."""
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
    """Rows in the form of `PagedInputs.rows`: rows with one new token each, with their splits, or the past of chunks.

    at: indices of their queries in the batch; None: the rows are the whole batch. tiles: `gather_tiles` of all tokens
        of chunks.
    """

    columns: Tensor
    table: Tensor
    max_length: int
    splits: Splits | None = None
    at: slice | Tensor | None = None
    tiles: Tensor | None = None


@dataclass
class PromptChunks:
    """Consecutive prompts, or parts of prompts, in a batch: its queries `begin` to `end`. Attention reads the tokens of
    all of them one after another, only the new tokens if `past` is None."""

    rows: list[Row]
    begin: int
    end: int
    tokens: int
    """Number of past and new tokens."""
    fits: bool
    """Whether the scratch has room for these tokens; a single row may have more."""
    sequences: Sequences = field(init=False)
    past: Rows | None = None

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.end, self.tokens = self.end + row.count, self.tokens + row.end

    def numbers(self) -> list[list[int]]:
        """The numbers to send to the device: the first query of each row and, if any row has a past, also the first
        token of each row, columns, lengths, tables and tiles."""
        starts = [[0, *accumulate(numbers)] for numbers in ((row.count for row in self.rows), (row.end for row in self.rows))]
        if not any(row.past for row in self.rows):
            return starts[:1]
        columns = [n for row in self.rows for n in row.past_columns()]
        return [*starts, columns, blocks_of(self.rows), gather_tiles([row.end for row in self.rows])]

    def receive(self, sent: Iterator[Tensor]) -> None:
        """Receives its `numbers` as tensors on the device."""
        queries, keys = [row.count for row in self.rows], [row.end for row in self.rows]
        starts = next(sent)
        if queries == keys:
            self.sequences = Sequences(queries, keys, (starts, starts))
            return
        self.sequences = Sequences(queries, keys, (starts, next(sent)))
        columns, table, tiles = (next(sent) for _ in range(3))
        columns = columns.view(-1, len(COLUMNS))
        longest = max(row.past_quantized for row in self.rows)
        self.past = Rows(columns, table.view(len(columns), -1), longest, tiles=tiles.view(-1, 2))


@dataclass
class Writes:
    """The slots of the new tokens in pages, in rings and among exact first tokens, int64 `[T]` each; negative for
    tokens that are not stored there."""

    pages: Tensor
    ring: Tensor
    sinks: Tensor


@dataclass
class BatchStep:
    """One forward pass: the slots that it writes, its rows with one token, its chunks of prompts, and its number of
    tokens without padding."""

    writes: Writes
    rows: Rows | None
    chunks: list[PromptChunks] = field(default_factory=list)
    tokens: int = 0


def step_of_table(table: Tensor, layout: BlockLayout) -> BatchStep:
    """The step of a block table, int32 `[B, HEADER + P]`, whose rows without a request hold -1."""
    table = table.clamp_min(0)
    max_length = (table.shape[1] - HEADER) * layout.page_size
    if table.device.type == "cpu":  # the torch reference reads up to the maximum
        max_length = max(int(table[:, LENGTH].max()), 1)
    splits = split_rows(table[:, LENGTH], max_length, layout.heads)
    rows = Rows(table[:, : len(COLUMNS)], table[:, HEADER:], max_length, splits)
    return BatchStep(Writes(*table[:, PAGE_SLOT : SINK_SLOT + 1].long().unbind(1)), rows)


def step_of_batch(batch: Batch, scratch_tokens: int, tokens: int, device: torch.device) -> BatchStep:
    """The step of a batch padded at its end to `tokens` tokens. Chunks of prompts read their past through a scratch of
    `scratch_tokens`."""
    count = batch.end - batch.past
    begins = count.cumsum() - count
    single = (count == 1) & (batch.past > 0)
    chunks: list[PromptChunks] = []
    for at in (~single).nonzero()[0]:
        row, begin = batch.row(at), int(begins[at])
        if chunks and chunks[-1].end == begin and chunks[-1].tokens + row.end <= scratch_tokens:
            chunks[-1].add(row)
        else:
            chunks.append(PromptChunks([row], begin, begin + row.count, row.end, row.end <= scratch_tokens))
    slots = numpy.full((3, tokens), -1)
    slots[:, : batch.tokens] = batch.writes()
    decoded, places = batch.pick(single), begins[single]
    *writes, indices = send([*slots, places], torch.int64, device)
    wanted: list[Sequence[int] | numpy.ndarray] = [
        decoded.columns().ravel(),
        decoded.blocks.ravel(),
        *(part for group in chunks for part in group.numbers()),
    ]
    sent = iter(send(wanted, torch.int32, device))
    columns, table = next(sent).view(-1, len(COLUMNS)), next(sent)
    for group in chunks:
        group.receive(sent)
    together = None
    if len(places):
        begin, end = int(places[0]), int(places[-1]) + 1
        at = slice(begin, end) if end - begin == len(places) else indices
        max_length = int(decoded.end.max())
        splits = split_rows(columns[:, LENGTH], max_length, batch.layout.heads)
        together = Rows(columns, table.view(len(places), -1), max_length, splits, at)
    return BatchStep(Writes(*writes), together, chunks, batch.tokens)


def blocks_of(rows: list[Row]) -> list[int]:
    """The block lists of `rows`, padded to the longest, one after another."""
    width = max((len(row.blocks) for row in rows), default=0)
    return [n for row in rows for n in (*row.blocks, *[0] * (width - len(row.blocks)))]


def send(parts: Sequence[Sequence[int] | numpy.ndarray], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Copies `parts` to the device, in one copy and without waiting, and returns them as tensors `[N]`. Each begins at
    a multiple of 16 bytes; otherwise Triton would compile its kernels twice."""
    unit = 16 // dtype.itemsize
    lengths = [len(part) for part in parts]
    begins = list(accumulate((-(-length // unit) * unit for length in lengths), initial=0))
    numbers = torch.zeros(begins[-1], dtype=dtype, pin_memory=device.type == "cuda")
    for begin, length, part in zip(begins, lengths, parts, strict=False):
        numbers.numpy()[begin : begin + length] = part
    tensor = numbers.to(device, non_blocking=True)
    return [tensor[begin : begin + length] for begin, length in zip(begins, lengths, strict=False)]
