"""`CompressedManager`: transformers' manager of continuous batching, with compressed pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestState, RequestStatus
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs, ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import FutureRequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.generation.continuous_batching.utils import WorkloadHints, get_accelerator_graph_name
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import NAME, paged_attention
from .metrics import Counters, Metrics
from .pool import CompressedPagedCache
from .requests import ASKED, Request, StopStrings, check_prompt
from .sampling import Sampling

NO_ROOM = "No requests can be scheduled and no requests can be offloaded."
"""The error of transformers' processor for a request that does not fit into an empty pool."""


class CompressedManager(ContinuousBatchingManager):
    """A manager whose requests are in compressed pages. `options`: those of `CompressedPagedCache` that the config does
    not have."""

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
        self._cache_options: dict[str, Any] = options | limits
        if asked.max_blocks_per_request is None and workload_hints is not None and workload_hints.max_generated_length:
            longest = workload_hints.max_prompt_length + workload_hints.max_generated_length
            self._cache_options["max_blocks_per_request"] = -(-longest // asked.page_size)
        super().__init__(model, generation_config, continuous_batching_config, workload_hints)  # type: ignore[arg-type]
        config = self.continuous_batching_config
        # Batches with prompts run eagerly: their launches depend on the number of prompts.
        wanted = asked.use_cuda_graph is None or asked.cuda_graph_booleans[1]
        graphs = model.device.type == "cuda" and get_accelerator_graph_name() is not None and wanted and asked.max_blocks_per_request != 0
        config.use_cuda_graph = (False, graphs)
        if asked.use_async_batching is None:
            config.use_async_batching = graphs
        if asked.per_request_processors:
            if asked.return_logprobs:
                raise NotImplementedError("return_logprobs with per_request_processors: they would be those of the noise")
            self.logit_processor: ContinuousBatchingLogitsProcessorList = Sampling(generation_config)
            if asked.max_memory_percent is None and model.device.type == "cuda":
                config.max_memory_percent = 0.8  # transformers' share where logits are processed

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)
        if model.config._attn_implementation != NAME:
            self._original_attn_impl = model.config._attn_implementation
            model.set_attn_implementation(NAME)

    def warmup(self) -> None:
        """Warms up as transformers does; the random tokens do not count for statistics."""
        cache = self._pool()
        cache.calibrating = False
        try:
            super().warmup()
        finally:
            cache.calibrating = True

    def start(self) -> None:
        """Starts as transformers does; the pool is allocated before it returns."""
        self._pool()
        super().start()

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        stop: StopStrings | None = None,
        **options: Any,
    ) -> str | None:
        """Adds a request. Its answer ends at the model's last position at the latest.

        Args:
            stop: strings that end the answer. The answer includes the tokens of the string.
            options: `temperature`, `top_p` and `seed` of this request, if the config has `per_request_processors`.

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
        elif asked is None:
            self._check_unused(request_id)
        if asked is not None:
            options = dict(asked.options)
            stop = options.pop("stop", None)
        try:
            wanted = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
            tokens, most = check_prompt(self.model.config, input_ids, wanted)
            if isinstance(self.logit_processor, Sampling):
                options = self.logit_processor.options(**options)
            else:
                self.logit_processor.check_kwargs(options)
            _check_room(request_id, len(tokens) + (1 if wanted is None else most or 1) - 1, self._pool())
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
        state.stop, state.asked = stop, asked
        if asked is not None:
            asked.admitted, asked.max_new_tokens = True, most
        self.input_queue.put(state, timeout=10)
        self._wake_up_loop.set()
        return request_id

    def add_requests(  # type: ignore[override]
        self, inputs: list[list[int]], max_new_tokens: int | None = None, **options: Any
    ) -> list[str]:
        """Adds requests as transformers does. One wrong prompt refuses all of them; a request that does not fit fails
        alone."""
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
        return [f"req_{first + i}" for i in range(count)]

    def _forget(self, request_id: str) -> None:
        """Drops the handler of a request that will have no result."""
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)

    def register_result_handler(self, request_id: str, callback: Callable) -> None:
        asked = ASKED.get()

        def noted(output: Any) -> None:
            if asked is not None:
                asked.cached_tokens = output.cached_tokens
            callback(output)

        super().register_result_handler(request_id, noted)

    @property
    def cache(self) -> CompressedPagedCache:
        return self.batch_processor.cache  # type: ignore[union-attr, return-value]

    def _pool(self) -> CompressedPagedCache:
        """The paged cache, made now if there is none."""
        if self.batch_processor is None:
            self.batch_processor = self._create_batch_processor()
        return self.cache

    def metrics(self, counters: Counters) -> Metrics:
        """The current metrics, without pages while there is no processor."""
        counts = vars(counters)
        processor = self.batch_processor
        if processor is None:
            return Metrics(waiting=self.input_queue.qsize(), **counts)
        scheduler, allocator = processor.scheduler, self.cache.allocator
        pool, cached = allocator.pool, len(allocator.ledger.cached_blocks)
        free = pool.num_free_sectors * allocator.blocks_per_sector + pool.count_free_blocks(allocator.index)
        return Metrics(
            running=len(scheduler.active_requests),
            waiting=len(scheduler.waiting_requests) + self.input_queue.qsize(),
            pages_used=allocator.num_blocks - free - cached,
            pages_cached=cached,
            pages_total=allocator.num_blocks,
            page_size=allocator.tokens_per_page,
            rings=allocator.rings.tensor.shape[2] - 1,
            page_bytes=self.cache.cache_tensor.nbytes,
            ring_bytes=allocator.rings.tensor.nbytes,
            **counts,
        )

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """Makes or resets the processor on the current stream and waits for it, since other streams copy and compute
        the first batch."""
        if isinstance(processor := getattr(self, "batch_processor", None), ContinuousBatchProcessor):
            processor.reset()
        else:
            processor = self._make_processor()
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
            **self._cache_options,
        )
        self._use_prefix_sharing = cache.use_prefix_sharing
        update_cb_config_after_cache_creation(config, num_blocks=cache.num_blocks, max_batch_tokens=cache.max_batch_tokens)
        kind = SCHEDULER_MAPPING.get(config.scheduler_type)
        if kind is None:
            raise ValueError(f"scheduler_type={config.scheduler_type!r}: expected one of {', '.join(map(repr, SCHEDULER_MAPPING))}")
        scheduler = type(kind.__name__, (Requests, kind), {"forget": self._forget})(
            cache=cache,
            safety_margin=config.safety_margin,
            max_requests_per_batch=config.max_requests_per_batch,
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


class Requests:
    """A mixin for schedulers: requests know how many of their tokens were cached, and cancelled requests are dropped
    completely."""

    forget: Callable[[str], None]
    cache: CompressedPagedCache

    def _infer_request_tokens(self, state: RequestState, *args: Any) -> list[int]:
        tokens = super()._infer_request_tokens(state, *args)  # type: ignore[misc]
        if isinstance(state, Request) and state.cached_tokens is None:
            state.cached_tokens = state.position_offset
            self.cache.counters.prompt_tokens += len(state.initial_tokens)
            self.cache.counters.cached_tokens += state.position_offset
        return tokens

    def clear_cancelled_requests(self) -> list[RequestState]:
        states = super().clear_cancelled_requests()  # type: ignore[misc]
        for state in states:
            state.status = RequestStatus.FINISHED  # ignores the result of a step that still runs
            self.forget(state.request_id)
        return states


def _check_room(request_id: str, tokens: int, cache: CompressedPagedCache) -> None:
    """Raises MemoryError if a request of `tokens` tokens, of which the last is not stored, does not fit into the empty
    pool."""
    room = cache.num_blocks * cache.allocator.tokens_per_page
    if tokens > room:
        raise MemoryError(
            f"request {request_id} of {tokens} tokens does not fit into a pool of {room} tokens: shorten it, or raise "
            "max_memory_percent or num_blocks of the ContinuousBatchingConfig"
        )


class BatchInputs(ContinuousBatchingIOs):
    """Inputs of a forward pass, planned for all requests of a batch at once."""

    cache: CompressedPagedCache
    logit_processor: ContinuousBatchingLogitsProcessorList

    def _get_graph_key(self) -> tuple[int, ...]:
        return (*super()._get_graph_key(), *getattr(self.logit_processor, "needed", ()))

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
        states = [future.state for future in requests_in_batch]
        names, past = [state.request_id for state in states], [state.position_offset for state in states]
        super().prepare_batch_tensors(requests_in_batch, logits_processors, use_decode_fast_path, num_q_tokens, 0, use_padding)
        count = [future.query_length for future in requests_in_batch]
        self.cache.prepare(names, past, count, self.block_table[0] if self.use_block_table else None)


class CompressedProcessor(ContinuousBatchProcessor):
    """A processor that fails a request that outgrows the pool and continues with the others."""

    cache: CompressedPagedCache

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        made = self.inputs_and_outputs
        pairs: list[Any] = made.io_pairs if isinstance(made, ContinuousBatchingAsyncIOs) else []
        every: list[Any] = [io for pair in pairs for io in (pair.host_io, pair.device_io)] or [made]
        for inputs in every:
            inputs.__class__, inputs.logit_processor = BatchInputs, self.logit_processor  # transformers makes them
        if isinstance(self.logit_processor, Sampling):
            self.do_sample = self.model_runner.do_sample = False  # the logits processors draw the tokens

    def prepare_next_batch(self) -> bool:
        while True:
            try:
                return super().prepare_next_batch()
            except RuntimeError as error:
                if str(error) != NO_ROOM or not self._fail_one():
                    raise

    def _fail_one(self) -> bool:
        """Fails the request for which no pages are left."""
        scheduler = self.scheduler
        if not scheduler.starved_requests:
            return False
        state, tokens = scheduler.starved_requests[0]
        try:
            _check_room(state.request_id, state.current_len() + tokens, self.cache)
        except MemoryError as error:
            self._handle_request_error(error, state)
            scheduler.finish_request(state.request_id)
            scheduler.block_new_requests = False
            return True
        return False
