"""transformers' OpenAI-compatible server with compressed caches: `qkvcache serve`.

The server, its handlers and its options are those of `transformers serve` (`transformers.cli.serve.Serve`). Added are the names of
`qkvcache.models`, checks and options of each request (`api.py`), an orderly end, `GET /metrics` in the text format of
Prometheus, and a line of metrics on the terminal.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import CBWorkerDeadError, GenerateManager, Modality

from ..attention import attach
from ..caches import CompressedCache
from ..models import folder
from ..prefix import PrefixStore
from . import api
from .context import Batching, continuous_batching
from .fields import UNSUPPORTED, Chat, Completion, Fields, Refusal, Response
from .metrics import Metrics, Observed, prometheus
from .requests import ASKED, SHARE_PREFIXES, Asked, check_prompt, session_of, sharing

TEXTS = "text", "input_text", "output_text"
"""Types of the message parts that a language model reads."""


class Server(Serve):
    """A server of one model: loaded by the constructor, then `run`.

        Server("smollm2", {"format": "turboquant_4bit_nc"}, port=8000).run()

    Requests may name the model as `name` does, or leave it out.

    Args:
        name: a model that `qkvcache.models.folder` knows.
        cache: options of `continuous_batching`; without continuous batching, of `CompressedCache`.
        metrics_interval: seconds between two lines of metrics; 0 prints none.
        grace_seconds: seconds for which running requests go on after SIGTERM or Ctrl-C.
        store: a folder in which pages survive the server (`continuous_batching(store=)`); None: they end with it.
        store_bytes: the most bytes of the folder. A tenth of them is the most bytes of pages in host memory.
        store_time_to_live: seconds after their last use for which pages are kept in the folder and in host memory; None: for ever.
        share_prefixes: whose prompts share pages: "key", those with the same API key, of all clients where there is none; "all"; or "none",
            which reads each prompt anew.
        options: those of `transformers.cli.serve.Serve`, such as `port`, `device`, `dtype`, `cb_max_memory_percent`.
            Continuous batching is on unless `continuous_batching=False`: requests then run one after the other.

    Raises:
        ImportError: the packages of the extra `serve` are missing.
        ValueError, NotImplementedError: the errors of `continuous_batching` and of `PrefixStore`, before the server
        listens.
    """

    def __init__(
        self,
        name: str,
        cache: dict[str, Any],
        *,
        metrics_interval: float = 10.0,
        grace_seconds: float = 20.0,
        store: str | Path | None = None,
        store_bytes: int = 50 * 10**9,
        store_time_to_live: float | None = None,
        share_prefixes: str = "key",
        continuous_batching: bool = True,
        **options,
    ):
        if share_prefixes not in SHARE_PREFIXES:
            raise ValueError(f"share_prefixes={share_prefixes!r}: expected one of {', '.join(SHARE_PREFIXES)}")
        if store is not None and share_prefixes == "none":
            raise ValueError("share_prefixes='none' with a store, in which no prompt would look for pages: leave one of them out")
        if store is not None and not continuous_batching:
            raise ValueError(f"store={str(store)!r} without continuous batching, which it holds the pages of: leave one of them out")
        self.batching: Batching | None = None
        self.tokenizer: PreTrainedTokenizerBase
        self.exchanges: set[api.Exchange] = set()
        """The running requests."""
        self.observed = Observed()
        self.stopping = self._died = False
        self.options_by_batch, self._share_prefixes = continuous_batching, share_prefixes
        self._name, self._cache, self._interval, self._grace = name, cache, metrics_interval, grace_seconds
        self._store: dict[str, Any] = {
            "directory": store, "max_bytes": store_bytes // 10, "max_disk_bytes": store_bytes, "time_to_live": store_time_to_live,
        }  # fmt: skip
        self._modality = Modality.LLM
        self._model: PreTrainedModel | None = None
        self._attached, self._lock, self._closed = ExitStack(), threading.Lock(), threading.Event()
        super().__init__(folder(name), continuous_batching=continuous_batching, non_blocking=True, **options)

    def start_server(self) -> None:
        """Completes the server. The parent's constructor calls it last, when everything is built and nothing listens yet."""
        models: Any = self._model_manager  # its methods are replaced on the instance
        path, named, load, shutdown = models.force_model, models.process_model_name, models.load_model_and_processor, models.shutdown

        def load_compressed(model_id: str, *args, **kwargs):
            if model_id != named(path):
                raise Refusal(f"the server is pinned to {self._name!r}", "model")
            model, processor = load(model_id, *args, **kwargs)
            self._compress(model, processor)
            return model, processor

        def stop_and_shutdown() -> None:
            # transformers would leave the thread of continuous batching running, and with it the model.
            self._generation_state.shutdown()
            self._attached.close()
            self._model = self.batching = None
            shutdown()

        models.force_model = self._name  # transformers lists and answers for this name alone
        models.process_model_name = lambda model_id: named(path if model_id == self._name else model_id)
        models.load_model_and_processor = load_compressed
        models.shutdown = stop_and_shutdown
        load_compressed(named(path))
        self._add_routes()

    def run(self) -> None:
        """Serves until SIGTERM or Ctrl-C; running requests then have `grace_seconds` to end.

        Raises:
            RuntimeError: the thread of continuous batching has died.
        """
        try:
            if found := self.metrics():
                Console(stderr=True).print(pool_line(found), highlight=False)
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
            self.server.run()
            if self._died:
                raise RuntimeError("the thread of continuous batching has died")
        finally:
            self.close()

    def close(self) -> None:
        """Ends the thread of continuous batching, once all pages are in the store."""
        self._closed.set()
        self._model_manager.shutdown()

    @property
    def app(self) -> Any:
        """The ASGI application, for another server than `run`'s, which then calls `close`."""
        return self.server.config.app

    @property
    def alive(self) -> bool:
        """Whether the thread of continuous batching runs, which generates all tokens."""
        return self._generation_state.is_cb_alive()

    def stop(self, *_: Any) -> None:
        """Refuses new requests, and exits when the running ones are done. A second call exits at once."""
        if self.stopping:
            self.server.should_exit = self.server.force_exit = True
        self.stopping = True

    def check(self, fields: Fields) -> None:
        """Raises Refusal for what this server cannot serve."""
        if fields.model not in (None, self._name):
            message = f"model={fields.model!r}: the server is pinned to {self._name!r}"
            raise Refusal(message, "model", code="model_not_found")
        if fields.seed is not None and not self.options_by_batch:
            raise Refusal("seed is not supported without continuous batching", "seed", code=UNSUPPORTED)
        tools = getattr(fields, "tools", None)
        if tools and "tools" not in (self.tokenizer.get_chat_template(tools=tools) or ""):
            raise Refusal("tools are not supported: the model's chat template has none", "tools", code=UNSUPPORTED)
        contents = [message.content for message in getattr(fields, "messages", ())]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        texts = (part.get("type") in TEXTS and isinstance(part.get("text"), str) for part in parts)
        if self._modality == Modality.LLM and not all(texts):
            raise Refusal("messages have parts other than text, which the model does not read", "messages")

    def sharing(self, request: Request, fields: Fields) -> dict[str, Any]:
        """The options of a request that say with whom it shares pages, and of which session it is."""
        session = request.headers.get("x-session-id") or fields.prompt_cache_key
        return sharing(self._share_prefixes, _tenant(request), fields.cache_salt, session)

    def cancel(self, asked: Asked) -> None:
        """Ends a request whose client has left."""
        if self.batching is not None and self.batching.manager is not None and asked.admitted:
            self.batching.manager.cancel_request(asked.request_id)

    def metrics(self) -> Metrics | None:
        """The current metrics; None without continuous batching."""
        return None if self.batching is None else self.batching.metrics()

    def _compress(self, model: PreTrainedModel, processor: Any) -> None:
        """Gives the model its compressed caches. After `POST /reset`, the model is loaded again and is a new object."""
        with self._lock:
            if model is self._model:
                return
            state, name = self._generation_state, self._model_manager.process_model_name(self._name)
            self.tokenizer = getattr(processor, "tokenizer", processor)
            self._modality = self._model_manager.get_model_modality(model, processor=processor)
            if state._continuous_batching:
                directory = self._store["directory"]
                store = None if directory is None else PrefixStore(model, tokenizer=self.tokenizer, **self._store)
                self.batching = self._attached.enter_context(continuous_batching(model, store=store, **self._cache))
            else:
                self._attached.enter_context(attach(model, lambda config: CompressedCache(config, **self._cache)))
            self.options_by_batch = state.use_continuous_batching(model, self._modality)
            if self.options_by_batch:
                config = state._cb_config = state._cb_config or ContinuousBatchingConfig()
                config.per_request_processors = True
                config.allow_block_sharing = config.allow_block_sharing and self._share_prefixes != "none"
                config.default_compile_level = config.default_compile_level or int(state._compile)
                # Uses the model's own generation config: transformers would use the first request's for all.
                state.get_manager(name, use_cb=True).init_cb(model, copy.deepcopy(model.generation_config))
            else:
                state._generate_managers[name] = Sequential()
            self._model = model

    def _add_routes(self) -> None:
        """Replaces the paths that are answered here, and gives errors OpenAI's form."""

        async def metrics(_: Any) -> PlainTextResponse:
            text = prometheus(self.metrics(), self.observed, self.alive)
            return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

        async def health(_: Any) -> JSONResponse:
            if self.stopping:
                raise api.stopping()
            return JSONResponse({"status": "ok" if self.alive else "unhealthy"}, 200 if self.alive else 503)

        async def session(request: Request) -> JSONResponse:
            name = request.path_params["session"]
            if self.batching is None or self.batching.manager is None:
                raise Refusal("sessions need continuous batching", status=404)
            call = self.batching.manager.release if request.method == "DELETE" else self.batching.manager.prefetch
            return JSONResponse({"session": name, "pages": call(session_of(_tenant(request), name))})

        async def missing(request: Request) -> None:
            raise Refusal(f"{request.url.path} is not served with continuous batching", status=404)

        async def failed(_: Any, error: Exception) -> JSONResponse:
            return api.answer_of(error)

        completions, chats, responses = self._completion_handler, self._chat_handler, self._response_handler
        routes = [
            Route("/metrics", metrics),
            Route("/health", health),
            Route("/v1/completions", api.Front(self, completions, Completion), methods=["POST"]),
            Route("/v1/chat/completions", api.Front(self, chats, Chat), methods=["POST"]),
            Route("/v1/responses", api.Front(self, responses, Response), methods=["POST"]),
            Route("/v1/sessions/{session}", session, methods=["POST", "DELETE"]),
        ]
        if self.options_by_batch:  # these call the model themselves
            routes += [Route(path, missing, methods=["POST"]) for path in ("/v1/systemone", "/v1/audio/transcriptions")]
        self.app.router.routes[:0] = routes
        for kind in (HTTPException, CBWorkerDeadError, Refusal, Exception):
            self.app.add_exception_handler(kind, failed)
        self.server.config.timeout_graceful_shutdown = 2  # for connections without a request that runs
        self.server.handle_exit = self.stop  # type: ignore[method-assign, assignment]

    def _watch(self) -> None:
        """Ends a server that is stopping, or whose thread of continuous batching has died, once no request runs or the grace period is
        over. Prints a line for every interval in which tokens were generated or requests changed."""
        console, until, printed, before = Console(stderr=True), None, time.monotonic(), self.metrics()
        while not self._closed.wait(0.1):
            now = time.monotonic()
            if not self.alive:
                self._died = self.stopping = True
            if self.stopping:
                until = now + self._grace if until is None else until
                if now >= until:
                    for exchange in list(self.exchanges):
                        exchange.loop.call_soon_threadsafe(exchange.end, api.stopping())
                if not self.exchanges:
                    self.server.should_exit = True
            if self._interval and now - printed >= self._interval:
                found = self.metrics()
                if found and found != before:
                    earlier = before.tokens_generated if before and before.tokens_generated <= found.tokens_generated else 0
                    console.print(line(found, (found.tokens_generated - earlier) / (now - printed)), highlight=False)
                printed, before = now, found


