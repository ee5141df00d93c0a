"""Quantized tokens in pages, for rows of any lengths, with the torch reference of the kernels that read and write them.

A pool holds `N` pages of `PAGE` tokens, a power of two of at least 64. Token `n` of a row is at offset `n % PAGE` of the page
`table[row, n // PAGE]`. Pages may be anywhere in the pool, and rows may share them. Lengths are on the device: no function here reads them
from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from .attend import MASKED_BELOW, Options, apply_mask, scores
from .segments import CODECS, AttentionInputs, Exact, KeysOrValues, Packed, Pair, names, number, pv

COLUMNS = BEGIN, SINK_ROW, SINKS, RING_ROW, RING_START, RING_TOKENS = range(6)
"""Columns of `PagedInputs.rows`."""


@dataclass(eq=False)
class Pages:
    """The quantized tokens of a layer.

    planes      of keys and of values: `[N, H', PAGE, width]` for each buffer that is kept for each token. `H'` is `H`, or 1 for a buffer
                that heads share, or 1 where each head has pages of its own
    statistics  of keys and of values: `[B or 1, H or 1, 1, width]` for each buffer that is kept once; of one row if all rows share it
    table       int32 `[B, P]`, where all heads of a row share its pages, or `[B, H, P]`, where each head has its own. Entries beyond the
                length are not read
    lengths     int32 `[B]` or, with pages for each head, `[B, H]`: tokens

    Kernels require that the last two dimensions of planes are contiguous, and that their addresses, their strides over pages and, unless
    heads are `PAGE * width` apart, over heads are multiples of 64 bytes. Kernels use 64-bit offsets of pages where a plane spans 2^31
    elements or more.
    """

    key: Codec
    value: Codec
    planes: tuple[Codes, Codes]
    statistics: tuple[Codes, Codes]
    table: Tensor
    lengths: Tensor

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return self.key, self.value

    @cached_property
    def page_size(self) -> int:
        """Tokens of a page."""
        return next(iter(self.planes[0].values())).shape[2]

    @property
    def per_head(self) -> bool:
        """Whether each head has pages of its own."""
        return self.table.dim() == 3

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Strides of `table`, then of `lengths`, over rows and heads; 0 over heads that share pages."""
        pages, lengths = self.table.stride()[:-1], self.lengths.stride()
        return pages[0], pages[1] if len(pages) > 1 else 0, lengths[0], lengths[1] if len(lengths) > 1 else 0

    def gather(self, side: int, tokens: int, begin: int = 0) -> tuple[Codes, Tensor]:
        """Codes of the keys (`side` 0) or values (1) `begin` to `begin + tokens` of all rows, `[B, H', tokens, width]`, with the
        statistics, and which of them exist, bool `[B, 1 or H, tokens]`. Codes of those that do not are zeros."""
        place = torch.arange(begin, begin + tokens, device=self.table.device)
        table = self.table if self.per_head else self.table[:, None]
        exists = (place < self.lengths.view(len(table), -1, 1)).expand(*table.shape[:2], tokens)
        entry = place.div(self.page_size, rounding_mode="floor").clamp_max(table.shape[2] - 1)
        page = torch.where(exists, table[:, :, entry], 0).long()
        offset = place % self.page_size
        codes: Codes = {}
        for name, plane in self.planes[side].items():
            gathered = plane[page, 0, offset] if self.per_head else plane[page[:, 0], :, offset].transpose(1, 2)
            codes[name] = torch.where(exists[..., None], gathered, 0)
        return codes | self.statistics[side], exists


LEAST_SPLIT, BALANCED_SPLIT, MOST_SPLITS = 128, 512, 100
"""Fewest tokens of a split: fewer are not worth its partial outputs; fewest where the GPU has programs enough without; most splits of a
row: joining more costs too much."""
SPLIT_GRAIN, WAVES = 64, 4
"""Splits begin at multiples of SPLIT_GRAIN tokens, a multiple of the tiles of all launches. WAVES: programs that run
one after another on each place of the GPU when there are many tokens, so that few places wait for the last one."""


