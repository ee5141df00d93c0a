"""`Pages`: quantized tokens in pages, as kernels and torch read and write them.

A slab is one allocation of pages, each of `PAGE` tokens, a power of two of at least 64. Token `n` of a row is
at offset `n % PAGE` of the page that entry `n // PAGE` of the row's table names. Pages may be anywhere in the
slabs, and rows may share them. Lengths are on the device: no function here reads them from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..formats.base import Codec, Codes

BLOCK = 32
"""Tokens of a block, the least that kernels read of a page, which it divides."""


@dataclass(eq=False)
class Pages:
    """The quantized tokens of a layer.

    codecs      of keys and of values
    slabs       of each slab the planes of keys and of values: `[N, H', PAGE, width]` for each buffer that is kept for each token. `H'` is
                `H`, or 1 for a buffer that heads share, or 1 where each head has pages of its own. Planes
                `[G, H', n * PAGE, width]` have `n` pages after one another, which kernels cannot read
    firsts      the entry in tables of the first page of each slab
    page_size   tokens of a page
    statistics  of keys and of values: `[B or 1, H or 1, 1, width]` for each buffer that is kept once; of one row if all rows share it
    table       int32 or int64 `[B, P]`, where all heads of a row share its pages, or `[B, H, P]`, where each head has its own. Entries
                beyond the length are not read
    lengths     int32 `[B]` or, with pages for each head, `[B, H]`: tokens; None: all that are read exist

    An entry `e` names page `e - first` of a slab. Kernels read all pages from the planes of the first slab:
    pages of other slabs lie at the same distances from them. They require that the last two dimensions of
    planes are contiguous, and that their addresses, their strides over pages and, unless heads are `PAGE *
    width` apart, over heads are multiples of 64 bytes.
    """

    codecs: tuple[Codec, Codec]
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
    on_host: ClassVar[bool] = False
    """Whether kernels read the pages in host memory."""
    chosen: ClassVar[tuple[Tensor, Tensor] | None] = None
    """The blocks that kernels read, where `table` has an entry for each of them: their indices in the row's pages,
    int32 `[B, H, N]`, ascending, and the tokens in them, int32 `[B, H]`. None: they read all tokens."""

    def read(self, side: int, most: int) -> tuple[Codes, Tensor]:
        """Codes of the keys (`side` 0) or values (1) that attention over the first `most` tokens reads, `[B,
        H', T, width]`, with the statistics, and the index of each in its row's pages, int64 `[B, 1 or H, T]`,
        -1 where there is no token."""
        codes, exists = self.gather(side, most)
        return codes, torch.where(exists, torch.arange(most, device=exists.device), -1)

    def copy_of(self, tokens: int) -> Callable[[], None]:
        """A function that copies the last `tokens` tokens of each row, as the device counts, to what the
        device keeps of pages `on_host`."""
        raise NotImplementedError

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
        """The slots, `entry * PAGE + offset` as int64 `[B, 1 or H, T]`, of the tokens `place`, int64 `[T]` or
        `[B, 1 or H, T]`. All rows have a slot for each of them."""
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
                    put_where(plane.transpose(1, 2), stored.flatten(), (here.flatten(), at.flatten()), new.transpose(1, 2).flatten(0, 1))
                    continue
                head = torch.arange(slots.shape[1], device=slots.device)[:, None] % plane.shape[1]
                index = (x.expand_as(slots).flatten() for x in (here, head, at))
                put_where(plane, stored.flatten(), tuple(index), new.expand(*slots.shape, -1).flatten(0, 2))

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
        """The indices of the slots at `offset` of the pages `page` in the first and the third dimension of
        `plane`. Pages that it lacks are exchanged for others."""
        neighbours = plane.shape[2] // self.page_size
        page = page.clamp(0, max(plane.shape[0] * neighbours - 1, 0))
        if neighbours == 1:
            return page, offset
        return page // neighbours, page % neighbours * self.page_size + offset

    def gather(self, side: int, tokens: int, begin: int = 0) -> tuple[Codes, Tensor]:
        """Codes of the keys (`side` 0) or values (1) `begin` to `begin + tokens` of all rows, `[B, H',
        tokens, width]`, with the statistics, and which of them exist, bool `[B, 1 or H, tokens]`. Codes of
        those that do not are zeros."""
        place = torch.arange(begin, begin + tokens, device=self.table.device)
        table = self.table if self.per_head else self.table[:, None]
        if self.lengths is None:
            return self.take(side, self.slots(place)) | self.statistics[side], place.new_ones(*table.shape[:2], tokens, dtype=torch.bool)
        exists = (place < self.lengths.view(len(table), -1, 1)).expand(*table.shape[:2], tokens)
        entry = (place // self.page_size).clamp_max(table.shape[2] - 1)
        entries = torch.where(exists, table[:, :, entry].long(), self.firsts[0])
        codes = self.take(side, entries * self.page_size + place % self.page_size)
        return {name: torch.where(exists[..., None], x, 0) for name, x in codes.items()} | self.statistics[side], exists


def put_where(x: Tensor, stored: Tensor, index: tuple[Tensor, ...], new: Tensor) -> None:
    """Writes `new` `[M, ...]` to the `index`, `[M]` for each of the first dimensions of `x`, where `stored`,
    bool `[M]`. So that the host need not know which are, those that are not stored are written as copies of
    the first that is."""
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
