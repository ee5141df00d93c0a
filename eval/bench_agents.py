"""Sessions of agents in continuous batching, and what is reused; rows in eval/results/agents.jsonl.

    python eval/bench_agents.py [--users 32] [--caches identity] [--scale 8]    sessions; rows are written cell by cell
    python eval/bench_agents.py --tiny                                          on a tiny model, to try the script on a CPU
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
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from bench_batching import EXACT, FOUR, STOCK, Bench, Cell, answer, quantile
from gpu import let_go
from harness import Table, at_least, device_name, grouped, in_time, note, outcome, parser_of, run_or_show, with_presets

TURNS, FIRST, ADDED, ANSWER, BRANCHED = 43, 22_000, 5_200, 444, 0.44


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


def measure(args: argparse.Namespace) -> None:
    device, bench = device_name(args.device), Bench(args.device, args.layers, args.tiny)
    limits = (64, round(FIRST / args.scale) + 64), (2, max(round(2 * ANSWER / args.scale), 4))
    same = {"scale": args.scale, "turns": args.turns, "device": device}

    def sessions(cell: Cell) -> dict[str, Any]:
        with bench.manager(cell) as manager:
            return serve(manager, Load(args.scale, bench.config.vocab_size, args.turns), cell.users, args.fill, args.seconds)

    for cache in in_time(args.caches, args.minutes):
        cell = Cell(cache, args.users, args.layers, *limits, args.pool_gib)
        what = f"agents: sessions, {cache}, {args.users} users, {args.layers} layers, {device}"
        note(args.out, what, asdict(cell) | outcome(lambda cell=cell: sessions(cell)) | same)
        let_go()


def tables(rows: list[dict]) -> Iterator[Table]:
    for (device, layers, users, scale), group in grouped(rows, "device", "layers", "users", "scale"):
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
        headers = ["cache", "turns/s", "x identity", "TTFT of a first turn, s", "of a later one, s", "reused"]
        headers += ["computed tokens/s", "tokens of a prompt", "tokens in the pool"]
        yield Table(headers, lines, f"{device}, {layers} layers, {users} agents, lengths divided by {scale:g}:")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "agents", minutes=15.0)
    parser.add_argument("--caches", nargs="+", metavar="NAME", default=[EXACT, FOUR, STOCK], help="stock, or formats")
    parser.add_argument("--users", type=at_least(1), default=32)
    parser.add_argument("--layers", type=at_least(1), default=32)
    parser.add_argument("--turns", type=at_least(2), default=TURNS, help="of a session")
    parser.add_argument("--scale", type=float, default=8.0, help="divides all lengths")
    parser.add_argument("--pool-gib", type=float, help="the same pool for every cache; without it, what is free")
    parser.add_argument("--fill", type=float, default=60.0, help="the longest wait for the first answers, in seconds")
    parser.add_argument("--seconds", type=float, default=30.0, help="that a cell is measured")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short sessions, to try the script")
    tiny = {"users": 3, "layers": 2, "turns": 5, "scale": 100.0, "pool_gib": 0.004, "fill": 5.0, "seconds": 3.0}
    run_or_show(parser, with_presets(parser, arguments, tiny=tiny), measure, "agents: sessions", tables)


if __name__ == "__main__":
    main()
