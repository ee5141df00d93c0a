"""Quantized tokens in pages, with the torch reference of the kernels that read and write them.

A slab is one allocation of pages, each of `PAGE` tokens, a power of two of at least 64. Token `n` of a row is at offset `n % PAGE` of the
page that entry `n // PAGE` of the row's table names. Pages may be anywhere in the slabs, and rows may share them. Lengths are on the
device: no function here reads them from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..formats.base import Codec, Codes, affine
from .host.handles import give_handle
from .segments import Exact, KeysOrValues, Packed, Pair, Segment, layout_of, names

T = TypeVar("T")
S = TypeVar("S")

COLUMNS = BEGIN, SINK_ROW, RING_ROW, SINKS, RING_START, RING_TOKENS, LENGTH, TOKENS = range(8)
"""Columns of `PagedInputs.rows`."""
CONTROL = TICKET, DROPPED, ROOM = range(3)
"""Entries of `PagedInputs.control`."""


@dataclass(eq=False)
class Pages:
    """The quantized tokens of a layer.

    slabs       of each slab the planes of keys and of values: `[N, H', PAGE, width]` for each buffer that is kept for each token. `H'` is
                `H`, or 1 for a buffer that heads share, or 1 where each head has pages of its own. Planes `[G, H', n * PAGE, width]` have
                `n` pages after one another, which kernels cannot read
    firsts      the entry in tables of the first page of each slab
    page_size   tokens of a page
    statistics  of keys and of values: `[B or 1, H or 1, 1, width]` for each buffer that is kept once; of one row if all rows share it
    table       int32 or int64 `[B, P]`, where all heads of a row share its pages, or `[B, H, P]`, where each head has its own. Entries
                beyond the length are not read
    lengths     int32 `[B]` or, with pages for each head, `[B, H]`: tokens; None: all that are read exist

    An entry `e` names page `e - first` of a slab. Kernels read all pages from the planes of the first slab: pages of other slabs
    lie at the same distances from them. They require that the last two dimensions of planes are contiguous, and that their addresses, their
    strides over pages and, unless heads are `PAGE * width` apart, over heads are multiples of 64 bytes.
    """

    key: Codec
    value: Codec
    slabs: Sequence[tuple[Codes, Codes]]
    firsts: Sequence[int]
    page_size: int
    statistics: tuple[Codes, Codes]
    table: Tensor
    lengths: Tensor | None
    by_page: bool = True
    """Whether kernels can read and write the pages."""
    grows: bool = False
    """Whether slabs may be added while compiled code runs, which is compiled with the first slab alone."""
    partial: bool = False
    """Whether there may be slabs that are not in `slabs`, as in compiled code."""
    index: Pages | None = None
    """Copies on the device, where the pages lie in host memory and kernels read them: of what chooses blocks, `index_names` of keys."""

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return self.key, self.value

    @property
    def tensors(self) -> list[Tensor]:
        """The table, the planes and the statistics."""
        return [self.table, *(x for slab in (*self.slabs, self.statistics) for side in slab for x in side.values())]

    @property
    def compiled(self) -> Pages:
        """These pages as compiled code reads them."""
        return replace(self, slabs=self.slabs[:1], firsts=self.firsts[:1], partial=True) if self.grows else self

    @property
    def planes(self) -> tuple[Codes, Codes]:
        """The planes that kernels are given."""
        return self.slabs[0]

    @property
    def per_head(self) -> bool:
        """Whether each head has pages of its own."""
        return self.table.dim() == 3

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Strides of `table`, then of `lengths`, over rows and heads; 0 over heads that share pages."""
        pages, lengths = self.table.stride()[:-1], () if self.lengths is None else self.lengths.stride()
        return pages[0], pages[1] if len(pages) > 1 else 0, *(*lengths, 0, 0)[:2]  # type: ignore[return-value]

    def slots(self, place: Tensor) -> Tensor:
        """The slots, `entry * PAGE + offset` as int64 `[B, 1 or H, T]`, of the tokens `place`, int64 `[T]` or `[B, 1 or
        H, T]`. All rows have a slot for each of them."""
        table = self.table if self.per_head else self.table[:, None]
        entry = place // self.page_size
        found = table[:, :, entry] if place.dim() == 1 else table.expand(-1, place.shape[1], -1).gather(2, entry.expand(len(table), -1, -1))
        return found.long() * self.page_size + place % self.page_size

    def take(self, side: int, slots: Tensor, run: int = 1) -> Codes:
        """Codes of the keys (`side` 0) or values (1) in `slots`, int64 `[B, 1 or H, N]` (1: the same for all heads), and in the `run - 1`
        slots after each, which is a multiple of `run`: `[B, H', N * run, width]`."""
        found: Codes = {}
        for planes, mine, page, offset in self._places(slots):
            for name, plane in planes[side].items():
                here, at = self._inside(plane, page, offset)
                runs = plane.unflatten(2, (-1, run)).flatten(3)
                if run > 1:  # torch copies eight bytes as fast as one
                    runs = runs.view(torch.int64)
                codes = runs[here, torch.arange(plane.shape[1], device=slots.device)[:, None], at // run].view(plane.dtype)
                found[name] = codes if mine is None or name not in found else torch.where(mine[..., None], codes, found[name])
        return {name: x.unflatten(3, (run, -1)).flatten(2, 3) for name, x in found.items()}

    def put(self, side: int, slots: Tensor, codes: Codes) -> None:
        """Writes codes `[B, H', T, width]` into `slots`, int64 `[B, 1 or H, T]`; negative for tokens that are not stored."""
        for planes, mine, page, offset in self._places(slots):
            stored = slots >= 0 if mine is None else (slots >= 0) & mine
            for name, new in codes.items():
                plane = planes[side][name]
                here, at = self._inside(plane, page, offset)
                if slots.shape[1] == 1:
                    _put(plane.transpose(1, 2), stored.flatten(), (here.flatten(), at.flatten()), new.transpose(1, 2).flatten(0, 1))
                    continue
                head = torch.arange(slots.shape[1], device=slots.device)[:, None] % plane.shape[1]
                index = (x.expand_as(slots).flatten() for x in (here, head, at))
                _put(plane, stored.flatten(), tuple(index), new.expand(*slots.shape, -1).flatten(0, 2))

    def _places(self, slots: Tensor) -> Iterator[tuple[tuple[Codes, Codes], Tensor | None, Tensor, Tensor]]:
        """Yields for each slab: its planes; which slots it has (None: all); and the page and the offset of each slot."""
        if self.partial:
            raise NotImplementedError(
                "compiled steps of a cache that grows have one token, a format with kernels, and attention other than eager: pass "
                "max_length, or leave out compile"
            )
        entry, offset = slots.div(self.page_size, rounding_mode="floor"), slots % self.page_size
        if len(self.slabs) == 1:
            yield self.slabs[0], None, entry - self.firsts[0], offset
            return
        ascending = sorted(zip(self.firsts, self.slabs, strict=True), key=lambda slab: slab[0])
        of = torch.zeros_like(entry)
        for first, _ in ascending[1:]:  # a tensor of `firsts` would make the host wait for the device
            of += entry >= first
        for i, (first, planes) in enumerate(ascending):
            yield planes, of == i, entry - first, offset

    def _inside(self, plane: Tensor, page: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """The indices of the slots at `offset` of the pages `page` in the first and the third dimension of `plane`. Pages that it lacks
        are exchanged for others."""
        neighbours = plane.shape[2] // self.page_size
        page = page.clamp(0, max(plane.shape[0] * neighbours - 1, 0))
        if neighbours == 1:
            return page, offset
        return page // neighbours, page % neighbours * self.page_size + offset

    def gather(self, side: int, tokens: int, begin: int = 0) -> tuple[Codes, Tensor]:
        """Codes of the keys (`side` 0) or values (1) `begin` to `begin + tokens` of all rows, `[B, H', tokens, width]`, with the
        statistics, and which of them exist, bool `[B, 1 or H, tokens]`. Codes of those that do not are zeros."""
        place = torch.arange(begin, begin + tokens, device=self.table.device)
        table = self.table if self.per_head else self.table[:, None]
        if self.lengths is None:
            return self.take(side, self.slots(place)) | self.statistics[side], place.new_ones(*table.shape[:2], tokens, dtype=torch.bool)
        exists = (place < self.lengths.view(len(table), -1, 1)).expand(*table.shape[:2], tokens)
        entry = (place // self.page_size).clamp_max(table.shape[2] - 1)
        entries = torch.where(exists, table[:, :, entry].long(), self.firsts[0])
        codes = self.take(side, entries * self.page_size + place % self.page_size)
        return {name: torch.where(exists[..., None], x, 0) for name, x in codes.items()} | self.statistics[side], exists


def both(change: Callable[[T], S], sides: tuple[T, T]) -> tuple[S, S]:
    """Apply `change` to each of two sides, keys and values."""
    return change(sides[0]), change(sides[1])


def differ(stored: Tensor, given: Tensor) -> bool:
    """Whether two tensors `[B, H, T, D]` differ in batch, heads, head_dim or dtype."""
    a, b = stored.shape, given.shape
    return a[0] != b[0] or a[1] != b[1] or a[3] != b[3] or stored.dtype is not given.dtype


LEAST_SPLIT, BALANCED_SPLIT, MOST_SPLITS = 128, 512, 100
"""Fewest tokens of a split: fewer are not worth its partial outputs; fewest where the GPU has programs enough without; most splits of a
row: joining more costs too much."""
SPLIT_GRAIN, WAVES = 64, 4
"""Splits begin at multiples of SPLIT_GRAIN tokens, a multiple of the tiles of all launches. WAVES: programs that run
one after another on each place of the GPU when there are many tokens, so that few places wait for the last one."""


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
        """Divide rows with `lengths` tokens in pages, int32 `[B]`, each at most `max_length`, among `programs` that run
        at a time for a head. Splits have equal length, so that programs end together. The host does not wait for the
        device.

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


BLOCK = 32
"""Tokens of a block, the unit in which attention with a budget chooses tokens: it divides a page."""
WHOLE = 2**16
"""The share that is everything."""


MOST_QUERIES = 512
"""The most queries that read chosen blocks: a turn, not a part of a prompt, which reads all tokens."""
LEAST_SKIPPED = 2**19
"""The fewest vectors, tokens times KV heads of all rows, that must be left out so that a GPU gains by it."""


@dataclass(frozen=True)
class AttentionBudget:
    """The quantized tokens that a query and KV head read: at least `tokens`, and at least `share` of those stored, in parts of `WHOLE`; in
    whole blocks."""

    tokens: int
    share: int = 0

    def blocks(self, stored: int) -> int:
        """The blocks that are read of `stored` blocks."""
        return min(max(-(-self.tokens // BLOCK), -(-self.share * stored // WHOLE)), stored)

    def pays(self, skipped: int, ring: Tensor) -> bool:
        """Whether not reading `skipped` tokens of all rows takes less time than choosing blocks. `ring`: `[F, H, R, D]`."""
        return skipped > 0 and (ring.device.type != "cuda" or skipped * ring.shape[1] >= LEAST_SKIPPED)


@dataclass(eq=False)
class Selection:
    """The blocks of quantized tokens that attention reads (`select_blocks.py`).

    blocks   int32 `[B, H, N]`: their indices in the row's pages, ascending, in the first entries
    entries  `[B, H, N]`: the entries of their pages, in the table's dtype
    lengths  int32 `[B, H]`: tokens in these blocks; the last block of a row may have fewer than `BLOCK`. Tokens of the first block that
             come before BEGIN are counted, and not read
    """

    blocks: Tensor
    entries: Tensor
    lengths: Tensor

    def places(self) -> Tensor:
        """The index of each token in its row's pages, int64 `[B, H, N * BLOCK]`, -1 beyond `lengths`."""
        offset = torch.arange(BLOCK, device=self.blocks.device)
        places = (self.blocks[..., None].long() * BLOCK + offset).flatten(2)
        inside = torch.arange(places.shape[2], device=places.device) < self.lengths[..., None]
        return places.masked_fill(~inside, -1)


def index_names(codec: Codec, head_dim: int) -> tuple[str, ...]:
    """The buffers, kept for each token, of the upper halves of codes, where these are kept apart; else all."""
    layout = layout_of(codec)
    read = None if layout is None else (layout.upper or layout).planes
    return tuple(name for name in names(codec, head_dim, "each") if read is None or name in read)


@dataclass(eq=False)
class BlockCache:
    """Blocks of pages in host memory that the device keeps, for each row and head the last that attention read.

    pages   the slots, pages of `BLOCK` tokens: `(b * H + h) * S + s` is the entry of slot `s` of head `h` of row `b`
    blocks  int32 `[B, H, S]`: the block in each slot; -1: none that counts
    hands   int32 `[B, H]`: the slot from which on a free one is looked for
    """

    pages: Pages
    blocks: Tensor
    hands: Tensor
    launches: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def of(pages: Pages, slots: tuple[Codes, Codes], blocks: Tensor, hands: Tensor) -> BlockCache:
        """The cache of blocks of `pages`, in the planes `slots` `[B * H * S, 1, BLOCK, width]`."""
        apart = {"slabs": [slots], "firsts": [0], "page_size": BLOCK, "grows": False, "partial": False, "index": None}
        return BlockCache(replace(pages, **apart), blocks, hands)  # type: ignore[arg-type]

    @property
    def tensors(self) -> list[Tensor]:
        return [*(x for side in self.pages.slabs[0] for x in side.values()), self.blocks, self.hands]


@dataclass(eq=False)
class PagedInputs:
    """The inputs of attention over pages. A row has, in this order, sinks, quantized tokens and the tokens of a ring.

    sinks       keys and values `[E, H, S, D]` in the model's dtype, `S` may be 0
    ring        keys and values `[F, H, R, D]` in the model's dtype, `R` may be 0
    rows        int32 `[B, 8]`, contiguous in the last dimension, for each row:
                BEGIN        the first token of its pages that is read
                SINK_ROW     its row of the `E` in `sinks`, and RING_ROW, its row of the `F` in `ring`
                SINKS        how many of its sinks are read
                RING_START   the slot of the oldest token of its ring, and RING_TOKENS, how many there are, in slots `(RING_START + i) % R`
                LENGTH       tokens in its pages, for `step`; attention reads `pages.lengths`
                TOKENS       tokens of the row, for `step`
                None: row `b` has all sinks and the whole ring of row `b`, in order, and the first `max_length` tokens of its pages
    max_length  bound on `pages.lengths`, which sizes launches and results; without `rows`, quantized tokens
    tokens      approximate sum of the lengths of all rows, where they differ much: long rows then get more splits. None: lengths are
                similar
    splits      of the rows, in place of `tokens`, for kernels that attend with one query of each row without accumulating attention
    control     int32 `[3]`, for `step`: TICKET, programs of the launch that have finished; DROPPED, tokens that came when there was no
                room; ROOM, the most tokens of a row. None: no step stores tokens
    budget      of quantized tokens that attention reads (`select_blocks.py`); None: all
    selection   the blocks that it reads, in which case pages have room for `max_length` tokens, and attention for those of the selection
    cache       of blocks, where the pages lie in host memory and there may be more tokens than the budget
    branches    consecutive rows whose pages begin with the same `shared` tokens, a multiple of the page size; the batch is a multiple of
                them. Kernels may read these tokens once for all of them
    exact       whether attention reads sinks and ring
    """

    pages: Pages
    sinks: Pair
    ring: Pair
    rows: Tensor | None
    max_length: int
    tokens: int | None = None
    splits: Splits | None = None
    control: Tensor | None = None
    budget: AttentionBudget | None = None
    selection: Selection | None = None
    cache: BlockCache | None = None
    branches: int = 1
    shared: int = 0
    exact: bool = True
    launches: dict[Any, Any] = field(default_factory=dict)
    """Arguments that kernels reuse from step to step: planes and statistics do not move or change. Inputs over the same storage may share
    them; rows, tables, lengths, sinks and rings may differ."""
    held: dict[str, Any] = field(init=False, default_factory=dict)
    """Arguments that kernels reuse in calls over these inputs, and their twins."""
    handle: Tensor | None = field(init=False, default=None)
    """The tensor that stands for these inputs in compiled code (`handles.py`)."""

    @property
    def identity(self) -> tuple:
        """Everything on which launches over these inputs depend: addresses, shapes and dtypes of tensors, and numbers. Later slabs do not
        count where slabs are added between compiled steps: kernels find their pages by the table."""
        pages, index, cache, splits = self.pages, self.pages.index, self.cache, self.splits
        tensors = [*pages.compiled.tensors, *self.sinks, *self.ring, self.rows, self.control, pages.lengths]
        tensors += [] if index is None else index.tensors
        tensors += [] if cache is None else cache.tensors
        tensors += [] if splits is None else [splits.items, splits.firsts, splits.shared, splits.shares]
        places = ((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in tensors if x is not None)
        numbers = pages.firsts[0], pages.page_size, pages.by_page, pages.grows, index is None, cache is None
        return *pages.codecs, *numbers, self.max_length, self.tokens, self.budget, self.branches, self.shared, *places

    def __setstate__(self, state: dict) -> None:
        """Makes a copy, which has a handle of its own."""
        self.__dict__ |= state
        if self.handle is not None:
            give_handle(self)

    def twin(self, **changes: Any) -> PagedInputs:
        """The same inputs, but for some fields; `dataclasses.replace` takes five times as long, at every step."""
        twin = object.__new__(PagedInputs)
        twin.__dict__ |= self.__dict__ | changes
        return twin

    def ended(self, later: int) -> PagedInputs:
        """The same inputs without the last `later` tokens, which are in the ring."""
        if not later:
            return self
        if self.rows is None:
            key, value = (x[:, :, : x.shape[2] - later] for x in self.ring)
            return self.twin(ring=(key, value), held={})
        rows = self.rows.clone()
        rows[:, RING_TOKENS] -= later
        return self.twin(rows=rows, held={})

    def first_shared(self) -> PagedInputs:
        """The tokens that rows share, of the first row of each group of `branches`."""
        key = f"the first {self.shared} tokens of {self.branches} rows"
        if key not in self.held:
            pages, every = self.pages, slice(None, None, self.branches)
            once = [{name: x[every] if len(x) > 1 else x for name, x in side.items()} for side in pages.statistics]
            first = replace(pages, table=pages.table[every], statistics=(once[0], once[1]), lengths=None)
            launches = self.launches.setdefault(("shared", self.branches), {})
            self.held[key] = self.twin(pages=first, rows=None, max_length=self.shared, exact=False, launches=launches, held={})
        return self.held[key]

    def selects(self, query: Tensor) -> bool:
        """Whether attention of `query` `[B, Hq, Q, D]` reads chosen blocks: there are more tokens than the budget, and choosing pays, as it
        always does where the others lie in host memory."""
        if self.budget is None or query.shape[2] > MOST_QUERIES:
            return False
        skipped = self.max_length - self.budget.blocks(-(-self.max_length // BLOCK)) * BLOCK
        return skipped > 0 and (self.cache is not None or self.budget.pays(skipped * query.shape[0], self.ring[0]))

    @property
    def slots(self) -> tuple[int, int, int]:
        """Slots of sinks, of the quantized tokens that are read, and of the ring."""
        read = self.max_length if self.selection is None else self.selection.blocks.shape[2] * BLOCK
        return self.sinks[0].shape[2], read, self.ring[0].shape[2]

    def gather(self, side: int) -> tuple[Codes, Tensor]:
        """Codes of the keys (`side` 0) or values (1) that are read, `[B, H', T, width]`, with the statistics, and the index of each in its
        row's pages, int64 `[B, 1 or H, T]`, -1 where there is no token."""
        if self.selection is None:
            codes, exists = self.pages.gather(side, self.max_length)
            return codes, torch.where(exists, torch.arange(self.max_length, device=exists.device), -1)
        places, size = self.selection.places(), self.pages.page_size
        first = places[:, :, ::BLOCK]
        slots = torch.where(first < 0, self.pages.firsts[0] * size, self.selection.entries.long() * size + first % size)
        codes = self.pages.take(side, slots, BLOCK)
        for x in codes.values():
            x.view(torch.uint8).masked_fill_(places[..., None] < 0, 0)
        return codes | self.pages.statistics[side], places

    def columns(self, places: Tensor) -> Tensor:
        """The index of each slot's token in its row, int64 `[B, 1 or H, S + T + R]`, -1 for a slot without a token. `places`: those of
        `gather`."""
        heads, (sink_slots, _, ring_slots) = places.shape[:2], self.slots
        first, ring = (torch.arange(n, device=places.device) for n in (sink_slots, ring_slots))
        if self.rows is None:  # each slot has a token, except those beyond a selection
            region = torch.where(places < 0, -1, places + sink_slots)
            if self.selection is None:
                region = torch.arange(sink_slots, sink_slots + self.max_length, device=places.device).expand(*heads, -1)
            zones = first.expand(*heads, -1), region, (ring + sink_slots + self.max_length).expand(*heads, -1)
            return torch.cat(zones, dim=-1) if self.exact else region
        begin, _, _, sinks, start, count = self.rows[:, None, : RING_TOKENS + 1, None].long().unbind(2)
        lengths: Tensor = self.pages.lengths  # type: ignore[assignment]
        quantized = (lengths.view(len(self.rows), -1, 1).clamp_max(self.max_length) - begin).clamp_min(0)
        age = (ring - start) % max(len(ring), 1)
        zones = (
            torch.where(first < sinks, first, -1).expand(*heads, -1),
            torch.where(places >= begin, places - begin + sinks, -1),
            torch.where(age < count, sinks + quantized + age, -1).expand(*heads, -1),
        )
        return torch.cat(zones, dim=-1) if self.exact else zones[1]


class RunningStep:
    """The running step of a cache: the `plan` of attention that its first layer has made and its other layers run; None: none yet.

    The plan is of this process, and is not copied."""

    plan: Any = None

    def __getstate__(self) -> dict:
        return {}


@dataclass(eq=False)  # frozen ones take four times as long to make, at every step
class AttentionInputs:
    """The keys and values of one layer for one step, which are not changed.

    key, value  what the torch reference reads
    paged       the same as `PagedInputs`, for kernels; None where only torch can read the tokens
    joined      keys and values `[B, H, T, D]` of sinks and residual in one tensor each, where they are contiguous in memory
    running     the running step; None: its layers do not share a plan
    """

    key: KeysOrValues
    value: KeysOrValues
    paged: Any = None
    joined: Pair | None = None
    running: RunningStep | None = None

    @property
    def tokens(self) -> int:
        """Tokens of each row, or slots for them."""
        return self.key.shape[2]

    @property
    def counted(self) -> bool:
        """Whether the device counts the tokens, which are the same for all heads."""
        return self.paged is not None and self.paged.rows is not None and not self.by_head

    @property
    def compiled(self) -> bool:
        """Whether compiled code attends to these inputs by operators."""
        return self.paged is not None and self.paged.handle is not None

    @property
    def by_head(self) -> bool:
        """Whether each head has pages of its own. Slots without a token are left out by `paged`; attention over `key` and `value`,
        which have as many quantized tokens as the longest head, needs a mask for each head then."""
        return self.paged is not None and self.paged.pages.per_head


class TokenInputs(AttentionInputs):
    """Inputs of a step of one token, whose `key` and `value` are built if somebody asks: kernels do not need them.

    build   returns `key` and `value`
    tokens  tokens of each row
    """

    tokens = 0  # type: ignore[assignment]

    def __init__(self, build: Callable[[], tuple[KeysOrValues, KeysOrValues]], paged: PagedInputs | None, tokens: int) -> None:
        self.build, self.paged, self.joined, self.running, self.tokens = build, paged, None, None, tokens
        self.sides: tuple[KeysOrValues, KeysOrValues] | None = None

    @property
    def key(self) -> KeysOrValues:  # type: ignore[override]
        return self.built()[0]

    @property
    def value(self) -> KeysOrValues:  # type: ignore[override]
        return self.built()[1]

    def built(self) -> tuple[KeysOrValues, KeysOrValues]:
        """`key` and `value`, built once. (torch.compile traces no `cached_property`.)"""
        if self.sides is None:
            self.sides = self.build()
        return self.sides


def paged_side(inputs: PagedInputs, side: int) -> tuple[KeysOrValues, Tensor]:
    """Keys (0) or values (1) in all slots, zeros where there is no token, and `places` as of `PagedInputs.gather`."""
    pages, first, ring = inputs.pages, inputs.sinks[side], inputs.ring[side]
    codes, places = inputs.gather(side)
    packed = _blocks(pages.codecs[side], codes, inputs.slots[1], ring)
    if not inputs.exact:
        return KeysOrValues.of([*packed], (*ring.shape[:2], inputs.slots[1], ring.shape[3]), ring.dtype, ring.device), places
    if inputs.rows is not None:
        rows = inputs.rows.long()
        first, ring = first[rows[:, SINK_ROW]], ring[rows[:, RING_ROW]]
        column = inputs.columns(places)[:, :1, :, None]
        first = first.masked_fill(column[:, :, : first.shape[2]] < 0, 0)
        ring = ring.masked_fill(column[:, :, column.shape[2] - ring.shape[2] :] < 0, 0)
    segments: list[Segment] = [Exact(first), *packed, Exact(ring)]
    return KeysOrValues.of(segments, (*ring.shape[:2], sum(inputs.slots), ring.shape[3]), ring.dtype, ring.device), places


BLOCK_ELEMENTS = 2**20
"""Elements that torch quantizes or dequantizes at a time. It bounds temporaries (4 MiB in fp32); on a CPU, smaller
blocks cost more in calls than they save in cache misses."""


def block_of(like: Tensor) -> int:
    """Tokens of a block of keys or values like `like` `[B, H, T, D]`: a multiple of 64."""
    batch, heads, _, dim = like.shape
    return max(BLOCK_ELEMENTS // max(batch * heads * dim, 1) // 64, 1) * 64


def _blocks(codec: Codec, codes: Codes, tokens: int, like: Tensor) -> Iterator[Packed]:
    """`tokens` quantized tokens, keys or values like `like`, in blocks that are dequantized one at a time."""
    limit = block_of(like)
    for begin in range(0, tokens, limit):
        count = min(limit, tokens - begin)
        part = {name: x if x.shape[2] != tokens else x.narrow(2, begin, count) for name, x in codes.items()}
        yield Packed(codec, part, count, like.shape[3])


def quantize_into(pages: Pages, x: Pair, slots: Tensor | int, zones: Sequence[tuple[Pair, Tensor]] = ()) -> None:
    """Quantizes keys and values `[B, H, T, D]` into `slots`, int64 `[B, 1 or H, T]` (1: the same for all heads): `entry
    * PAGE + offset`, or negative for tokens that are not stored. An int: as the tokens from this number on of each row,
    whose heads share pages. Also copies them into `zones`: keys and values `[F, H, R, D]` in the model's dtype, with the slot of each
    token, `row * R + slot`, int64 `[B, T]`, or negative."""
    if isinstance(slots, int):
        slots = pages.slots(torch.arange(slots, slots + x[0].shape[2], device=x[0].device))
    for side, (codec, new, statistics) in enumerate(zip(pages.codecs, x, pages.statistics, strict=True)):
        pages.put(side, slots, codec.quantize(new, statistics))
        for zone, at in zones:
            place = zone[side].transpose(1, 2)
            row, slot = at.flatten().div(place.shape[1], rounding_mode="floor"), at.flatten() % place.shape[1]
            _put(place, row >= 0, (row, slot), new.transpose(1, 2).flatten(0, 1))


def _put(x: Tensor, stored: Tensor, index: tuple[Tensor, ...], new: Tensor) -> None:
    """Writes `new` `[M, ...]` to the `index`, `[M]` for each of the first dimensions of `x`, where `stored`, bool
    `[M]`. So that the host need not know which are, those that are not stored are written as copies of the first that is."""
    if not len(new):
        return
    first = stored.int().argmax(0, keepdim=True)
    at = tuple(torch.where(stored, i, i.index_select(0, first)) for i in index)
    stored = stored.view(-1, *[1] * (new.dim() - 1))
    new = torch.where(stored, new, torch.where(stored.any(), new.index_select(0, first), x[at]))
    if not torch.are_deterministic_algorithms_enabled() or x.is_contiguous():
        x[at] = new
        return
    # The deterministic algorithm of CUDA copies a tensor that is not contiguous, and planes of pages overlap themselves.
    memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    place = sum((i * step for i, step in zip(at, x.stride(), strict=False)), torch.full_like(at[0], int(x.storage_offset())))
    for size, step in zip(x.shape[len(at) :], x.stride()[len(at) :], strict=True):
        place = place[..., None] + torch.arange(size, device=x.device) * step
    memory[place] = new.expand(place.shape)


def calibrate(pages: Pages, begun: Tensor, x: Pair, is_valid: Tensor | None) -> None:
    """Computes the statistics of the rows that have none, those that have not `begun`, bool `[B]`, from keys and values `[B, H, T, D]`. A
    row begins with its first tokens that are valid: `is_valid`, bool `[B, T]`; None: all are."""
    for codec, statistics, new in zip(pages.codecs, pages.statistics, x, strict=True):
        if statistics:
            for name, value in codec.calibrate(new, is_valid).items():
                statistics[name].copy_(torch.where(begun[:, None, None, None], statistics[name], value))
    begun |= torch.ones_like(begun) if is_valid is None else is_valid.any(-1)


def step(inputs: PagedInputs, x: Pair) -> None:
    """Stores new tokens, keys and values `[B, H, T, D]`, with counts on the device: the first as sinks, the others in the ring. Tokens that
    leave the ring are quantized. A step that does not fit is dropped and counted in `control`. All rows have as many tokens."""
    rows, control, ring = inputs.rows, inputs.control, inputs.ring[0].shape[2]
    if rows is None or control is None:
        raise ValueError("the inputs have no counts on the device")
    tokens, sinks = x[0].shape[2], inputs.sinks[0].shape[2]
    seen, quantized = rows[0, TOKENS].long(), rows[0, LENGTH].long()
    new_tokens = tokens * (seen + tokens <= control[ROOM])
    opening = torch.minimum((sinks - seen).clamp_min(0), new_tokens)
    entering, end = new_tokens - opening, seen - seen.clamp_max(sinks)  # of the ring, the number of its next token
    i = torch.arange(ring + tokens, device=rows.device)
    number = end - ring + i  # of the last tokens before these, then of these
    leaves = (number >= quantized)[:tokens] & (i[:tokens] < entering)
    into = torch.where(leaves, number[:tokens], 0)
    slots = torch.where(leaves, inputs.pages.slots(into), -1) if inputs.pages.table.shape[1] else None
    fresh, kept = (opening + i[:tokens]).clamp_max(tokens - 1), entering + i[:ring]
    place = torch.arange(sinks, device=rows.device) - seen
    opens = ((place >= 0) & (place < opening))[:, None]
    sides = zip(inputs.pages.codecs, inputs.pages.statistics, inputs.sinks, inputs.ring, x, strict=True)
    for side, (codec, statistics, first, residual, new) in enumerate(sides):
        held = torch.cat([residual.index_select(2, number[:ring] % ring), new.index_select(2, fresh)], dim=2)
        if slots is not None:
            inputs.pages.put(side, slots, codec.quantize(held[:, :, :tokens], statistics))
        residual.index_copy_(2, number[kept] % ring, held.index_select(2, kept))
        if sinks:
            first.copy_(torch.where(opens, new.index_select(2, place.clamp(0, tokens - 1)), first))
    seen, quantized = seen + new_tokens, quantized + leaves.sum()
    first = seen.clamp_max(sinks)
    rows[:, SINKS:] = torch.stack([first, quantized % ring, seen - first - quantized, quantized, seen]).int()
    control[DROPPED].add_((tokens - new_tokens).int())


def unfold(inputs: PagedInputs, columns: int, new: Pair) -> Pair:
    """Keys and values of all tokens at their columns, `[B, H, columns, D]` each, followed by `new` `[B, H, T, D]`,
    which are not stored yet. Columns without a token are zero. All rows have as many tokens."""
    out = []
    for side in (0, 1):
        held, places = paged_side(inputs, side)
        at = inputs.columns(places)[0, 0]
        at = torch.cat([at, at.amax() + 1 + torch.arange(new[side].shape[2], device=at.device)])
        at = torch.where((at >= 0) & (at < columns), at, columns)
        whole = new[side].new_zeros(*held.shape[:2], columns + 1, held.shape[3])
        out.append(whole.index_copy_(2, at, torch.cat([held.dense(), new[side]], dim=2))[:, :, :columns])
    return out[0], out[1]


def dequantize_pages(pages: Pages, out: Pair, begin: int = 0) -> None:
    """Writes keys and values `begin` to `begin + T` of each row into `out` `[B, H, T, D]`, rotated as they are stored, and zeros beyond a
    row's length. Rotating the queries and the outputs of attention costs less than rotating tokens back."""
    for side, x in enumerate(out):
        codes, exists = pages.gather(side, x.shape[2], begin)
        x.copy_(dequantized(pages.codecs[side], codes, x, stored=True).masked_fill(~exists[..., None], 0))


def dequantized(codec: Codec, codes: Codes, like: Tensor, stored: bool) -> Tensor:
    """The vectors of `codes`, `[B, H, T, D]`: rotated as they are stored, in fp32, or in the dtype of `like`."""
    if not stored:
        return codec.dequantize(codes, like.shape[3], like.dtype)
    levels, scale, offset, center = codec.unpack(codes, like.shape[3])
    vectors = affine(levels, scale, offset)
    return vectors if center is None else vectors + center


GATHER_TILE = 64
"""Tokens of a tile of `gather_rows`."""


def gather_tiles(lengths: Sequence[int]) -> list[int]:
    """Tiles of rows of these lengths in tokens: for each its row, and its first token in that row."""
    return [n for row, length in enumerate(lengths) for at in range(0, length, GATHER_TILE) for n in (row, at)]


def gather_rows(inputs: PagedInputs, new: Pair, starts: tuple[Tensor, Tensor], tiles: Tensor, out: Pair) -> None:
    """Writes all tokens of rows of different lengths, one row after another, in the model's dtype: of each row sinks, quantized tokens, the
    tokens of the ring and, after these, its new tokens.

    Args:
        inputs: its heads share the pages of a row.
        new: keys and values `[1, H, N, D]`, those of one row after another.
        starts: the first token of each row in `new` and in `out`, int32 `[B + 1]` each; the last entries are the tokens of all rows.
        tiles: int32 `[M, 2]`, `gather_tiles` of the rows' tokens in `out`, for kernels.
        out: keys and values `[1, H, T, D]`.
    """
    pages, rows, (news, places) = inputs.pages, inputs.rows, (x.tolist() for x in starts)
    for b, (begin, sink_row, ring_row, sinks, start, count, length, _) in enumerate(rows.tolist()):  # type: ignore[union-attr]
        row = replace(pages, table=pages.table[b : b + 1], lengths=None)
        order = torch.arange(start, start + count, device=pages.table.device) % max(inputs.slots[2], 1)
        quantized = max(length - begin, 0)
        for side, (x, sink, ring, last) in enumerate(zip(out, inputs.sinks, inputs.ring, new, strict=True)):
            parts = [sink[sink_row, :, :sinks], ring[ring_row][:, order], last[0, :, news[b] : news[b + 1]]]
            if quantized:
                codes, _ = row.gather(side, quantized, begin)
                parts.insert(1, dequantized(pages.codecs[side], codes, x, stored=False)[0])
            x[0, :, places[b] : places[b + 1]] = torch.cat(parts, dim=1)
