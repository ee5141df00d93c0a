"""All that compressed pages touch of transformers' continuous batching: subclasses, replaced methods, private names.

Other modules of this folder know tensors, requests and blocks, and import nothing of it. Importing this module checks
the installed release: it raises NotImplementedError for releases before `FIRST`, if a name is missing, or if an
overridden method has other parameters. `tests/batching/test_batching_contract.py` has a test for each touch.
"""

from __future__ import annotations

import copy
import inspect
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, islice, takewhile
from math import ceil, lcm
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..formats import Format
from ..kernels import AttentionBudget
from ..kernels.attend.chunked import CHUNK_BYTES
from ..releases import LAST_TESTED, warn_if_newer
from ..storage.links import links
from .attention import NAME, NewKV, paged_attention
from .branches import Branches
from .grammars import Grammar, masked
from .layout import PAGE_ALIGNMENT, BlockLayout
from .metrics import Metrics
from .reproducible import FixedRows
from .requests import ASKED, Asked, StopStrings, check_prompt
from .rings import Rings
from .sampling import GREEDY, gumbel, key, sampling_options
from .sessions import Sessions
from .statistics import Statistics
from .step import HEADER
from .store import LayerGroup, PageStore

if TYPE_CHECKING:
    from ..prefix import PrefixStore
    from ..prefix.pages import StoredPages

FIRST = "5.24"
"""The first release of transformers in which models pass their keys and values to a paged cache themselves."""


def unsupported(reason: object) -> NotImplementedError:
    return NotImplementedError(
        f"continuous batching on compressed pages needs transformers from {FIRST} on, and was tested up to {LAST_TESTED}; "
        f"{transformers.__version__} differs ({reason}): pip install 'transformers[serving]=={LAST_TESTED}.*'"
    )


if Version(transformers.__version__).release < Version(FIRST).release:
    raise unsupported("it is older")
warn_if_newer()
try:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.cache import (
        PagedAttentionCache,
        PagedAttentionMemoryHandler,
        group_layers_by_attn_type,
    )
    from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, CachePool, FullAttentionCacheAllocator
    from transformers.generation.continuous_batching.cb_logits_processors import (
        ContinuousBatchingLogitsProcessorList,
        ContinuousBatchingTopPLogitsWarper,
    )
    from transformers.generation.continuous_batching.continuous_api import (
        BackgroundThreadStatus,
        ContinuousBatchingManager,
        ContinuousBatchProcessor,
    )
    from transformers.generation.continuous_batching.distributed import DistributedHelper
    from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs, ContinuousBatchingIOs
    from transformers.generation.continuous_batching.requests import FutureRequestState, GenerationOutput, RequestState, RequestStatus
    from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
    from transformers.generation.continuous_batching.utils import WorkloadHints, get_accelerator_graph_name, stream_context
except ImportError as error:
    raise unsupported(error) from error

FETCHED = "pages that were fetched"
"""The id of the request that fetched pages belong to until they are matched."""
RING_SHARE = 16
"""Rings take at most one sixteenth of the free memory, unless `max_requests_per_batch` sets their number."""
TURN = 0.5
"""Seconds for which a client may run two requests more than one that waits, until one of them gives way."""


# The pool.


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
        ring_bytes: bytes of the exact last tokens of a request in one layer; 0: pages are those of transformers, without rings.
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


class CompressedAllocator(FullAttentionCacheAllocator):
    """Compressed blocks of a group of layers. They are counted, shared, forked, hashed and freed as in transformers.

    Of layers with a sliding window, a request has the blocks of one window, which its tokens take in turn, and shares none, as in
    transformers. A page has the bytes of `storage.PageLayout`, and kernels read it as they read those of `storage.PagePool`.
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
        budget: AttentionBudget | None,
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
        """Copies the fetched pages of a request into blocks, as those of a request that has ended."""
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
        """The free capacity as in transformers, and that of cached blocks, which are freed when they are needed."""
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
        """Marks complete blocks as transformers does, those of a request's last step too, but only if the request has
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


# Requests and their tokens.


