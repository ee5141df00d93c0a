"""`HeadPages`: the quantized tokens, and their metadata, of one layer whose heads retain different numbers of tokens.

Codes lie in one pool of pages of `PAGE` tokens for the heads of all rows: token `n` of a head is in slot `n % PAGE` of
page `table[row, head, n // PAGE]`. A head that retains fewer tokens returns pages to the pool, and other heads take
them. Retained tokens keep their codes, bit for bit. When a head becomes shorter, its last tokens move into the slots of
evicted ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import Packed, Pages, Pair, quantize_into, quantizes
from ..policies.ranking import first_of
from .chunks import PAGE, block_of
from .quantized import QuantizedTokens


class HeadPages(QuantizedTokens):
    """Quantized keys and values of `dims` channels, and the metadata of their tokens, with the names and dtypes of
    `fields`, `[B, H, 0]` each.

    planes      codes of keys and of values: `[P, 1, PAGE, width]` for each buffer with an entry for each token
    fields      `[P + 1, PAGE]`, the metadata; the last page stands for slots without a token
    table       int32 `[B, H, W]`, the pages of each head; beyond its length the last page
    lengths     int32 `[B, H]`, tokens of each head
    """

    def __init__(self, codecs: tuple[Codec, Codec], dims: Sequence[int], fields: dict[str, Tensor]):
        super().__init__(codecs, dims, per_head=True)
        self.planes: tuple[Codes, Codes] = {}, {}
        self.fields = {name: _with_empty_page(x.new_empty(0, PAGE), name) for name, x in fields.items()}
        self._dirty: dict[str, Tensor] = {}
        """Fields by slot, `[B, H, columns]`, that were written and are not in pages yet."""
        self.lengths = fields["positions"].new_zeros(fields["positions"].shape[:2])
        self.table = self.lengths.new_zeros(*self.lengths.shape, 0)
        self.length = self.capacity = 0
        """`length`: tokens of the longest head, perhaps of a row that was removed. `capacity`: pages, used or free."""
        self.pages: Pages | None = None
        """The input of kernels; None without pages."""

    @property
    def columns(self) -> int:
        """Slots of each head in the table."""
        return self.table.shape[-1] * PAGE

    def bind(self) -> None:
        """Renews `pages`."""
        self.pages = Pages(*self.codecs, self.planes, self.statistics, self.table, self.lengths) if self.capacity else None

    def read(self, name: str) -> Tensor:
        """A field of all slots, `[B, H, columns]`; slots without a token have position -1."""
        if name in self._dirty:
            return self._dirty[name]
        return self.fields[name].index_select(0, self.table.flatten()).view(*self.lengths.shape, -1)

    def write(self, name: str, x: Tensor) -> None:
        """Replaces a field, `[B, H, columns]`. It is copied to pages only when tokens are evicted or rows change, since
        scores change in every step."""
        self._dirty[name] = x

    def _flush(self) -> None:
        """Copies written fields to pages."""
        for name, x in self._dirty.items():
            self.fields[name][self.table] = x.unflatten(-1, (-1, PAGE))
        self._dirty.clear()

    def retain(self, kept: Tensor, new: Pair, accepted: Tensor, fields: dict[str, Tensor], most: int | Tensor) -> None:
        """Evicts all stored tokens except `kept`, bool `[B, H, L]`, and adds the tokens of `new`, keys and values `[B,
        H, N, D]`, that are `accepted`, bool `[B, H, N]`.

        Args:
            fields: the metadata of the stored and then of the new tokens, `[B, H, L + N]` each.
            most: the most tokens of a row over all heads, an int or an int64 scalar.
        """
        self._dirty.clear()  # `fields` has all
        stored, chosen = kept.shape[-1], torch.cat([kept, accepted], dim=-1)
        lengths = chosen.sum(-1, dtype=torch.int32)
        had, wanted = _pages(self.lengths), _pages(lengths)
        sizes = lengths.max(), wanted.sum(), (had != wanted).any(), *([most] if isinstance(most, Tensor) else [])
        longest, most_pages, differ, *counted = torch.stack(sizes).tolist()
        source = _sources(chosen, stored, lengths, longest)
        slot = torch.arange(longest, device=source.device)
        if stored:
            row, head, at = ((source >= 0) & (source < stored) & (source != slot)).nonzero(as_tuple=True)
            page, offset = self._address(row, head, source[row, head, at])
            codes = [{name: x[page, 0, offset] for name, x in planes.items()} for planes in self.planes]  # before others get the pages
        if most_pages > self.capacity:
            self._allocate(_grown(self.capacity, most_pages, self._most_pages(most if isinstance(most, int) else counted[0])), new)
        if differ:
            self._assign(had[..., None], wanted[..., None], -(-longest // PAGE))
        self.lengths, self.length = lengths, longest
        self.bind()
        if stored and len(row):
            page, offset = self._address(row, head, at)
            for planes, side in zip(self.planes, codes, strict=True):
                for name, x in side.items():
                    planes[name][page, 0, offset] = x
        self._quantize(new, source, stored)
        source = F.pad(source, (0, self.columns - longest), value=-1)
        empty, source = source < 0, source.clamp_min(0)
        for name, x in fields.items() if longest else ():
            self.write(name, x.gather(-1, source).masked_fill(empty, _nothing(name)))
        self._flush()

    def _address(self, row: Tensor, head: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """The page, and the slot in it, of slots `[N]`."""
        return self.table[row, head, slot // PAGE].long(), slot % PAGE

    def _most_pages(self, tokens: int) -> int:
        """The most pages that rows of `tokens` tokens over all heads can take, since each head may have a page that is
        not full."""
        batch, heads = self.lengths.shape
        return batch * ((tokens - heads) // PAGE + heads)

    def simulate(
        self, lengths: Callable[[int], Sequence[int]], most: Callable[[int], int], groups: int, like: Pair, *, others: bool = False
    ) -> None:
        """Allocates the pages after `groups` groups of tokens; after `k` of them the heads hold `lengths(k)` tokens,
        or, if `most(k)` over all heads are fewer, `most(k)`: then the most pages possible. With `others`, `most(k)` is
        the mean over layers, and one layer may hold all tokens of a head. Nothing is stored: for planning, on the meta
        device."""

        def pages(k: int) -> int:
            return len(self.lengths) * sum(-(-tokens // PAGE) for tokens in lengths(k))

        tokens, limit, capacity, k = lengths(groups), most(groups) + others * PAGE, pages(0), 0  # others may take one page
        if not max(tokens) or not limit:
            return
        if sum(tokens) > limit:  # the evicted tokens depend on the text
            capacity = self._most_pages(limit)
        while capacity < pages(groups) and sum(tokens) <= limit:
            k = bisect_left(range(groups), capacity + 1, lo=k + 1, key=pages)  # the first group without room
            capacity = _grown(capacity, pages(k), self._most_pages(most(k)))
        self._allocate(capacity, like)
        self.length = max(tokens) if others else min(max(tokens), limit)
        self.table = self.table.new_empty(*self.lengths.shape, -(-self.length // PAGE))

    def _allocate(self, capacity: int, like: Pair) -> None:
        """Makes room for `capacity` pages; the present pages come first."""
        grown: list[Codes] = []
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
            for codec, side, old in zip(self.codecs, like, self.planes, strict=True):
                planes = codec.allocate(side.new_empty(capacity, 1, 0, side.shape[3]), PAGE)
                for name, x in old.items():
                    planes[name][: self.capacity] = x
                grown.append(planes)
            for name, x in self.fields.items():
                self.fields[name] = _with_empty_page(F.pad(x[:-1], (0, 0, 0, capacity - self.capacity)), name)
        self.planes, self.capacity = (grown[0], grown[1]), capacity
        self._place(self.table)
        self._allocate_statistics(like)

    def _used(self) -> Tensor:
        """The entries of the table that are pages of a head, bool `[B, H, W]`."""
        return torch.arange(self.table.shape[-1], device=self.lengths.device) < _pages(self.lengths)[..., None]

    def _place(self, table: Tensor) -> None:
        """Sets the table to `table` `[B, H, W]`, whose entries beyond the length of a head are not read."""
        self.table = table
        self.table = torch.where(self._used(), table, self.capacity)
        self.bind()

    def _assign(self, had: Tensor, wanted: Tensor, width: int) -> None:
        """Changes the number of pages of each head from `had` to `wanted`, int32 `[B, H, 1]`, at most `width`: heads
        return their last pages, or take free ones."""
        place, spare = torch.arange(width, device=had.device), self.capacity
        table = F.pad(self.table, (0, width - self.table.shape[-1]))
        missing = (place >= had) & (place < wanted)
        table = torch.where(place < torch.minimum(had, wanted), table, spare)
        used = torch.zeros(spare + 1, dtype=torch.int32, device=table.device).scatter_(0, table.flatten().long(), 1)
        free = used[:-1].argsort(stable=True)
        rank = missing.flatten().cumsum(0) - 1
        self.table = torch.where(missing, free[rank.clamp_min(0)].view_as(table).int(), table)

    def _quantize(self, new: Pair, source: Tensor, stored: int) -> None:
        """Quantizes the new tokens into the slots assigned by `source`, in one launch if there is a kernel, else block
        by block."""
        if self.pages is None:
            return
        count, slot = new[0].shape[2], torch.arange(source.shape[-1], device=source.device)
        address = self.pages.table[..., slot // PAGE].long() * PAGE + slot % PAGE
        into = torch.full((*source.shape[:2], stored + count + 1), -1, dtype=torch.int64, device=source.device)
        into = into.scatter_(-1, source.masked_fill(source < 0, stored + count), address)[..., stored:-1]
        block = count if quantizes(self.codecs, new) else min(map(block_of, new))
        for key, value, slots in zip(*(x.split(block, dim=2) for x in (*new, into)), strict=True):
            quantize_into(self.codecs, (key, value), self.planes, self.statistics, slots)

    def packed(self, side: int, limit: int) -> Iterator[Packed]:
        """Blocks, of at most `limit` tokens of each head, of the keys (0) or values (1) stored at the time of the call;
        zeros beyond a head's length."""
        pages, codec, dim, length = self.pages, self.codecs[side], self.dims[side], self.length if self.pages else 0
        parts = ((begin, min(limit, length - begin)) for begin in range(0, length, limit))
        return (Packed(codec, pages.gather(side, tokens, begin)[0], tokens, dim) for begin, tokens in parts)  # type: ignore[union-attr]

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by `fn(tensor)`, which may change the rows or the device. A repeated row gets its own
        pages."""
        self._flush()
        with torch.inference_mode(False):
            k_statistics, v_statistics = ({name: fn(x) for name, x in side.items()} for side in self.statistics)
            self.lengths, self.table = fn(self.lengths), fn(self.table)
            taken = self.table[self._used()].long()
            key, value = ({name: _rows_of(x, taken) for name, x in planes.items()} for planes in self.planes)
            self.fields = {name: _with_empty_page(_rows_of(x, taken), name) for name, x in self.fields.items()}
        self.statistics, self.planes, self.capacity = (k_statistics, v_statistics), (key, value), len(taken)
        self._place(self._in_order())

    def _pages_of(self, rows: slice) -> Tensor:
        """The pages of one row, int64 `[P]`, in the order of the table."""
        return self.table[rows][self._used()[rows]].long()

    def snapshot(self, rows: slice) -> tuple[Codes, Codes]:
        """A copy of the pages of one row, `[1, P, PAGE, width]` for each buffer."""
        taken = self._pages_of(rows)
        key, value = ({name: x[taken, 0][None] for name, x in planes.items()} for planes in self.planes)
        return key, value

    def form(self, like: Pair, codes: Tensor) -> tuple[Codes, Codes]:
        """Empty codes for keys and values like `like`, with the number of pages of the `codes` of a snapshot."""
        empty = (x.new_empty(1, codes.shape[1], 0, x.shape[3]) for x in like)
        key, value = (codec.allocate(x, PAGE, per_head=True) for codec, x in zip(self.codecs, empty, strict=True))
        return key, value

    def load(self, codes: tuple[Codes, Codes], statistics: tuple[Codes, Codes], like: Pair) -> None:
        """Copies the codes of a `snapshot`, and its `statistics` if any. `place` sets the tokens' pages."""
        self._allocate_statistics(like)
        if codes[0]:
            self._allocate(next(iter(codes[0].values())).shape[1], like)
        for planes, given in zip(self.planes, codes, strict=True):
            for name, x in given.items():
                planes[name][None, :, 0].copy_(x)
        self._load_statistics(statistics)

    def named_tensors(self, rows: slice) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one row's snapshot except codes and statistics, `[1, ...]` each, with their names."""
        self._flush()
        taken = self._pages_of(rows)
        yield "pages.lengths", self.lengths[rows]
        yield from ((f"pages.{name}", x[taken][None]) for name, x in self.fields.items())

    def place(self, tensors: dict[str, Tensor], length: int) -> None:
        """Sets `length` and the `named_tensors` of a row whose codes have been loaded."""
        self.lengths, self.length = tensors["pages.lengths"], length
        self.table = self.lengths.new_zeros(*self.lengths.shape, -(-length // PAGE))
        self._place(self._in_order())
        for name in self.fields:
            self.fields[name] = _with_empty_page(tensors[f"pages.{name}"][0], name)

    def check(self, tensors: dict[str, Tensor], length: int, seen: int) -> None:
        """Raises ValueError unless `length` and these tensors, of the form of `named_tensors`, are valid for
        `place`."""
        lengths, pages = tensors["pages.lengths"], tensors["pages.positions"].shape[1]
        if lengths.min() < 0 or not lengths.max() <= length <= seen or _pages(lengths).sum() != pages:
            raise ValueError(f"{pages} pages for heads of {lengths.tolist()} tokens, the longest of {length}, after {seen} tokens")

    def _in_order(self) -> Tensor:
        """A table of pages in the order of rows, heads and tokens."""
        return (self._used().flatten().cumsum(0) - 1).view_as(self.table).int()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every live tensor with its role: `codes`, `scales` or `bookkeeping`."""
        self._flush()
        for planes, statistics, codec, dim in zip(self.planes, self.statistics, self.codecs, self.dims, strict=True):
            yield from codec.roles(planes | statistics, dim)
        yield from (("bookkeeping", x) for x in (self.table, self.lengths, *self.fields.values()))


def _nothing(field: str) -> int:
    """The value of a field in a slot without a token."""
    return -1 if field == "positions" else 0


def _with_empty_page(x: Tensor, field: str) -> Tensor:
    """Pages `[N, PAGE]` of a field, and after them one without tokens."""
    return F.pad(x, (0, 0, 0, 1), value=_nothing(field))


def _rows_of(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]` on the device of `index`."""
    return x.index_select(0, index.to(x.device)).to(index.device)


def _pages(lengths: Tensor) -> Tensor:
    """The number of pages of each of `lengths`."""
    return (lengths + (PAGE - 1)).div(PAGE, rounding_mode="floor")


def _grown(capacity: int, wanted: int, most: int) -> int:
    """The new number of pages when there are `capacity` and `wanted` are needed: at least an eighth more, at most
    `most`."""
    return max(wanted, min(capacity + capacity // 8, most))


def _sources(chosen: Tensor, stored: int, lengths: Tensor, longest: int) -> Tensor:
    """The index of each slot's next token among the `stored` and then the new tokens, int64 `[B, H, longest]`;
    -1 for none. All `chosen` tokens, bool `[B, H, T]`, get a slot. A token whose slot is below the new length of its
    head stays there."""
    place, lengths = torch.arange(chosen.shape[-1], device=chosen.device), lengths[..., None]
    stays = chosen & (place < stored) & (place < lengths)
    moves = chosen & ~stays
    movers = first_of([moves, ~moves], longest)
    place, stays = place[:longest], stays[..., :longest]
    vacant = (place < lengths) & ~stays
    rank = (vacant.cumsum(-1) - 1).clamp_min(0)
    return torch.where(stays, place, torch.where(vacant, movers.gather(-1, rank), -1))