@dataclass(eq=False)
class Splits:
    """The work items of programs, where rows differ in length: the tokens of a row that each program reads.

    items       int32 `[N, 3]`: a row, the first of its tokens in the pages, and the end of them. Items of a row follow one another; the
                first of them is of its sinks and ring, and has a first token below 0. Items that are left over have no tokens
    firsts      int32 `[B + 1]`: the first item of each row, and their number
    """

    items: Tensor
    firsts: Tensor

    @staticmethod
    def of(lengths: Tensor, max_length: int, programs: int) -> Splits:
        """Divide rows with `lengths` tokens in pages, int32 `[B]`, each at most `max_length`, among `programs` that run
        at a time for a head. Splits have equal length, so that programs end together. The host does not wait for the
        device."""
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


@dataclass(eq=False)
class PagedInputs:
    """The inputs of attention over pages. A row has, in this order, sinks, quantized tokens and the tokens of a ring.

    sinks       keys and values `[E, H, S, D]` in the model's dtype, `S` may be 0
    ring        keys and values `[F, H, R, D]` in the model's dtype, `R` may be 0
    rows        int32 `[B, 6]`, for each row:
                BEGIN        the first token of its pages that is read
                SINK_ROW     its row of the `E` in `sinks`, and SINKS, how many tokens of it are read
                RING_ROW     its row of the `F` in `ring`; RING_START, the slot of its oldest token, and RING_TOKENS, how many there are,
                             in slots `(RING_START + i) % R`
    max_length  bound on `pages.lengths`, which sizes launches and results
    tokens      approximate sum of the lengths of all rows, where they differ much: long rows then get more splits. None: lengths are
                similar
    splits      of the rows, in place of `tokens`, for kernels that attend with one query of each row without accumulating attention
    """

    pages: Pages
    sinks: Pair
    ring: Pair
    rows: Tensor
    max_length: int
    tokens: int | None = None
    splits: Splits | None = None
    launches: dict[str, Any] = field(default_factory=dict)
    """Arguments that kernels reuse from step to step: tensors do not move, and statistics do not change. Inputs over the same storage may
    share them; rows, tables and lengths may differ."""
    arguments: tuple[list[Tensor], list[Tensor], list[Tensor], list[int], int, int] = field(init=False)
    """Arguments of torch operators: the table, planes and statistics; `rows`, `lengths`, and what `splits` has; sinks and ring; indices of
    the codecs; `max_length` and `tokens` (-1: None)."""

    def __post_init__(self) -> None:
        pages = self.pages
        pool = [pages.table]
        for kind, sides in (("each", pages.planes), ("once", pages.statistics)):
            for codec, side, x in zip(pages.codecs, sides, self.ring, strict=True):
                pool += [side[name] for name in names(codec, x.shape[3], kind)]
        numbers = [number(codec) for codec in pages.codecs]
        tokens = -1 if self.tokens is None else self.tokens
        counts = [self.rows, pages.lengths]
        if self.splits is not None:
            counts += [self.splits.items, self.splits.firsts]
        self.arguments = pool, counts, [*self.sinks, *self.ring], numbers, self.max_length, tokens

    @staticmethod
    def of(
        pool: Sequence[Tensor], counts: Sequence[Tensor], exact: Sequence[Tensor], numbers: Sequence[int], max_length: int, tokens: int
    ) -> PagedInputs:
        """The inverse of `arguments`."""
        key, value = (CODECS[n] for n in numbers)
        left = iter(pool[1:])
        sides = [
            {name: next(left) for name in names(codec, x.shape[3], kind)}
            for kind in ("each", "once")
            for codec, x in zip((key, value), exact[2:], strict=True)
        ]
        pages = Pages(key, value, (sides[0], sides[1]), (sides[2], sides[3]), pool[0], counts[1])
        splits = Splits(counts[2], counts[3]) if len(counts) > 2 else None
        return PagedInputs(pages, (exact[0], exact[1]), (exact[2], exact[3]), counts[0], max_length, None if tokens < 0 else tokens, splits)

    @property
    def slots(self) -> tuple[int, int, int]:
        """Slots of sinks, pages and ring."""
        return self.sinks[0].shape[2], self.max_length, self.ring[0].shape[2]

    def columns(self, exists: Tensor) -> Tensor:
        """The index of each slot's token in its row, int64 `[B, 1 or H, S + max_length + R]`, -1 for a slot without a token. `exists`:
        bool `[B, 1 or H, max_length]`, as `Pages.gather` returns it."""
        begin, _, sinks, _, start, count = self.rows[:, None, :, None].long().unbind(2)
        first, region, ring = (torch.arange(n, device=self.rows.device) for n in self.slots)
        exists = exists & (region >= begin)
        quantized = exists.sum(-1, keepdim=True)
        heads = exists.shape[:2]
        age = (ring - start) % max(len(ring), 1)
        return torch.cat(
            [
                torch.where(first < sinks, first, -1).expand(*heads, -1),
                torch.where(exists, region - begin + sinks, -1),
                torch.where(age < count, sinks + quantized + age, -1).expand(*heads, -1),
            ],
            dim=-1,
        )


