"""The pages and the rings that fit into the free memory."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

import torch
from transformers import PreTrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler, group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION

from ...formats import Format
from ...kernels.attend.chunked import CHUNK_BYTES
from ..layout import PAGE_ALIGNMENT, BlockLayout

RING_SHARE = 16
"""Rings take at most one sixteenth of the free memory, unless `max_requests_per_batch` sets their number."""


def page_layout(
    config: PreTrainedConfig, format: Format, heads: int, head_dim: int, page_size: int, num_sink_tokens: int, dtype: torch.dtype
) -> BlockLayout:
    """The layout of pages of full layers, or of all if there are none: windows have no exact first tokens."""
    sinks = num_sink_tokens if FULL_ATTENTION in group_layers_by_attn_type(config) else 0
    return BlockLayout(format, heads, head_dim, page_size, sinks, dtype)


class PoolSize(PagedAttentionMemoryHandler):
    """The pool and the rings that fit into the free memory.

    sectors: sectors of `bytes_per_sector` bytes, which are divided into blocks.
    blocks: as many blocks of `page_size` tokens, each with a page of every layer, are as large.
    rings: requests that can have exact last tokens at the same time; never more than blocks, since a request has at least one.
    batch_tokens: new tokens of a step.
    groups: for each group of layers, the blocks in a sector, and the window.
    bytes_per_block, bytes_per_ring: over all layers.

    Args:
        cb_config: a config that is resolved as by transformers' managers.
        page_bytes: bytes of a page of one layer, with the KV heads of one GPU.
        ring_bytes: bytes of the exact last tokens of a request in one layer; 0: the pages of transformers, without rings.
        logits_to_keep: whether the model can compute logits of selected tokens only.
        max_requests: number of rings; None: as many as fit into a share of the memory, up to `cb_config.max_requests_per_batch`.
        kv_tp_size: GPUs that share the KV heads of a layer.
        free: free bytes before anything is allocated; None asks the device.
        least: the minimum of a count over the GPUs of a tensor-parallel group.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        cb_config: ContinuousBatchingConfig,
        dtype: torch.dtype,
        page_bytes: int,
        ring_bytes: int,
        *,
        logits_to_keep: bool,
        max_requests: int | None = None,
        kv_tp_size: int = 1,
        free: float | None = None,
        least: Callable[[int], int] = int,
    ):
        layers = group_layers_by_attn_type(config)
        sector = lcm(*(len(held) * page_bytes for held in layers.values()), PAGE_ALIGNMENT)
        self.groups = tuple(
            (sector // (len(held) * page_bytes), None if name == FULL_ATTENTION else config.sliding_window) for name, held in layers.items()
        )
        self.bytes_per_ring, self._free = config.num_hidden_layers * ring_bytes, free
        super().__init__(
            config=config, cb_config=cb_config, dtype=dtype, bytes_per_sector=sector, bytes_per_block=config.num_hidden_layers * page_bytes,
            tokens_per_sector=cb_config.page_size * max(blocks for blocks, _ in self.groups), attn_types=list(layers),
            model_supports_logits_to_keep=logits_to_keep, kv_tp_size=kv_tp_size,
        )  # fmt: skip
        self._all, rings = self.available_memory, 0
        if ring_bytes:
            self.num_attention_masks = 0
            most = least(self._all // RING_SHARE // self.bytes_per_ring)
            rings = max(min(cb_config.max_requests_per_batch or most, most), 1) if max_requests is None else max_requests
        self._fit(rings, least)
        if self.blocks < rings:
            self._fit(self.blocks, least)

    def _fit(self, rings: int, least: Callable[[int], int]) -> None:
        self.rings = rings
        self.available_memory = self._all - int((rings + 1) * self.bytes_per_ring * self._share)
        self.batch_tokens, self.sectors = map(least, self.infer_max_batch_tokens_and_num_sectors())
        self.blocks = max(self.sectors * self.bytes_per_sector // self.bytes_per_block, 1)

    @property
    def _share(self) -> float:
        return self.cb_config.max_memory_percent or 0.0  # resolved by then

    def get_available_memory(self) -> int:
        return super().get_available_memory() if self._free is None else int(self._free * self._share)

    @property
    def bytes_per_cache_token(self) -> int:
        """Without a dense copy of the keys and values that a step reads: read indices."""
        return self.io_multiplier * self.num_groups * torch.int64.itemsize if self.bytes_per_ring else super().bytes_per_cache_token

    @property
    def fixed_overhead_bytes(self) -> int:
        return super().fixed_overhead_bytes + (CHUNK_BYTES if self.bytes_per_ring else 0)
