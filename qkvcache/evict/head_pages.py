"""`HeadPages`: the quantized tokens, and their metadata, of one layer whose heads retain different numbers of tokens.

Each head of each row has pages of its own. A head that retains fewer tokens returns pages to the pool, and other heads take
them. Retained tokens keep their codes, bit for bit. When a head becomes shorter, its last tokens move into the slots of
evicted ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import Packed, Pair, both
from ..storage.paged import PAGE, PagedTokens
from ..storage.pool import Numbers, PageLayout
from .policies.ranking import first_of


class HeadPages(PagedTokens):
    """Quantized keys and values like `like` `[B, H, T, D]`, and the metadata of their tokens, with the names and dtypes of
    `fields`, `[B, H, 0]` each.

    fields      `[P + 1, PAGE]`, the metadata by number of the page; the last page stands for slots without a token
    lengths     int32 `[B, H]`, tokens of each head
    """

    lengths: Tensor

    def __init__(self, codecs: tuple[Codec, Codec], like: Pair, fields: dict[str, Tensor]):
        key, value = like
        layout = PageLayout(codecs, (key.shape[3], value.shape[3]), 1, PAGE, key.dtype)
        super().__init__(layout, like, key.shape[1:2])
        self.fields = {name: _with_empty_page(x.new_empty(0, PAGE), name) for name, x in fields.items()}
        self._dirty: dict[str, Tensor] = {}
        """Fields by slot, `[B, H, columns]`, that were written and are not in pages yet."""
        self.lengths = fields["positions"].new_zeros(fields["positions"].shape[:2])
        self.bind()

    def bind(self) -> None:
        super().bind()
        spare = len(self.pool.owners)
        for name, x in self.fields.items():
            if missing := spare + 1 - x.shape[0]:
                self.fields[name] = _with_empty_page(F.pad(x[:-1], (0, 0, 0, missing)), name)
        numbers = torch.from_numpy(numpy.where(self.numbers < 0, spare, self.numbers))
        self.index = numbers.to(self.pool.device, non_blocking=True)
        """The numbers of the pages of each head, int64 `[B, H, W]`; where there is none, the number of the page without tokens."""

    @property
    def columns(self) -> int:
        """Slots of each head in the table."""
        return self.numbers.shape[-1] * PAGE

    def read(self, name: str) -> Tensor:
        """A field of all slots, `[B, H, columns]`; slots without a token have position -1."""
        if name in self._dirty:
            return self._dirty[name]
        return self.fields[name].index_select(0, self.index.flatten()).view(*self.lengths.shape, -1)

    def write(self, name: str, x: Tensor) -> None:
        """Replaces a field, `[B, H, columns]`. It is copied to pages only when tokens are evicted or rows change, since
        scores change in every step."""
        self._dirty[name] = x

    def _flush(self) -> None:
        """Copies written fields to pages."""
        for name, x in self._dirty.items():
            self.fields[name][self.index] = x.unflatten(-1, (-1, PAGE))
        self._dirty.clear()

    def retain(self, kept: Tensor, new: Pair, accepted: Tensor, fields: dict[str, Tensor], most: int | Tensor) -> None:
        """Evicts all stored tokens except `kept`, bool `[B, H, L]`, and adds the tokens of `new`, keys and values `[B,
        H, N, D]`, that are `accepted`, bool `[B, H, N]`.

        Args:
            fields: the metadata of the stored and then of the new tokens, `[B, H, L + N]` each.
            most: the most tokens of a row over all heads, an int or an int64 scalar.
        """
        self.own(0, self.numbers.shape[-1])
        stored, chosen = kept.shape[-1], torch.cat([kept, accepted], dim=-1)
        lengths = chosen.sum(-1, dtype=torch.int32)
        *counts, limit = torch.cat([lengths.flatten().long(), torch.as_tensor(most, device=lengths.device).view(1)]).tolist()
        longest, wanted = max(counts), -(-numpy.array(counts).reshape(lengths.shape) // PAGE)
        source = _sources(chosen, stored, lengths, longest)
        slot = torch.arange(longest, device=source.device)
        row, head, at = ((source >= 0) & (source < stored) & (source != slot)).nonzero(as_tuple=True)
        codes = [self.pages.take(side, self._slots(row, head, source[row, head, at])) for side in (0, 1)] if len(row) else []
        self.lengths, self.length = lengths, longest
        self._assign(wanted, self._most_pages(limit))
        for side, moved in enumerate(codes):
            self.pages.put(side, self._slots(row, head, at), moved)
        if longest:
            count = new[0].shape[2]
            into = torch.full((*source.shape[:2], stored + count + 1), -1, dtype=torch.int64, device=source.device)
            into = into.scatter_(-1, source.masked_fill(source < 0, stored + count), self.pages.slots(slot))[..., stored:-1]
            self.store(new, into)
        source = F.pad(source, (0, self.columns - longest), value=-1)
        empty, source = source < 0, source.clamp_min(0)
        self._dirty = {name: x.gather(-1, source).masked_fill(empty, _nothing(name)) for name, x in fields.items()} if longest else {}
        self._flush()

    def _slots(self, row: Tensor, head: Tensor, place: Tensor) -> Tensor:
        """The slots, int64 `[1, 1, N]`, of tokens `[N]`."""
        entry = self.table[row, head, place // PAGE]
        return (entry * PAGE + place % PAGE)[None, None]

    def _most_pages(self, tokens: int) -> int:
        """The most pages that rows of `tokens` tokens over all heads can take, since each head may have a page that is
        not full."""
        batch, heads = self.lengths.shape
        return batch * ((tokens - heads) // PAGE + heads)

    def simulate(self, lengths: Callable[[int], Sequence[int]], most: Callable[[int], int], groups: int, *, others: bool = False) -> None:
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
        self.length = max(tokens) if others else min(max(tokens), limit)
        width = -(-self.length // PAGE)
        self.simulate_pages(width, capacity)
        self.index = self.lengths.new_empty(*self.lengths.shape, width, dtype=torch.int64)
        self.fields = {name: x.new_empty(capacity + 1, PAGE) for name, x in self.fields.items()}

    def _assign(self, wanted: Numbers, most: int) -> None:
        """Gives each head as many pages as `wanted` says, `[B, H]`: heads return their last pages, or take free ones. The pool grows to
        `most` pages at most, if no more are wanted."""
        had, before = (self.numbers >= 0).sum(-1)[..., None], self.numbers
        width, place = int(wanted.max()), numpy.arange(max(int(wanted.max()), before.shape[-1]))
        wanted = wanted[..., None]
        numbers = numpy.concatenate([before, numpy.full((*before.shape[:2], len(place) - before.shape[-1]), -1)], axis=-1)
        dropped, missing = (place >= wanted) & (place < had), (place >= had) & (place < wanted)
        self.pool.release(numbers[dropped])
        numbers[dropped] = -1
        short = int(missing.sum()) - len(self.pool.free())
        if short > 0:
            capacity = self.pool.capacity
            self.pool.release(self.pool.allocate(_grown(capacity, capacity + short, most) - capacity, 1))
        numbers[missing] = self.pool.take(int(missing.sum()))
        self.numbers = numbers[..., :width].copy()
        self.bind()

    def packed(self, side: int, limit: int, length: int | None = None) -> Iterator[Packed]:
        """Blocks, of at most `limit` of the first `length` tokens of each head (None: of all), of the keys (0) or values (1); zeros beyond
        a head's length."""
        pages, length = self.pages, self.length if length is None else length
        parts = ((begin, min(limit, length - begin)) for begin in range(0, length, limit))
        return (Packed(self.codecs[side], pages.gather(side, tokens, begin)[0], tokens, self.dims[side]) for begin, tokens in parts)

    def select(self, rows: Sequence[int]) -> None:
        self._flush()
        self.lengths = self.lengths.index_select(0, torch.tensor(rows, dtype=torch.int64, device=self.lengths.device))
        super().select(rows)

    @torch.inference_mode(False)
    def _renumber(self, numbers: Numbers) -> None:
        index = torch.from_numpy(numpy.append(numbers, -1)).to(self.pool.device)  # the last one has no tokens
        self.fields = {name: x[index] for name, x in self.fields.items()}

    def _copy(self, source: Numbers, target: Numbers) -> None:
        super()._copy(source, target)
        old, new = (torch.from_numpy(x).to(self.pool.device) for x in (source, target))
        for x in self.fields.values():
            x[new] = x[old]

    def fork(self) -> HeadPages:
        self._flush()
        twin: HeadPages = super().fork()  # type: ignore[assignment]
        twin.fields, twin._dirty = {name: x.clone() for name, x in self.fields.items()}, {}
        return twin

    def _pages_of(self, rows: slice) -> Numbers:
        """The pages of some rows in the order of the table."""
        return self.numbers[rows][self.numbers[rows] >= 0]

    def snapshot(self, rows: slice) -> dict[str, Tensor]:
        """`PagedTokens.snapshot`, with the columns of all pages, and with `pages.lengths` and the fields `[1, P, PAGE]`."""
        self._flush()
        taken = torch.from_numpy(self._pages_of(rows)).to(self.index.device)
        fields = {f"pages.{name}": x[taken][None] for name, x in self.fields.items()}
        return super().snapshot(rows) | fields | {"pages.lengths": self.lengths[rows]}

    def _codes_of(self, rows: slice) -> tuple[Codes, Codes]:
        numbers = self._pages_of(rows)
        if not len(numbers):
            return {}, {}
        return both(lambda side: {name: x.flatten(0, 2)[None, None] for name, x in self.pool.read(side, numbers).items()}, (0, 1))

    def form(self, columns: int) -> dict[str, Tensor]:
        pages = columns // PAGE
        fields = {f"pages.{name}": x.new_empty(1, pages, PAGE) for name, x in self.fields.items()}
        return super().form(pages * PAGE) | fields | {"pages.lengths": self.lengths}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.lengths = tensors["pages.lengths"]
        counts = self.lengths.cpu().numpy().astype(numpy.int64)[..., None]
        self.length = int(counts.max())
        used = numpy.arange(-(-self.length // PAGE)) < -(-counts // PAGE)
        self.numbers = numpy.full(used.shape, -1)
        self.numbers[used] = self.pool.allocate(1, int(used.sum()))[0]
        self.fields = {name: _with_empty_page(tensors[f"pages.{name}"][0], name) for name in self.fields}
        self.bind()
        super().load(tensors)

    def _load_codes(self, codes: tuple[Codes, Codes]) -> None:
        for side, given in enumerate(codes):
            self.pool.write_row(side, self._pages_of(slice(None)), given)

    def check(self, tensors: dict[str, Tensor], seen: int) -> None:
        """Raises ValueError unless the lengths in a snapshot after `seen` tokens match its pages."""
        lengths, pages = tensors["pages.lengths"], tensors["pages.positions"].shape[1]
        if lengths.min() < 0 or lengths.max() > seen or ((lengths + PAGE - 1) // PAGE).sum() != pages:
            raise ValueError(f"{pages} pages for heads of {lengths.tolist()} tokens, after {seen} tokens")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every live tensor with its role: `codes`, `scales` or `bookkeeping`."""
        self._flush()
        yield from super().tensors()
        yield from (("bookkeeping", x) for x in (self.index, self.lengths, *self.fields.values()))


def _nothing(field: str) -> int:
    """The value of a field in a slot without a token."""
    return -1 if field == "positions" else 0


@torch.inference_mode(False)  # tensors made in inference mode cannot be written outside of it
def _with_empty_page(x: Tensor, field: str) -> Tensor:
    """Pages `[N, PAGE]` of a field, and after them one without tokens."""
    return F.pad(x, (0, 0, 0, 1), value=_nothing(field))


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
