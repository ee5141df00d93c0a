"""An attack on `qkvcache serve` over HTTP on this machine, with the embedded model on a CPU: requests that cost more than they ask for,
clients that take all, connections without requests, paths of administrators, signals. A probe asks for /health all the while.

    python -m tests.batching.attack
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qkvcache import demo

from .clients import CHAT, COMPLETIONS, RESPONSES, key_of, saved

KEYS = "attacker-key", "another-key"
SAID = [{"role": "user", "content": "A"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
READ_SECONDS, GRACE = 2.0, 2.0
OPTIONS = ["--device=cpu", "--dtype=float32", "--cb-num-blocks=24", "--cb-max-batch-tokens=512", "--port=0", "--metrics-interval=0"]
OPTIONS += [f"--read-seconds={READ_SECONDS}", f"--grace-seconds={GRACE}", "--max-waiting=96", "--max-waiting-per-client=64"]


class Program:
    """`qkvcache serve` in a process."""

    def __init__(self, folder: str):
        saved(folder)
        self.log = Path(folder) / "log"
        environment = os.environ | {"QKVCACHE_API_KEY": " ".join(KEYS), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "qkvcache.cli", "serve", folder, *OPTIONS]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        while not (found := re.search(r"http://[\w.]+:(\d+)", self.log.read_text())):
            if self.process.poll() is not None:
                raise RuntimeError(self.log.read_text())
            time.sleep(0.1)
        self.port = int(found[1])

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("localhost", self.port, timeout=300)

    def ask(self, path: str, body: bytes | dict | None = None, key: str | None = KEYS[0]) -> tuple[int, bytes]:
        connection = self.connection()
        try:
            data = json.dumps(body).encode() if isinstance(body, dict) else body
            headers = {"content-type": "application/json"} | (key_of(key) if key else {})
            connection.request("GET" if data is None else "POST", path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (BrokenPipeError, ConnectionResetError):  # the server has answered while the body was sent
            return 413, b""
        finally:
            connection.close()

    @property
    def megabytes(self) -> float:
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())[1]) / 1024

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


class Probe(threading.Thread):
    """Asks for /health every ten milliseconds, on one connection; keeps the longest answer."""

    def __init__(self, program: Program):
        super().__init__(daemon=True)
        self.program, self.longest, self.wrong, self.ended = program, 0.0, 0, threading.Event()
        self.start()

    def run(self) -> None:
        connection = self.program.connection()
        while not self.ended.wait(0.01):
            begin = time.perf_counter()
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            self.wrong += answer.status != 200
            self.longest = max(self.longest, time.perf_counter() - begin)

    def end(self) -> None:
        self.ended.set()
        self.join()


def statuses(program: Program, *requests: tuple[str, bytes | dict]) -> Counter[str]:
    """The statuses of the answers. A request asks for one token unless it names another number."""
    few = {COMPLETIONS: {"max_tokens": 1}, CHAT: {"max_tokens": 1}, RESPONSES: {"max_output_tokens": 1}}
    bodies = [(path, few.get(path, {}) | body if isinstance(body, dict) else body) for path, body in requests]
    return Counter(str(program.ask(path, body)[0]) for path, body in bodies)


# The attacks. Each returns counts of statuses, or of what it saw.


def templates(program: Program) -> Counter[str]:
    given = [{"chat_template": LOOP}, {"chat_template": "{{ 'a' * 30000000 }}"}]
    given += [{"chat_template": "Hello", "padding": "max_length", "max_length": 10**7}, {"tokenize": False}, {"return_tensors": "pt"}]
    return statuses(program, *((CHAT, {"messages": SAID, "chat_template_kwargs": found}) for found in given))


def stop_strings(program: Program) -> Counter[str]:
    wrong = [{"stop": "a" * 100_000}, {"stop": ["a" * 257]}, {"stop": ["a"] * 5}]
    worst = {"stop": [letter * 255 + "!" for letter in "ae t"], "max_tokens": 60}
    asked = [*wrong, worst, worst | {"stream": True}]
    return statuses(program, *((COMPLETIONS, {"prompt": "a" * 300} | found) for found in asked))


def long_prompts(program: Program) -> Counter[str]:
    sizes = 3_000_000, 10_000_000, 120_000
    found = statuses(program, *((COMPLETIONS, {"prompt": "A b " * (size // 4), "n": 16}) for size in sizes))
    return found + statuses(program, (COMPLETIONS, {"prompt": "a" * 120_000}), (CHAT, {"messages": [{"role": "a", "content": ""}] * 4000}))


def bodies(program: Program) -> Counter[str]:
    """The worst of each kind that fits into a body."""
    deep, wide = b"[" * 100_000, {f"a{i}": 1 for i in range(12_000)}
    arguments = {"name": "a", "arguments": "[" * 60_000}
    return statuses(
        program,
        (CHAT, deep),
        (CHAT, wide),
        (CHAT, {"messages": [1] * 40_000}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 3500}]}),
        (CHAT, {"messages": SAID, "metadata": wide}),
        (CHAT, {"messages": [{"role": "a", "content": "", "x": [[]] * 30}] * 800}),
        (CHAT, {"messages": SAID, "tools": [{"type": "function", "function": wide}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": arguments}]}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": arguments | {"arguments": "3"}}] * 128}]}),
        (RESPONSES, {"input": [1] * 40_000}),
        (RESPONSES, {"input": [{"type": "function_call"}] * 3000}),
        (RESPONSES, {"input": "a", "model": "a" * 100_000}),
        (COMPLETIONS, b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}"),
        (COMPLETIONS, {"prompt": "a", "n": 10**9}),
    )


def unfinished_body(program: Program) -> Counter[str]:
    """350 MB, in pieces, and the end never."""
    with socket.create_connection(("localhost", program.port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEYS[0]}\r\ncontent-length: 999999999\r\n\r\n"
        connection.sendall(head.encode())
        sent = 0
        try:
            for _ in range(350):
                connection.sendall(b" " * 10**6)
                sent += 1
        except OSError:
            pass
    return Counter({"MB taken": sent})


def administrators(program: Program) -> Counter[str]:
    """Other paths, while eight requests run; those must have the same answer."""
    asked = {"prompt": demo.text()[:400], "max_tokens": 20, "temperature": 0}
    expected = json.loads(program.ask(COMPLETIONS, asked)[1])["choices"][0]["text"]
    paths = ["/reset", "/load_model", "/docs", "/redoc", "/openapi.json", "/v1/systemone", "/v1/audio/transcriptions"]
    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(program.ask, COMPLETIONS, asked, KEYS[1]) for _ in range(8)]
        found = statuses(program, *((path, body) for path in paths for body in (b"{}", {"model": "demo:../../etc/passwd.gguf"})))
        answers = [json.loads(future.result()[1])["choices"][0]["text"] for future in running]
    return found + Counter({"answers right": answers.count(expected), "answers wrong": 8 - answers.count(expected)})


def without_key(program: Program) -> Counter[str]:
    paths = [COMPLETIONS, CHAT, RESPONSES, "/v1/models", "/metrics", "/reset"]
    return Counter(str(program.ask(path, None, key)[0]) for path in paths for key in (None, "other", KEYS[0][:-1]))


def a_greedy_client(program: Program) -> Counter[str]:
    """60 requests of 16 answers each with one key, and then two tokens with another."""
    asked = {"prompt": "A", "n": 16, "max_tokens": 3000, "temperature": 1, "stream": True}
    connections, found = [program.connection() for _ in range(60)], Counter[str]()
    for connection in connections:
        connection.request("POST", COMPLETIONS, json.dumps(asked), {"authorization": f"Bearer {KEYS[0]}"})
    time.sleep(1)
    begin = time.perf_counter()
    status = program.ask(COMPLETIONS, {"prompt": "A", "max_tokens": 2}, KEYS[1])[0]
    found["another client's seconds"] = round(time.perf_counter() - begin, 1)
    found[f"another client {status}"] += 1
    for connection in connections:
        found[str(connection.getresponse().status)] += 1
        connection.close()
    return found


def half_open(program: Program, count: int = 400) -> Counter[str]:
    """Connections that send nothing, or half a head."""
    opened = [socket.create_connection(("localhost", program.port)) for _ in range(count)]
    for connection in opened[::2]:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost:")
    time.sleep(READ_SECONDS + 1.5)
    found = Counter({"opened": count, "descriptors left": program.descriptors})
    for connection in opened:
        connection.close()
    return found


def leavers(program: Program, count: int = 100) -> Counter[str]:
    """Clients that leave while their answer runs."""
    for i in range(count):
        connection = program.connection()
        body = {"prompt": "A" * i, "max_tokens": 3000, "stream": i % 2 == 0}
        connection.request("POST", COMPLETIONS, json.dumps(body), {"authorization": f"Bearer {KEYS[0]}"})
        connection.close()
    return Counter({"left": count})


ATTACKS: dict[str, Callable[[Program], Counter[str]]] = {
    "A1 templates": templates,
    "A2 stop strings": stop_strings,
    "A3 long prompts": long_prompts,
    "A3 worst bodies": bodies,
    "A3 350 MB of a body": unfinished_body,
    "A4 administrators": administrators,
    "A7 a greedy client": a_greedy_client,
    "A8 half-open connections": half_open,
    "A10 without a key": without_key,
    "clients that leave": leavers,
}


def terminated(program: Program) -> Counter[str]:
    """Two signals while four streams run: each ends with an error event, and the log has no traceback (A20)."""
    asked = {"prompt": "A", "max_tokens": 3000, "stream": True}
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(program.ask, COMPLETIONS, asked) for _ in range(4)]
        time.sleep(1)
        for _ in range(2):
            program.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        ends = Counter("ends with an error" if b'"error"' in future.result()[1] else "ends otherwise" for future in running)
    begin = time.perf_counter()
    ends[f"exit {program.process.wait(60)}"] += 1
    ends["seconds"] = round(time.perf_counter() - begin, 1)
    ends["tracebacks"] = program.log.read_text().count("Traceback")
    return ends


def metrics(program: Program) -> dict[str, float]:
    lines = program.ask("/metrics")[1].decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def run() -> Iterator[tuple[str, float, float, Counter[str]]]:
    """Yields for each attack: its name, seconds of the longest answer of /health, MB after it, counts. Raises AssertionError if the
    server is not as before."""
    with tempfile.TemporaryDirectory() as folder:
        program = Program(folder)
        try:
            asked = {"prompt": demo.text()[:200], "max_tokens": 8, "temperature": 0}
            good = json.loads(program.ask(COMPLETIONS, asked)[1])["choices"][0]["text"]
            before = program.descriptors
            for name, attack in {"no attack": lambda _: time.sleep(3) or Counter(), **ATTACKS}.items():
                probe = Probe(program)
                counts = attack(program)
                probe.end()
                deadline = time.monotonic() + 60
                while any(metrics(program)[f"qkvcache_{gauge}"] for gauge in ("running", "waiting", "pages_used")):
                    assert time.monotonic() < deadline, (name, metrics(program))
                    time.sleep(0.1)
                assert not probe.wrong and json.loads(program.ask(COMPLETIONS, asked)[1])["choices"][0]["text"] == good, name
                yield name, probe.longest, program.megabytes, counts
            deadline = time.monotonic() + 20
            while program.descriptors > before + 2:
                assert time.monotonic() < deadline, f"descriptors: {before} before, {program.descriptors} after"
                time.sleep(0.1)
            counted = {name: int(value) for name, value in metrics(program).items() if "requests_total" in name}
            yield "A22 counted", 0.0, program.megabytes, Counter(counted)
            yield "A20 two signals", 0.0, 0.0, terminated(program)
        finally:
            program.process.kill()


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n\n")[0]).parse_args()
    for name, longest, megabytes, counts in run():
        said = ", ".join(f"{count} x {kind}" if kind[0].isdigit() else f"{kind}: {count}" for kind, count in counts.items())
        print(f"{name:26} /health {1000 * longest:4.0f} ms  {megabytes:5.0f} MB  {said}", flush=True)


if __name__ == "__main__":
    main()
