"""A load test of `qkvcache serve` over HTTP on 127.0.0.1, with the embedded model on a CPU: requests of many clients, whole and as streams,
of one answer and of two, with stop strings; clients that leave, are refused, have no key, wait elsewhere, or open a connection and send
nothing. Every answer must be the one that its prompt has alone; pages, rings, threads, tasks, descriptors and memory must be as before.

    python -m tests.batching.load --requests 5000
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import http.client
import json
import os
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from qkvcache import CompressedCache, demo, models
from qkvcache.batching.gate import Limits
from qkvcache.batching.server import Server
from qkvcache.releases import passing

from .clients import place, saved, served

CACHE = {"format": "identity", "residual_length": 16}
"""Exact, so that a request which gave way to another, and a prompt that a full step cut in two, have the answers that they have alone."""
NEW = (1, 4, 8)
"""Tokens of answers."""
LEAVE_AT = 300
"""Tokens of answers whose clients leave before."""
KEYS = "a-key", "another-key"
LIMITS = Limits(max_waiting=14, max_waiting_per_client=10, max_n=2, read_seconds=2.0)
GROWTH = 24.0
"""MB by which memory may be more after the last tenth of the requests than after any of the first five."""
WRONG = (
    b"{",
    b" " * 1_000_000,
    {"prompt": "A", "stop": 300 * "a"},
    {"prompt": "A", "n": 3},
    {"prompt": ""},
    {"prompt": "A", "max_tokens": 0},
    {"prompt": "A", "max_tokens": "x"},
    {"prompt": "A", "logprobs": 3},
    {"prompt": 5000 * "A b "},
    {"prompt": 30_000 * "A b "},
)
"""Bodies that are refused."""


def expected(path: str, prompts: list[str]) -> dict[str, list[str]]:
    """The answer of each prompt alone, by `generate` with the same cache: after one token, two, and so on."""
    model, tokenizer = models.load(path)
    greedy, found = GenerationConfig(do_sample=False, max_new_tokens=max(NEW), eos_token_id=tokenizer.eos_token_id), {}
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        cache = CompressedCache(model.config, **CACHE)
        out = model.float().generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy, **passing(cache))
        answer = out[0, ids.shape[1] :]
        found[prompt] = [tokenizer.decode(answer[:count], skip_special_tokens=True) for count in range(max(NEW) + 1)]
    return found


def post(address: tuple[str, int], body: bytes | dict, leave: bool = False, key: str = KEYS[0]) -> tuple[int, bytes]:
    """Status and body of an answer; a client that leaves reads none of it."""
    connection = http.client.HTTPConnection(*address, timeout=120)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", "/v1/completions", data, {"content-type": "application/json", "authorization": f"Bearer {key}"})
        if leave:
            time.sleep(random.random() / 5)
            return 0, b""
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def texts_of(received: bytes, stream: bool) -> list[str]:
    """The text of each choice of an answer."""
    events = [line.removeprefix("data: ") for line in received.decode().split("\n\n") if line.startswith("data: {")]
    found: dict[int, str] = {}
    for event in map(json.loads, events if stream else [received]):
        for choice in event["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + (choice.get("text") or "")
    return [found[index] for index in sorted(found)]


def megabytes() -> float:
    """Resident memory, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def held(server: Server) -> dict[str, int]:
    """Descriptors and tasks of the server's process."""
    loop = server.server.servers[0].get_loop()
    return {"descriptors": len(os.listdir("/proc/self/fd")), "tasks": len(asyncio.all_tasks(loop))}


