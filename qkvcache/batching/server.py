"""transformers' OpenAI-compatible server with compressed caches: `qkvcache serve`.

The server, its handlers and its options are those of `transformers serve` (`transformers.cli.serve.Serve`). Added are the names of
`qkvcache.models`, `GET /metrics` in the text format of Prometheus, and a line of metrics on the terminal.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel
from transformers.cli.serve import Serve

from ..attention import attach
from ..caches import CompressedCache
from ..models import folder
from .context import Batching, continuous_batching
from .metrics import Metrics

TOTALS = {"tokens_generated", "preemptions"}
"""Metrics that only grow: Prometheus calls them counters, the others gauges."""


class Server(Serve):
    """A server of one model: loaded by the constructor, then `run`.

        Server("smollm2", {"format": "turboquant_4bit_nc"}, port=8000).run()

    Requests may name the model as `name` does, or leave it out.

    Args:
        name: a model that `qkvcache.models.folder` knows.
        cache: options of `continuous_batching`; without continuous batching, of `CompressedCache`.
        metrics_interval: seconds between two lines of metrics; 0 prints none.
        options: those of `transformers.cli.serve.Serve`, such as `port`, `device`, `dtype`, `cb_max_memory_percent`. Continuous batching
            is on unless `continuous_batching=False`: requests then run one after the other.

    Raises:
        ImportError: the packages of the extra `serve` are missing.
        ValueError, NotImplementedError: what `continuous_batching` refuses, before the server listens.
    """

    def __init__(self, name: str, cache: dict[str, Any], *, metrics_interval: float = 10.0, continuous_batching: bool = True, **options):
        self.batching: Batching | None = None
        self._name, self._cache, self._batches, self._interval = name, cache, continuous_batching, metrics_interval
        self._model: PreTrainedModel | None = None
        self._attached, self._lock, self._closed = ExitStack(), threading.Lock(), threading.Event()
        super().__init__(folder(name), continuous_batching=continuous_batching, non_blocking=True, **options)

    def start_server(self) -> None:
        """Called at the end of the parent's constructor, when everything is built and nothing listens."""
        models: Any = self._model_manager  # its methods are replaced on the instance
        path, load, shutdown = models.force_model, models.load_model_and_processor, models.shutdown

        def load_compressed(model_id: str, *args, **kwargs):
            if model_id == models.process_model_name(self._name):
                model_id = models.process_model_name(path)
            model, processor = load(model_id, *args, **kwargs)
            self._compress(model)
            return model, processor

        def stop_and_shutdown() -> None:
            # transformers would leave the thread of continuous batching running, and with it the model.
            self._generation_state.shutdown()
            self._attached.close()
            self._model = self.batching = None
            shutdown()

        models.force_model = self._name
        models.load_model_and_processor = load_compressed
        models.shutdown = stop_and_shutdown
        started = int(time.time())
        # transformers would list the models in the cache of the Hub, but this server has only its own.
        models.get_gen_models = lambda: [{"id": self._name, "object": "model", "created": started, "owned_by": "qkvcache"}]
        load_compressed(models.process_model_name(self._name))
        self._add_metrics()

    def run(self) -> None:
        """Serves until the process is interrupted."""
        try:
            if self._interval > 0 and self._batches:
                threading.Thread(target=self._print_metrics, name="metrics", daemon=True).start()
            self.server.run()
        finally:
            self._closed.set()
            self._model_manager.shutdown()

    def metrics(self) -> Metrics | None:
        """None without continuous batching."""
        batching = self.batching
        return None if batching is None else batching.metrics()

    def _compress(self, model: PreTrainedModel) -> None:
        """A model that was loaded again, after `POST /reset`, is a new object."""
        with self._lock:
            if model is self._model:
                return
            if self._batches:
                self.batching = self._attached.enter_context(continuous_batching(model, **self._cache))
            else:
                self._attached.enter_context(attach(model, lambda config: CompressedCache(config, **self._cache)))
            self._model = model

    def _add_metrics(self) -> None:
        from fastapi.responses import PlainTextResponse

        def metrics() -> PlainTextResponse:
            found = self.metrics()
            return PlainTextResponse(prometheus(found) if found else "", media_type="text/plain; version=0.0.4")

        application: Any = self.server.config.app
        application.get("/metrics")(metrics)

    def _print_metrics(self) -> None:
        """Prints a line every interval in which tokens were generated or requests changed."""
        console, before, at = Console(stderr=True), self.metrics(), time.perf_counter()
        while not self._closed.wait(self._interval):
            now, then = self.metrics(), at
            at = time.perf_counter()
            if now and now != before:
                earlier = before.tokens_generated if before and before.tokens_generated <= now.tokens_generated else 0
                console.print(line(now, (now.tokens_generated - earlier) / (at - then)), highlight=False)
            before = now


def line(metrics: Metrics, tokens_per_second: float) -> str:
    """The metrics in words, for a terminal."""
    share = metrics.pages_used / max(metrics.pages_total, 1)
    return (
        f"[dim]{time.strftime('%H:%M:%S')}[/] {metrics.running} running, {metrics.waiting} waiting, "
        f"pages {metrics.pages_used:,} of {metrics.pages_total:,} ({share:.0%}), {tokens_per_second:,.1f} tokens/s, "
        f"{metrics.preemptions:,} preemptions"
    )


def prometheus(metrics: Metrics) -> str:
    """The metrics in the text format of Prometheus."""
    lines = []
    for field in fields(metrics):
        total = field.name in TOTALS
        name = f"qkvcache_{field.name}{'_total' * total}"
        lines += [f"# TYPE {name} {'counter' if total else 'gauge'}", f"{name} {getattr(metrics, field.name)}"]
    return "\n".join(lines) + "\n"
