"""The blocks of a group of layers, in the pool that all groups share."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any

from torch import Tensor
from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator

from ...links import links
from ..store import LayerGroup


class CompressedAllocator(FullAttentionCacheAllocator):
    """Compressed blocks of a group of layers. They are counted, shared, forked, hashed and freed as in transformers.

    Of layers with a sliding window, a request has the blocks of one window, which its tokens take in turn, and shares none, as in
    transformers. A page has the bytes of `storage.PageLayout`, and kernels read it as they read a page of `storage.PagePool`.
    """

    ledger: Any

    def __init__(self, group: LayerGroup, index: int, allow_block_sharing: bool):
        self.group = group
        window = group.layout.window
        self.salts: dict[str, bytes] = {}
        """The salts of requests that share blocks with some others alone."""
        self.supports_block_sharing = window is None
        self.most_tokens = sys.maxsize if window is None else window
        self._before_cache_tensor_init(
            index=index,
            layer_indices=group.layers,
            tokens_per_page=group.layout.page_size,
            bytes_per_page=group.layout.nbytes,
            allow_block_sharing=allow_block_sharing,
        )

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: CachePool) -> None:
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.write_trash_index = 0  # sector 0 holds no request
        self.ledger.cached_blocks = OrderedDict()
        self.group.bind(cache_tensor)

    def _compute_blocks_needed(self, allocated_blocks: int, past_length: int, query_length: int) -> int:
        tokens = min(past_length + query_length, self.most_tokens)
        return super()._compute_blocks_needed(allocated_blocks, 0, tokens)

    # A block has the link of its page as its hash, in place of the 64 bits of transformers, with which two prompts can be made to collide.

    def find(self, found: Sequence[bytes]) -> list[int]:
        """The blocks of the first of these links that have one."""
        known = self.ledger.hash_to_block
        return [known[link] for link in takewhile(known.__contains__, found)]

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Names complete blocks. One that another request has, too, is exchanged for the other's."""
        table, ledger = self.block_table[request_id], self.ledger
        known = [ledger.block_to_hash[block] for block in takewhile(ledger.block_to_hash.__contains__, table)]
        tokens = token_ids[: (len(known) + new_new_blocks) * self.tokens_per_page]
        every = links(tokens, self.tokens_per_page, self.salts.get(request_id, b""), known)
        for index in range(len(known), len(every)):
            same = ledger.register_new_hash(table[index], every[index])
            if same is not None:
                ledger.acquire(same)
                if ledger.release(table[index]):
                    self.pool.free_blocks(self.index, [table[index]])
                table[index] = same

    def is_read(self, link: bytes) -> bool:
        """Whether a request has the block of this link."""
        block = self.ledger.hash_to_block.get(link)
        return block is not None and block not in self.ledger.cached_blocks

    def demote(self, dead: Sequence[bytes]) -> None:
        """Makes the cached blocks of these links the first to go, the last ones before the others."""
        for block in filter(self.ledger.cached_blocks.__contains__, map(self.ledger.hash_to_block.get, dead)):
            self.ledger.cached_blocks.move_to_end(block, last=False)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Frees the blocks of a request, the last ones first: more requests share its first ones, which go last."""
        self.block_table.get(request_id, []).reverse()
        super().free_blocks(request_id, no_cache)

    @property
    def room(self) -> int:
        """Blocks that no request reads: free ones, and cached ones, which can be freed."""
        free = self.pool.count_free_blocks(self.index) + self.pool.num_free_sectors * self.blocks_per_sector
        return free + len(self.ledger.cached_blocks)

    def free_cached(self, count: int) -> None:
        """Frees `count` cached blocks, those that were used longest ago."""
        ledger = self.ledger
        for block in list(islice(ledger.cached_blocks, count)):
            del ledger.cached_blocks[block]
            del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
            self.pool.free_blocks(self.index, [block])
