"""Sessions of agents in continuous batching: what is reused, and what a restart costs; rows in eval/results/agents.jsonl.

    python eval/bench_agents.py [--users 32] [--caches identity] [--scale 8]    sessions; rows are written cell by cell
    python eval/bench_agents.py --restart [--context 32768]                     the next turn from the pool, host memory, disk
    python eval/bench_agents.py --tiny                                          both on a tiny model, to try the script on a CPU
    python eval/bench_agents.py --markdown | --show                             the tables, from the rows; needs no GPU

Each of `users` agents holds a session: its first prompt has 22,000 tokens, every turn adds about 5,200 and is
answered with 444, and there are 43 turns, so that the median prompt has 142,000 tokens of which 96 % were seen
before; lengths are lognormal around these, and divided by `scale`. In 44 % of the sessions a turn sends a second
request, of a subagent, that begins with the same tokens. The next turn is sent when the one before is answered. At
the beginning, sessions are in the middle of their turns. The model is a Llama of the 8B shape with random bf16
weights.

turns_s         turns answered a second; sessions_s: over the turns of a session.
computed_s      tokens of prompts that are computed a second; reused: the share of prompt tokens that is not.
ttft_first      seconds from the first prompt of a session to its first token, its wait in the queue included; ttft_later:
                of later turns.

With `--restart`, a session of `context` tokens goes on: seconds to the first token of a turn with `new` tokens, whose
pages are in the pool, in locked host memory, in files that the system holds in memory, in files that it reads from
disk, and nowhere, so that all are computed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_batching import EXACT, FOUR, STOCK, Bench, Cell, answer, quantile
from gpu import let_go
from harness import Table, at_least, device_name, in_time, outcome, parser_of, replace_rows, run_or_show
from transformers import GenerationConfig

from qkvcache import PrefixStore, continuous_batching

TURNS, FIRST, ADDED, ANSWER, BRANCHED = 43, 22_000, 5_200, 444, 0.44
REPEATS = 3


@dataclass
class Load:
    """The lengths of sessions in tokens."""

    scale: float
    vocabulary: int
    turns: int = TURNS
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def around(self, median: float) -> int:
        return max(round(median * (0.5 * torch.randn((), generator=self.generator)).clamp(-1.5, 1.5).exp().item()), 1)

    def tokens(self, median: float) -> list[int]:
        return torch.randint(3, self.vocabulary, (self.around(median / self.scale),), generator=self.generator).tolist()

    def chance(self, share: float) -> bool:
        return torch.rand((), generator=self.generator).item() < share


class Agent:
    """One session after another."""

    def __init__(self, load: Load, begun: bool):
        self.load = load
        self.begin(begun)

    def begin(self, begun: bool = False) -> None:
        self.turns, self.turn, self.history = max(self.load.around(self.load.turns), 2), 0, self.load.tokens(FIRST)
        if begun:
            self.turn = int(torch.randint(self.turns, (), generator=self.load.generator))
            for _ in range(self.turn):
                self.history += self.load.tokens(ADDED + ANSWER)

    def answered(self, tokens: list[int]) -> None:
        """The next prompt: of the next turn, or of the next session."""
        self.turn += 1
        if self.turn == self.turns:
            self.begin()
        else:
            self.history = self.history + tokens + self.load.tokens(ADDED)


@dataclass
class Turn:
    """A turn: when it was sent and answered, its tokens, those of them that were in pages, and its time to the first token."""

    sent: float
    first: bool
    tokens: int
    agent: Agent | None
    done: float = 0.0
    reused: int = 0
    ttft: float = 0.0


def serve(manager: Any, load: Load, users: int, fill: float, seconds: float) -> dict[str, Any]:
    """A closed loop of agents, measured for `seconds` once all have had an answer, or `fill` seconds have passed."""
    agents, running, turns = [Agent(load, begun=True) for _ in range(users)], dict[str, Turn](), list[Turn]()
    cache, reused = manager.batch_processor.cache, dict[str, int]()
    search = cache.search_prefix_match

    def counted(request_id: str, ids: list[int]) -> int:
        reused[request_id] = found = search(request_id, ids)
        return found

    def send(prompt: list[int], agent: Agent | None, first: bool) -> None:
        turn = Turn(time.perf_counter(), first, len(prompt), agent)
        running[manager.add_request(prompt, max_new_tokens=load.around(ANSWER / load.scale), record_timestamps=True)] = turn

    cache.search_prefix_match = counted
    for agent in agents:
        send(agent.history, agent, first=False)
    begin, start = time.perf_counter(), None
    while start is None or time.perf_counter() < start + seconds:
        result = answer(manager, time.perf_counter() + 0.2)
        if start is None and (len(turns) >= users or time.perf_counter() > begin + fill):
            start = time.perf_counter()
        if result is None:
            continue
        turn = running.pop(result.request_id)
        turn.done, turn.reused, turn.ttft = time.perf_counter(), reused.pop(result.request_id, 0), result.timestamps[0] - turn.sent
        turns.append(turn)
        if (agent := turn.agent) is not None:
            agent.answered(list(result.generated_tokens))
            if load.chance(1 - (1 - BRANCHED) ** (1 / load.turns)):
                send(agent.history + load.tokens(ADDED), None, first=False)
            send(agent.history, agent, first=agent.turn == 0)
    elapsed = time.perf_counter() - start
    answered = sum(turn.done >= start for turn in turns)
    found = [turn for turn in turns if turn.sent >= start]  # others began before all had their pages
    later, first = ([turn.ttft for turn in found if turn.first == wanted] for wanted in (False, True))
    prompts, held = sum(turn.tokens for turn in found), sum(turn.reused for turn in found)
    return {
        "turns_s": answered / elapsed, "sessions_s": answered / elapsed / load.turns, "computed_s": (prompts - held) / elapsed,
        "reused": held / max(prompts, 1), "prompt": prompts / max(len(found), 1), "answered": answered,
        "ttft_first": quantile(first, 0.5), "ttft_later": quantile(later, 0.5), "ttft_later_p95": quantile(later, 0.95),
        "seconds": elapsed, "fill_s": start - begin, "running": len(manager.batch_processor.scheduler.active_requests),
        "pool_tokens": max(held.tokens_per_page * held.num_blocks for held in cache.cache_allocators.values()),
    }  # fmt: skip


class Agents(Bench):
    """The model, and what is measured on it."""

    @contextmanager
    def manager(self, cell: Cell, store: PrefixStore | None = None) -> Iterator[Any]:
        greedy = GenerationConfig(do_sample=False, max_new_tokens=cell.outputs[1], eos_token_id=-1)
        with self.pages(cell.cache) if store is None else continuous_batching(self.model, format=cell.cache, store=store):
            manager = self.model.init_continuous_batching(generation_config=greedy, continuous_batching_config=self.batching_config(cell))
            try:
                manager.warmup()
                manager.start()
                self.warm(manager, cell)
                yield manager
            finally:
                manager.stop(block=True, timeout=60, hard_stop=True)
                manager.destroy()

    def sessions(self, cell: Cell, scale: float, turns: int, fill: float, seconds: float) -> dict[str, Any]:
        with self.manager(cell) as manager:
            return serve(manager, Load(scale, self.config.vocab_size, turns), cell.users, fill, seconds)

    def restarts(self, cell: Cell, context: int, new: int) -> dict[str, Any]:
        """Milliseconds to the first token of a turn, by where its pages are."""
        load, found = Load(1, self.config.vocab_size), dict[str, Any]()
        history = torch.randint(3, load.vocabulary, (context,), generator=load.generator).tolist()
        with tempfile.TemporaryDirectory() as folder:
            store = PrefixStore(self.model, max_bytes=2**35, directory=folder, max_disk_bytes=2**40)
            with self.manager(cell, store) as manager:
                history += self.turn(manager, history)[0]
                found["pool_ms"], history = self.turns(manager, history, new, lambda: None)
                found["host_ms"], history = self.turns(manager, history, new, lambda: lose(manager))
            store = PrefixStore(self.model, max_bytes=2**35, directory=folder, max_disk_bytes=2**40)
            with self.manager(cell, store) as manager:
                found["restart_ms"], history = self.turns(manager, history, new, lambda: None, repeats=1)
                found["files_ms"], history = self.turns(manager, history, new, lambda: lose(manager, store))
                found["disk_ms"], history = self.turns(manager, history, new, lambda: lose(manager, store, Path(folder)))
                found["file_bytes"] = store.stats.disk_bytes
        with self.manager(cell) as manager:
            found["computed_ms"], history = self.turns(manager, history, new, lambda: lose(manager), repeats=1)
        return found | {"context": context, "new": new}

    def turns(
        self, manager: Any, history: list[int], new: int, before: Callable[[], None], repeats: int = REPEATS
    ) -> tuple[float, list[int]]:
        """The median milliseconds to the first token of some turns, and the session after them."""
        times = []
        for at in range(repeats):
            generator = torch.Generator().manual_seed(len(history) + at)
            history = history + torch.randint(3, self.config.vocab_size, (new,), generator=generator).tolist()
            time.sleep(0.3)
            while manager.cache.sessions is not None and manager.cache.sessions.unwritten:
                time.sleep(0.1)
            before()
            tokens, seconds = self.turn(manager, history)
            history, times = history + tokens, [*times, 1e3 * seconds]
        return median(times), history

    @staticmethod
    def turn(manager: Any, prompt: list[int]) -> tuple[list[int], float]:
        begin = time.perf_counter()
        manager.add_request(prompt, max_new_tokens=4, record_timestamps=True)
        result = answer(manager, begin + 120)
        return list(result.generated_tokens), result.timestamps[0] - begin


def lose(manager: Any, store: PrefixStore | None = None, folder: Path | None = None) -> None:
    """Loses the cached pages of the pool, those in the host memory of `store`, and what the system holds of the files in `folder`."""
    for held in manager.cache.allocators:
        held.free_cached(len(held.ledger.cached_blocks))
    if store is not None:
        store.trim(0)
    for path in folder.iterdir() if folder is not None else ():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(args: argparse.Namespace) -> None:
    begin, device = time.perf_counter(), device_name(args.device)
    bench = Agents(args.device, args.layers, args.tiny)
    limits = (64, round(FIRST / args.scale) + 64), (2, max(round(2 * ANSWER / args.scale), 4))
    cells = [Cell(cache, args.users, args.layers, *limits, args.pool_gib) for cache in args.caches]
    for cell in in_time(cells if not args.restart or args.tiny else (), args.minutes):
        row = outcome(lambda cell=cell: bench.sessions(cell, args.scale, args.turns, args.fill, args.seconds))
        write(args, f"agents: sessions, {cell.cache}, {args.users} users, {args.layers} layers, {device}", asdict(cell) | row, begin)
        let_go()
    cells = [Cell(cache, 1, args.layers, (64, min(args.context, 8192)), (2, 8), args.pool_gib) for cache in args.caches if cache != STOCK]
    for cell in in_time(cells if args.restart or args.tiny else (), args.minutes):
        row = outcome(lambda cell=cell: bench.restarts(cell, args.context, args.new))
        write(args, f"agents: restart, {cell.cache}, {args.context} tokens, {args.layers} layers, {device}", asdict(cell) | row, begin)
        let_go()


def write(args: argparse.Namespace, what: str, row: dict[str, Any], begin: float) -> None:
    replace_rows(args.out, what, [row | {"scale": args.scale, "turns": args.turns, "device": device_name(args.device)}])
    short = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
    print(f"{time.perf_counter() - begin:4.0f} s  {what}: {short}", file=sys.stderr, flush=True)


def tables(rows: list[dict]) -> Iterator[Table]:
    sessions = [row for row in rows if row["what"].startswith("agents: sessions")]
    for device, layers, users, scale in dict.fromkeys((row["device"], row["layers"], row["users"], row["scale"]) for row in sessions):
        group = [row for row in sessions if (row["device"], row["layers"], row["users"], row["scale"]) == (device, layers, users, scale)]
        exact = next((row["sessions_s"] for row in group if row["cache"] == EXACT and "failed" not in row), None)
        lines = []
        for row in group:
            if "failed" in row:
                lines.append([row["cache"], row["failed"].split(":")[0], *[""] * 7])
                continue
            times = f"{row['sessions_s'] / exact:.2f}" if exact else "-"
            waits = [f"{row[name]:.2f}" for name in ("ttft_first", "ttft_later")]
            reuse = [f"{row['reused']:.0%}", f"{row['computed_s']:,.0f}", f"{row['prompt']:,.0f}"]
            lines.append([row["cache"], f"{row['turns_s']:.2f}", times, *waits, *reuse, f"{row['pool_tokens']:,}"])
        headers = [
            "turns/s",
            "x identity",
            "TTFT of a first turn, s",
            "of a later one, s",
            "reused",
            "computed tokens/s",
            "tokens of a prompt",
        ]
        title = f"{device}, {layers} layers, {users} agents, lengths divided by {scale:g}:"
        yield Table(["cache", *headers, "tokens in the pool"], lines, title)
    restarts = [row for row in rows if row["what"].startswith("agents: restart") and "failed" not in row]
    names = ("pool_ms", "host_ms", "files_ms", "disk_ms", "computed_ms")
    if restarts:
        lines = [
            [f"`{row['cache']}`", f"{row['context']:,}", f"{row['file_bytes'] / 1e6:,.0f}", *(f"{row[name]:,.0f}" for name in names)]
            for row in restarts
        ]
        headers = ["tokens", "MB", "in the pool", "in host memory", "in files", "on disk", "nowhere"]
        new = ", ".join(sorted({f"{row['new']:,}" for row in restarts}))
        yield Table(["cache", *headers], lines, f"Milliseconds to the first token of a turn with {new} new tokens, by where its pages are:")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "agents", minutes=15.0)
    parser.add_argument("--restart", action="store_true", help="the time to the first token by where pages are, not sessions")
    parser.add_argument("--caches", nargs="+", metavar="NAME", default=[EXACT, FOUR, STOCK], help="stock, or formats")
    parser.add_argument("--users", type=at_least(1), default=32)
    parser.add_argument("--layers", type=at_least(1), default=32)
    parser.add_argument("--turns", type=at_least(2), default=TURNS, help="of a session")
    parser.add_argument("--scale", type=float, default=8.0, help="divides all lengths")
    parser.add_argument("--context", type=at_least(1), default=32768, help="with --restart")
    parser.add_argument("--new", type=at_least(1), default=1024, help="tokens of a turn, with --restart")
    parser.add_argument("--pool-gib", type=float, help="the same pool for every cache; without it, what is free")
    parser.add_argument("--fill", type=float, default=60.0, help="the longest wait for the first answers, in seconds")
    parser.add_argument("--seconds", type=float, default=30.0, help="that a cell is measured")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short sessions, to try the script")
    args = parser.parse_args(arguments)
    if args.tiny:
        tiny = {"users": 3, "layers": 2, "turns": 5, "scale": 100.0, "context": 1500, "new": 64, "pool_gib": 0.004, "fill": 5.0}
        vars(args).update(tiny | {"seconds": min(args.seconds, 3.0)})
    run_or_show(parser, args, measure, "agents", tables)


if __name__ == "__main__":
    main()
