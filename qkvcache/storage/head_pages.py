"""`HeadPages`: the quantized tokens of one layer whose heads retain different numbers of tokens.

Each row of the batch owns a pool of pages of `PAGE` tokens, which its heads share: token `n` of a head is in slot `n % PAGE` of the page
`table[row, head, n // PAGE]`, counted within the row. A head that retains fewer tokens gives pages back, and another takes them. Retained
tokens keep their codes, bit for bit; those at the end of a head that became shorter move into the slots of evicted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import Packed, Pages, Pair, quantize_pages
from .chunks import PAGE, block_of
from .quantized import Copy, QuantizedTokens


class HeadPages(QuantizedTokens):
    """Quantized keys and values of `dims` channels.

    planes      of keys and of values: `[B * P, 1, PAGE, width]` for each buffer that is kept for each token; each row owns `P` pages
    table       int32 `[B, H, W]`, pages within the row; entries beyond the length are not read
    lengths     int32 `[B, H]`, tokens of each head
    """

    def __init__(self, codecs: tuple[Codec, Codec], dims: Sequence[int], lengths: Tensor):
        super().__init__(codecs, dims, per_head=True)
        self.planes: tuple[Codes, Codes] = {}, {}
        self.lengths, self.table = lengths, lengths.new_zeros(*lengths.shape, 0)
        self.length = self.capacity = 0
        """Tokens of the longest head, perhaps of a row that is no longer there, and pages of a row."""
        self.pages: Pages | None = None
        """What kernels read."""

    def bind(self) -> None:
        """Renews `pages`."""
        self.pages = None
        if self.capacity:
            first = torch.arange(0, len(self.table) * self.capacity, self.capacity, dtype=torch.int32, device=self.table.device)
            self.pages = Pages(*self.codecs, self.planes, self.statistics, self.table + first[:, None, None], self.lengths)

    def retain(self, kept: Tensor, new: Pair, accepted: Tensor, most: int) -> Tensor:
        """Evicts all stored tokens but `kept`, bool `[B, H, L]`, and adds those of the keys and values `new` `[B, H, N, D]` that are
        `accepted`, bool `[B, H, N]`. `most`: tokens that a row may hold, over all heads.

        Returns which of the `L` stored and then of the `N` new tokens each slot holds now, int64 `[B, H, M]`, -1 for none.
        """
        stored, chosen = kept.shape[-1], torch.cat([kept, accepted], dim=-1)
        lengths = chosen.sum(-1, dtype=torch.int32)
        longest, wanted = torch.stack([lengths.max(), _pages(lengths).sum(-1).max()]).tolist()
        source = _sources(chosen, stored, lengths, longest)
        slot = torch.arange(longest, device=source.device)
        moved = ((source >= 0) & (source < stored) & (source != slot)).nonzero(as_tuple=True)
        codes = self._read(*self._address(moved[0], moved[1], source[moved]))  # before another head gets their pages
        self._reserve(wanted, most, new)
        self._assign(lengths, longest)
        page, offset = self._address(moved[0], moved[1], moved[2])
        for planes, side in zip(self.planes, codes, strict=True):
            for name, x in side.items():
                planes[name][page, 0, offset] = x
        self._quantize(new, source, stored)
        return source

    def _address(self, row: Tensor, head: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Page of the pool, and slot of that page, of slots `[N]`."""
        return row * self.capacity + self.table[row, head, slot // PAGE], slot % PAGE

    def _read(self, page: Tensor, offset: Tensor) -> tuple[Codes, Codes]:
        key, value = ({name: plane[page, 0, offset] for name, plane in planes.items()} for planes in self.planes)
        return key, value

    def _reserve(self, wanted: int, most: int, like: Pair) -> None:
        """Makes room for `wanted` pages in each row: an eighth more than there was, but not beyond what `most` tokens of a row can take."""
        if wanted <= self.capacity:
            return
        heads = self.lengths.shape[1]
        bound = (most - heads) // PAGE + heads  # each head may leave a page unfilled
        self._allocate(max(wanted, min(self.capacity + self.capacity // 8, bound)), like)

    def _allocate(self, capacity: int, like: Pair) -> None:
        """Gives each row `capacity` pages, the first of which hold what there was."""
        batch = len(self.lengths)
        grown: list[Codes] = []
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
            for codec, side, old in zip(self.codecs, like, self.planes, strict=True):
                planes, _ = codec.allocate(side.new_empty(batch * capacity, 1, 0, side.shape[3]), PAGE)
                for name, x in old.items():
                    planes[name].unflatten(0, (batch, -1))[:, : self.capacity] = x.unflatten(0, (batch, -1))
                grown.append(planes)
        self.planes, self.capacity = (grown[0], grown[1]), capacity
        self._allocate_statistics(like)

    def _assign(self, lengths: Tensor, longest: int) -> None:
        """Changes the tokens of each head to `lengths` `[B, H]`, of which `longest` is the largest: heads give pages at their end back, and
        take free ones."""
        had, wanted, width = _pages(self.lengths)[..., None], _pages(lengths)[..., None], -(-longest // PAGE)
        place = torch.arange(width, device=lengths.device)
        table = F.pad(self.table, (0, width - self.table.shape[-1]))
        kept, missing = place < torch.minimum(had, wanted), (place >= had) & (place < wanted)
        used = torch.zeros(len(table), self.capacity + 1, dtype=torch.int32, device=table.device)
        used.scatter_(1, torch.where(kept, table, self.capacity).flatten(1).long(), 1)
        free = used[:, :-1].argsort(dim=-1, stable=True)
        rank = missing.flatten(1).cumsum(-1) - 1
        page = free.gather(1, rank.clamp_min(0)).view_as(table)
        self.table = torch.where(missing, page.int(), torch.where(kept, table, 0))
        self.lengths, self.length = lengths, longest
        self.bind()

    def _quantize(self, new: Pair, source: Tensor, stored: int) -> None:
        """Quantizes the new tokens into the slots that `source` gives them, block by block."""
        if self.pages is None:
            return
        count, slot = new[0].shape[2], torch.arange(source.shape[-1], device=source.device)
        address = self.pages.table[..., slot // PAGE].long() * PAGE + slot % PAGE
        into = torch.full((*source.shape[:2], stored + count + 1), -1, dtype=torch.int64, device=source.device)
        into = into.scatter_(-1, source.masked_fill(source < 0, stored + count), address)[..., stored:-1]
        block = min(map(block_of, new))
        for key, value, slots in zip(*(x.split(block, dim=2) for x in (*new, into)), strict=True):
            quantize_pages(self.codecs, (key, value), self.planes, self.statistics, slots)

    def packed(self, side: int, limit: int) -> Iterator[Packed]:
        """The keys (0) or values (1) stored at the time of the call, blocks of at most `limit` tokens of each head; zeros beyond its
        length."""
        return _packed(self.pages, self.codecs[side], side, self.length, limit, self.dims[side])

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by `fn(tensor)`, which may change the rows or the device."""
        with torch.inference_mode(False):
            key, value = (
                {name: fn(x.unflatten(0, (-1, self.capacity))).flatten(0, 1) for name, x in planes.items()} for planes in self.planes
            )
            k_statistics, v_statistics = ({name: fn(x) for name, x in side.items()} for side in self.statistics)
        self.planes, self.statistics = (key, value), (k_statistics, v_statistics)
        self.table, self.lengths = fn(self.table), fn(self.lengths)
        self.bind()

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

    def place(self, table: Tensor, lengths: Tensor, length: int) -> None:
        """Takes `table`, `lengths` and a bound on these for pages that are already there."""
        self.table, self.lengths, self.length = table, lengths, length
        self.bind()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every live tensor with its role: `codes`, `scales` or `bookkeeping`."""
        for planes, statistics, codec, dim in zip(self.planes, self.statistics, self.codecs, self.dims, strict=True):
            yield from codec.roles(planes | statistics, dim)
        tables = (self.table, self.lengths) if self.pages is None else (self.table, self.lengths, self.pages.table)
        yield from (("bookkeeping", x) for x in tables)


def _pages(lengths: Tensor) -> Tensor:
    """Pages that so many tokens take."""
    return (lengths + PAGE - 1).div(PAGE, rounding_mode="floor")


def _sources(chosen: Tensor, stored: int, lengths: Tensor, longest: int) -> Tensor:
    """What `retain` returns. Tokens stay where they are if their slot is below the new length of their head."""
    place, lengths = torch.arange(chosen.shape[-1], device=chosen.device), lengths[..., None]
    stays = chosen & (place < stored) & (place < lengths)
    movers = (chosen & ~stays).int().argsort(dim=-1, descending=True, stable=True)
    place, stays = place[:longest], stays[..., :longest]
    vacant = (place < lengths) & ~stays
    rank = (vacant.cumsum(-1) - 1).clamp_min(0)
    return torch.where(stays, place, torch.where(vacant, movers.gather(-1, rank), -1))


def _packed(pages: Pages | None, codec: Codec, side: int, length: int, limit: int, head_dim: int) -> Iterator[Packed]:
    for begin in range(0, length if pages else 0, limit):
        tokens = min(limit, length - begin)
        codes, _ = pages.gather(side, tokens, begin)  # type: ignore[union-attr]
        yield Packed(codec, codes, tokens, head_dim)
