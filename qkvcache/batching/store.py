"""`PageStore`: compressed pages and rings of all requests of a model, and the slots of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from ..kernels import PagedInputs, Pages, Pair, Prepared, Work, prepare, quantize_into, reads_together
from ..kernels.attend.chunked import CHUNK_BYTES
from ..kernels.paged_inputs import LENGTH
from .layout import BlockLayout
from .rings import Rings
from .statistics import Statistics
from .step import Batch, BatchStep, BlockTables, Rows, step_of_batch, step_of_table


class LayerGroup:
    """Layers of one kind, whose pages are in the same blocks."""

    def __init__(self, layout: BlockLayout, layers: list[int], rings: Rings):
        self.layout, self.layers = layout, layers
        self.tables = BlockTables(rings.count)
        self.views: dict[int, tuple[Any, Pair]] = {}
        """The planes and the exact first tokens of each layer (`BlockLayout.views`)."""
        self.batch: Batch  # the latest
        self.step: BatchStep | None = None

    def bind(self, data: Tensor) -> None:
        """Sets the memory of all blocks, uint8 `[bytes]`."""
        self.views = {layer: self.layout.views(data, i, len(self.layers)) for i, layer in enumerate(self.layers)}


class PageStore:
    """The pages of `groups` of layers, whose blocks transformers' allocators hand out, and the rings of requests. A KV head
    has `query_groups` query heads."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        rings: Rings,
        statistics: Statistics,
        rank: int,
        query_groups: int,
        budget: Any = None,
    ):
        self.groups, self.rings, self.statistics, self.calibrating = groups, rings, statistics, True
        self.budget, self.reads_few = budget, False
        """The budget of attention, and whether it pays in the latest batch."""
        self.group_of = {layer: group for group in groups for layer in group.layers}
        layout = groups[0].layout
        like = torch.empty(1, layout.heads, 1, layout.head_dim, dtype=layout.dtype, device=rings.tensor.device)
        prepare(layout.codecs, (layout.head_dim,) * 2, layout.dtype, like.device)
        self._together = reads_together(query_groups, layout.head_dim, like.device)
        self.scratch_tokens = CHUNK_BYTES // (2 * like[0].nbytes)
        self.ring_index = {layer: i for i, layer in enumerate(self.group_of)}
        self.launches: dict[int, dict[str, Any]] = {layer: {} for layer in self.group_of}
        self.unwritten = set(self.group_of)
        """The layers that have not yet stored a token."""
        self._once = {layer: statistics.of_layer(layer, like, rank) for layer in self.group_of}

    @property
    def kind(self) -> tuple[bool, ...]:
        """The kind of launches of a decode step: whether the latest batch reads few tokens, and of which groups
        rows read tokens together."""
        return self.reads_few, *(group.batch.shares is not None for group in self.groups)

    # A layer.

    def inputs(self, layer: int, rows: Rows) -> PagedInputs:
        """The inputs of attention over rows of a layer."""
        pages, sinks = self._pages(layer, rows.table, rows.columns[:, LENGTH])
        select = self.budget.select if self.reads_few and self.group_of[layer].layout.window is None else None
        work, prepared = Work(splits=rows.splits), Prepared(self.launches[layer])
        return PagedInputs(pages, sinks, self._ring(layer), rows.columns, rows.max_length, work, select=select, prepared=prepared)

    def write(self, layer: int, writes: Sequence[Tensor], x: Pair) -> None:
        """Quantizes keys and values `[1, H, T, D]` into pages, and stores the first and the last tokens in the model's dtype. `writes`: as
        of `Batch.writes`."""
        self.unwritten.discard(layer)
        in_pages, in_ring, in_sinks = writes
        pages, sinks = self._pages(layer, in_pages[:0, None], None)
        zones = [(zone, at[None]) for zone, at in ((self._ring(layer), in_ring), (sinks, in_sinks)) if zone[0].shape[2]]
        quantize_into(pages, x, in_pages[None, None], zones)

    def calibrate(self, layer: int, x: Pair) -> None:
        """Freezes the statistics of a layer when its first prompts are read, from keys and values `[1, H, T, D]`. They
        must not change later: kernels cache tables that they derive from statistics."""
        if self.calibrating and layer in self.statistics.pending:
            tokens = self.group_of[layer].batch.tokens
            self.statistics.calibrate(layer, (x[0][:, :, :tokens], x[1][:, :, :tokens]))
            self.launches[layer].clear()

    def _pages(self, layer: int, table: Tensor, lengths: Tensor | None) -> tuple[Pages, Pair]:
        group = self.group_of[layer]
        planes, sinks = group.views[layer]
        size = group.layout.page_size
        return Pages(group.layout.codecs, [planes], [0], size, self._once[layer], table, lengths), sinks

    def _ring(self, layer: int) -> Pair:
        """The rings of a layer, `[F, H, R, D]`."""
        return self.rings.layer(self.ring_index[layer])

    # A forward pass.

    def prepare(self, requests: Sequence[str], blocks: Sequence[Sequence[list[int]]], past: Sequence[int], count: Sequence[int]) -> None:
        """Plans the next tokens of a batch, `count` after `past` of each request, whose `blocks` are given for each group."""
        before = numpy.array(past)
        after = before + numpy.array(count)
        rows, since = self.rings.extend(requests, before, after)
        if not self.rings.read and (since > before - before % self.rings.slots).any():
            raise RuntimeError("a request has lost the exact tokens of its page to another one: its answer would not be reproducible")
        if self.budget is not None:
            self.reads_few = self.budget.pays_in_rows(after[after - before == 1], self._ring(0)[0])
        for group, lists in zip(self.groups, blocks, strict=True):
            group.tables.forget(rows[since == before])  # they may have belonged to other requests
            table = group.tables.read(rows, lists)
            together = self._together and not self.reads_few and group.layout.window is None
            group.batch = Batch(group.layout, self.rings, table, before, after, rows, since, group.tables if together else None)

    def step_of(self, layer: int, block_table: Tensor | None, tokens: int) -> BatchStep:
        """The slots that this forward pass of `tokens` tokens reads and writes. They are computed in the first layer of
        each group. `block_table`: int32 `[groups, B, HEADER + P]`, for steps with one token of each request."""
        group = self.group_of[layer]
        if layer == group.layers[0] or group.step is None:
            if block_table is None:
                group.step = step_of_batch(group.batch, self.scratch_tokens, tokens, self.rings.tensor.device)
            else:
                group.step = step_of_table(block_table[self.groups.index(group)], group.layout, group.batch.shares is not None)
        return group.step

    # Requests.

    def fork(self, source: str, request: str) -> None:
        """Gives `request` a copy of the ring of `source`, if one is free, at the next `rings.copy`."""
        self.rings.fork(source, request)
        self.forget(request)

    def forget(self, request: str) -> None:
        """Reads the blocks of a request anew: they were exchanged for others with the same tokens."""
        for group in self.groups:
            group.tables.forget(self.rings.by_request.get(request, 0))