def run(requests: int, clients: int = 16, seed: int = 0) -> Counter[str]:
    """Counts of requests by what they did. Raises AssertionError for a wrong answer, and for anything that is left."""
    tqdm.monitor_interval = 0  # a thread of its own
    draw, text, counts, before = random.Random(seed), demo.text(), Counter[str](), set(threading.enumerate())
    prompts = [text[at : at + draw.choice((3, 20, 90, 250))] for at in (97 * i for i in range(24))]
    with tempfile.TemporaryDirectory() as path:
        saved(path, bare=True)  # so that prompts can be empty
        answers = expected(path, prompts)
        with served(path, CACHE, api_keys=KEYS, limits=LIMITS, log_level="error", cb_num_blocks=12) as server:
            address = place(server)

            def one(number: int) -> str:
                draw = random.Random(seed + number)
                kinds = {"whole": 4, "stream": 3, "several": 1, "stopped": 1, "leaves": 1, "refused": 1, "no key": 0.5, "silent": 0.5}
                (kind,) = draw.choices(list(kinds), list(kinds.values()))
                if kind == "silent":
                    with socket.create_connection(address) as connection:
                        connection.sendall(draw.choice((b"", b"POST /v1/completions HTTP/1.1\r\n")))
                        time.sleep(draw.random())
                    return kind
                if kind in ("refused", "no key"):
                    status, received = post(address, draw.choice(WRONG), key=KEYS[0] if kind == "refused" else "other")
                    assert 400 <= status < 500 and (status == 401) == (kind == "no key"), (status, received)
                    return kind
                prompt, new = draw.choice(prompts), LEAVE_AT if kind == "leaves" else draw.choice(NEW)
                asked, stream = {"prompt": prompt, "max_tokens": new, "temperature": 0}, kind == "stream" or draw.random() < 0.2
                if kind == "leaves":
                    post(address, asked | {"stream": draw.random() < 0.5}, leave=True)
                    return kind
                expected = answers[prompt][new]
                if kind == "stopped" and expected:
                    asked["stop"] = stop = draw.choice(expected)
                    expected = expected.partition(stop)[0]
                asked |= {"stream": stream, "n": 1 + (kind == "several")}
                while True:
                    status, received = post(address, asked, key=draw.choice(KEYS))
                    if status != 429:
                        break
                    counts["waited elsewhere"] += 1
                    time.sleep(0.2)
                assert status == 200, (status, received)
                got = texts_of(received, stream)
                assert got == [expected] * asked["n"], f"{prompt!r} has {got!r}, alone {expected!r}"
                return kind

            post(address, {"prompt": prompts[0], "max_tokens": 1})
            with ThreadPoolExecutor(clients) as threads:
                sizes, kept, tenth = list[float](), list[dict[str, int]](), requests // 10
                for begin in range(0, requests, tenth):
                    counts.update(threads.map(one, range(begin, min(begin + tenth, requests))))
                    sizes.append(megabytes())
                    kept.append(held(server))
            cache = server.batching.manager.cache
            deadline = time.monotonic() + 30
            while server.exchanges or server.metrics().running or any(held.block_table for held in cache.allocators):
                assert time.monotonic() < deadline, f"left: {server.metrics()}"
                time.sleep(0.05)
            found = server.metrics()
            assert not found.pages_used and not found.waiting and not cache.store.rings.by_request, found
            assert len(cache.store.rings.free) == found.rings and not server.batching.manager.output_router.result_handlers
            time.sleep(2 * LIMITS.read_seconds)  # until idle connections are closed
            earlier, grown, now = max(sizes[:5]), sizes[-1] - max(sizes[:5]), held(server)
            assert grown <= GROWTH and all(now[name] <= kept[0][name] for name in now), f"{sizes} MB, {kept[0]} before, {now} now"
            counts["MB"], counts["MB more"] = round(earlier), round(grown)
            counts["tokens"], counts["cached tokens"] = found.tokens_generated, found.cached_tokens
            counts.update({f"counted {kind}": count for kind, count in server.observed.outcomes.items()})
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not left, f"threads are left: {left}"
    elsewhere = counts["counted limited"] - counts["waited elsewhere"]  # of the refused, and of those that leave
    assert 0 <= counts["refused"] - counts["counted refused"] <= elsewhere and not counts["counted failed"], counts
    assert counts["counted unauthorized"] == counts["no key"], counts
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    counts = run(arguments.requests, arguments.clients)
    for name, count in counts.items():
        print(f"{name:20} {count:,}")
    print(f"{'seconds':20} {time.perf_counter() - begin:,.0f}")


if __name__ == "__main__":
    main()
