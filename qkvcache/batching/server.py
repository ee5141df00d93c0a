"""transformers' OpenAI-compatible server with compressed caches: `qkvcache serve`.

The server, its handlers and its options come from `transformers serve` (`transformers.cli.serve.Serve`). Added are the names of
`qkvcache.models`, checks and options of each request (`api.py`), an orderly end, `GET /metrics` in the text format of
Prometheus, and a line of metrics on the terminal.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import CBWorkerDeadError, GenerateManager, Modality

from ..caches import CompressedCache
from ..caches.attach import attach
from ..models import folder
from . import api
from .context import Batching, continuous_batching
from .fields import UNSUPPORTED, Chat, Completion, Fields, Refusal, Response
from .gate import OPEN, Gate, Keys, Limits, connections
from .grammars import Grammar, Grammars
from .metrics import Metrics, Observed, prometheus
from .prompts import Processor, Renderer, made
from .requests import ASKED, SHARE_PREFIXES, Asked, check_prompt, session_of, sharing

TEXTS = "text", "input_text", "output_text"
"""Types of the message parts that a language model reads."""
LAST_STEP = 10.0
"""Seconds in which a step has to end when the server has stopped."""


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
        structured_outputs: whether requests may ask for answers that follow a JSON schema (`response_format`). A step is then prepared when
            the step before has ended, and on a GPU no steps are captured as graphs, which takes time.
        api_keys: keys of which a request must have one (`Authorization: Bearer KEY`). Empty: everybody may call, where `no_api_key` says so
            or `host` is this machine.
        limits: what clients may ask for.
        options: options of `transformers.cli.serve.Serve`, such as `port`, `device`, `dtype`, `cb_max_memory_percent`.
            Continuous batching is on unless `continuous_batching=False`: requests then run one after the other.

    Raises:
        ImportError: the packages of the extra `serve`, or of `structured`, are missing.
        ValueError, NotImplementedError: the errors of `Keys`, of `continuous_batching` and of `PrefixStore`, before the server
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
        structured_outputs: bool = False,
        api_keys: Sequence[str] = (),
        no_api_key: bool = False,
        limits: Limits | None = None,
        continuous_batching: bool = True,
        host: str = "localhost",
        **options,
    ):
        if share_prefixes not in SHARE_PREFIXES:
            raise ValueError(f"share_prefixes={share_prefixes!r}: expected one of {', '.join(SHARE_PREFIXES)}")
        if store is not None and share_prefixes == "none":
            raise ValueError("share_prefixes='none' with a store, in which no prompt would look for pages: leave one of them out")
        of_batching = {
            f"store={str(store)!r}": store is not None, "structured_outputs=True": structured_outputs,
            "reproducible=True": cache.get("reproducible", False),
        }  # fmt: skip
        if not continuous_batching and (found := [name for name, given in of_batching.items() if given]):
            raise ValueError(f"{', '.join(found)} without continuous batching, which it needs: leave one of them out")
        self.limits, self.keys = limits or Limits(), Keys(api_keys, host, no_api_key)
        self._structured = structured_outputs
        self.grammars: Grammars | None = None
        self.batching: Batching | None = None
        self.tokenizer: PreTrainedTokenizerBase
        self.max_body_bytes = 0
        self.exchanges: set[api.Exchange] = set()
        """The running requests."""
        self.observed = Observed()
        self.stopping = self.hung = self._died = False
        self.options_by_batch, self._share_prefixes = continuous_batching, share_prefixes
        self._name, self._cache, self._interval, self._grace = name, cache, metrics_interval, grace_seconds
        self._store: dict[str, Any] = {
            "directory": store, "max_bytes": store_bytes // 10, "max_disk_bytes": store_bytes, "time_to_live": store_time_to_live,
        }  # fmt: skip
        self._modality = Modality.LLM
        self._model: PreTrainedModel | None = None
        self._attached, self._closed, self._renderer = ExitStack(), threading.Event(), Renderer()
        self._seen: tuple[PreTrainedModel, Processor] | None = None
        """The model and its processor, which handlers get in place of loading them; None once the server is closed."""
        super().__init__(folder(name), continuous_batching=continuous_batching, non_blocking=True, host=host, **options)

    def start_server(self) -> None:
        """Completes the server. The parent's constructor calls it last, when everything is built and nothing listens yet."""
        models: Any = self._model_manager  # its methods are replaced on the instance
        path, named, shutdown = models.force_model, models.process_model_name, models.shutdown

        def seen(model_id: str, *args, **kwargs):
            if model_id != named(path):
                raise Refusal(f"the server is pinned to {self._name!r}", "model")
            return self._seen

        def stop_and_shutdown() -> None:
            self._closed.set()
            # transformers would wait for the thread of continuous batching for ever, or leave it running, and with it the model.
            if self.batching is not None and (manager := self._manager) is not None:
                self.batching.close(LAST_STEP if self.alive else 0.0)
                self.hung = manager.is_running()
            self._generation_state._cb_manager = None
            self._attached.close()
            self._model = self._seen = self.batching = None
            shutdown()

        models.force_model = self._name  # transformers lists and answers for this name alone
        models.process_model_name = lambda model_id: named(path if model_id == self._name else model_id)
        models.shutdown = stop_and_shutdown
        model, processor = models.load_model_and_processor(named(path))
        self._compress(model, processor)
        self._seen, models.load_model_and_processor = (model, Processor(processor)), seen
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
            gc.collect()
            gc.freeze()  # a full collection would look at all that was imported and loaded, for .2 s in which nobody is answered
            self.server.run()
            if self._died:
                raise RuntimeError("the thread of continuous batching has died")
        finally:
            gc.unfreeze()
            self.close()

    def close(self) -> None:
        """Ends the thread of continuous batching, once all pages are in the store. `hung` says whether its last step does not end."""
        self._model_manager.shutdown()
        self._renderer.close()

    @property
    def app(self) -> Any:
        """The ASGI application, for another server than `run`'s, which then calls `close`."""
        return self.server.config.app

    @property
    def _manager(self) -> Any:
        return None if self.batching is None else self.batching.manager

    @property
    def dead(self) -> bool:
        """Whether the thread of continuous batching, which generates all tokens, has ended."""
        manager = self._manager
        ended = manager is not None and not (self._generation_state.is_cb_alive() and manager.is_running())
        return ended and not self._closed.is_set()

    @property
    def alive(self) -> bool:
        """Whether the thread of continuous batching runs, and has ended a step in the last `stall_seconds` or had none."""
        manager = self._manager
        stalled = manager is not None and time.monotonic() - manager.progressed > self.limits.stall_seconds
        return not self.dead and not stalled

    def stop(self, *_: Any) -> None:
        """Refuses new requests, and exits when the running ones are done. A second call ends those that run."""
        if self.stopping:
            self._grace = 0.0
        self.stopping = True

    def admit(self, client: str | None, n: int) -> None:
        """Raises Refusal (429) if, with `n` more, the answers that wait for their first token exceed `max_waiting`, or the answers of this
        client `max_waiting_per_client`."""
        waiting = Counter[str | None]()
        for exchange in self.exchanges:
            waiting[exchange.client] += exchange.waiting
        limits = self.limits
        if waiting.total() + n > limits.max_waiting or waiting[client] + n > limits.max_waiting_per_client:
            whose = f"{waiting[client]} of yours" if waiting[client] + n > limits.max_waiting_per_client else f"{waiting.total()} in all"
            message = f"too many answers wait for their first token ({whose}): try again later"
            after = str(min(max(ceil(self.observed.seconds["time_to_first_token"].mean), 1), 60))
            raise Refusal(message, status=429, code="rate_limit_exceeded", headers={"retry-after": after})

    async def render(self, client: str | None, call: Callable[[], Any], schema: dict | None) -> tuple[Any, Grammar | None]:
        """A prompt, made by `call`, and the grammar of its answers, in a thread."""

        def run() -> tuple[Any, Grammar | None]:
            return made(self._model, call), None if schema is None or self.grammars is None else self.grammars.of(schema)

        return await self._renderer.run(client, run)

    def check(self, fields: Fields) -> None:
        """Raises Refusal for what this server cannot serve."""
        if fields.model not in (None, self._name):
            message = f"model={fields.model!r:.80}: the server is pinned to {self._name!r}"
            raise Refusal(message, "model", code="model_not_found")
        if (n := getattr(fields, "n", 1)) > self.limits.max_n:
            raise Refusal(f"n={n}: at most {self.limits.max_n}", "n")
        if fields.seed is not None and not self.options_by_batch:
            raise Refusal("seed is not supported without continuous batching", "seed", code=UNSUPPORTED)
        if api.schema_of(fields) is not None and self.grammars is None:
            raise Refusal("response_format is not supported without --structured-outputs", "response_format", code=UNSUPPORTED)
        tools = getattr(fields, "tools", None)
        if tools and "tools" not in (self.tokenizer.get_chat_template(tools=tools) or ""):
            raise Refusal("tools are not supported: the model's chat template has none", "tools", code=UNSUPPORTED)
        where = "input" if isinstance(fields, Response) else "messages"
        others = [part for part in parts_of(fields) if not (part.get("type") in TEXTS and isinstance(part.get("text"), str))]
        if others and self._modality == Modality.LLM:
            raise Refusal(f"{where} has parts other than text, which the model does not read", where)
        if not all(map(carries_its_data, others)):
            raise Refusal(f"{where} has a URL that is not a data: URL, or an unknown part: the server fetches and opens nothing", where)

    def sharing(self, request: Request, fields: Fields) -> dict[str, Any]:
        """The options of a request that say with whom it shares pages, and of which session it is."""
        session = request.headers.get("x-session-id") or fields.prompt_cache_key
        return sharing(self._share_prefixes, request.state.tenant, fields.cache_salt, session)

    def cancel(self, asked: Asked) -> None:
        """Ends a request whose client has left."""
        asked.left = True
        if self._manager is not None and asked.admitted:
            self._manager.cancel_request(asked.request_id)

    def metrics(self) -> Metrics | None:
        """The current metrics; None without continuous batching."""
        return None if self.batching is None else self.batching.metrics()

    def _compress(self, model: PreTrainedModel, processor: Any) -> None:
        """Gives the model its compressed caches."""
        state, name = self._generation_state, self._model_manager.process_model_name(self._name)
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self._modality = self._model_manager.get_model_modality(model, processor=processor)
        if state._continuous_batching:
            directory = self._store["directory"]
            store = None if directory is None else _store_of(model, tokenizer=self.tokenizer, **self._store)
            self.batching = self._attached.enter_context(continuous_batching(model, store=store, **self._cache))
        else:
            self._attached.enter_context(attach(model, lambda config: CompressedCache(config, **self._cache)))
        self.options_by_batch = state.use_continuous_batching(model, self._modality)
        if self.options_by_batch:
            config = state._cb_config = state._cb_config or ContinuousBatchingConfig()
            config.per_request_processors = True
            config.allow_block_sharing = config.allow_block_sharing and self._share_prefixes != "none"
            if self._structured:
                self.grammars = Grammars(self.tokenizer, model.config.get_text_config(decoder=True).vocab_size)
                config.use_async_batching = config.use_cuda_graph = False
            config.default_compile_level = config.default_compile_level or int(state._compile)
            # Uses the model's own generation config: transformers would use the first request's for all.
            state.get_manager(name, use_cb=True).init_cb(model, copy.deepcopy(model.generation_config))
        else:
            state._generate_managers[name] = Sequential()
        self._model = model
        self.max_body_bytes = self.limits.body_bytes(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None))

    def _add_routes(self) -> None:
        """Serves the paths that are answered here and no others, asks for a key, and gives errors OpenAI's form."""

        async def metrics(_: Any) -> PlainTextResponse:
            text = prometheus(self.metrics(), self.observed, self.alive)
            return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

        async def health(_: Any) -> JSONResponse:
            if self.stopping:
                return api.answer_of(api.stopping())
            return JSONResponse({"status": "ok" if self.alive else "unhealthy"}, 200 if self.alive else 503)

        async def models(_: Any) -> JSONResponse:
            return JSONResponse({"object": "list", "data": self._model_manager.list_models()})

        async def session(request: Request) -> JSONResponse:
            name = request.path_params["session"]
            if self._manager is None:
                raise Refusal("sessions need continuous batching", status=404)
            call = self._manager.release if request.method == "DELETE" else self._manager.prefetch
            return JSONResponse({"session": name, "pages": call(session_of(request.state.tenant, name))})

        def refused(_: Any, error: Exception) -> JSONResponse:
            self.observed.add(api.refusal(error).outcome)
            return api.answer_of(error)

        async def failed(request: Request, error: Exception) -> JSONResponse:
            return refused(request, error)

        completions, chats, responses = self._completion_handler, self._chat_handler, self._response_handler
        self.app.router.routes[:] = [
            Route(OPEN, health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/completions", api.Front(self, completions, Completion), methods=["POST"]),
            Route("/v1/chat/completions", api.Front(self, chats, Chat), methods=["POST"]),
            Route("/v1/responses", api.Front(self, responses, Response), methods=["POST"]),
            Route("/v1/sessions/{session}", session, methods=["POST", "DELETE"]),
        ]
        self.app.user_middleware.append(Middleware(Gate, keys=self.keys, refuse=refused))  # within CORS, whose preflights have no key
        for kind in (HTTPException, CBWorkerDeadError, Refusal, Exception):
            self.app.add_exception_handler(kind, failed)
        config = self.server.config
        config.timeout_graceful_shutdown = 2  # for connections without a request that runs
        config.http = connections(self.limits.max_connections, self.limits.read_seconds)
        self.server.handle_exit = self.stop  # type: ignore[method-assign, assignment]

    def _watch(self) -> None:
        """Ends a server that is stopping, or whose thread of continuous batching has died, once no request runs or the grace period is
        over. Prints a line for every interval in which tokens were generated or requests changed."""
        console, began, printed, before = Console(stderr=True), None, time.monotonic(), self.metrics()
        while not self._closed.wait(0.1):
            now = time.monotonic()
            if self.dead:
                self._died = self.stopping = True
            if self.stopping:
                began = began or now
                grace = 0.0 if self._died else self._grace
                if now >= began + grace:
                    for exchange in list(self.exchanges):
                        exchange.loop.call_soon_threadsafe(exchange.end, api.dead() if self._died else api.stopping())
                # A client that reads nothing keeps its request.
                if not self.exchanges or now >= began + grace + 1:
                    self.server.should_exit = True
            if self._interval and now - printed >= self._interval:
                found = self.metrics()
                if found and found != before:
                    earlier = before.tokens_generated if before and before.tokens_generated <= found.tokens_generated else 0
                    console.print(line(found, (found.tokens_generated - earlier) / (now - printed)), highlight=False)
                printed, before = now, found


class Sequential(GenerateManager):
    """transformers' manager of requests that run one after the other, with the checks and options of each request."""

    def generate_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        return super().generate_streaming(model, processor, _configured(model, inputs, gen_config), gen_config, *args, **kwargs)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        inputs = _configured(model, inputs, gen_config)
        # Shielded: the model's thread returns the answer even if the client has left.
        answer = super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)
        return await asyncio.shield(answer)


