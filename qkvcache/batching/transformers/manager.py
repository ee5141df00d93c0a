"""The manager of a model: takes requests, starts and ends the thread that runs the steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.generation.continuous_batching.utils import WorkloadHints, get_accelerator_graph_name
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention import NAME, paged_attention
from ..requests import ASKED, check_prompt
from ..sampling import sampling_options
from .cache import CompressedPagedCache
from .processor import CompressedProcessor
from .request import Request
from .sampling import Sampling
from .scheduler import FairScheduling

_CACHED = "_cached_continuous_batching_manager"
"""The attribute of a model that keeps its manager."""


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model. They are compiled one by one: they share their code, and only attention divides it."""
    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


class CompressedManager(ContinuousBatchingManager):
    """A manager whose requests are in compressed pages. `options`: the options of `CompressedPagedCache` that the config does not have."""

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
                raise NotImplementedError("return_logprobs with per_request_processors: they would be the logprobs of the noise")
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
                neither `use_async_batching` nor `use_cuda_graph` then; `salt`, bytes: the request shares pages with requests of this salt
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
        scheduler = type(kind.__name__, (FairScheduling, kind), {"forget": self._forget})(
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
