"""`CompressedAllocator`: compressed pages as a cache allocator of transformers.

Blocks are counted, shared, forked, hashed and freed as in transformers. The bytes of a page (`layout.py`), the ring of
each request (`rings.py`) and the slots that a forward pass reads (`step.py`) differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator

from ..kernels import PagedInputs, Pages, Pair
from ..kernels.pages import LENGTH
from .layout import BlockLayout
from .rings import Rings
from .statistics import Statistics
from .step import Batch, BlockTables, Rows


class CompressedAllocator(FullAttentionCacheAllocator):
    """The pages of all layers of a model with full attention in every layer."""

    def __init__(self, layout: BlockLayout, rings: Rings, statistics: Statistics, layers: list[int], rank: int, allow_block_sharing: bool):
        self.layout, self.rings, self.statistics = layout, rings, statistics
        self.head_dim, self.num_key_value_heads, self.cache_dtype = layout.head_dim, layout.heads, layout.dtype
        self._before_cache_tensor_init(
            index=0,
            layer_indices=layers,
            tokens_per_page=layout.page_size,
            bytes_per_page=layout.nbytes,
            allow_block_sharing=allow_block_sharing,
        )
        like = torch.empty(1, layout.heads, 1, layout.head_dim, dtype=layout.dtype, device=rings.tensor.device)
        self.tables = BlockTables(rings.tensor.shape[2] - 1)
        self.ring_index = {layer: i for i, layer in enumerate(layers)}
        self.launches: dict[int, dict[str, Any]] = {layer: {} for layer in layers}
        self.once = {layer: statistics.of_layer(layer, like, rank) for layer in layers}

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: CachePool) -> None:
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.write_trash_index = 0  # sector 0 holds no request
        self.views = {layer: self.layout.views(cache_tensor, i, self.pages_per_block) for i, layer in enumerate(self.layer_indices)}

    def inputs(self, layer: int, rows: Rows) -> PagedInputs:
        """The inputs of attention over rows of a layer."""
        planes, sinks = self.views[layer]
        pages = Pages(*self.layout.codecs, [planes], [0], self.layout.page_size, self.once[layer], rows.table, rows.columns[:, LENGTH])
        return PagedInputs(pages, sinks, self.ring(layer), rows.columns, rows.max_length, splits=rows.splits, launches=self.launches[layer])

    def ring(self, layer: int) -> Pair:
        """The rings of a layer, `[F, H, R, D]`."""
        return self.rings.layer(self.ring_index[layer])

    def calibrate(self, layer: int, x: Pair) -> None:
        """Freezes the statistics of a layer, computed from keys and values `[1, H, T, D]`. They must not change later:
        kernels cache tables that they derive from statistics."""
        self.statistics.calibrate(layer, x)
        self.launches[layer].clear()

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.rings.release(request_id)

    def fork_blocks(self, source_request_id: str, dest_request_id: str, past_length: int) -> tuple[list[int], list[int]]:
        self.rings.fork(source_request_id, dest_request_id)
        self._forget(dest_request_id)
        return super().fork_blocks(source_request_id, dest_request_id, past_length)

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        super().mark_complete_blocks(request_id, token_ids, new_new_blocks)
        self._forget(request_id)  # its blocks were exchanged for others with the same tokens

    def batch(self, requests: Sequence[str], past: Sequence[int], count: Sequence[int]) -> Batch:
        """The slots that are read and written for the next tokens of these requests: `count` tokens of each, after
        `past`."""
        before = numpy.array(past)
        after = before + numpy.array(count)
        rows, since = self.rings.extend(requests, before, after)
        self.tables.forget(rows[since == before])  # they may have belonged to other requests
        blocks = self.tables.read(rows, [self.block_table[request] for request in requests])
        return Batch(self.layout, self.rings, blocks, before, after, rows, since)

    def _forget(self, request_id: str) -> None:
        self.tables.forget(self.rings.by_request.get(request_id, 0))
