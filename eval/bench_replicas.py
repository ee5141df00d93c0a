"""Two replicas of `examples/ray_serve` under sessions of agents, with and without affinity; rows in eval/results/replicas.jsonl.

    python eval/bench_replicas.py [--users 8] [--seconds 60]      on this machine's CPU, with the embedded model
    python eval/bench_replicas.py --markdown | --show             the table, from the rows

The sessions are those of `bench_agents.py`, divided by `scale` and with fewer turns, since the embedded model has 4,096
positions; they are made of words that are tokens. Each agent sends a turn over HTTP, streamed, when the one before is
answered. Without affinity, each request names a session of its own, so that the router draws its replica.

turns_s     turns answered a second; reused: the share of prompt tokens that were in pages (`cached_tokens`).
ttft_later  median seconds to the first token of a turn that is not the first of its session.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from bench_agents import ADDED, ANSWER, Agent, Load
from harness import Table, at_least, parser_of, replace_rows, run_or_show

from qkvcache import models

PORT, POSITIONS = 8123, 4096

sys.path.append(str(Path(__file__).parents[1]))  # for `examples`


class Client:
    """Agents of one load. A turn is `(answered at, first of its session, tokens, cached tokens, seconds to its first token)`."""

    def __init__(self, scale: float, turns: int, affinity: bool):
        self.tokenizer = models.load("demo")[1]
        pieces = self.tokenizer.convert_ids_to_tokens(range(self.tokenizer.vocab_size))
        self.words = [i for i, piece in enumerate(pieces) if piece[0] == "Ġ" and piece[1:].isalpha()]
        self.load, self.affinity, self.lock = Load(scale, len(self.words), turns), affinity, threading.Lock()
        self.turns: list[tuple[float, bool, int, int, float]] = []

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode([self.words[i] for i in tokens])

    def run(self, until: threading.Event) -> None:
        """One agent."""
        with self.lock:
            agent = Agent(self.load, begun=True)
        said = self.text(agent.history)
        while not until.is_set():
            with self.lock:
                first, tokens, new = agent.turn == 0, len(agent.history), self.load.around(ANSWER / self.load.scale)
            answer, *found = self.ask(said, new)
            with self.lock:
                self.turns.append((time.perf_counter(), first, *found))
                agent.answered([])
                if len(agent.history) > POSITIONS - 10 * ADDED / self.load.scale:
                    agent.begin()
            said = self.text(agent.history) if agent.turn == 0 else said + answer + self.text(agent.history[tokens:])

    def ask(self, prompt: str, new: int) -> tuple[str, int, int, float]:
        connection, begin, text, first, usage = http.client.HTTPConnection("127.0.0.1", PORT, timeout=300), time.perf_counter(), "", 0.0, {}
        headers = {"content-type": "application/json"} | ({} if self.affinity else {"x-session-id": uuid.uuid4().hex})
        body = {"model": "demo", "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read()!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                first, event = first or time.perf_counter() - begin, json.loads(line[6:])
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event["usage"] or usage
        return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], first


def cell(args: argparse.Namespace, affinity: bool, store: str | None) -> dict[str, Any]:
    """A closed loop of agents, measured for some seconds once each has had two answers on average."""
    from ray import serve

    from examples.ray_serve.app import Arguments, app

    try:
        pages = {"cb_num_blocks": args.pages, "cb_max_batch_tokens": 512}
        serve.run(app(Arguments(device="cpu", dtype="float32", store=store, **pages)))
        client, until = Client(args.scale, args.turns, affinity), threading.Event()
        with ThreadPoolExecutor(args.users) as threads:
            agents = [threads.submit(client.run, until) for _ in range(args.users)]
            while len(client.turns) < 2 * args.users and not any(agent.done() for agent in agents):
                time.sleep(0.05)
            start = time.perf_counter()
            time.sleep(args.seconds)
            until.set()
            elapsed = time.perf_counter() - start
        for agent in agents:
            agent.result()
    finally:
        serve.delete("default")
    found = [turn for turn in client.turns if start <= turn[0] < start + elapsed]
    prompts, cached = (sum(turn[i] for turn in found) for i in (2, 3))
    later = median(turn[4] for turn in found if not turn[1])
    return {
        "turns_s": len(found) / elapsed, "reused": cached / prompts, "computed": (prompts - cached) / len(found),
        "prompt": prompts / len(found), "ttft_later": later, "answered": len(found), "seconds": elapsed,
    }  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    import ray
    from ray import serve

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": PORT})
    for affinity, stored in ((True, False), (False, False), (True, True), (False, True)):
        with tempfile.TemporaryDirectory() as folder:
            row = cell(args, affinity, folder if stored else None)
        what = f"replicas: {'affinity' if affinity else 'none'}, {'store' if stored else 'pools'}, {args.users} users"
        fields = {"affinity": affinity, "store": stored, "users": args.users, "pages": args.pages, "scale": args.scale, "turns": args.turns}
        replace_rows(args.out, what, [fields | row | {"device": "cpu"}])
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in (fields | row).items()}, flush=True)
    serve.shutdown()
    ray.shutdown()


def tables(rows: list[dict]) -> Iterator[Table]:
    lines = [
        ["by conversation" if row["affinity"] else "at random", "yes" if row["store"] else "no", f"{row['turns_s']:.2f}",
         f"{row['reused']:.0%}", f"{row['computed']:,.0f} of {row['prompt']:,.0f}", f"{row['ttft_later']:.2f}"]
        for row in sorted(rows, key=lambda row: (row["store"], not row["affinity"]))
    ]  # fmt: skip
    headers = ["replica", "shared folder", "turns/s", "reused", "tokens computed a turn", "TTFT of a later turn, s"]
    yield Table(headers, lines)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "replicas")
    parser.add_argument("--users", type=at_least(1), default=8)
    parser.add_argument("--turns", type=at_least(2), default=16, help="of a session")
    parser.add_argument("--scale", type=float, default=64.0, help="divides all lengths")
    parser.add_argument("--pages", type=at_least(1), default=32, help="of 256 tokens, of a replica")
    parser.add_argument("--seconds", type=float, default=60.0, help="that a cell is measured")
    run_or_show(parser, parser.parse_args(arguments), measure, "replicas", tables, gpu=False)


if __name__ == "__main__":
    main()
