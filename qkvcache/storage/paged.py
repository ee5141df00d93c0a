"""`PagedTokens`: the quantized tokens of one layer in pages of a pool, found through a table; `RowPages`,
whose heads share the pages of a row.

Appending writes into free slots; stored tokens are neither moved nor quantized again. Rows that are repeated,
reordered or forked share pages until one of them writes.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import Packed, Pages, Pair, Select, both, on_triton, quantize_into, quantizes
from ..kernels.segments import block_of, join_tokens
from ..kernels.store.reference import calibrate
from .pool import Numbers, PageLayout, PagePool, selected

SIDES = ("key", "value")
PAGE = 64
"""Tokens of a page."""
MAX_GROWTH = 16 * PAGE
"""Tokens for which room is made at most in steps of one token."""
GROUP = 16
"""Tokens that are quantized together in eager steps of one token without a kernel."""
COLUMNS = 8
"""Initial columns of a table to which pages can be added."""


def growth(length: int, missing: int) -> int:
    """Slots that are added to `length` stored tokens when `missing` tokens have no slot."""
    # An eighth of the stored tokens keeps both slabs and unused slots few.
    return max(-(-missing // PAGE), min(length // 8, MAX_GROWTH) // PAGE) * PAGE


class PagedTokens:
    """Quantized keys and values like `like` `[B, H, T, D]`, and the statistics that all tokens share.

    Args:
        layout: the layout of a page.
        heads: the heads of each row that have pages of their own, `[H]`, or none, `[]`.
        static: the table keeps its address.
    """

    lengths: Tensor | None = None
    """Tokens of each head on the device, int32 `[B, H]`; None if all heads have as many."""
    grows = False
    """Whether pages are added between steps of compiled code."""
    pool_of = PagePool
    """The class of the pool."""

    def __init__(self, layout: PageLayout, like: Pair, heads: Sequence[int], static: bool = False):
        self.codecs, self.dims, self.static = layout.codecs, layout.dims, static
        device = like[0].device
        self.pool = self.pool_of(layout, device, on_triton(device))
        self.numbers: Numbers = numpy.full((like[0].shape[0], *heads, 0), -1)
        """Numbers of the pages of each row `[B, W]`, or of each head `[B, H, W]`; -1 for none."""
        self.owned = 0
        """The first column from which no page has other owners."""
        self.table = torch.empty((*self.numbers.shape[:-1], 0), device=device, dtype=torch.int64)
        """The entries of the pages, int64 `[B, C]` or `[B, H, C]`, `C` at least `W`."""
        (key, value), (key_dim, value_dim) = self.codecs, self.dims
        self.has_statistics = key.keeps(key_dim) or value.keeps(value_dim)
        """Whether the codecs keep buffers that all tokens share."""
        self.length = 0
        """Stored tokens of a row; of the longest head, if heads have pages of their own."""
        with torch.inference_mode(False):
            by_head = layout.per_head or bool(heads)
            self.statistics: tuple[Codes, Codes] = key.allocate_statistics(like[0], by_head), value.allocate_statistics(like[1], by_head)
            """Buffers that all tokens of a row share. They must be computed before a valid token of the row is quantized."""
            self.begun = torch.zeros(like[0].shape[0] * self.has_statistics, dtype=torch.bool, device=device)
            """Rows that have statistics, bool `[B]`: others have seen padding alone. Empty if the codecs keep none."""
        self.calibrated = not self.has_statistics
        """Whether all rows are known to have their statistics."""

    def __getstate__(self) -> dict:
        """Leaves out what holds addresses."""
        return {name: x for name, x in self.__dict__.items() if name not in ("pages", "launches", "bound")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self.bind()

    def bind(self) -> None:
        """Writes the entries of the pages into the table, and renews `pages`, the input of kernels."""
        pool, firsts = self.pool, self.pool.firsts()
        self.table = self._entered(pool, self.table, firsts)
        by_page, size = pool.by_address, pool.layout.page_size
        self.pages = Pages(self.codecs, pool.planes(), firsts, size, self.statistics, self.table, self.lengths, by_page, self.grows)
        self.launches: dict[Any, Any] = {}
        """Arguments that kernels reuse, `Prepared.of_layer`."""

    def _entered(self, pool: PagePool, table: Tensor, firsts: Sequence[int]) -> Tensor:
        """`table` with the entries of the pages in `pool`, or a new one if it does not fit. `firsts`: as of the pool."""
        width, none = self.numbers.shape[-1], firsts[0]
        table = self._fitted(table, width, none)
        if width:
            entries = numpy.where(self.numbers < 0, none, pool.entries(numpy.maximum(self.numbers, 0), firsts))
            table[..., :width].copy_(torch.from_numpy(entries), non_blocking=True)
        return table

    def _fitted(self, table: Tensor, width: int, entry: int) -> Tensor:
        """`table`, or a new one, filled with `entry`, if it has not a row for each row and `width` columns."""
        shape, columns = self.numbers.shape[:-1], table.shape[-1]
        if table.shape[:-1] != shape or columns < width or table.device != self.pool.device:
            while columns < width:
                columns = max(2 * columns, COLUMNS)
            with torch.inference_mode(False):
                table = torch.full((*shape, columns), entry, dtype=torch.int64, device=self.pool.device)
        return table

    # Statistics.

    def calibrate(self, x: Pair, is_valid: Tensor | None = None) -> None:
        """Computes the statistics of rows that have none from keys and values `[B, H, T, D]`. `is_valid`: the
        tokens that are not padding, bool `[B, T]`; None: all."""
        if not self.calibrated:
            calibrate(self.pages, self.begun, both(Tensor.detach, x), is_valid)
            self.calibrated = is_valid is None

    def take_means(self, other: PagedTokens) -> None:
        """Copies the means of keys, which another codec has, and the other statistics from `other`, whose
        tokens are not quantized."""
        (keys, values), (old_keys, old_values) = self.statistics, other.statistics
        if "center" in keys:
            keys["center"].copy_(self.codecs[0].rotate(other.codecs[0].unrotate(old_keys["center"])))
        for name, x in values.items():
            x.copy_(old_values[name])
        self.begun.copy_(other.begun)
        self.calibrated = other.calibrated

    def uncalibrate(self) -> None:
        """Forgets the statistics of all rows: they have no tokens."""
        self.begun.zero_()
        self.calibrated = not self.has_statistics

    # Tokens.

    def store(self, x: Pair, slots: Tensor | int) -> None:
        """Quantizes keys and values `[B, H, T, D]` into slots of the pages, `kernels.quantize_into`, in one
        launch if there is a kernel, else block by block."""
        tokens = x[0].shape[2]
        block = tokens if quantizes(self.codecs, x) else min(map(block_of, x))
        for at in range(0, tokens, block):
            key, value = (side[:, :, at : at + block] for side in x)
            self._quantize((key, value), slots + at if isinstance(slots, int) else slots[:, :, at : at + block])

    def _quantize(self, x: Pair, slots: Tensor | int) -> None:
        quantize_into(self.pages, x, slots)

    def simulate_pages(self, width: int, count: int) -> None:
        """Allocates `count` pages, and a table of `width` columns. For planning, on the meta device: pages
        have no numbers, of which there may be billions."""
        if count:
            self.pool.simulate(count)
            self.table = self._fitted(self.table, width, 0)

    # Rows and owners.

    def branches(self) -> tuple[int, int]:
        """The number of consecutive rows whose pages begin with the same tokens, and the number of these tokens, in full pages. Of all
        groups of rows, the group for which reading shared tokens once spares the most reading."""
        batch, width = self.numbers.shape[0], min(self.length // PAGE, self.owned)
        if batch < 2 or not width:
            return 1, 0
        differ = self.numbers[1:, :width] != self.numbers[:-1, :width]
        common = numpy.where(differ.any(1), differ.argmax(1), width)  # of each row and the next
        sizes = [k for k in range(2, batch + 1) if batch % k == 0]
        shared = [int(common[numpy.arange(1, batch) % k > 0].min()) * PAGE for k in sizes]
        return max(zip(sizes, shared, strict=True), key=lambda found: (1 - 1 / found[0]) * found[1])

    def own(self, begin: int, used: int) -> None:
        """Makes this the only owner of the pages in columns from `begin` on, which are about to be written.
        The first `used` of all columns hold tokens, which are copied."""
        if begin >= self.owned:
            return
        places, owners = [], self.pool.owners.copy()
        several = (self.numbers[..., begin:] >= 0) & (owners[self.numbers[..., begin:]] > 1)
        for *row, column in numpy.argwhere(several).tolist():
            place = (*row, begin + column)
            if owners[self.numbers[place]] > 1:  # not given up by another row meanwhile
                owners[self.numbers[place]] -= 1
                places.append(place)
        if places:  # an interruption may cost pages, but leaves all tables with pages of their own
            at = tuple(numpy.array(places).T)
            old, new, written = self.numbers[at], self.pool.take(len(places)), at[-1] < used
            self.bind()
            self._copy(old[written], new[written])
            numbers = self.numbers.copy()
            numbers[at] = new
            self.numbers = numbers
            self.pool.release(old)
            self.bind()
        self.owned = begin

    def _copy(self, source: Numbers, target: Numbers) -> None:
        """Copies pages `[N]` to others."""
        self.pool.copy(source, target)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices; a row that occurs several times is shared."""
        before, numbers = self.numbers, self.numbers[list(rows)]
        self.pool.share(_pages(numbers))
        self.numbers = numbers
        self.pool.release(_pages(before))
        self.owned = self.numbers.shape[-1]
        index, in_place = torch.tensor(rows, dtype=torch.int64, device=self.pool.device), self.static and len(rows) == len(before)
        self._change_statistics(lambda x: selected(x, index, in_place))
        if not self.static:
            self._compact(fewer=len(self.numbers) < len(before))
        self.bind()

    def _compact(self, fewer: bool) -> None:
        """Moves the pages into a new pool, if no other table has pages of the present one, and half of it is
        free, or there are `fewer` rows than before; `bind` must follow."""
        pool, pages = self.pool, _pages(self.numbers)
        free = len(pool.free())
        if not free or (2 * free < pool.capacity and not fewer) or int(pool.owners.sum()) != pages.size:
            return
        used = pages[numpy.sort(numpy.unique(pages, return_index=True)[1])]  # in the order of the tables
        held = [self.pool.read(side, used) for side in (0, 1)]
        pool.release(pages)  # a fork without pages keeps the pool
        self.pool = self.pool_of(pool.layout, pool.device, pool.by_address)
        neighbours = self.numbers.ndim == 2 and len(used) == self.numbers.size
        new = self.pool.allocate(*self.numbers.shape if neighbours else (len(used), 1)).ravel()
        place = numpy.full(len(pool.owners), -1)
        place[used] = new
        self.numbers = numpy.where(self.numbers < 0, -1, place[self.numbers])
        self.pool.owners[:] = numpy.bincount(_pages(self.numbers), minlength=len(new))
        self._renumber(used)
        for side, codes in enumerate(held):
            self.pool.write(side, new, codes)

    def _renumber(self, numbers: Numbers) -> None:
        """Page `i` was `numbers[i]`."""

    def fork(self) -> PagedTokens:
        """Returns a copy that shares the pages, but not the statistics, which either may compute again."""
        twin = copy.copy(self)
        twin.numbers, twin.table = self.numbers.copy(), self.table.clone()
        twin._change_statistics(Tensor.clone)
        self.pool.share(_pages(self.numbers))
        self.owned = twin.owned = self.numbers.shape[-1]
        twin.bind()
        return twin

    # The snapshot of some rows.

    def snapshot(self, rows: slice) -> dict[str, Tensor]:
        """Tensors of some rows, by names `key.region.<buffer>`, `key.statistics.<buffer>`, and the same with
        `value`: the columns of codes `[B, H', T, width]`, as views where possible."""
        tensors: dict[str, Tensor] = {}
        for side, codes, statistics in zip(SIDES, self._codes_of(rows), self.statistics, strict=True):
            tensors |= {f"{side}.region.{name}": x for name, x in codes.items()}
            if self.has_statistics and bool(self.begun[rows].any()):
                tensors |= {f"{side}.statistics.{name}": x[rows] for name, x in statistics.items()}
        return tensors

    def _codes_of(self, rows: slice) -> tuple[Codes, Codes]:
        raise NotImplementedError

    def form(self, columns: int) -> dict[str, Tensor]:
        """Empty tensors of the names, dtypes and shapes of a `snapshot` with so many columns of codes."""
        tensors: dict[str, Tensor] = {}
        for side, statistics in zip(SIDES, self.statistics, strict=True):
            tensors |= {f"{side}.statistics.{name}": x for name, x in statistics.items()}
        rows = 1 if self.numbers.ndim == 3 else len(self.numbers)  # heads with pages of their own have as many columns together
        for of, name, dtype, heads, width, _ in self.pool.layout.planes if columns else ():
            tensors[f"{SIDES[of]}.region.{name}"] = torch.empty(rows, heads, columns, width, dtype=dtype, device="meta")
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copies a `snapshot` into this storage, which is empty and has the same number of rows."""
        for side, statistics in zip(SIDES, self.statistics, strict=True):
            for name, x in statistics.items():
                x.copy_(tensors[f"{side}.statistics.{name}"])
        self.begun.fill_(True)
        self.calibrated = True
        key, value = (
            {name.removeprefix(f"{side}.region."): x for name, x in tensors.items() if name.startswith(f"{side}.region.")} for side in SIDES
        )
        if key:
            self._load_codes((key, value))

    def _load_codes(self, codes: tuple[Codes, Codes]) -> None:
        raise NotImplementedError

    def move(self, device: torch.device, move: Callable[[Tensor], Tensor]) -> None:
        """Moves every tensor to `device` by `move(tensor)`."""
        with torch.inference_mode(False):
            self.pool.move(device, move)
            self._change_statistics(move)

    def _change_statistics(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces each tensor of the statistics by `change(tensor)`."""
        self.statistics = both(lambda codes: {name: change(x) for name, x in codes.items()}, self.statistics)
        self.begun = change(self.begun) if self.has_statistics else self.begun

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every live tensor with its role: `codes`, `scales` or `bookkeeping`."""
        yield from self.pool.tensors()
        yield from self.pool.layout.roles(self.statistics)
        for x in (self.begun, self.table):
            if x.numel():
                yield "bookkeeping", x


class RowPages(PagedTokens):
    """Quantized keys and values in slots that are the same in all heads.

    Args:
        per_head: each head has its own copy of buffers that heads could share, since a slot may hold another
            token in each head.
        static: the table keeps its address.
        grows: whether pages may be added between steps of compiled code.
        reads: chooses what attention reads; None: it reads all tokens.
        room: tokens for which slots are allocated when the object is made.
    """

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        like: Pair,
        per_head: bool = False,
        static: bool = False,
        grows: bool = False,
        reads: Select | None = None,
        room: int = 0,
    ):
        key, value = like
        layout = PageLayout(codecs, (key.shape[3], value.shape[3]), key.shape[1], PAGE, key.dtype, per_head)
        super().__init__(layout, like, (), static)
        self.ahead, self.grows, self.reads = 0, grows, reads
        """`ahead`: tokens after the stored ones whose codes are written already."""
        self.bound: Numbers | None = None
        """`numbers` when `bind` ran last; after an interrupted change `numbers` is another array."""
        self.reserve(room)

    def bind(self) -> None:
        super().bind()
        self.runs: list[Run] | None = None
        """The columns of the table as torch reads them; None: not known yet."""
        self.bound = self.numbers

    @property
    def capacity(self) -> int:
        """Slots of each row."""
        return self.numbers.shape[1] * PAGE

    def reserve(self, tokens: int) -> bool:
        """Makes room for `tokens` more, which are about to be written; returns whether pages were added or copied."""
        written = self.length + self.ahead
        shared = written // PAGE < self.owned
        self.own(written // PAGE, -(-written // PAGE))
        missing = self.length + tokens - self.capacity
        if missing <= 0:
            if self.bound is not self.numbers:
                self.bind()
            return shared
        rows, pages = self.numbers.shape[0], growth(self.length, missing) // PAGE
        if len(self.pool.free()) >= rows * pages:
            new = self.pool.take(rows * pages).reshape(rows, pages)
            self.pool.clear(new.ravel())
        else:
            new = self.pool.allocate(rows, pages)
        self.numbers = numpy.concatenate([self.numbers, new], axis=1)
        self.bind()
        return True

    def simulate(self, length: Callable[[int], int], groups: int) -> None:
        """Allocates the pages after `groups` groups of tokens; after `k` of them `length(k)` tokens are
        stored. Nothing is stored: for planning, on the meta device."""
        slots, k = growth(0, length(0)), 0
        while slots < length(groups):
            k = bisect_left(range(groups), slots + 1, lo=k + 1, key=length)  # the first group without room
            added, missing = growth(length(k - 1), length(k) - slots), length(groups) - slots
            repeats = -(-missing // added) if length(k - 1) // 8 >= MAX_GROWTH == added else 1  # later additions have the same size
            slots += repeats * added
        self.simulate_pages(slots // PAGE, len(self.numbers) * slots // PAGE)
        self.length = length(groups)

    def append(self, x: Pair) -> None:
        """Quantizes and stores keys and values `[B, H, T, D]`."""
        self.write(x)
        self.count(x[0].shape[2])

    def count(self, tokens: int) -> None:
        """Counts the next `tokens` slots as stored. Their codes are written already, or will be before they
        are read."""
        self.length += tokens
        self.ahead = max(self.ahead - tokens, 0)

    def write(self, x: Pair) -> None:
        """Quantizes keys and values `[B, H, T, D]` into the next `T` slots without codes."""
        tokens = x[0].shape[2]
        self.reserve(self.ahead + tokens)
        self.store(x, self.length + self.ahead)
        self.ahead += tokens

    def packed(self, side: int, limit: int, length: int | None = None) -> Iterator[Packed]:
        """Blocks of at most `limit` tokens of the keys (0) or values (1) of the first `length` tokens (None:
        of all), in order: views where the pages of each row are neighbours."""
        codec, once, dim = self.codecs[side], self.pages.statistics[side], self.dims[side]
        blocks = self._blocks(side, self.length if length is None else length, limit)
        return (Packed(codec, codes | once, count, dim) for count, codes in blocks)

    def _blocks(self, side: int, length: int, limit: int) -> Iterator[tuple[int, Codes]]:
        """Blocks of at most `limit` of the first `length` tokens of each row, with their number of tokens."""
        rows = len(self.numbers)
        for begin, end, run, at in self._pieces(0, length):
            for start in range(begin, end, limit):
                count = min(limit, end - start)
                if run.page is None:
                    numbers = self.numbers[:, start // PAGE : -(-(start + count) // PAGE)]
                    planes, first = self.pool.read(side, numbers.ravel()), start % PAGE
                    codes = {name: x.unflatten(0, (rows, -1)).transpose(1, 2).flatten(2, 3) for name, x in planes.items()}
                else:
                    codes, first = {name: x[:rows] for name, x in self.pages.slabs[run.slab][side].items()}, at + start - begin
                yield count, {name: x.narrow(2, first, count) for name, x in codes.items()}

    def _quantize(self, x: Pair, slots: Tensor | int) -> None:
        if self.pool.by_address or not isinstance(slots, int):
            return super()._quantize(x, slots)
        for side, (codec, new, statistics) in enumerate(zip(self.codecs, x, self.statistics, strict=True)):
            self._put(side, slots, codec.quantize(new, statistics))

    def _put(self, side: int, first: int, codes: Codes) -> None:
        """Writes codes `[B, H', T, width]` as the codes of the tokens from `first` on."""
        for begin, end, run, at in self._pieces(first, first + next(iter(codes.values())).shape[2]):
            new = {name: x[:, :, begin - first : end - first] for name, x in codes.items()}
            if run.page is None:
                self.pages.put(side, self.pages.slots(torch.arange(begin, end, device=self.pool.device)), new)
                continue
            for name, plane in self.pages.slabs[run.slab][side].items():
                plane[: len(self.numbers), :, at : at + end - begin] = new[name]

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, Run, int]]:
        """The tokens `begin` to `end` by runs: the first and the end of those in a run, the run, and the
        place of the first of them in its slab."""
        if self.runs is None:
            self.runs = _runs(self.pool, self.numbers)
        first = 0
        for run in self.runs:
            start, stop = max(begin, first), min(end, first + run.columns * PAGE)
            if start < stop:
                yield start, stop, run, (run.page or 0) * PAGE + start - first
            first += run.columns * PAGE

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, and gives back slabs that hold none of them."""
        self.length, self.ahead = min(self.length, length), 0
        if self.static or not self.numbers.shape[1]:
            return
        needed, width = max(-(-self.length // PAGE), 1), self.numbers.shape[1]
        kept = self.pool.slab_of(int(self.numbers[0, needed - 1]))
        while needed < width and kept.first <= self.numbers[0, needed] < kept.end:
            needed += 1
        if needed < width:
            dropped, self.numbers = self.numbers[:, needed:], self.numbers[:, :needed].copy()
            self.pool.release(dropped)
            self.pool.trim()
            self.bind()

    def clear(self) -> None:
        """Removes all tokens, and keeps the pages."""
        self.truncate(0)
        self.own(0, 0)
        for slab in self.pool.slabs:  # masked attention multiplies stale values by 0, and nan times 0 is nan
            slab.data.zero_()
        self.uncalibrate()

    def _codes_of(self, rows: slice) -> tuple[Codes, Codes]:
        if not self.length:
            return {}, {}

        def codes(side: int) -> Codes:
            parts = [part.codes for part in self.packed(side, self.length)]
            names = parts[0].keys() - self.statistics[side].keys()
            return {name: join_tokens([part[name][rows] for part in parts]) for name in names}

        return both(codes, (0, 1))

    def _load_codes(self, codes: tuple[Codes, Codes]) -> None:
        tokens = next(iter(codes[0].values())).shape[2]
        self.reserve(tokens)
        for side, given in enumerate(codes):
            if not self.pool.by_address:
                self._put(side, 0, given)
                continue
            for row, numbers in enumerate(self.numbers[:, : -(-tokens // PAGE)]):
                self.pool.write_row(side, numbers, {name: x[row : row + 1] for name, x in given.items()})
        self.length = tokens


class Run(NamedTuple):
    """Columns of a table, one after another. Their pages in row `b` are neighbours in group `b` of a slab,
    from `page` on; None: they are anywhere."""

    columns: int
    slab: int = 0
    page: int | None = None


def _runs(pool: PagePool, numbers: Numbers) -> list[Run]:
    """The runs of the pages `[B, W]`."""
    rows, width = numbers.shape
    if pool.by_address or not width:
        return [Run(width)]
    begins, ends, neighbours = (numpy.array([getattr(slab, name) for slab in pool.slabs]) for name in ("first", "end", "neighbours"))
    slab = begins.searchsorted(numbers[0], side="right") - 1
    page = numbers[0] - begins[slab]
    in_rows = numbers == numbers[0] + numpy.arange(rows)[:, None] * neighbours[slab]
    regular = (page < neighbours[slab]) & (numbers[-1] < ends[slab]) & in_rows.all(0)
    follows = (numpy.diff(page) == 1) & (numpy.diff(slab) == 0) & regular[1:] & regular[:-1] | ~regular[1:] & ~regular[:-1]
    first = [0, *(follows == 0).nonzero()[0] + 1, width]
    return [Run(end - at, int(slab[at]), int(page[at]) if regular[at] else None) for at, end in pairwise(first)]


def _pages(numbers: Numbers) -> Numbers:
    """The numbers of pages that exist."""
    return numbers[numbers >= 0]
