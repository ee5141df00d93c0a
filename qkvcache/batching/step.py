"""The slots that a forward pass reads and writes, planned on the host and sent to the device once for all layers.

Steps in which every request has one token are described by transformers' block table, at fixed addresses, so that they can be replayed as
CUDA graphs: a header for each row, and then its blocks. In other batches (`step_of_rows`), rows with one token and a past are decoded
together, and prompts, or chunks of them, are read together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from ..attention.varlen import Sequences
from ..kernels.pages import COLUMNS, gather_tiles
from .layout import PageLayout
from .rings import Ring, Rings

LENGTH, PAGE_SLOT, RING_SLOT, SINK_SLOT = range(8, 12)
HEADER = SINK_SLOT + 1
"""Columns of the block table before the blocks: those of `PagedInputs.rows`, tokens in the pages, and the slots of the new token; slot 0 is
never read. Lengths and blocks begin at multiples of 16 bytes, as those of other batches do, for which Triton would compile
its kernels again otherwise."""

TYPICAL_TOKENS = 4096
"""Tokens of a row for which replayed steps are split. A graph knows only the maximum, for which one split would cover most of a row. Longer
rows get more splits."""


@dataclass(slots=True)
class Row:
    """The next tokens, `past` to `end`, of a request with these blocks."""

    blocks: list[int]
    past: int
    end: int
    page_size: int
    slots: int
    """Slots of its ring."""
    ring: int
    """The row of its ring."""
    sink_slots: int
    past_ring: int
    past_ring_tokens: int
    """The row of the ring of the past, and tokens of the past that are read from it."""
    ring_tokens: int
    """Tokens that are in the ring once the new ones are written."""

    @staticmethod
    def of(layout: PageLayout, rings: Rings, blocks: list[int], before: Ring, after: Ring) -> Row:
        sinks = layout.num_sink_tokens
        past, end = before.end, after.end
        read, kept = rings.tokens(before, min(past, sinks)), rings.tokens(after, min(end, sinks))
        return Row(blocks, past, end, layout.page_size, rings.slots, after.row, sinks, before.row, read, kept)

    @property
    def count(self) -> int:
        return self.end - self.past

    @property
    def past_sinks(self) -> int:
        return min(self.past, self.sink_slots)

    @property
    def past_quantized(self) -> int:
        """Tokens of the past that are read from the pages, or as exact first tokens."""
        return self.past - self.past_ring_tokens

    def columns(self) -> list[int]:
        """The columns up to LENGTH, after the new tokens are written."""
        sinks = min(self.end, self.sink_slots)
        length = self.end - self.ring_tokens
        return [sinks, self.blocks[0], sinks, self.ring, length % self.slots, self.ring_tokens, 0, 0, length]

    def past_columns(self) -> list[int]:
        """The columns of `PagedInputs` before the new tokens are written."""
        sinks = self.past_sinks
        return [sinks, self.blocks[0], sinks, self.past_ring, self.past_quantized % self.slots, self.past_ring_tokens]

    def page_slots(self) -> list[int]:
        """Slots of the new tokens in the pages, page by page."""
        size, slots, at = self.page_size, list[int](), self.past
        while at < self.end:
            count = min(size - at % size, self.end - at)
            slots += range(self.page_slot(at), self.page_slot(at) + count)
            at += count
        return slots

    def ring_places(self) -> range:
        """The new tokens that are written into the ring."""
        return range(max(self.past, self.end - self.slots, self.sink_slots), self.end)

    def sink_places(self) -> range:
        """The new tokens that are stored as first tokens."""
        return range(self.past, min(self.end, self.sink_slots))

    def page_slot(self, place: int) -> int:
        return self.blocks[place // self.page_size] * self.page_size + place % self.page_size

    def ring_slot(self, place: int) -> int:
        return self.ring * self.slots + place % self.slots

    def sink_slot(self, place: int) -> int:
        return self.blocks[0] * self.sink_slots + place

    def header(self) -> list[int]:
        """The header of a row with one new token."""
        sink = self.sink_slot(self.past) if self.past < self.sink_slots else 0
        ring = 0 if self.past < self.sink_slots else self.ring_slot(self.past)
        return [*self.columns(), self.page_slot(self.past), ring, sink]


@dataclass
class Rows:
    """Rows as `PagedInputs` describes them: those with one new token each, or the past of chunks.

    at: indices of their queries in the batch; None: they are the whole batch. tiles: `gather_tiles` of all tokens of chunks.
    """

    columns: Tensor
    lengths: Tensor
    table: Tensor
    max_length: int
    tokens: int | None = None
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


def step_of_table(table: Tensor, page_size: int, pool_tokens: int) -> Step:
    """The step of a block table, int32 `[B, HEADER + P]`, whose rows without a request hold -1; `pool_tokens` of all pages."""
    table = table.clamp_min(0)
    max_length = (table.shape[1] - HEADER) * page_size
    if table.device.type == "cpu":  # the torch reference reads up to the maximum
        max_length = max(int(table[:, LENGTH].max()), 1)
    columns = table[:, : len(COLUMNS)].contiguous()
    tokens = min(len(table) * min(TYPICAL_TOKENS, max_length), pool_tokens)
    rows = Rows(columns, table[:, LENGTH], table[:, HEADER:], max_length, tokens)
    return Step(Writes(*table[:, PAGE_SLOT : SINK_SLOT + 1].long().unbind(1)), rows)


def step_of_rows(rows: list[Row], scratch_tokens: int, tokens: int, device: torch.device) -> Step:
    """The step of these rows in a batch of `tokens` tokens, the last of which may be padding; chunks of prompts read their past through
    a scratch of `scratch_tokens`."""
    decoded: list[Row] = []
    places: list[int] = []
    chunks: list[Chunks] = []
    pages: list[int] = []
    ring: list[int] = []
    sinks: list[int] = []
    for row in rows:
        begin = len(pages)
        pages += row.page_slots()
        for slots, places_of, slot in ((ring, row.ring_places(), row.ring_slot), (sinks, row.sink_places(), row.sink_slot)):
            slots += [-1] * (begin + min(places_of.start, row.end) - row.past - len(slots))
            slots += map(slot, places_of)
        if row.past and row.count == 1:
            decoded.append(row)
            places.append(begin)
        elif chunks and chunks[-1].end == begin and chunks[-1].tokens + row.end <= scratch_tokens:
            chunks[-1].add(row)
        else:
            chunks.append(Chunks([row], begin, begin + row.count, row.end, row.end <= scratch_tokens))
    count = len(pages)
    for slots in (pages, ring, sinks):
        slots += [-1] * (tokens - len(slots))
    *writes, indices = send([pages, ring, sinks, places], torch.int64, device)
    wanted = [
        [n for row in decoded for n in row.columns()[: len(COLUMNS)]],
        [row.columns()[LENGTH] for row in decoded],
        blocks_of(decoded),
        *(part for group in chunks for part in group.numbers()),
    ]
    sent = iter(send(wanted, torch.int32, device))
    columns, lengths, table = (next(sent) for _ in range(3))
    for group in chunks:
        group.receive(sent)
    together = None
    if decoded:
        longest, total = max(row.end for row in decoded), sum(row.end for row in decoded)
        at = slice(places[0], places[0] + len(places)) if places[-1] - places[0] + 1 == len(places) else indices
        together = Rows(columns.view(-1, len(COLUMNS)), lengths, table.view(len(decoded), -1), longest, total, at)
    return Step(Writes(*writes), together, chunks, count)


def blocks_of(rows: list[Row]) -> list[int]:
    """Their tables, each as long as the longest."""
    width = max((len(row.blocks) for row in rows), default=0)
    return [n for row in rows for n in (*row.blocks, *[0] * (width - len(row.blocks)))]


def send(lists: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Tensors on the device, copied at once and without waiting. Each begins at a multiple of 16 bytes: for others Triton would compile its
    kernels again."""
    unit = 16 // dtype.itemsize
    numbers: list[int] = []
    for part in lists:
        numbers += part
        numbers += [0] * (-len(part) % unit)
    tensor = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    begins = accumulate((-(-len(part) // unit) * unit for part in lists), initial=0)
    return [tensor[begin : begin + len(part)] for begin, part in zip(begins, lists, strict=False)]
