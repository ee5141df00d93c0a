"""`CompressedPagedCache`: transformers' paged cache with compressed pages, and the number of pages that fit into
memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import PagedAttentionCache, RequestState, RequestStatus
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, CachePool
from transformers.generation.continuous_batching.distributed import DistributedHelper

from ..kernels import Pair, prepare
from ..kernels.attend_chunked import CHUNK_BYTES
from .allocator import CompressedAllocator
from .layout import BlockLayout
from .metrics import Counters
from .rings import Rings
from .statistics import Statistics
from .step import HEADER, Batch, BatchStep, step_of_batch, step_of_table

RING_SHARE = 16
"""Rings take at most one sixteenth of the free memory, unless `max_requests_per_batch` sets their number."""


class StockSizing(PagedAttentionMemoryHandler):
    """transformers' computation of the memory for a pool.

    Args:
        free: free bytes; None asks the device. The config's share `max_memory_percent` of these bytes, less `taken`, is
            used.
    """

    def __init__(self, *, free: float | None = None, taken: int = 0, **kwargs: Any):
        self._free, self._taken = free, taken
        super().__init__(**kwargs)

    def get_available_memory(self) -> int:
        share = self.cb_config.max_memory_percent or 0.0  # resolved by then
        available = super().get_available_memory() if self._free is None else int(self._free * share)
        return available - int(self._taken * share)


class Sizing(StockSizing):
    """The memory for compressed pages: no masks, and no dense copy of the keys and values that a step reads.
    `num_blocks` counts compressed blocks."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.num_attention_masks = 0

    @property
    def bytes_per_cache_token(self) -> int:
        return self.io_multiplier * self.num_groups * torch.int64.itemsize  # read indices

    @property
    def fixed_overhead_bytes(self) -> int:
        return super().fixed_overhead_bytes + CHUNK_BYTES

    def num_sectors_from_config(self) -> int | None:
        return self.cb_config.num_blocks


@dataclass(frozen=True)
class PoolSize:
    """The allocation for all requests. blocks: number of blocks of `page_size` tokens, each with a page of every layer.
    rings: requests that can have exact last tokens at the same time. batch_tokens: new tokens of a step.
    bytes_per_block, bytes_per_ring: over all layers."""

    blocks: int
    rings: int
    batch_tokens: int
    bytes_per_block: int
    bytes_per_ring: int


