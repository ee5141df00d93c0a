"""Metrics of requests and pages, and their text for Prometheus."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate

COUNTERS = ("tokens_generated", "prompt_tokens", "cached_tokens", "preemptions", "pages_written", "pages_fetched")
"""The fields of `Metrics` that several managers add to; the others are of one moment."""


@dataclass
class Metrics:
    """The numbers of requests, pages and tokens at one moment.

    running           requests that have pages
    waiting           requests whose prompt waits for pages or for its turn
    pages_used        pages of running requests
    pages_cached      pages that no request reads, kept for prompts that begin with their tokens; freed when pages are needed
    pages_total       pages of the pool; 0 as long as there is none
    page_size         tokens of a page (of all layers)
    rings             requests that have exact last tokens at the same time, the most that run together
    page_bytes        bytes of all pages, including the pages whose tokens are never read
    ring_bytes        bytes of all rings, including the rings that are never read
    tokens_generated  since `continuous_batching` was entered
    prompt_tokens     tokens of prompts, since then
    cached_tokens     tokens of prompts that were in pages already
    preemptions       how often a running request lost its pages to other requests; it continues later
    pages_written     pages that are in the store's directory since then, and survive this process
    pages_fetched     pages that came from the store
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    page_size: int = 0
    rings: int = 0
    page_bytes: int = 0
    ring_bytes: int = 0
    tokens_generated: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    pages_written: int = 0
    pages_fetched: int = 0


class Histogram:
    """Counts of observed seconds by upper bound."""

    def __init__(self, *bounds: float):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    @property
    def mean(self) -> float:
        """The mean of all observed seconds; 0 without any."""
        return self.sum / max(sum(self.counts), 1)

    def lines(self, name: str) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        totals = list(accumulate(self.counts))
        for bound, total in zip((*self.bounds, "+Inf"), totals, strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield from (f"{name}_sum {self.sum}", f"{name}_count {totals[-1]}")


LONG = 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0
SHORT = 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0
"""Bounds of histograms, in seconds."""


class Observed:
    """Requests over HTTP by outcome, and the seconds of those that finished: to their first token, for each token after it, and in all."""

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(("finished", "cancelled", "refused", "unauthorized", "limited", "failed"), 0)
        self.seconds = {"time_to_first_token": Histogram(*LONG), "time_per_output_token": Histogram(*SHORT), "request": Histogram(*LONG)}

    def add(self, outcome: str, begin: float = 0.0, first: float = 0.0, tokens: int = 0) -> None:
        """Counts a request: when it began and had its first token (0: not known), of `time.perf_counter`; the tokens of its answer."""
        self.outcomes[outcome] += 1
        if outcome != "finished":
            return
        end = time.perf_counter()
        self.seconds["request"].observe(end - begin)
        if first:
            self.seconds["time_to_first_token"].observe(first - begin)
            if tokens > 1:
                self.seconds["time_per_output_token"].observe((end - first) / (tokens - 1))


def prometheus(metrics: Metrics | None, observed: Observed, alive: bool) -> str:
    """The metrics in the text format of Prometheus; None: there is no continuous batching."""
    lines = ["# TYPE qkvcache_worker_alive gauge", f"qkvcache_worker_alive {int(alive)}", "# TYPE qkvcache_requests_total counter"]
    lines += [f'qkvcache_requests_total{{outcome="{kind}"}} {count}' for kind, count in observed.outcomes.items()]
    for name, histogram in observed.seconds.items():
        lines += histogram.lines(f"qkvcache_{name}_seconds")
    for name in (item.name for item in fields(Metrics) if metrics is not None):
        full = f"qkvcache_{name}{'_total' * (name in COUNTERS)}"
        lines += [f"# TYPE {full} {'counter' if name in COUNTERS else 'gauge'}", f"{full} {getattr(metrics, name)}"]
    return "\n".join(lines) + "\n"