def _tenant(request: Request) -> str | None:
    """Who sends a request, by its API key; None: anybody."""
    return getattr(request.state, "tenant", None)


class Sequential(GenerateManager):
    """transformers' manager of requests that run one after the other, with the checks and options of each request."""

    def generate_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        _configure(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        _configure(model, inputs, gen_config)
        # Shielded: the model's thread returns the answer even if the client has left.
        answer = super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)
        return await asyncio.shield(answer)


def _configure(model: PreTrainedModel, inputs: dict, config: GenerationConfig) -> None:
    """Checks a request and sets its sampling options: transformers would leave `do_sample` as the model has it."""
    _, config.max_new_tokens = check_prompt(model.config, inputs["input_ids"][0].tolist(), config.max_new_tokens)
    asked = ASKED.get()
    if asked is None:
        return
    asked.admitted, asked.max_new_tokens = True, config.max_new_tokens
    temperature = asked.options.get("temperature")
    if temperature is not None or "top_p" in asked.options:
        config.do_sample = temperature != 0
        config.top_k = config.top_k or 0  # generate's default is the 50 most probable tokens


def pool_line(metrics: Metrics) -> str:
    """The pool in words, for a terminal."""
    return (
        f"pages: {metrics.page_bytes / 1e6:,.1f} MB for {metrics.pages_total * metrics.page_size:,} tokens; "
        f"rings: {metrics.ring_bytes / 1e6:,.1f} MB for {metrics.rings:,} requests at once"
    )


def line(metrics: Metrics, tokens_per_second: float) -> str:
    """The metrics in words, for a terminal."""
    share = metrics.pages_used / max(metrics.pages_total, 1)
    return (
        f"[dim]{time.strftime('%H:%M:%S')}[/] {metrics.running} running, {metrics.waiting} waiting, "
        f"pages {metrics.pages_used:,} of {metrics.pages_total:,} ({share:.0%}), {tokens_per_second:,.1f} tokens/s, "
        f"{metrics.preemptions:,} preemptions"
    )
