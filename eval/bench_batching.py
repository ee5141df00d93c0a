"""Many requests at once on one GPU: compressed pages in continuous batching beside transformers' own; rows in eval/results/batching.jsonl.

    python eval/bench_batching.py [--users 128] [--caches identity int8] [--seconds 20]    measure; rows are written cell by cell
    python eval/bench_batching.py --quick                 8 and 128 users of stock, identity, 4 bits on 8 layers, in two minutes
    python eval/bench_batching.py --markdown | --plot     the table | batching.png, from the rows; needs no GPU

A Llama of the 8B shape with random bf16 weights serves N users in a closed loop: each sends a request, and the next when it is answered.
Lengths of prompts and answers are lognormal within their limits, drawn once for all caches. The first requests are as a load that has run
for long leaves them: a random share of each answer is written and belongs to the prompt, the rest is asked for. Measuring begins when
all of them have their first token, or after `--fill` seconds, and takes `--seconds`. A cell of the whole model takes one minute or two.

cache         stock: transformers' pages and sdpa, unchanged. Others: pages of that format in our kernels; identity isolates compression.
requests_s    requests a second: written_s over the mean length of an answer, which says something before requests end. answered: those
              that did end.
written_s     tokens of answers a second; prompt_s, tokens of prompts that are read a second; tokens_s: both.
ttft, tpot    seconds from a request to its first token, its wait in the queue included, of requests that got it while measuring, without
              the first requests, which all came at once; between two tokens of one request.
running       requests that have pages, at the end; pool_tokens: tokens that the pool holds.
preempted     requests whose pages were taken away, and which were read again.

`--pool-gib` gives every cache the same memory for pages and rings; without it, transformers sizes the pool by the memory that is free.
`--quick` has the share of its layers in the pool of a card of 80 GB beside a whole model of eight billion parameters.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu import gpu, let_go, random_llama
from harness import Table, at_least, device_name, grouped, in_time, note, outcome, parser_of, picture, run_or_show, with_presets
from palette import format_color
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from qkvcache import continuous_batching, plan

STOCK, EXACT, FOUR = "stock", "identity", "turboquant_4bit_nc"
CACHES = (EXACT, FOUR, STOCK, "int8")
USERS = (128, 8, 512, 32)
FEW = 8
PAGE, WARM = 256, 4
"""Tokens of a page, and requests that compile the kernels."""


@dataclass(frozen=True)
class Cell:
    """One cache under one load."""

    cache: str
    users: int
    layers: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    pool_gib: float | None
    compiled: bool = False

    def __str__(self) -> str:
        pool = ("" if self.pool_gib is None else f", a pool of {self.pool_gib:g} GiB") + ", compiled" * self.compiled
        lengths = f"prompts {self.prompts[0]} to {self.prompts[1]}, outputs {self.outputs[0]} to {self.outputs[1]}"
        return f"{self.cache}, {self.users} users, {self.layers} layers, {lengths}{pool}"


class Load:
    """The requests of a cell: prompts and lengths of answers, the same for every cache."""

    def __init__(self, cell: Cell, vocabulary: int):
        self.generator = torch.Generator().manual_seed(cell.users)
        self.cell, self.vocabulary = cell, vocabulary

    def lengths(self, limits: tuple[int, int], count: int) -> torch.Tensor:
        """Lognormal around the geometric mean of the limits, which are two deviations away."""
        low, high = (torch.tensor(float(limit)).log() for limit in limits)
        drawn = (low + high) / 2 + (high - low) / 4 * torch.randn(count, generator=self.generator)
        return drawn.clamp(low, high).exp()

    def prompt(self, tokens: int) -> list[int]:
        return torch.randint(3, self.vocabulary, (tokens,), generator=self.generator).tolist()

    def request(self, begun: bool = False) -> tuple[list[int], int]:
        """A prompt and the length of its answer; of an answer that has `begun`, what is written is in the prompt."""
        prompt, answer = (round(self.lengths(limits, 1).item()) for limits in (self.cell.prompts, self.cell.outputs))
        written = int(torch.rand((), generator=self.generator).item() * answer) if begun else 0
        return self.prompt(prompt + written), answer - written

    def mean_answer(self) -> float:
        """Of many answers, in tokens."""
        other = Load(self.cell, self.vocabulary)
        return other.lengths(self.cell.outputs, 100_000).mean().item()


@contextmanager
def running(model: PreTrainedModel, generation: GenerationConfig, config: ContinuousBatchingConfig) -> Iterator[Any]:
    """The manager of a model while its thread runs."""
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
    try:
        manager.warmup()
        manager.start()
        yield manager
    finally:
        manager.stop(block=True, timeout=60, hard_stop=True)
        manager.destroy()


class Bench:
    """The model, and what is measured on it."""

    def __init__(self, device: str, layers: int, tiny: bool):
        shape = {"num_hidden_layers": layers, "max_position_embeddings": 2**17}
        self.model = random_llama(tiny, device, **shape)
        self.config = self.model.config
        self.weights = gpu("memory_allocated")

    def batching_config(self, cell: Cell) -> ContinuousBatchingConfig:
        requests, blocks = max(cell.users, WARM), None
        if cell.pool_gib is not None:
            format = None if cell.cache == STOCK else cell.cache
            memory = {"gpu_memory": 80e9, "weights_memory": 0}  # of which nothing but sizes are asked
            sizes = plan(self.config, format=format, dtype=self.model.dtype, requests=[(1, PAGE, 1)], **memory).batching
            blocks = max(int(cell.pool_gib * 2**30 - requests * sizes.bytes_per_ring) // sizes.bytes_per_page, 1)
        return ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=blocks, max_batch_tokens=self.batch_tokens(cell), max_requests_per_batch=requests,
            auto_switch_to_flash=False, default_compile_level=int(cell.compiled),
        )  # fmt: skip

    @staticmethod
    def batch_tokens(cell: Cell) -> int:
        return min(8192, cell.prompts[1])

    @contextmanager
    def manager(self, cell: Cell) -> Iterator[Any]:
        """A running manager, whose kernels are compiled."""
        greedy = GenerationConfig(do_sample=False, max_new_tokens=cell.outputs[1], eos_token_id=-1)
        pages = nullcontext() if cell.cache == STOCK else continuous_batching(self.model, format=cell.cache)
        with pages, running(self.model, greedy, self.batching_config(cell)) as manager:
            self.warm(manager, cell)
            yield manager

    def measure(self, cell: Cell, fill: float, seconds: float) -> dict[str, Any]:
        gpu("reset_peak_memory_stats")
        begin = time.perf_counter()
        with self.manager(cell) as manager:
            warmup = time.perf_counter() - begin
            found = serve(manager, Load(cell, self.config.vocab_size), fill, seconds)
        return found | {"warmup_s": warmup, "peak_bytes": gpu("max_memory_allocated") - self.weights}

    def warm(self, manager: Any, cell: Cell) -> None:
        """Compiles the kernels: of prompts, of chunks of a prompt, of both beside decoding, and of decoding alone."""
        load = Load(replace(cell, users=0), self.config.vocab_size)
        most = self.batch_tokens(cell)
        lengths = [cell.prompts[0], most // 2, min(most + PAGE, cell.prompts[1]), cell.prompts[0]]
        for tokens in lengths:
            manager.add_request(load.prompt(tokens), max_new_tokens=8)
        for _ in range(WARM):
            answer(manager, time.perf_counter() + 120)


def answer(manager: Any, until: float) -> Any:
    """The next finished request; None if there is none until then.

    Raises RuntimeError if the request failed, or if generation stopped.
    """
    while (left := until - time.perf_counter()) > 0:
        result = manager.get_result(timeout=min(left, 1.0))
        if result is not None and result.error is not None:
            raise RuntimeError(result.error)
        if result is not None:
            return result
        if not manager.is_running():
            raise RuntimeError(f"generation stopped: {manager.background_thread_status.fatal_error}")
    return None


@dataclass
class Progress:
    """What has been done for all requests so far: tokens read and written; requests that have a token; times of tokens, by request."""

    read: int
    written: int
    begun: set[str]
    times: dict[str, list[float]]
    preempted: int

    @staticmethod
    def of(manager: Any, answered: list[Any]) -> Progress:
        scheduler = manager.batch_processor.scheduler
        states = [*list(scheduler.active_requests.values()), *list(scheduler.waiting_requests.values())]
        found = Progress(0, 0, set(), {}, 0)
        for result in answered:
            found._add(result, len(result.prompt_ids), len(result.generated_tokens))
        for state in states:
            prompt = state._true_initial_tokens or len(state.initial_tokens)
            found._add(state, min(state.position_offset, prompt), len(state.initial_tokens) - prompt + len(state.generated_tokens))
        return found

    def _add(self, request: Any, read: int, written: int) -> None:
        self.read, self.written = self.read + read, self.written + written
        times = list(request.timestamps or ())
        if len(times) < written:  # it is read again, and transformers forgot the times of tokens before that
            self.preempted += 1
        elif times:
            self.times[request.request_id] = times
        if written:
            self.begun.add(request.request_id)


def serve(manager: Any, load: Load, fill: float, seconds: float) -> dict[str, Any]:
    """A closed loop of `load.cell.users`, measured for `seconds` once all have their first token, or `fill` seconds have passed."""
    sent: dict[str, float] = {}
    answered: list[Any] = []
    users = load.cell.users
    ready = [load.request(begun=at < users) for at in range(3 * users)][::-1]  # drawing lengths must not delay answers

    def send() -> None:
        prompt, tokens = ready.pop() if ready else load.request()
        now = time.perf_counter()
        sent[manager.add_request(prompt, max_new_tokens=tokens, record_timestamps=True)] = now

    def loop(until: float) -> None:
        while result := answer(manager, until):
            answered.append(result)
            send()

    begin = time.perf_counter()
    for _ in range(users):
        send()
    first, before = set(sent), Progress.of(manager, answered)
    while not first <= before.begun and time.perf_counter() < begin + fill:
        loop(min(time.perf_counter() + 0.2, begin + fill))
        before = Progress.of(manager, answered)
    start, earlier = time.perf_counter(), len(answered)
    loop(start + seconds)
    after, elapsed = Progress.of(manager, answered), time.perf_counter() - start
    later = sent.keys() - first
    ttft = [times[0] - sent[name] for name, times in after.times.items() if name in later and times[0] >= start]
    while_measured = [[at for at in times if at >= start] for name, times in after.times.items() if name in sent]
    tpot = [(times[-1] - times[0]) / (len(times) - 1) for times in while_measured if len(times) > 1]
    read, written = after.read - before.read, after.written - before.written
    processor = manager.batch_processor
    allocators = processor.cache.cache_allocators.values()
    return {
        "requests_s": written / elapsed / load.mean_answer(), "tokens_s": (read + written) / elapsed, "prompt_s": read / elapsed,
        "written_s": written / elapsed, "answered": len(answered) - earlier, "sent": len(sent), "fill_s": start - begin,
        "seconds": elapsed, "running": len(processor.scheduler.active_requests), "preempted": after.preempted,
        "ttft_median": median(ttft or [float("nan")]), "ttft_p95": quantile(ttft, 0.95),
        "tpot_median": median(tpot or [float("nan")]), "tpot_p95": quantile(tpot, 0.95),
        "pool_tokens": max(allocator.tokens_per_page * allocator.num_blocks for allocator in allocators),
        "pool_bytes": processor.cache.cache_tensor.nbytes,
    }  # fmt: skip


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else float("nan")


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """The most telling first. Stock with many users is the last: it attends to the tokens of all requests under one mask."""
    found = [
        Cell(cache, users, args.layers, tuple(args.prompts), tuple(args.outputs), args.pool_gib, args.compile and cache != STOCK)
        for users in args.users
        for cache in args.caches
    ]
    yield from sorted(found, key=lambda cell: cell.cache == STOCK and cell.users > FEW)


def measure(args: argparse.Namespace) -> None:
    device = device_name(args.device)
    bench = Bench(args.device, args.layers, args.tiny)
    for cell in in_time(cells(args), args.minutes):
        row = outcome(lambda cell=cell: bench.measure(cell, args.fill, args.seconds))
        same = {"device": device, "run": time.strftime("%Y-%m-%d %H:%M:%S"), "quick": args.quick}
        note(args.out, f"batching: {cell}, {device}", asdict(cell) | row | same)
        let_go()


def settings(rows: list[dict]) -> Iterator[tuple[str, list[dict]]]:
    """Rows that may be compared, under a title."""
    keys = ("device", "layers", "prompts", "outputs", "pool_gib", "compiled")
    for (device, layers, *lengths, gib, compiled), group in grouped([{"compiled": False} | row for row in rows], *keys):
        pool = ("" if gib is None else f", a pool of {gib:g} GiB") + ", compiled layers" * compiled
        prompts, outputs = (" to ".join(f"{limit:,}" for limit in limits) for limits in lengths)
        yield f"{device}, {layers} layers, prompts of {prompts} tokens, answers of {outputs}{pool}", group


def tables(rows: list[dict]) -> Iterator[Table]:
    """A table for each setting; times of requests/s are those of `identity` in the same run of users."""
    columns = ["requests/s", "x identity", "answer tokens/s", "prompt tokens/s", "TTFT s", "TPOT ms", "tokens in the pool", "preempted"]
    for title, group in settings(rows):
        lines = []
        for row in sorted(group, key=lambda row: (row["users"], row["cache"] != STOCK, row["cache"] != EXACT, row["cache"])):
            head = [str(row["users"]), row["cache"]]
            if "failed" in row:
                lines.append([*head, row["failed"].split(":")[0], *[""] * 7])
                continue
            exact = next((other for other in group if other["users"] == row["users"] and other["cache"] == EXACT), {})
            times = f"{row['requests_s'] / exact['requests_s']:.2f}" if exact.get("requests_s") else "-"
            rate = [f"{row['requests_s']:.2f}", times] if row["requests_s"] else ["none answered", "-"]
            tokens = [f"{row['written_s']:,.0f}", f"{row['tokens_s'] - row['written_s']:,.0f}"]
            ttft, tpot = row["ttft_median"], 1e3 * row["tpot_median"]
            latency = ["-" if isnan(ttft) else f"{ttft:.2f}", "-" if isnan(tpot) else f"{tpot:.1f}"]
            lines.append([*head, *rate, *tokens, *latency, f"{row['pool_tokens']:,}", str(row["preempted"])])
        yield Table(["users", "cache", *columns], lines, f"{title}:", rule=("---:", "---", "---:"))


def plot(rows: list[dict], path: Path) -> None:
    """Requests/s by users, a panel for each setting, with times of `identity` above the bars."""
    panels = list(settings([row for row in rows if "failed" not in row]))
    with picture(path, 1, len(panels), dpi=120, figsize=(5 * len(panels), 4), layout="constrained") as (_, axes):
        for axis, (title, group) in zip(axes[0], panels, strict=True):
            users, caches = (sorted({row[name] for row in group}) for name in ("users", "cache"))
            exact = {row["users"]: row["requests_s"] for row in group if row["cache"] == EXACT}
            for i, cache in enumerate(sorted(caches, key=lambda cache: (cache != STOCK, cache != EXACT))):
                found = {row["users"]: row["requests_s"] for row in group if row["cache"] == cache}
                places = [users.index(n) + (i - (len(caches) - 1) / 2) * 0.8 / len(caches) for n in found]
                bars = axis.bar(places, list(found.values()), 0.8 / len(caches), color=format_color(cache), label=cache)
                axis.bar_label(bars, [f"{rate / exact[n]:.2f}x" if exact.get(n) else "" for n, rate in found.items()], fontsize=8)
            axis.set(xlabel="users in a closed loop", ylabel="requests/s (higher is better)")
            axis.set_title(title.replace(", prompts", ",\nprompts").replace(", a pool", ",\na pool"), fontsize=9)
            axis.set_xticks(range(len(users)), map(str, users))
            axis.margins(y=0.3)
            axis.legend()


TINY = {
    "caches": [STOCK, EXACT, FOUR], "users": [3], "layers": 2, "prompts": [8, 400], "outputs": [2, 8], "fill": 10.0, "seconds": 2.0,
    "minutes": 2.0, "pool_gib": 0.002,
}  # fmt: skip
QUICK = {
    "caches": [EXACT, FOUR, STOCK], "users": [128, 8], "layers": 8, "prompts": [256, 16384], "outputs": [32, 256], "fill": 6.0,
    "seconds": 8.0, "minutes": 2.5, "pool_gib": 12.0,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "batching", minutes=15.0)
    parser.add_argument("--quick", action="store_true", help="a few cells on 8 layers with short answers; options given beside it count")
    parser.add_argument("--caches", nargs="+", metavar="NAME", default=CACHES, help="stock, or formats")
    parser.add_argument("--users", nargs="+", type=at_least(1), metavar="N", default=USERS)
    parser.add_argument("--layers", type=at_least(1), default=32, help="of the model")
    limits = {"nargs": 2, "type": at_least(1), "metavar": "TOKENS", "help": "shortest and longest"}
    parser.add_argument("--prompts", default=[256, 32768], **limits)
    parser.add_argument("--outputs", default=[64, 1024], **limits)
    parser.add_argument("--pool-gib", type=float, help="the same pool for every cache")
    parser.add_argument("--compile", action="store_true", help="decoder layers (default_compile_level=1), but of stock")
    parser.add_argument("--fill", type=float, default=20.0, help="the longest wait for the first tokens, in seconds")
    parser.add_argument("--seconds", type=float, default=20.0, help="that a cell is measured")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short requests, to try the script")
    run_or_show(parser, with_presets(parser, arguments, quick=QUICK, tiny=TINY), measure, "batching", tables, plot)


if __name__ == "__main__":
    main()
