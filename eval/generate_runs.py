"""What bench_generate.py measures: one configuration at a time, on one model."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from gpu import fill, gpu, let_go, random_llama
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, H2OCache
from qkvcache.evaluation.quality import held_bytes
from qkvcache.releases import passing

QUANTO, H2O, BUDGET = "QuantizedCache quanto 4-bit", "H2O", 4096
WARM, SEEN = 6, 32  # steps that are left out, and that the profiler sees
READS = " reads "
"""Between a format and its attention budget, in the name of a cache."""
CHUNK = 8192
"""Tokens of a prefill."""
KINDS = {  # the first that is found in a kernel's name
    "attention": r"^(attend|reduce|rotate|mass|sum_splits|lse|column)\w*_kernel|^_(decode|dequantize)_kernel|flash|fmha|sdpa",
    "append": r"encode|_quantize_kernel|append|store|_step_kernel|evict|index_copy|index_put|scatter|_cat_|CatArray",
    "weights": r"gemm|gemv|nvjet|cutlass|cublas|splitk|(fused|add)_?mm|_mm_|matmul",
}


@dataclass(frozen=True)
class Run:
    """One configuration. `how`: what fills the cache (`random`, or a prompt read `whole` or in `chunks`), or what `largest` looks for."""

    section: str
    cache: str
    mode: str
    batch: int
    context: int
    how: str = "random"

    def __str__(self) -> str:
        return f"{self.section} {self.cache} {self.mode} {self.batch}x{self.context} {self.how}"


class Clock:
    """A streamer that notes when each token reaches the host; `at` maps a count of tokens to what happens when so many have come."""

    def __init__(self, at: dict[int, Callable] | None = None):
        self.at, self.times = at or {}, []

    def put(self, tokens: Tensor) -> None:  # at first the prompt itself
        self.times.append(time.perf_counter())
        self.at.get(len(self.times) - 1, lambda: None)()

    def end(self) -> None:
        pass

    @property
    def steps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


def free(model: PreTrainedModel) -> None:
    """Of the configuration before: compiled code with its CUDA graphs, and what they hold."""
    torch.compiler.reset()
    model.__dict__.pop("_compiled_call", None)
    counters.clear()
    let_go()


def kernel_times(events: Iterable, steps: int, ms: float) -> dict:
    """Milliseconds of GPU time a step, by kind; the GPU is idle for the rest of `ms`, which was measured without a profiler."""
    times: Counter[str] = Counter()
    for event in events:
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            times[event.name] += event.time_range.elapsed_us() / 1e3 / steps
    found: Counter[str] = Counter()
    for name, spent in times.items():
        found[next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "rest")] += spent
    busy = sum(times.values())
    return {f"{kind}_ms": found[kind] for kind in (*KINDS, "rest")} | {
        "busy_ms": busy, "idle_ms": max(ms - busy, 0.0), "ms": ms, "kernels": [[name[:120], spent] for name, spent in times.most_common(12)]
    }  # fmt: skip


class Bench:
    """The model, and what is measured on it."""

    def __init__(self, tiny: bool, memory_gib: float, steps: int):
        self.steps, self.scale = steps, 128 if tiny else 1  # a tiny model reads a tiny part of each context
        total = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 2**20
        self.memory = min(memory_gib * 2**30, total)
        gpu("set_per_process_memory_fraction", self.memory / total)
        self.model = random_llama(tiny)
        self.weights = gpu("memory_allocated")

    def cache(self, name: str, mode: str, length: int) -> Cache:
        config, options = self.model.config, {"max_length": -(-length // 128) * 128} if mode == "compiled" else {}
        if name == "DynamicCache":
            return DynamicCache(config=config)
        if name == "StaticCache":
            return StaticCache(config=config, max_cache_len=options["max_length"])
        if name == QUANTO:
            return QuantizedCache("quanto", config, nbits=4)
        if name == H2O:
            return H2OCache(config, budget=BUDGET // self.scale, format=None, **options)
        format, _, read = name.partition(READS)
        return CompressedCache(config, format=format, attention_budget=int(read) // self.scale if read else None, **options)

    def ids(self, *shape: int) -> Tensor:
        return torch.randint(self.model.config.vocab_size, shape, device=self.model.device)

    def read(self, cache: Cache, ids: Tensor) -> float:
        """Seconds to read a prompt in chunks. `generate` would compile them for a cache with `max_length`."""
        gpu("synchronize")
        begin = time.perf_counter()
        for part in ids.split(CHUNK // self.scale, dim=1):
            token = self.model(part, **passing(cache), logits_to_keep=1).logits[:, -1].argmax(-1)
        token.cpu()
        return time.perf_counter() - begin

    def generate(self, cache: Cache, ids: Tensor, past: int, tokens: int, clock: Clock | None = None) -> None:
        mask = torch.ones(ids.shape[0], past + ids.shape[1], dtype=torch.long, device=self.model.device)
        self.model.generate(ids, attention_mask=mask, **passing(cache), max_new_tokens=tokens, do_sample=False, streamer=clock)

    def peak(self) -> int:
        return gpu("max_memory_allocated") - self.weights

    def size(self, cache: Cache) -> int:
        """What the cache holds; of a StaticCache and a QuantizedCache, what is allocated beside the weights."""
        return held_bytes(cache) if isinstance(cache, DynamicCache) else gpu("memory_allocated") - self.weights

    def prefill(self, run: Run) -> dict:
        for _ in range(2):  # the first time kernels are compiled
            gpu("reset_peak_memory_stats")
            cache, ids, clock = self.cache(run.cache, run.mode, run.context + 1), self.ids(run.batch, run.context), Clock()
            if run.how == "chunks":
                seconds = self.read(cache, ids)
            else:
                self.generate(cache, ids, 0, 1, clock)
                seconds = clock.steps[0]
            found = {"prefill_s": seconds, "peak_bytes": self.peak(), "cache_bytes": self.size(cache)}
            del cache
        return found

    def decode(self, run: Run, profiled: bool) -> dict:
        last, found = 1 + WARM + self.steps, {}
        cache = self.cache(run.cache, run.mode, run.context + last + SEEN)
        past, ids = run.context, self.ids(run.batch, 1)
        if run.how == "random":
            fill(cache, self.model.config, run.batch, run.context)
        else:
            self.prefill(replace(run, context=2 * CHUNK // self.scale))  # compiles kernels
        if run.how == "chunks":
            gpu("reset_peak_memory_stats")
            found = {"prefill_s": self.read(cache, self.ids(run.batch, run.context)), "prefill_peak_bytes": self.peak()}
        elif run.how == "whole":
            past, ids = 0, self.ids(run.batch, run.context)
        found["cache_bytes"] = self.size(cache)
        gpu("reset_peak_memory_stats")
        activity = torch.profiler.ProfilerActivity.CUDA if torch.cuda.is_available() else torch.profiler.ProfilerActivity.CPU
        profiler = torch.profiler.profile(activities=[activity])  # of the GPU alone, which slows the host least
        clock = Clock({last: profiler.start, last + SEEN: profiler.stop} if profiled else None)
        self.generate(cache, ids, past, last + SEEN * profiled, clock)
        first, *steps = clock.steps
        timed = steps[WARM : WARM + self.steps]
        ms = sum(timed) / len(timed) * 1e3
        if run.how == "whole":
            found["prefill_s"] = first
        if isinstance(cache, CompressedCache):  # it may have grown, or evicted
            found["cache_bytes"] = cache.nbytes
        found |= {"ms": ms, "median_ms": sorted(timed)[len(timed) // 2] * 1e3, "slowest_ms": max(timed) * 1e3, "steps": len(timed)}
        found |= {"tokens_s": run.batch / ms * 1e3, "peak_bytes": self.peak(), "compile_s": sum(steps[:WARM]) - WARM * ms / 1e3}
        found |= {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": sum(counters["graph_break"].values())}
        found |= {"cudagraph_skips": counters["inductor"]["cudagraph_skips"]}
        if profiled:
            found["profile"] = kernel_times(profiler.events(), SEEN, ms)
        return found

    def largest(self, run: Run) -> dict:
        step = 4096 // self.scale if run.how == "context" else 1

        def shape(count: int) -> tuple[int, int]:
            return (1, count * step) if run.how == "context" else (count, run.context)

        def size(count: int) -> int:
            batch, tokens = shape(count)
            free(self.model)
            cache = self.cache(run.cache, run.mode, tokens + 2)
            fill(cache, self.model.config, batch, tokens)
            self.generate(cache, self.ids(batch, 1), tokens, 2)
            return max(self.size(cache), 1)

        low, high = 0, 4
        if few := fitting(lambda: size(4)):
            most = (self.memory - self.weights) / (few / 4)
            low, high = 4, 4 + int(most * 1.1)
            if (near := int(most * 0.85)) > 4:
                low, high = (near, high) if fitting(lambda: size(near)) else (low, near)
        while high - low > max(1, low // 100):  # to a hundredth: a try fills all memory
            middle = (low + high) // 2
            low, high = (middle, high) if fitting(lambda count=middle: size(count)) else (low, middle)
        batch, context = shape(low)
        return {"found": context if run.how == "context" else batch}

    def measure(self, run: Run, profiled: bool) -> dict:
        if run.section == "prefill":
            return self.prefill(run)
        return self.largest(run) if run.section == "largest" else self.decode(run, profiled)


def fitting(call: Callable) -> Any:
    """What `call` returns, or None where memory is short; no frame is left that would keep its tensors alive."""
    try:
        return call()
    except Exception as failure:
        if isinstance(failure, torch.OutOfMemoryError) or "out of memory" in str(failure):  # or what wraps it
            return None
        raise
