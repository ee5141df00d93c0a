"""`HeadPages`: the quantized tokens of one layer whose heads retain different numbers of tokens, with their metadata.

Each row of the batch owns pages of `PAGE` tokens, which its heads share: token `n` of a head is in slot `n % PAGE` of the page
`table[row, head, n // PAGE]`. A head that retains fewer tokens gives pages back, and another takes them. Retained tokens keep their codes,
bit for bit; those at the end of a head that became shorter move into the slots of evicted ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import Packed, Pages, Pair, quantize_pages, quantizes
from ..policies.ranking import first_of
from .chunks import PAGE, block_of
from .quantized import Copy, QuantizedTokens


class HeadPages(QuantizedTokens):
    """Quantized keys and values of `dims` channels, and the metadata of their tokens, which has the names and dtypes of `fields`,
    `[B, H, 0]` each.

    planes      of keys and of values: `[B * P, 1, PAGE, width]` for each buffer that is kept for each token; each row owns `P` pages
    fields      `[B * P + 1, PAGE]`, the metadata; the last page stands for slots without a token
    table       int32 `[B, H, W]`, of all pages; that last page beyond the length of a head
    lengths     int32 `[B, H]`, tokens of each head
    """

    def __init__(self, codecs: tuple[Codec, Codec], dims: Sequence[int], fields: dict[str, Tensor]):
        super().__init__(codecs, dims, per_head=True)
        self.planes: tuple[Codes, Codes] = {}, {}
        self.fields = {name: _with_empty_page(x.new_empty(0, PAGE), name) for name, x in fields.items()}
        self.lengths = fields["positions"].new_zeros(fields["positions"].shape[:2])
        self.table = self.lengths.new_zeros(*self.lengths.shape, 0)
        self.length = self.capacity = 0
        """Tokens of the longest head, perhaps of a row that is no longer there, and pages of a row."""
        self.pages: Pages | None = None
        """What kernels read."""

    @property
    def columns(self) -> int:
        """Slots of a head, as many as the table has for each."""
        return self.table.shape[-1] * PAGE

    def bind(self) -> None:
        """Renews `pages`."""
        self.pages = Pages(*self.codecs, self.planes, self.statistics, self.table, self.lengths) if self.capacity else None

    def read(self, name: str) -> Tensor:
        """A field of all slots, `[B, H, columns]`, a copy; of slots without a token the position is -1."""
        return self.fields[name].index_select(0, self.table.flatten()).view(*self.lengths.shape, -1)

    def write(self, name: str, x: Tensor) -> None:
        """The inverse of `read`."""
        self.fields[name][self.table] = x.unflatten(-1, (-1, PAGE))

    def retain(self, kept: Tensor, new: Pair, accepted: Tensor, fields: dict[str, Tensor], most: int | Tensor) -> None:
        """Evicts all stored tokens but `kept`, bool `[B, H, L]`, and adds those of the keys and values `new` `[B, H, N, D]` that are
        `accepted`, bool `[B, H, N]`.

        Args:
            fields: the metadata of the stored and then of the new tokens, `[B, H, L + N]` each.
            most: tokens that a row may hold, over all heads; an int or an int64 scalar.
        """
        stored, chosen = kept.shape[-1], torch.cat([kept, accepted], dim=-1)
        lengths = chosen.sum(-1, dtype=torch.int32)
        had, wanted = _pages(self.lengths), _pages(lengths)
        sizes = lengths.max(), wanted.sum(-1).max(), (had != wanted).any(), torch.as_tensor(most, device=lengths.device)
        longest, most_pages, differ, limit = torch.stack(sizes).tolist()
        source = _sources(chosen, stored, lengths, longest)
        slot = torch.arange(longest, device=source.device)
        moved = ((source >= 0) & (source < stored) & (source != slot)).nonzero(as_tuple=True)
        codes = self._read(*self._address(moved[0], moved[1], source[moved]))  # before another head gets their pages
        self._reserve(most_pages, limit, new)
        if differ:
            self._assign(had[..., None], wanted[..., None], -(-longest // PAGE))
        self.lengths, self.length = lengths, longest
        self.bind()
        page, offset = self._address(*moved)
        for planes, side in zip(self.planes, codes, strict=True) if len(page) else ():
            for name, x in side.items():
                planes[name][page, 0, offset] = x
        self._quantize(new, source, stored)
        source = F.pad(source, (0, self.columns - longest), value=-1)
        empty, source = source < 0, source.clamp_min(0)
        for name, x in fields.items() if longest else ():
            self.write(name, x.gather(-1, source).masked_fill(empty, _nothing(name)))

    def _address(self, row: Tensor, head: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Page, and slot of that page, of slots `[N]`."""
        return self.table[row, head, slot // PAGE].long(), slot % PAGE

    def _read(self, page: Tensor, offset: Tensor) -> tuple[Codes, Codes]:
        key, value = ({name: plane[page, 0, offset] for name, plane in planes.items()} for planes in self.planes)
        return key, value

    def _reserve(self, wanted: int, most: int, like: Pair) -> None:
        """Makes room for `wanted` pages in each row, which may hold `most` tokens."""
        if wanted > self.capacity:
            self._allocate(_grown(self.capacity, wanted, self._most_pages(most)), like)

    def _most_pages(self, tokens: int) -> int:
        """Pages that `tokens` of a row can take, over all heads, each of which may leave one unfilled."""
        heads = self.lengths.shape[1]
        return (tokens - heads) // PAGE + heads

    def simulate(
        self, lengths: Callable[[int], Sequence[int]], most: Callable[[int], int], groups: int, like: Pair, *, others: bool = False
    ) -> None:
        """Allocates what is allocated after `groups` groups of tokens were added one by one, of which `k` bring the heads to `lengths(k)`
        tokens; the most that may be, if `most(k)` over all heads are fewer. With `others`, `most(k)` is the mean over layers, of which one
        may hold all tokens of a head. Nothing is stored: for planning, on the meta device."""

        def pages(k: int) -> int:
            return sum(-(-tokens // PAGE) for tokens in lengths(k))

        tokens, limit, capacity, k = lengths(groups), most(groups) + others * PAGE, pages(0), 0  # what others leave may take one page
        if not max(tokens) or not limit:
            return
        if sum(tokens) > limit:  # which of them go depends on the text
            capacity = self._most_pages(limit)
        while capacity < pages(groups) and sum(tokens) <= limit:
            k = bisect_left(range(groups), capacity + 1, lo=k + 1, key=pages)  # the first group without room
            capacity = _grown(capacity, pages(k), self._most_pages(most(k)))
        self._allocate(capacity, like)
        self.length = max(tokens) if others else min(max(tokens), limit)
        self.table = self.table.new_empty(*self.lengths.shape, -(-self.length // PAGE))

    def _allocate(self, capacity: int, like: Pair) -> None:
        """Gives each row `capacity` pages, the first of which hold what there was."""
        batch, within = len(self.lengths), self._table_of_rows()
        grown: list[Codes] = []
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
            for codec, side, old in zip(self.codecs, like, self.planes, strict=True):
                planes = codec.allocate(side.new_empty(batch * capacity, 1, 0, side.shape[3]), PAGE)
                for name, x in old.items():
                    planes[name].unflatten(0, (batch, -1))[:, : self.capacity] = x.unflatten(0, (batch, -1))
                grown.append(planes)
            for name, x in self.fields.items():
                pages = F.pad(x[:-1].unflatten(0, (batch, self.capacity)), (0, 0, 0, capacity - self.capacity))
                self.fields[name] = _with_empty_page(pages.flatten(0, 1), name)
        self.planes, self.capacity = (grown[0], grown[1]), capacity
        self._place(within)
        self._allocate_statistics(like)

    def _table_of_rows(self) -> Tensor:
        """`table`, with pages counted within the row; anything beyond the length of a head."""
        return self.table - self._first_pages()

    def _first_pages(self) -> Tensor:
        """The first page of each row, int32 `[B, 1, 1]`."""
        rows = torch.arange(len(self.lengths), dtype=torch.int32, device=self.lengths.device)
        return (rows * self.capacity)[:, None, None]

    def _place(self, within: Tensor) -> None:
        """Takes the table `within` `[B, H, W]` of pages counted within the row."""
        used = torch.arange(within.shape[-1], device=within.device) < _pages(self.lengths)[..., None]
        self.table = torch.where(used, within + self._first_pages(), len(within) * self.capacity)
        self.bind()

    def _assign(self, had: Tensor, wanted: Tensor, width: int) -> None:
        """Changes the pages of each head from `had` to `wanted`, int32 `[B, H, 1]`, at most `width`: heads give pages at their end back,
        and take free ones."""
        place, spare = torch.arange(width, device=had.device), len(had) * self.capacity
        table = F.pad(self.table, (0, width - self.table.shape[-1]))
        missing = (place >= had) & (place < wanted)
        table = torch.where(place < torch.minimum(had, wanted), table, spare)
        used = torch.zeros(spare + 1, dtype=torch.int32, device=table.device).scatter_(0, table.flatten().long(), 1)
        free = used[:-1].view(len(had), -1).argsort(dim=-1, stable=True) + self._first_pages()[..., 0]
        rank = missing.flatten(1).cumsum(-1) - 1
        self.table = torch.where(missing, free.gather(1, rank.clamp_min(0)).view_as(table).int(), table)

    def _quantize(self, new: Pair, source: Tensor, stored: int) -> None:
        """Quantizes the new tokens into the slots that `source` gives them: in one launch if there is a kernel, else block by block."""
        if self.pages is None:
            return
        count, slot = new[0].shape[2], torch.arange(source.shape[-1], device=source.device)
        address = self.pages.table[..., slot // PAGE].long() * PAGE + slot % PAGE
        into = torch.full((*source.shape[:2], stored + count + 1), -1, dtype=torch.int64, device=source.device)
        into = into.scatter_(-1, source.masked_fill(source < 0, stored + count), address)[..., stored:-1]
        block = count if quantizes(self.codecs, new) else min(map(block_of, new))
        for key, value, slots in zip(*(x.split(block, dim=2) for x in (*new, into)), strict=True):
            quantize_pages(self.codecs, (key, value), self.planes, self.statistics, slots)

    def packed(self, side: int, limit: int) -> Iterator[Packed]:
        """The keys (0) or values (1) stored at the time of the call, blocks of at most `limit` tokens of each head; zeros beyond its
        length."""
        return _packed(self.pages, self.codecs[side], side, self.length, limit, self.dims[side])

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by `fn(tensor)`, which may change the rows or the device."""
        shape, within = (len(self.lengths), self.capacity), fn(self._table_of_rows())
        with torch.inference_mode(False):
            key, value = ({name: fn(x.unflatten(0, shape)).flatten(0, 1) for name, x in planes.items()} for planes in self.planes)
            k_statistics, v_statistics = ({name: fn(x) for name, x in side.items()} for side in self.statistics)
            for name, x in self.fields.items():
                self.fields[name] = _with_empty_page(fn(x[:-1].unflatten(0, shape)).flatten(0, 1), name)
        self.planes, self.statistics = (key, value), (k_statistics, v_statistics)
        self.lengths = fn(self.lengths)
        self._place(within)

    def snapshot(self, rows: slice, tokens: int, copy: Copy) -> tuple[Codes, Codes]:
        """All pages of `rows`, `[rows, P, PAGE, width]` for each buffer, copied to host memory by `copy(destination, source)`."""
        sides: tuple[Codes, Codes] = {}, {}
        for codes, planes in zip(sides, self.planes, strict=True):
            for name, x in planes.items():
                source = x.unflatten(0, (-1, self.capacity))[rows, :, 0]
                codes[name] = torch.empty_like(source, device="cpu", memory_format=torch.contiguous_format)
                copy(codes[name], source)
        return sides

    def load(self, codes: tuple[Codes, Codes], statistics: tuple[Codes, Codes], like: Pair, copy: Copy) -> None:
        """Takes what `snapshot` returned, and `statistics`, if there are any. `place` says where the tokens are."""
        self._allocate_statistics(like)
        if codes[0]:
            self._allocate(next(iter(codes[0].values())).shape[1], like)
        for planes, given in zip(self.planes, codes, strict=True):
            for name, x in given.items():
                copy(planes[name].unflatten(0, (-1, self.capacity))[:, :, 0], x)
        self._load_statistics(statistics, copy)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What a snapshot holds beside codes and statistics, `[B, ...]` each, with its name."""
        yield from (("pages.table", self._table_of_rows()), ("pages.lengths", self.lengths))
        shape = len(self.lengths), self.capacity
        yield from ((f"pages.{name}", x[:-1].unflatten(0, shape)) for name, x in self.fields.items())

    def place(self, tensors: dict[str, Tensor], length: int) -> None:
        """Takes `length` and the `named_tensors` of another layer, whose codes are already there."""
        self.lengths, self.length = tensors["pages.lengths"], length
        for name in self.fields:
            self.fields[name] = _with_empty_page(tensors[f"pages.{name}"].flatten(0, 1), name)
        self._place(tensors["pages.table"])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every live tensor with its role: `codes`, `scales` or `bookkeeping`."""
        for planes, statistics, codec, dim in zip(self.planes, self.statistics, self.codecs, self.dims, strict=True):
            yield from codec.roles(planes | statistics, dim)
        yield from (("bookkeeping", x) for x in (self.table, self.lengths, *self.fields.values()))


def _nothing(field: str) -> int:
    """What a field holds where there is no token."""
    return -1 if field == "positions" else 0


def _with_empty_page(x: Tensor, field: str) -> Tensor:
    """Pages `[N, PAGE]` of a field, and one without tokens."""
    return F.pad(x, (0, 0, 0, 1), value=_nothing(field))


def _pages(lengths: Tensor) -> Tensor:
    """Pages that so many tokens take."""
    return (lengths + (PAGE - 1)).div(PAGE, rounding_mode="floor")


def _grown(capacity: int, wanted: int, most: int) -> int:
    """Pages of a row that has `capacity` and needs `wanted`: an eighth more than there were, but not beyond the `most` it can need."""
    return max(wanted, min(capacity + capacity // 8, most))


def _sources(chosen: Tensor, stored: int, lengths: Tensor, longest: int) -> Tensor:
    """Which of the `stored` and then of the new tokens each slot holds next, int64 `[B, H, longest]`, -1 for none: those that are `chosen`,
    bool `[B, H, T]`. Tokens stay where they are if their slot is below the new length of their head."""
    place, lengths = torch.arange(chosen.shape[-1], device=chosen.device), lengths[..., None]
    stays = chosen & (place < stored) & (place < lengths)
    moves = chosen & ~stays
    movers = first_of([moves, ~moves], longest)
    place, stays = place[:longest], stays[..., :longest]
    vacant = (place < lengths) & ~stays
    rank = (vacant.cumsum(-1) - 1).clamp_min(0)
    return torch.where(stays, place, torch.where(vacant, movers.gather(-1, rank), -1))


def _packed(pages: Pages | None, codec: Codec, side: int, length: int, limit: int, head_dim: int) -> Iterator[Packed]:
    for begin in range(0, length if pages else 0, limit):
        tokens = min(limit, length - begin)
        codes, _ = pages.gather(side, tokens, begin)  # type: ignore[union-attr]
        yield Packed(codec, codes, tokens, head_dim)