class PageOptions(Options, total=False):
    """Options of attention over pages."""

    observed: Tensor | None
    """The weight of each query in accumulated attention, fp32 or bool `[B, Q]`."""


OPTIONS = "sinks", "observed", "scaling", "softcap", "causal"
"""The names of the options, in the order in which torch operators take them."""


def attend_pages(
    query: Tensor,
    inputs: PagedInputs,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    observed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of a few queries over sinks, pages and a ring.

    Args:
        query: `[B, Hq, Q, D]`, `Hq` a multiple of the KV heads.
        mask: bool (True: visible) or additive, broadcastable to `[B, Hq, Q, T]`, where `T` is at least the tokens of the longest row: a
            column is a token's index in its row.
        scaling, causal, softcap, sinks, observed: see `PageOptions`.

    Returns the output `[B, Hq, Q, Dv]` in the query's dtype, the log of the normaliser, fp32 `[B, Hq, Q]`, and accumulated attention by
    slot, fp32 `[B, H, S + max_length + R]`, without `observed` `[B, H, 0]`. A row without tokens has the output 0 and, without `sinks`,
    the log -inf.
    """
    batch, query_heads, queries, _ = query.shape
    key, exists = _side(inputs, 0)
    value, _ = _side(inputs, 1)
    heads, slots = key.shape[1:3]
    groups = query_heads // heads
    logits = scores(query, AttentionInputs(key, value), None, scaling, softcap=softcap).unflatten(1, (heads, groups))
    column = inputs.columns(exists)[:, :, None, None]
    newest = column.amax(-1, keepdim=True) + 1 - queries + torch.arange(queries, device=query.device)[:, None]
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())].expand(batch, query_heads, queries, -1).unflatten(1, (heads, groups))
        index = column.clamp(0, mask.shape[-1] - 1).expand(batch, heads, groups, queries, slots)
        logits = apply_mask(logits, mask.gather(-1, index), False)
    if causal:
        logits = logits.masked_fill(column > newest, torch.finfo(torch.float32).min)
    logits = logits.masked_fill(column < 0, -torch.inf).flatten(1, 2)
    lse = torch.logsumexp(logits, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float()[:, None])
    probabilities = (logits - lse[..., None]).exp().masked_fill(lse[..., None] == -torch.inf, 0)
    by_head = probabilities.reshape(batch, heads, groups * queries, slots)
    out = pv(by_head, value).view(batch, query_heads, queries, -1).to(query.dtype)
    if observed is None:
        return out, lse, lse.new_empty(batch, heads, 0)
    count = observed.float()[:, None].masked_fill(logits.amax(-1) <= MASKED_BELOW, 0).reshape(batch, heads, 1, groups * queries)
    counted = by_head.masked_fill((count == 0).mT, 0)
    return out, lse, (count @ counted)[:, :, 0]


def _side(inputs: PagedInputs, side: int) -> tuple[KeysOrValues, Tensor]:
    """Keys (0) or values (1) in all slots, zeros where there is no token, and which tokens of the pages exist."""
    pages, exact = inputs.pages, (inputs.sinks[side], inputs.ring[side])
    batch, (_, heads, _, dim) = inputs.rows.shape[0], exact[1].shape
    codes, exists = pages.gather(side, inputs.max_length)
    rows = inputs.rows.long()
    first, ring = exact[0][rows[:, SINK_ROW]], exact[1][rows[:, RING_ROW]]
    column = inputs.columns(exists)[:, :1, :, None]
    first = first.masked_fill(column[:, :, : first.shape[2]] < 0, 0)
    ring = ring.masked_fill(column[:, :, column.shape[2] - ring.shape[2] :] < 0, 0)
    segments = Exact(first), Packed(pages.codecs[side], codes, inputs.max_length, dim), Exact(ring)
    shape = (batch, heads, sum(inputs.slots), dim)
    return KeysOrValues.of(segments, shape, ring.dtype, ring.device), exists


def quantize_into(
    codecs: tuple[Codec, Codec], x: Pair, planes: tuple[Codes, Codes], statistics: tuple[Codes, Codes], slots: int | Tensor
) -> None:
    """Quantizes keys and values `[B, H, T, D]` into slots of a chunk or of a pool of pages.

    Args:
        planes: as of `Pages`; of a chunk, `[B, H', slots, width]`.
        statistics: the buffers that are kept once, as of `Pages`.
        slots: of a chunk, the slot of the first token. Of a pool, `page * PAGE + offset` of each token, int32 or int64 `[B, T]`, or of each
            vector, `[B, H, T]`, where each head has pages of its own; negative for tokens that are not stored.
    """
    for codec, side, into, constant in zip(codecs, x, planes, statistics, strict=True):
        for name, new in codec.quantize(side, constant).items():
            plane = into[name]
            if isinstance(slots, int):
                plane[:, :, slots : slots + new.shape[2]] = new
            elif slots.dim() == 3:
                _put(plane.select(1, 0), slots.long().flatten(), new.expand(-1, slots.shape[1], -1, -1).flatten(0, 2))
            else:
                _put(plane.transpose(1, 2), slots.long().flatten(), new.transpose(1, 2).flatten(0, 1))


def _put(plane: Tensor, slots: Tensor, new: Tensor) -> None:
    """Writes `new` `[M, ...]` into the slots `[M]` of `plane` `[N, PAGE, ...]`, unless they are negative. So that the host need
    not know which are, those without a slot are written as copies of the first entry that has one."""
    stored = slots >= 0
    first = stored.int().argmax()
    at = torch.where(stored, slots, slots[first].clamp_min(0))
    index = at.div(plane.shape[1], rounding_mode="floor"), at % plane.shape[1]
    stored = stored.view(-1, *[1] * (new.dim() - 1))
    plane[index] = torch.where(stored, new, torch.where(stored.any(), new[first], plane[index]))


def store_rows(x: Pair, ring: Pair, ring_slots: Tensor, sinks: Pair, sink_slots: Tensor) -> None:
    """Copies keys and values `[1, H, T, D]` into the slots of rings `[F, H, R, D]` and of sinks `[E, H, S, D]`, `S` may be 0.

    `ring_slots`, `sink_slots`: `row * R + slot` and `row * S + slot` of each token, int64 `[T]`; negative for tokens that are not stored.
    """
    for places, slots in ((ring, ring_slots), (sinks, sink_slots)):
        for place, side in zip(places, x, strict=True):
            if place.shape[2]:
                _put(place.transpose(1, 2), slots, side[0].transpose(0, 1))


def dequantize_pages(pages: Pages, out: Pair, begin: int = 0) -> None:
    """Writes keys and values `begin` to `begin + T` of each row into `out` `[B, H, T, D]`, and zeros beyond a row's length."""
    for side, x in enumerate(out):
        codes, exists = pages.gather(side, x.shape[2], begin)
        x.copy_(pages.codecs[side].dequantize(codes, x.shape[3], x.dtype).masked_fill(~exists[..., None], 0))


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
    pages, (news, places) = inputs.pages, (x.tolist() for x in starts)
    for b, ((begin, sink_row, sinks, ring_row, start, count), length) in enumerate(
        zip(inputs.rows.tolist(), pages.lengths.tolist(), strict=True)
    ):
        row = Pages(*pages.codecs, pages.planes, pages.statistics, pages.table[b : b + 1], pages.lengths[b : b + 1])
        order = torch.arange(start, start + count, device=inputs.rows.device) % max(inputs.slots[2], 1)
        quantized = max(length - begin, 0)
        dense = tuple(x.new_empty(1, x.shape[1], quantized, x.shape[3]) for x in out)
        if quantized:
            dequantize_pages(row, dense, begin)  # type: ignore[arg-type]
        for x, sink, middle, ring, last in zip(out, inputs.sinks, dense, inputs.ring, new, strict=True):
            parts = sink[sink_row, :, :sinks], middle[0], ring[ring_row][:, order], last[0, :, news[b] : news[b + 1]]
            x[0, :, places[b] : places[b + 1]] = torch.cat(parts, dim=1)