def pool_size(
    config: PreTrainedConfig,
    cb_config: ContinuousBatchingConfig,
    layout: BlockLayout,
    *,
    residual_length: int,
    layers: int,
    logits_to_keep: bool,
    max_requests: int | None = None,
    free: float | None = None,
    least: Callable[[int], int] = int,
) -> PoolSize:
    """The pool and the rings that fit into the free memory.

    Args:
        cb_config: a config that is resolved as by transformers' managers.
        layout: the layout of a page of one layer, with the KV heads of one GPU. `layers`: number of layers with these
            pages.
        logits_to_keep: whether the model can compute logits of selected tokens only.
        max_requests: number of rings; None: as many as fit into a share of the memory, up to `cb_config.max_requests_per_batch`. There are
            never more than blocks: a request has at least one.
        free: free bytes before anything is allocated; None asks the device.
        least: the minimum of a count over the GPUs of a tensor-parallel group.
    """
    bytes_per_block = layout.nbytes * layers
    sizes_of_ring = layers, 1, layout.heads, residual_length + 1, layout.head_dim, layout.dtype
    bytes_per_ring = Rings(*sizes_of_ring, torch.device("meta")).tensor[:, :, 0].nbytes
    sizes: dict[str, Any] = {
        "config": config, "cb_config": cb_config, "dtype": layout.dtype, "bytes_per_sector": bytes_per_block,  # aligned as a page is
        "tokens_per_sector": layout.page_size, "bytes_per_block": bytes_per_block, "attn_types": [FULL_ATTENTION],
        "model_supports_logits_to_keep": logits_to_keep, "free": free,
    }  # fmt: skip
    if max_requests is None:
        most = least(Sizing(**sizes).available_memory // RING_SHARE // bytes_per_ring)
        max_requests = max(min(cb_config.max_requests_per_batch or most, most), 1)

    def beside(rings: int) -> tuple[int, int]:
        batch_tokens, blocks = Sizing(**sizes, taken=(rings + 1) * bytes_per_ring).infer_max_batch_tokens_and_num_sectors()
        return least(batch_tokens), least(blocks)

    batch_tokens, blocks = beside(max_requests)
    if blocks < max_requests:
        max_requests = blocks
        batch_tokens, blocks = beside(max_requests)
    return PoolSize(blocks, max_requests, batch_tokens, bytes_per_block, bytes_per_ring)


class CompressedPagedCache(PagedAttentionCache):
    """Compressed pages for all requests of a model.

    Args:
        max_requests: number of rings; None: as many as the memory allows, up to `max_requests_per_batch`. Never more than blocks.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        device: torch.device,
        distributed_helper: DistributedHelper,
        dtype: torch.dtype,
        model_supports_logits_to_keep: bool,
        *,
        num_sink_tokens: int,
        residual_length: int,
        statistics: Statistics,
        counters: Counters,
        max_requests: int | None,
        max_blocks_per_request: int | None,
    ):
        smallest = copy.copy(continuous_batching_config)
        smallest.num_blocks, smallest.max_batch_tokens = 1, 1
        super().__init__(config, smallest, device, distributed_helper, dtype, model_supports_logits_to_keep)
        stock = self.cache_allocators[FULL_ATTENTION]
        del self.cache_tensor  # transformers allocated one block
        heads, head_dim = stock.num_key_value_heads, stock.head_dim  # type: ignore[attr-defined]
        layers, page_size = stock.layer_indices, stock.tokens_per_page
        layout = BlockLayout(statistics.format, heads, head_dim, page_size, num_sink_tokens, dtype)
        prepare(layout.codecs, (head_dim, head_dim), dtype, device)
        self.counters, self.calibrating = counters, True
        slots = residual_length + 1  # the new token is in the ring too
        self.scratch_tokens = CHUNK_BYTES // (2 * heads * head_dim * dtype.itemsize)
        self.batch: Batch  # the latest
        self.step: BatchStep | None = None
        self.first_layer = layers[0]

        allow = continuous_batching_config.allow_block_sharing
        rank = distributed_helper.tp_local_rank
        size = pool_size(
            config, continuous_batching_config, layout, residual_length=residual_length, layers=len(layers),
            logits_to_keep=model_supports_logits_to_keep, max_requests=max_requests,
            least=lambda count: _least(count, distributed_helper, device),
        )  # fmt: skip
        continuous_batching_config.max_requests_per_batch = size.rings
        rings = Rings(len(layers), size.rings, heads, slots, head_dim, dtype, device)
        self.allocator = CompressedAllocator(layout, rings, statistics, layers, rank, allow)
        self.cache_allocators = {FULL_ATTENTION: self.allocator}
        self.layer_to_allocator = dict.fromkeys(layers, self.allocator)

        bytes_per_sector = self.bytes_per_sector = size.bytes_per_block
        self.tokens_per_sector, self.max_batch_tokens, self.num_sectors = page_size, size.batch_tokens, size.blocks
        with torch.inference_mode(False):
            self.cache_tensor = torch.zeros((self.num_sectors + 2) * bytes_per_sector, dtype=torch.uint8, device=device)
        self.pool = CachePool(self.num_sectors, 1)
        self.allocator.register_cache_tensor(bytes_per_sector, self.num_sectors * bytes_per_sector, self.cache_tensor, self.pool)
        self.use_prefix_sharing = allow and self.allocator.use_block_sharing
        self.num_blocks = self.allocator.num_blocks
        self.max_tokens_read = page_size * self.num_blocks

        if max_blocks_per_request is None:
            longest = getattr(config, "max_position_embeddings", None) or self.max_tokens_read
            max_blocks_per_request = min(ceil(longest / page_size), self.num_blocks)
        self.max_decode_fast_path_length = page_size * max_blocks_per_request
        self.max_blocks_per_request = HEADER + max_blocks_per_request if max_blocks_per_request else 0
        continuous_batching_config.max_blocks_per_request = self.max_blocks_per_request

    # A forward pass.

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        """Does nothing. transformers calls it for each request; `prepare` fills the rows of all requests."""

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: list[list[int]] | None, write_index: list[list[int]]
    ) -> None:
        """Does nothing. transformers calls it for each request; compressed pages do not need the indices."""

    def prepare(self, requests: list[str], past: list[int], count: list[int], table: Tensor | None) -> None:
        """Plans the next tokens of a batch, `count` after `past` of each request, and fills the rows of the block
        `table`, int32 `[B or more, HEADER + P or more]`; None: the batch has none."""
        self.batch = self.allocator.batch(requests, past, count)
        if table is not None:
            rows = torch.from_numpy(self.batch.table())
            table[: rows.shape[0], : rows.shape[1]].copy_(rows, non_blocking=True)

    def step_of(self, layer: int, block_table: Tensor | None, tokens: int) -> BatchStep:
        """The slots that this forward pass of `tokens` tokens reads and writes. They are computed in the first
        layer."""
        if layer == self.first_layer or self.step is None:
            if block_table is None:
                self.step = step_of_batch(self.batch, self.scratch_tokens, tokens, self.cache_tensor.device)
            else:
                self.step = step_of_table(block_table[0], self.allocator.layout)
        return self.step

    def calibrate(self, layer: int, x: Pair) -> None:
        """Freezes the statistics when the first prompts are read."""
        if self.calibrating and layer in self.allocator.statistics.pending:
            tokens = self.batch.tokens
            self.allocator.calibrate(layer, (x[0][:, :, :tokens], x[1][:, :, :tokens]))

    # The lifetime of a request.

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Finds cached blocks as transformers does, but not for the last tokens of the prompt: these are computed
        again, so that the ring has them."""
        return super().search_prefix_match(request_id, prompt_ids[: max(len(prompt_ids) - self.allocator.rings.slots + 1, 0)])

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        """Whether the request's tokens can be stored, as in transformers; answers at once if its last block has room,
        as in most steps."""
        blocks = self.allocator.block_table.get(state.request_id)
        if blocks is not None and state.position_offset + request_len <= len(blocks) * self.allocator.tokens_per_page:
            return True
        return super().can_store_request_tokens(state, request_len, dry_run)

    def perform_cache_copy(self, copy_src_and_dst: dict[str, tuple[list[int], list[int]]]) -> None:
        super().perform_cache_copy(copy_src_and_dst)
        self.allocator.rings.copy()

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self.counters.preemptions += no_cache  # only offloading needs it
        super().free_blocks(request_id, no_cache)

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        """Marks complete blocks as transformers does, but only if the request has blocks: it has none if it was
        cancelled while its step ran."""
        self.counters.tokens_generated += state.status != RequestStatus.PREFILLING  # a call for each token
        if complete_blocks and state.request_id in self.allocator.block_table:
            super().mark_complete_blocks(state, complete_blocks)


def _least(count: int, helper: DistributedHelper, device: torch.device) -> int:
    """The minimum of a count over a tensor-parallel group."""
    if helper.tp_size == 1:
        return count
    value = torch.tensor([count], device=device, dtype=torch.int64)
    helper.tp_all_reduce_min(value)
    return int(value.item())
