"""Rows of different lengths in pages that lie anywhere in a pool, may be shared, and hold nan or codes that show wherever no token is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qkvcache.formats import Format
from qkvcache.formats.base import Codec, Codes
from qkvcache.kernels import AttentionInputs, PagedInputs, Pages, Pair
from qkvcache.kernels import paged_inputs as columns
from qkvcache.kernels.store.reference import quantize_into
from qkvcache.storage.storage import sides_of
from tests.codes import planes_of


def pages_of(
    codecs: tuple[Codec, Codec],
    planes: tuple[Codes, Codes],
    page: int,
    statistics: tuple[Codes, Codes],
    table: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Pages:
    """Pages in one slab; without a table, no row has any."""
    if table is None:
        table = torch.empty(0, 0, dtype=torch.int32, device=next((x.device for x in planes[0].values()), None))
    return Pages(codecs, [planes], [0], page, statistics, table, lengths)


def inputs_of(pages: Pages, sinks: Pair, ring: Pair, rows: Tensor | None = None, max_length: int = 0) -> PagedInputs:
    return PagedInputs(pages, sinks, ring, rows, max_length)


def divided(inputs: PagedInputs, **work) -> PagedInputs:
    """The same inputs with other fields of their work."""
    return inputs.twin(work=inputs.work._replace(**work))


def pool(format: Format, like: tuple[Tensor, Tensor], pages: int, page: int, per_head: bool = False):
    """Planes of keys and of values, all bits set, and the statistics of `like` `[1, H, T, D]`."""
    planes, statistics = [], []
    for codec, x in zip(format.codecs(), like, strict=True):
        heads = 1 if per_head else x.shape[1]
        each = planes_of(codec, x.new_empty(pages, heads, 0, x.shape[3]), page)
        for plane in each.values():
            plane.view(torch.uint8).fill_(0xFF)
        planes.append(each)
        statistics.append(codec.calibrate(x))
    return tuple(planes), tuple(statistics)


def build(
    format: Format,
    lengths: Sequence[int] | Sequence[Sequence[int]],
    *,
    heads: int = 2,
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float16,
    page: int = 64,
    begin: int = 0,
    sinks: int = 3,
    ring: int = 8,
    ring_tokens: Sequence[int] = (),
    shared: int = 0,
    device: torch.device | str = "cpu",
) -> PagedInputs:
    """Rows of `lengths` tokens in pages, for each head apart if they are lists; of the first `shared` pages all rows have the same."""
    batch, per_head = len(lengths), not isinstance(lengths[0], int)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    longest = max(int(counts.max()), 1)
    width = -(-longest // page) + 1
    number = torch.randperm(batch * (heads if per_head else 1) * width + 3)
    table = (
        number[: batch * (heads if per_head else 1) * width].view(batch, heads, width)
        if per_head
        else number[: batch * width].view(batch, width)
    )
    table = table.int().to(device)
    if shared:
        table[..., :shared] = table[:1, ..., :shared]
    x = tuple(torch.randn(batch, heads, longest, dim, device=device).to(dtype) for dim in dims)
    if shared:
        for side in x:
            side[:, :, : shared * page] = side[:1, :, : shared * page]
    planes, statistics = pool(format, tuple(side[:1, :, :32] for side in x), len(number), page, per_head)
    place = torch.arange(longest, device=device)
    slots = table[..., place // page].long() * page + place % page
    slots = slots.masked_fill(place >= counts[..., None], -1)
    pages = pages_of(format.codecs(), planes, page, statistics, table, counts)
    quantize_into(pages, x, slots if per_head else slots[:, None])
    after = torch.arange(width, device=device) >= -(-counts[..., None] // page)
    table = table.masked_fill(after, 2**30)  # which nobody may read
    pages = replace(pages, table=table)
    tokens = torch.tensor(ring_tokens or [ring] * batch, dtype=torch.int32, device=device)
    rows = torch.zeros(batch, len(columns.COLUMNS), dtype=torch.int32, device=device)
    rows[:, columns.BEGIN] = begin
    rows[:, columns.SINK_ROW] = torch.randperm(batch + 1, device=device)[:batch]
    rows[:, columns.SINKS] = torch.arange(batch, device=device) % (sinks + 1)
    rows[:, columns.RING_ROW] = torch.randperm(batch + 2, device=device)[:batch]
    rows[:, columns.RING_START] = torch.randint(max(ring, 1), (batch,), device=device)
    rows[:, columns.RING_TOKENS] = tokens
    rows[:, columns.LENGTH] = counts if counts.dim() == 1 else 0  # operators take the lengths of rows from here
    first, last = (
        tuple(torch.full((rows_, heads, count, dim), torch.nan, dtype=dtype, device=device) for dim in dims)
        for rows_, count in ((batch + 1, sinks), (batch + 2, ring))
    )
    for b in range(batch):
        _, sink_row, ring_row, count, start, filled, *_ = rows[b].tolist()
        for side, dim in enumerate(dims):
            first[side][sink_row, :, :count] = torch.randn(heads, count, dim).to(first[side])
            last[side][ring_row, :, (start + torch.arange(filled)) % max(ring, 1)] = torch.randn(heads, filled, dim).to(last[side])
    return inputs_of(pages, first, last, rows, longest + 40)


def of_heads(
    format: Format, queries: int, lengths: Sequence[Sequence[int]] = ((150, 5), (0, 97)), *, dtype: torch.dtype, device: torch.device | str
) -> tuple[AttentionInputs, Tensor]:
    """Inputs of attention as storage makes them whose heads share a budget, with the last `queries` tokens running; and the columns
    without a token, bool `[B, H, T]`: those that a head lacks, and in the last row the first of the residual."""
    batch, heads, longest, sinks, residual, empty = len(lengths), len(lengths[0]), max(map(max, lengths)), 3, 14, 4

    def random(tokens: int) -> tuple[Tensor, Tensor]:
        key, value = (torch.randn(batch, heads, tokens, 64, device=device, dtype=dtype) for _ in range(2))
        return key, value

    x, first, last = random(longest), random(sinks), random(residual + queries)
    accepted = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[..., None]
    pages = pytest.importorskip("qkvcache.evict.head_pages")  # of a room
    stored = pages.HeadPages(format.codecs(), x, {"positions": torch.empty(batch, heads, 0, dtype=torch.int32, device=device)})
    stored.calibrate(x)
    stored.retain(accepted[..., :0], x, accepted, {"positions": accepted.int()}, heads * longest)
    padding = torch.zeros(batch, heads, sinks + residual + queries, dtype=torch.bool, device=device)
    padding[-1, :, sinks : sinks + empty] = True
    rows = [[0, b, b, sinks, empty * (b == batch - 1), residual + queries - empty * (b == batch - 1), 0, 0] for b in range(batch)]
    paged = inputs_of(stored.pages, first, last, torch.tensor(rows, dtype=torch.int32, device=device), stored.columns)
    hidden = torch.cat([padding[..., :sinks], ~accepted, padding[..., sinks:]], dim=-1)
    return AttentionInputs(*sides_of(first, stored, last), paged=paged), hidden


def row(inputs: PagedInputs, b: int, h: int, side: int) -> Tensor:
    """The keys (0) or values (1) of a head of a row, `[T, D]` in fp32: token after token, by the tables."""
    pages, rows = inputs.pages, inputs.rows[b].tolist()
    begin, sink_row, ring_row, sinks, start, tokens, *_ = rows
    first, ring = inputs.sinks[side][sink_row, h, :sinks], inputs.ring[side][ring_row, h]
    order = [(start + i) % max(ring.shape[0], 1) for i in range(tokens)]
    table, length = (pages.table[b, h], pages.lengths[b, h]) if pages.per_head else (pages.table[b], pages.lengths[b])
    parts = [first.float()]
    for n in range(begin, int(length)):
        page, offset = int(table[n // pages.page_size]), n % pages.page_size
        codes = {}
        for name, plane in pages.planes[side].items():
            codes[name] = plane[page : page + 1, :, offset : offset + 1]
        head = 0 if pages.per_head else h
        statistics = {name: x[b % x.shape[0]][None] for name, x in pages.statistics[side].items()}
        if pages.per_head:  # codes of one head, so that its statistics are its own
            statistics = {name: x[:, h % x.shape[1]][:, None] for name, x in statistics.items()}
        parts.append(pages.codecs[side].dequantize(codes | statistics, first.shape[1])[0, head])
    parts.append(ring[order].float())
    return torch.cat(parts)