class Ends(StoppingCriteria):
    """Ends an answer at its stop strings, and when its client has left."""

    def __init__(self, asked: Asked, prompt: int):
        self.asked, self.prompt = asked, prompt

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.asked.first_token = self.asked.first_token or time.perf_counter()
        stop = self.asked.options.get("stop")
        done = self.asked.left or (stop is not None and stop.end(reversed(input_ids[0, self.prompt :].tolist())))
        return torch.full((len(input_ids),), done, dtype=torch.bool, device=input_ids.device)


def _configured(model: PreTrainedModel, inputs: dict, config: GenerationConfig) -> dict:
    """Checks a request and sets its sampling options: transformers would leave `do_sample` as the model has it. Returns the arguments of
    `generate`."""
    ids = inputs["input_ids"][0].tolist()
    _, config.max_new_tokens = check_prompt(model.config, ids, config.max_new_tokens)
    asked = ASKED.get()
    if asked is None:
        return inputs
    asked.admitted, asked.max_new_tokens = True, config.max_new_tokens
    temperature = asked.options.get("temperature")
    if temperature is not None or "top_p" in asked.options:
        config.do_sample = temperature != 0
        config.top_k = config.top_k or 0  # generate's default is the 50 most probable tokens
    return {**inputs, "stopping_criteria": StoppingCriteriaList([Ends(asked, len(ids))])}


def parts_of(fields: Fields) -> list[dict]:
    """The parts of all messages, and of the outputs of functions."""
    given = getattr(fields, "input", ())
    contents = [message.content for message in getattr(fields, "messages", ())]
    contents += [item.get(name) for item in given if isinstance(given, list) for name in ("content", "output")]
    return [part if isinstance(part, dict) else {} for content in contents if isinstance(content, list) for part in content]


def carries_its_data(part: dict) -> bool:
    """Whether an image, a video or a sound is in the request itself: transformers fetches other URLs, and opens files."""
    kind = str(part.get("type"))
    value = part.get("image_url" if kind == "input_image" else kind)
    if kind == "input_audio":
        return isinstance(value, dict) and isinstance(value.get("data"), str) and isinstance(value.get("format"), str)
    url = value.get("url") if isinstance(value, dict) else value
    return isinstance(url, str) and url.startswith("data:")


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


def _store_of(*args: Any, **options: Any) -> Any:
    from ..prefix import PrefixStore  # a room, which may not be there

    return PrefixStore(*args, **options)
