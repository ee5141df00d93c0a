"""transformers' paged cache, with compressed pages: what models call, and the lifetime of a request's blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import stream_context

from ...links import links
from ..attention import NewKV
from ..branches import Branches
from ..metrics import Metrics
from ..rings import Rings
from ..sessions import Sessions
from ..statistics import Statistics
from ..step import HEADER
from ..store import LayerGroup, PageStore
from .allocator import CompressedAllocator
from .pool import PoolSize, page_layout
from .request import Request

if TYPE_CHECKING:
    from ...prefix import PrefixStore
    from ...prefix.pages import StoredPages

FETCHED = "pages that were fetched"
"""The id of the request that fetched pages belong to until they are matched."""


class CompressedPagedCache(PagedAttentionCache):
    """transformers' paged cache with compressed pages.

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
        budget: Any,
        statistics: Statistics,
        counters: Metrics,
        max_requests: int | None,
        max_blocks_per_request: int | None,
        store: PrefixStore | None = None,
        reproducible: bool = False,
        wake: Callable[[], Any] = bool,
    ):
        smallest = copy.copy(continuous_batching_config)
        smallest.num_blocks, smallest.max_batch_tokens = 1, 1
        super().__init__(config, smallest, device, distributed_helper, dtype, model_supports_logits_to_keep)
        del self.cache_tensor  # transformers allocated one block
        self.counters = counters
        stock: list[Any] = list(self.cache_allocators.values())
        heads, head_dim, page_size = stock[0].num_key_value_heads, stock[0].head_dim, stock[0].tokens_per_page
        residual_length = page_size - 1 if reproducible else residual_length
        layout = page_layout(config, statistics.format, heads, head_dim, page_size, num_sink_tokens, dtype)
        size = PoolSize(
            config, continuous_batching_config, dtype, layout.nbytes, layout.ring_bytes(residual_length),
            logits_to_keep=model_supports_logits_to_keep, max_requests=max_requests,
            kv_tp_size=distributed_helper.tp_size if distributed_helper.are_kv_heads_tp_ed() else 1,
            least=lambda count: int(
                distributed_helper.tp_all_reduce_min(torch.tensor([count], dtype=torch.int64, device=device))
            ),
        )  # fmt: skip
        # The new token is in the ring too.
        rings = Rings(config.num_hidden_layers, size.rings, heads, residual_length + 1, head_dim, dtype, device, not reproducible)
        groups = [LayerGroup(replace(layout, window=getattr(held, "sliding_window", None)), held.layer_indices, rings) for held in stock]
        text = f"{type(layout.format).__module__} {layout}, {config.num_hidden_layers} layers, {residual_length} last tokens, {budget}"
        text += ", reproducible" * reproducible
        pages = None if store is None else self._stored_pages(store, text, page_size, statistics, distributed_helper)
        query_groups = -(-config.num_attention_heads // (heads * distributed_helper.tp_size))
        self.store = PageStore(groups, rings, statistics, distributed_helper.tp_local_rank, query_groups, budget)

        allow = continuous_batching_config.allow_block_sharing
        self.allocators = [CompressedAllocator(group, index, allow) for index, group in enumerate(groups)]
        self.cache_allocators = dict(zip(self.cache_allocators, self.allocators, strict=True))
        self.layer_to_allocator = {layer: held for held in self.allocators for layer in held.layer_indices}
        self.max_batch_tokens, self.num_sectors, self.num_blocks = size.batch_tokens, size.sectors, size.blocks
        self.bytes_per_sector, nbytes = size.bytes_per_sector, size.sectors * size.bytes_per_sector
        with torch.inference_mode(False):
            self.cache_tensor = torch.zeros(nbytes + 2 * self.bytes_per_sector, dtype=torch.uint8, device=device)
        self.pool = CachePool(self.num_sectors, len(self.allocators))
        for held in self.allocators:
            held.register_cache_tensor(self.bytes_per_sector, nbytes, self.cache_tensor, self.pool)
        self.tokens_per_sector = page_size * max(held.blocks_per_sector for held in self.allocators)
        self.max_tokens_read = self.tokens_per_sector * self.num_sectors

        if reproducible:
            if len(groups) > 1 or groups[0].layout.window is not None:
                raise NotImplementedError("reproducible=True: pages of layers with a sliding window hold their last tokens alone")
            max_blocks_per_request = 0
        if max_blocks_per_request is None:
            longest = getattr(config, "max_position_embeddings", None) or self.max_tokens_read
            max_blocks_per_request = min(ceil(longest / page_size), self.max_tokens_read // page_size)
        self.max_decode_fast_path_length = page_size * max_blocks_per_request
        self.max_blocks_per_request = HEADER + max_blocks_per_request if max_blocks_per_request else 0
        continuous_batching_config.max_blocks_per_request = self.max_blocks_per_request
        continuous_batching_config.max_requests_per_batch = size.rings
        self.stream: Any = None
        """The stream that steps run on."""
        self.sessions: Sessions | None = None
        self.branches, self.released = Branches(), set[str]()
        """The pages of sessions, and the sessions to be released before the next step."""
        self._session: dict[str, str] = {}
        """The session of each request that has one."""
        self._stored: dict[str, int] = {}
        """The number of pages of each request that were found or stored."""
        self._of_requests: tuple[dict[str, Any], ...] = (self._stored, self._session, self.allocators[0].salts)
        if pages is not None:
            (held,) = self.allocators
            self.sessions = Sessions(pages, statistics, held._copy_view, counters, lambda found: len(held.find(found)), wake)

    def _stored_pages(
        self, store: PrefixStore, text: str, page_size: int, statistics: Statistics, helper: DistributedHelper
    ) -> StoredPages:
        """The pages in a store whose bytes depend on what `text` says; their statistics are taken over."""
        if not self.use_prefix_sharing:
            raise NotImplementedError(
                "store=: requests share no pages, because the model has layers with a sliding window or allow_block_sharing is False"
            )
        if helper.tp_size > 1:
            raise NotImplementedError(f"store= with tensor parallelism over {helper.tp_size} GPUs: leave it out, or serve on one GPU")
        pages = store.pages(statistics.format.name, text, page_size)
        if pages.directory is not None and not (statistics.layers or statistics.stored):
            statistics.shared = pages.statistics
            statistics.known()
        return pages

    def too_large(self, request_id: str, tokens: int) -> MemoryError | None:
        """The error of a request whose `tokens` do not fit into the empty pool."""
        sectors = sum(ceil(held._compute_blocks_needed(0, 0, tokens) / held.blocks_per_sector) for held in self.allocators)
        if sectors <= self.num_sectors:
            return None
        room = self.num_blocks * self.store.groups[0].layout.page_size
        return MemoryError(
            f"request {request_id} of {tokens} tokens does not fit into a pool of {room} tokens: shorten it, or raise max_memory_percent "
            "or num_blocks of the ContinuousBatchingConfig"
        )

    def gauges(self) -> dict[str, int]:
        """The fields of `Metrics` that are of pages and rings."""
        layout, rings = self.store.groups[0].layout, self.store.rings
        block = layout.nbytes * len(self.store.group_of)
        used = self.num_sectors * self.bytes_per_sector - self.compute_free_capacity(relative=False)
        return {
            "pages_used": ceil(used / block),
            "pages_cached": ceil(self._cached_bytes / block),
            "pages_total": self.num_blocks,
            "page_size": layout.page_size,
            "rings": rings.count,
            "page_bytes": self.cache_tensor.nbytes,
            "ring_bytes": rings.tensor.nbytes,
        }

    # A forward pass. Models call `update`; attention reads the past before it writes the new tokens (`attention.py`).

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[NewKV, NewKV]:
        """Returns what attention takes in place of keys and values `[1, H, T, D]`. It needs no `kwargs`, which some models do not pass."""
        place = (self.store, layer_idx)
        return NewKV(place, key_states), NewKV(place, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: each request has a length of its own, and the model gets the positions of all tokens."""
        return 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model reads {name!r} of its cache, which paged caches do not have: leave `continuous_batching`, and call generate"
        )

    # transformers asks for the indices of each request; `BatchInputs` prepares all requests at once.

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        """Does nothing."""

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: Any
    ) -> None:
        """Does nothing: compressed pages do not need the indices."""

    # The lifetime of a request.

    def matched(self, prompt_ids: list[int]) -> list[int]:
        """The tokens of a prompt that blocks are searched for: not the last ones, which are computed again, so that the ring has them. A
        ring of the tokens of one page needs none of those in blocks."""
        return prompt_ids[: max(len(prompt_ids) - self.store.rings.slots + 1, 0)] if self.store.rings.read else prompt_ids

    def expect(self, state: Request) -> None:
        """A request waits, for the pages of its salt and session."""
        if state.salt:
            self.allocators[0].salts[state.request_id] = state.salt
        if state.session is not None:
            self._session[state.request_id] = state.session
        if self.sessions is not None and not state.is_cpu_offloaded:
            self.sessions.expect(state.request_id, self.matched(state.initial_tokens), state.salt)

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Finds cached blocks as transformers does, but by their links, among them the pages that were fetched for the request."""
        if not self.use_prefix_sharing:
            return 0
        (held,), tokens = self.allocators, self.matched(prompt_ids)[:-1]
        salt = held.salts.get(request_id, b"")
        found = links(tokens, held.tokens_per_page, salt)
        if self.sessions is not None:
            self._place(self.sessions, request_id, found, tokens, salt)
        blocks = held.find(found)
        if blocks:
            held.acquire_prefix_blocks(request_id, len(blocks) * held.tokens_per_page, blocks)
        if session := self._session.get(request_id):
            self._demote(self.branches.turn(session, found, held.is_read))
        self._stored[request_id] = len(blocks)
        return len(blocks) * held.tokens_per_page

    def _demote(self, dead: list[bytes]) -> None:
        self.allocators[0].demote(dead)
        if self.sessions is not None:
            self.sessions.demote(dead)

    def _place(self, sessions: Sessions, request_id: str, prompt: list[bytes], tokens: list[int], salt: bytes) -> None:
        """Copies the fetched pages of a request into blocks, like the pages of a request that has ended."""
        (held,) = self.allocators
        found = held.find(prompt)
        held.acquire_prefix_blocks(FETCHED, len(found) * held.tokens_per_page, found)
        if fetch := sessions.take(request_id, held.room - 1):
            state = RequestState(FETCHED, tokens, position_offset=len(found) * held.tokens_per_page)
            pages = fetch.pages[max(len(found) - fetch.first, 0) :] if fetch.first <= len(found) else []
            if pages and self.can_store_request_tokens(state, len(pages) * held.tokens_per_page):
                with stream_context(self.stream):
                    for block, page in zip(held.block_table[FETCHED][len(found) :], pages, strict=True):
                        held._copy_view[block].copy_(page.to(held._copy_view.device, copy=False).tensors["page"])
                held.salts[FETCHED] = salt
                held.mark_complete_blocks(FETCHED, tokens, len(pages))
        held.free_blocks(FETCHED)

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        """Whether the request's tokens can be stored, as in transformers; answers at once if its last block has room,
        as in most steps. Frees as many cached blocks as the request needs, and no more."""
        end = state.position_offset + request_len
        for held in self.allocators:
            blocks = held.block_table.get(state.request_id)
            if blocks is None or len(blocks) * held.tokens_per_page < min(end, held.most_tokens):
                self._make_room(held.needs_new_blocks(state.request_id, state.position_offset, request_len))
                return super().can_store_request_tokens(state, request_len, dry_run)
        return True

    def _make_room(self, count: int) -> None:
        """Frees cached blocks if `count` blocks are not free, and if there are then enough. Only blocks of models
        without windows are cached."""
        held = self.allocators[0]
        if len(self.allocators) > 1:
            return
        if held.room < count and self.sessions is not None:
            self.sessions.settle()
            self._release_copied()
        missing = count - (held.room - len(held.ledger.cached_blocks))
        if 0 < missing <= len(held.ledger.cached_blocks):
            held.free_cached(missing)

    def release(self) -> None:
        """Releases the sessions that are to be released, and the blocks that were copied to the host."""
        while self.released:
            self._demote(self.branches.release(self.released.pop()))
        self._release_copied()

    def _release_copied(self) -> None:
        while self.sessions is not None and self.sessions.copied:
            (held,), block = self.allocators, self.sessions.copied.popleft()
            if held.ledger.release(block):
                held.pool.free_blocks(held.index, [block])

    @property
    def _cached_bytes(self) -> int:
        return sum(len(held.ledger.cached_blocks) * held.bytes_per_block for held in self.allocators)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """The free capacity as in transformers, and the cached blocks, which are freed when they are needed."""
        cached = self._cached_bytes
        return super().compute_free_capacity(relative) + (cached / (self.num_sectors * self.bytes_per_sector) if relative else cached)

    def prepare_fork_request(self, src_state: RequestState, dst_req_ids: list[str], copy_src_and_dst: Any) -> list[str]:
        self._make_room(sum(held.count_non_shareable_blocks(src_state.request_id, src_state.current_len()) for held in self.allocators))
        forked = super().prepare_fork_request(src_state, dst_req_ids, copy_src_and_dst)
        for request_id in forked:
            self.store.fork(src_state.request_id, request_id)
            for of_request in self._of_requests:
                if src_state.request_id in of_request:
                    of_request[request_id] = of_request[src_state.request_id]
        return forked

    def perform_cache_copy(self, copy_src_and_dst: dict[str, tuple[list[int], list[int]]]) -> None:
        super().perform_cache_copy(copy_src_and_dst)
        self.store.rings.copy()

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self.counters.preemptions += no_cache  # only offloading needs it
        super().free_blocks(request_id, no_cache)
        self.store.rings.release(request_id)
        for of_request in self._of_requests:
            of_request.pop(request_id, None)
        if self.sessions is not None:
            self.sessions.drop(request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        if self.sessions is not None:
            self.sessions.settle()
            self._release_copied()
        super().free_all_requests(clear_ledgers)
        for request_id in list(self.store.rings.by_request):
            self.store.rings.release(request_id)

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        """Marks complete blocks as transformers does, also the blocks of a request's last step, but only if the request has
        blocks: it has none if it was cancelled while its step ran."""
        self.counters.tokens_generated += state.status != RequestStatus.PREFILLING  # a call for each token
        if complete_blocks and state.request_id in self.allocators[0].block_table:
            for name, count in complete_blocks.items():
                tokens = state.initial_tokens + state.generated_tokens
                self.cache_allocators[name].mark_complete_blocks(state.request_id, tokens, count)
            self.store.forget(state.request_id)  # its blocks were exchanged for others with the same tokens
            self._completed(state.request_id)

    def _completed(self, request_id: str) -> None:
        """Stores the pages of a request that were completed. Its blocks stay until they are copied."""
        held, first = self.allocators[0], self._stored.get(request_id, 0)
        known = held.ledger.block_to_hash
        blocks = list(takewhile(known.__contains__, held.block_table[request_id]))[first:]
        found = [known[block] for block in blocks]
        self._stored[request_id] = first + len(blocks)
        if session := self._session.get(request_id):
            self.branches.add(session, found)
        if self.sessions is not None:
            for block in blocks:
                held.ledger.acquire(block)
            self.sessions.store(found, blocks, first)