class Request(RequestState):
    """A request that can end at strings and knows how many tokens of its prompt were already in pages."""

    stop: StopStrings | None = None
    salt = b""
    session: str | None = None
    asked: Asked | None = None
    grammar: Grammar | None = None
    cached_tokens: int | None = None
    """The number of cached tokens of its prompt; None until the prompt is read."""

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        if self.asked is not None and not self.asked.first_token:
            self.asked.first_token = time.perf_counter()
        done = super().update_and_check_completion(token_id, logprob)
        if not done and self.grammar is not None and self.grammar.ends_with(token_id):
            self.status = RequestStatus.FINISHED
            return True
        if done or self.stop is None:
            return done
        # A preempted request has its first generated tokens at the end of its prompt.
        before = self.initial_tokens[self._true_initial_tokens :] if self._true_initial_tokens else []
        if not self.stop.end(chain(reversed(self.generated_tokens), reversed(before))):
            return False
        self.status = RequestStatus.FINISHED
        return True

    def to_generation_output(self) -> GenerationOutput:
        output: Any = super().to_generation_output()
        output.cached_tokens = self.cached_tokens or 0
        return output

    def create_equivalent_initial_request(self) -> Request:
        state: Any = super().create_equivalent_initial_request()
        state.__class__ = Request
        for name in ("stop", "salt", "session", "asked", "grammar", "cached_tokens"):
            setattr(state, name, getattr(self, name))
        return state


def client_of(state: RequestState) -> str | None:
    asked = getattr(state, "asked", None)
    return None if asked is None else asked.client


def running_by_client(active: dict[str, RequestState]) -> Counter[str | None]:
    return Counter(map(client_of, active.values()))


class Requests:
    """A mixin for schedulers: clients take turns, requests know how many of their tokens were cached, and cancelled requests are dropped
    completely."""

    forget: Callable[[str], None]
    cache: CompressedPagedCache
    active_requests: dict[str, RequestState]

    def add_waiting_request(self, state: Request) -> None:
        super().add_waiting_request(state)  # type: ignore[misc]
        self.cache.expect(state)

    def _get_waiting_candidates(self) -> list[RequestState]:
        """The waiting requests whose stored pages have been fetched. A client that has fewer requests running or before goes first."""
        states = super()._get_waiting_candidates()  # type: ignore[misc]
        if len(states) > 1:
            held, ranked = running_by_client(self.active_requests), []
            for state in states:
                ranked.append((held[client_of(state)], state))
                held[client_of(state)] += 1
            states = [state for _, state in sorted(ranked, key=itemgetter(0))]
        if not (rings := self.cache.store.rings).read:  # each running request keeps its ring
            states = states[: max(rings.count - len(self.active_requests), 0)]
        if self.cache.sessions is None:
            return states
        fetched = self.cache.sessions.fetched([state.request_id for state in states])
        return [state for state in states if state.request_id in fetched]

    def _infer_request_tokens(self, state: RequestState, *args: Any) -> list[int]:
        tokens = super()._infer_request_tokens(state, *args)  # type: ignore[misc]
        if isinstance(state, Request) and state.cached_tokens is None:
            state.cached_tokens = state.position_offset
            if state.asked is not None:
                state.asked.cached_tokens = state.position_offset
            self.cache.counters.prompt_tokens += len(state.initial_tokens)
            self.cache.counters.cached_tokens += state.position_offset
        return tokens

    def clear_cancelled_requests(self) -> list[RequestState]:
        states = super().clear_cancelled_requests()  # type: ignore[misc]
        for state in states:
            state.status = RequestStatus.FINISHED  # ignores the result of a step that still runs
            self.forget(state.request_id)
        return states


class Sampling(ContinuousBatchingLogitsProcessorList):
    """The logits processors of a manager whose requests have sampling options of their own; `config` has the defaults.

    A batch leaves out what none of its requests needs: sorting vocabularies for top_p takes long.
    """

    def __init__(self, config: GenerationConfig, vocab_size: int):
        super().__init__(LogitsProcessorList())
        self.vocab_size = vocab_size
        self.supported_keys = {"temperature": float, "top_p": float, "seed": int}
        self.default, self.tensors_required, self.do_processing = config, len(self.supported_keys), True
        self._top_k = TopKLogitsWarper(config.top_k) if config.top_k else None
        self._top_p = ContinuousBatchingTopPLogitsWarper(TopPLogitsWarper(1.0))
        self.masks: Tensor | None = None
        """The tokens that the latest batch may have, if a request has a grammar: int32 `[B, vocabulary / 32]`."""
        self.needed = [False] * self.tensors_required
        """Whether the latest batch needs temperatures, top_p, and noise."""

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.view(torch.float32).copy_(torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float32, device="cpu"))

    def prepare_tensor_args(self, requests_in_batch: list[FutureRequestState], arg_storage: Tensor) -> Tensor:
        states = [request.state for request in requests_in_batch if request.has_new_token]
        options = [GREEDY | state.logit_processor_kwargs for state in states]
        self._mask([getattr(state, "grammar", None) for state in states])
        self.needed = [any(given[name] != GREEDY[name] for given in options) for name in self.supported_keys]
        if any(self.needed):
            children = [state.request_id.partition("__child#")[2] for state in states]
            keys = [key(given["seed"], state.position_offset, child) for given, state, child in zip(options, states, children, strict=True)]
            given = [[given[name] for given in options] for name in ("temperature", "top_p")]
            real = torch.tensor(given, dtype=torch.float32, device="cpu").view(torch.int32)
            arg_storage[:, : len(states)] = torch.stack([*real, torch.tensor(keys, dtype=torch.int32, device="cpu")])
        return arg_storage

    def _mask(self, grammars: list[Grammar | None]) -> None:
        self.masks = None
        if any(grammars):
            masks = torch.full((len(grammars), -(-self.vocab_size // 32)), -1, dtype=torch.int32, device="cpu")
            for row, grammar in zip(masks, grammars, strict=True):
                if grammar is not None:
                    grammar.mask(row)
            self.masks = masks

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        if self.masks is not None:  # only where steps are not captured and follow each other (`add_request`)
            scores = torch.cat([masked(scores[: len(self.masks)], self.masks.to(scores.device)), scores[len(self.masks) :]])
        temperature, top_p, keys = logits_processor_args[:, : len(scores)]
        if self.needed[0]:
            scores = scores / temperature.view(torch.float32)[:, None]
        if self._top_k is not None and self.needed[2]:
            scores = self._top_k(None, scores)
        if self.needed[1]:
            scores = self._top_p(scores, top_p)
        if self.needed[2]:  # forked requests have different noise
            scores = torch.where(keys[:, None] == 0, scores, scores + gumbel(keys[:, None], scores.shape[1]))
        return scores


# A step.


class BatchInputs(ContinuousBatchingIOs):
    """Inputs of a forward pass, planned for all requests of a batch at once."""

    cache: CompressedPagedCache
    logit_processor: ContinuousBatchingLogitsProcessorList

    def _get_graph_key(self) -> tuple[int, ...]:
        return (*super()._get_graph_key(), *self.cache.store.kind, *getattr(self.logit_processor, "needed", ()))

    def get_model_kwargs(self, use_padding: bool = False) -> Any:
        """The arguments of the model as in transformers, without those that compressed pages do not read: compiled layers
        would check them in each call."""
        unread = ("write_index", "read_index", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q")
        return {name: x for name, x in super().get_model_kwargs(use_padding).items() if name not in unread}

    def prepare_batch_tensors(
        self,
        requests_in_batch: list[FutureRequestState],
        logits_processors: ContinuousBatchingLogitsProcessorList,
        use_decode_fast_path: bool,
        num_q_tokens: int,
        max_kv_read: int,
        use_padding: bool,
    ) -> None:
        """Prepares a batch as transformers does, but without the indices of tokens to read, which would cost clearing
        `max_kv_read` entries and copying one for each token of the pool."""
        names = [future.state.request_id for future in requests_in_batch]
        past = [future.state.position_offset for future in requests_in_batch]
        super().prepare_batch_tensors(requests_in_batch, logits_processors, use_decode_fast_path, num_q_tokens, 0, use_padding)
        store, allocators = self.cache.store, self.cache.allocators
        blocks = [[held.block_table[name] for name in names] for held in allocators]
        store.prepare(names, blocks, past, [future.query_length for future in requests_in_batch])
        if self.use_block_table:
            for group, table in zip(store.groups, self.block_table, strict=True):
                rows = torch.from_numpy(group.batch.table()[:, : table.shape[1]])
                table[: rows.shape[0], : rows.shape[1]].copy_(rows, non_blocking=True)


class CompressedProcessor(ContinuousBatchProcessor):
    """A processor that fails a request that outgrows the pool and continues with the others. It stops if a layer does not attend
    to its pages."""

    cache: CompressedPagedCache
    _unequal: float | None = None
    """Since when a client waits that runs fewer requests than another."""
    NO_ROOM = "No requests can be scheduled and no requests can be offloaded."
    """transformers' error for a request that does not fit into an empty pool."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        made = self.inputs_and_outputs
        pairs: list[Any] = made.io_pairs if isinstance(made, ContinuousBatchingAsyncIOs) else []
        every: list[Any] = [io for pair in pairs for io in (pair.host_io, pair.device_io)] or [made]
        for inputs in every:
            inputs.__class__, inputs.logit_processor = BatchInputs, self.logit_processor  # transformers makes them
        self.cache.stream = made.compute_stream
        if isinstance(self.logit_processor, Sampling):
            self.do_sample = self.model_runner.do_sample = False  # the logits processors draw the tokens

    def _give_way(self) -> None:
        """Lets the newest request of the client that runs the most wait, if another client waits and runs at least two fewer. It goes on
        from its pages, or from its tokens."""
        scheduler, now = self.scheduler, time.monotonic()
        held = running_by_client(scheduler.active_requests)
        ((most, count),) = held.most_common(1) or [(None, 0)]
        if count < 2 + min(held[client_of(state)] for state in scheduler.waiting_requests.values()):
            self._unequal = None
            return
        self._unequal = self._unequal or now
        if now - self._unequal < TURN:
            return
        self._unequal, scheduler.block_new_requests = now, False
        state: Any = next(state for state in reversed(scheduler.active_requests.values()) if client_of(state) == most)
        again = state.create_equivalent_initial_request()
        state._status = RequestStatus.FINISHED  # as of preempted requests: ignores the result of a step that still runs
        self.cache.counters.preemptions += 1
        scheduler.finish_request(state.request_id)
        scheduler.add_waiting_request(again)

    def prepare_next_batch(self) -> bool:
        self.cache.release()
        if self.scheduler.waiting_requests:
            self._give_way()
        else:
            self._unequal = None
        while True:
            try:
                return super().prepare_next_batch()
            except RuntimeError as error:
                if str(error) != self.NO_ROOM or not self.scheduler.starved_requests:
                    raise
                state, tokens = self.scheduler.starved_requests[0]
                if (too_large := self.cache.too_large(state.request_id, state.current_len() + tokens)) is None:
                    raise
                self._handle_request_error(too_large, state)
                self.scheduler.finish_request(state.request_id)
                self.scheduler.block_new_requests = False

    def _generation_step(self, model: torch.nn.Module) -> None:
        with nullcontext() if self.cache.store.rings.read else FixedRows(model.device.type == "cpu"):
            super()._generation_step(model)
        if layers := self.cache.store.unwritten:
            raise NotImplementedError(
                f"{type(model).__name__}: layers {sorted(layers)} stored nothing in compressed pages, and would forget all tokens: their "
                "attention does not go through transformers' attention interface; leave `continuous_batching`, and call generate"
            )


# The manager.


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model. They are compiled one by one: they share their code, and only attention divides it."""
    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


class CompressedManager(ContinuousBatchingManager):
    """A manager whose requests are in compressed pages. `options`: those of `CompressedPagedCache` that the config does not have."""

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: WorkloadHints | None,
        **options: Any,
    ):
        asked = continuous_batching_config
        limits = {"max_requests": asked.max_requests_per_batch, "max_blocks_per_request": asked.max_blocks_per_request}
        self.cache_options: dict[str, Any] = options | limits
        if asked.max_blocks_per_request is None and workload_hints is not None and workload_hints.max_generated_length:
            longest = workload_hints.max_prompt_length + workload_hints.max_generated_length
            self.cache_options["max_blocks_per_request"] = -(-longest // asked.page_size)
        super().__init__(model, generation_config, continuous_batching_config, workload_hints)  # type: ignore[arg-type]
        config, on_cuda = self.continuous_batching_config, model.device.type == "cuda"
        # Batches with prompts run eagerly: their launches depend on the number of prompts.
        wanted = asked.use_cuda_graph is None or asked.cuda_graph_booleans[1]
        self.reproducible = bool(options.get("reproducible"))
        graphs = on_cuda and get_accelerator_graph_name() is not None and wanted and asked.max_blocks_per_request != 0
        graphs = graphs and not self.reproducible
        config.use_cuda_graph = (False, graphs)
        if asked.use_async_batching is None:
            config.use_async_batching = graphs
        if self.reproducible and config.varlen_compile_config is not None:
            raise NotImplementedError("reproducible=True with compiled layers, which round by the shapes of a step: leave one of them out")
        if self.reproducible and (config.cpu_offload_space or self.num_return_sequences > 1):
            raise NotImplementedError(
                "reproducible=True with cpu_offload_space or num_return_sequences, which continue a request without the exact tokens of "
                "its page: leave them out, or send the prompt several times"
            )
        compiling, config.varlen_compile_config, config.decode_compile_config = config.varlen_compile_config, None, None
        if asked.per_request_processors:
            if asked.return_logprobs:
                raise NotImplementedError("return_logprobs with per_request_processors: they would be those of the noise")
            self.logit_processor: ContinuousBatchingLogitsProcessorList = Sampling(
                generation_config, model.config.get_text_config(decoder=True).vocab_size
            )
            if asked.max_memory_percent is None and on_cuda:
                config.max_memory_percent = 0.8  # transformers' share where logits are processed
        self._issued: set[str] = set()
        """Ids that were made for requests to come: no other request has them."""
        self.progressed = time.monotonic()
        """When the thread last ended a step, or looked for one."""
        self.compiled: list[torch.nn.Module] = []
        if compiling is not None:
            self.compiled = decoder_layers(model)
            for layer in self.compiled:
                layer.compile(**compiling.to_dict())

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)
        if model.config._attn_implementation != NAME:
            self._original_attn_impl = model.config._attn_implementation
            model.set_attn_implementation(NAME)

    def warmup(self) -> None:
        """Warms up as transformers does; the random tokens do not count for statistics."""
        store = self._pool().store
        store.calibrating = False
        try:
            super().warmup()
        finally:
            store.calibrating = True

    def start(self) -> None:
        """Starts as transformers does; the pool is allocated before it returns."""
        self._pool()
        self.progressed = time.monotonic()
        super().start()

    def _generation_loop_body(self, batch_processor: ContinuousBatchProcessor, bootstrapping: bool) -> bool:
        goes_on = super()._generation_loop_body(batch_processor, bootstrapping)
        self.progressed = time.monotonic()
        return goes_on

    def close(self, timeout: float | None = None) -> bool:
        """Stops, and drops the pool. False: the thread has not ended after `timeout` seconds, and goes on with both."""
        if self.is_running():
            self.background_thread_status.request_stop(BackgroundThreadStatus.HARD_STOP, self.distributed_helper.global_rank)
            self.join(time.perf_counter(), timeout)
        if self.is_running():
            return False
        if self.batch_processor is not None and self.cache.sessions is not None:
            self.cache.sessions.close()
        self.destroy()
        self.batch_processor = None
        if getattr(self.model, _CACHED, None) is self:
            delattr(self.model, _CACHED)
        for layer in self.compiled:
            layer._compiled_call_impl = None
        return True

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **options: Any,
    ) -> str | None:
        """Adds a request. Its answer ends at the model's last position at the latest.

        Args:
            options: `stop`, the `StopStrings` that end the answer, which includes their tokens; `temperature`, `top_p` and `seed` of this
                request, if the config has `per_request_processors`; `grammar`, the `Grammar` that the answer follows, if the config has
                neither `use_async_batching` nor `use_cuda_graph` then; `salt`, bytes: the request shares pages with those of the same salt
                alone; and `session`, a name: pages of its earlier requests with which the prompt does not begin are the first to go.

        Raises:
            ValueError, TypeError: a prompt that `check_prompt` refuses, or options that the manager does not have; nothing is added.
            MemoryError: prompt and answer can never have all their pages.
            RuntimeError: the manager stops, or has died.
        """
        if not self.is_tp_driver:
            return None
        if reason := self.background_thread_status.can_accept_new_requests():
            raise RuntimeError(reason)
        asked = ASKED.get()
        if request_id is None:
            (request_id,) = self._request_ids(1)
        if asked is not None:
            options = dict(asked.options)
        elif request_id in self._issued:
            self._issued.discard(request_id)
        else:
            self._check_unused(request_id)
        stop, grammar = options.pop("stop", None), options.pop("grammar", None)
        salt, session = options.pop("salt", b""), options.pop("session", None)
        try:
            if not isinstance(salt, bytes) or not isinstance(session, str | None):
                raise TypeError(f"salt={salt!r:.60}, session={session!r:.60}: expected bytes, and a string or None")
            config = self.continuous_batching_config
            ahead = config.use_async_batching or any(config.cuda_graph_booleans)
            if grammar is not None and (ahead or not isinstance(self.logit_processor, Sampling)):
                raise ValueError(
                    "grammar= needs a config with per_request_processors=True, use_async_batching=False and use_cuda_graph=False"
                )
            wanted = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
            tokens, most = check_prompt(self.model.config, input_ids, wanted)
            if isinstance(self.logit_processor, Sampling):
                options = sampling_options(self.logit_processor.default, **options)
            else:
                self.logit_processor.check_kwargs(options)
            # The last token is not stored.
            if too_large := self._pool().too_large(request_id, len(tokens) + (1 if wanted is None else most or 1) - 1):
                raise too_large
        except Exception:
            self._forget(request_id)
            raise
        state = Request(
            request_id=request_id,
            initial_tokens=tokens,
            num_children=self.num_return_sequences - 1,
            record_timestamps=record_timestamps,
            max_new_tokens=most,
            eos_token_id=self.generation_config.eos_token_id if eos_token_id is None else eos_token_id,
            streaming=streaming,
            logit_processor_kwargs=options,
        )
        state.stop, state.asked, state.grammar, state.salt, state.session = stop, asked, grammar, salt, session
        if asked is not None:
            asked.admitted, asked.max_new_tokens = True, most
        self.input_queue.put(state, timeout=10)
        self._wake_up_loop.set()
        return request_id

    def add_requests(  # type: ignore[override]
        self, inputs: list[list[int]], max_new_tokens: int | None = None, **options: Any
    ) -> list[str]:
        """Adds requests as transformers does. One wrong prompt refuses all of them; a request that does not fit fails alone."""
        for ids in inputs:
            check_prompt(self.model.config, ids, max_new_tokens)
        names = self._request_ids(len(inputs))
        pairs: Sequence[tuple[str, list[int]]] = list(zip(names, inputs, strict=True))
        if self._use_prefix_sharing:
            pairs = sorted(pairs, key=lambda pair: pair[1], reverse=True)  # prompts that begin alike follow each other
        for name, ids in pairs:
            try:
                self.add_request(ids, name, max_new_tokens, **options)
            except MemoryError as error:
                self.output_router.fail_and_deliver(Request(name, list(ids)), error)
        return names

    def release(self, session: str) -> int:
        """Ends a session of `add_request`: its pages are the first to go, in the pool and in the store. Returns their number."""
        cache = self._pool()
        if count := len(cache.branches.pages(session)):
            cache.released.add(session)
        return count

    def prefetch(self, session: str) -> int:
        """Reads the stored pages of a session into host memory, where its next turn finds them at once. Returns before they are there;
        the number of the session's pages, or 0 without a store."""
        cache = self._pool()
        found = cache.branches.pages(session) if cache.sessions is not None else []
        if found:
            cache.sessions.prefetch(found)  # type: ignore[union-attr]
        return len(found)

    def _check_unused(self, request_id: str) -> None:
        """Raises ValueError if a request that has not ended has this id: both would read and write the same pages."""
        self._pool()
        scheduler = self.batch_processor.scheduler  # type: ignore[union-attr]
        with self.input_queue.mutex:
            used = any(state.request_id == request_id for state in self.input_queue.queue)
        if used or request_id in scheduler.waiting_requests or request_id in scheduler.active_requests:
            raise ValueError(f"request_id={request_id!r} belongs to a request that has not ended: use another one")

    def _request_ids(self, count: int) -> list[str]:
        with self._request_lock:
            first = self._request_counter
            self._request_counter += count
        names = [f"req_{first + i}" for i in range(count)]
        self._issued.update(names)
        return names

    def _forget(self, request_id: str) -> None:
        """Drops the handler of a request that will have no result."""
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)

    @property
    def cache(self) -> CompressedPagedCache:
        return self.batch_processor.cache  # type: ignore[union-attr, return-value]

    def _pool(self) -> CompressedPagedCache:
        """The paged cache, made now if there is none."""
        if self.batch_processor is None:
            self.batch_processor = self._create_batch_processor()
        return self.cache

    def gauges(self) -> dict[str, int]:
        """The fields of `Metrics` that are of one moment."""
        waiting, processor = self.input_queue.qsize(), self.batch_processor
        if processor is None:
            return {"waiting": waiting}
        scheduler = processor.scheduler
        return self.cache.gauges() | {"waiting": waiting + len(scheduler.waiting_requests), "running": len(scheduler.active_requests)}

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """Makes or resets the processor on the current stream and waits for it, since other streams copy and compute the first batch."""
        processor = self._make_processor() if self.batch_processor is None else super()._create_batch_processor()
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()
        return processor

    def _make_processor(self) -> ContinuousBatchProcessor:
        model, config = self.model, self.continuous_batching_config
        text = model.config.get_text_config()
        supports = getattr(model, "_supports_logits_to_keep", None)
        cache = CompressedPagedCache(
            config=text,
            continuous_batching_config=config,
            device=model.device,
            distributed_helper=self.distributed_helper,
            dtype=model.dtype,
            model_supports_logits_to_keep=callable(supports) and supports(),
            wake=self._wake_up_loop.set,
            **self.cache_options,
        )
        self._use_prefix_sharing = cache.use_prefix_sharing
        update_cb_config_after_cache_creation(config, cache.num_blocks, cache.max_batch_tokens)
        kind = SCHEDULER_MAPPING.get(config.scheduler_type)
        if kind is None:
            known = ", ".join(map(repr, SCHEDULER_MAPPING))
            raise ValueError(f"scheduler_type={config.scheduler_type!r}: expected one of {known}")
        scheduler = type(kind.__name__, (Requests, kind), {"forget": self._forget})(
            cache=cache, safety_margin=config.safety_margin, max_requests_per_batch=config.max_requests_per_batch
        )
        return CompressedProcessor(
            cache=cache,
            config=text,
            generation_config=self.generation_config,
            continuous_batching_config=config,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue if self.is_tp_driver else None,
            cancel_queue=self.cancel_queue if self.is_tp_driver else None,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=model.device,
            model_dtype=model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )


# The model.

_CACHED = "_cached_continuous_batching_manager"


def manager_for(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None,
    config: ContinuousBatchingConfig | None,
    workload_hints: WorkloadHints | None,
    **options: Any,
) -> CompressedManager:
    """The manager that the model keeps, or a new one, as `init_continuous_batching` makes it."""
    kept = getattr(model, _CACHED, None)
    if isinstance(kept, CompressedManager):
        kept.switch_to_cb_friendly_attn(model)
        return kept
    if kept is not None:
        raise ValueError("the model keeps a manager with dense pages: call model.destroy_cached_continuous_batching_manager() before")
    generation = model.generation_config if generation_config is None else generation_config
    if generation is None:
        raise ValueError("a GenerationConfig must be passed or set in the model")
    if generation.eos_token_id is None:
        generation.eos_token_id = -1  # as in transformers: no token ends a text
    config = config or getattr(generation, "continuous_batching_config", None) or ContinuousBatchingConfig()
    attention = model.config._attn_implementation
    try:
        return CompressedManager(model, generation, config, workload_hints, **options)
    except Exception:
        model.set_attn_implementation(attention)
        raise


def overridden() -> dict[Callable, list[str]]:
    """The parameters that each method of transformers must have that is overridden here."""
    found: dict[Callable, list[str]] = {}
    for kind in (CompressedManager, CompressedProcessor, BatchInputs, Request, Sampling, CompressedPagedCache, CompressedAllocator):
        for name, method in vars(kind).items():
            stock = getattr(kind.__mro__[1], name, None)
            if inspect.isfunction(method) and inspect.isfunction(stock) and name not in ("__init__", "add_request", "add_requests"):
                found[stock] = list(inspect.signature(method).parameters)
    return found


def check_release() -> None:
    """Raises NotImplementedError if an overridden method has other parameters."""
    for method, expected in overridden().items():
        if (found := list(inspect.signature(method).parameters)) != expected:
            raise unsupported(f"{method.__qualname__} takes {found}, not {expected}")


check_release()
