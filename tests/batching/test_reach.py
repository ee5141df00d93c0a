"""Who may reach `qkvcache serve`, and what strangers can make it do: keys, sizes, waiting requests, connections, a worker that hangs."""

import asyncio
import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256

import pytest

from qkvcache import demo, models

from .clients import CHAT, COMPLETIONS, RESPONSES, key_of, place, send, served
from .requests import PATIENCE, until, waiting

pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS  # noqa: E402

from qkvcache.batching import gate, prompts  # noqa: E402
from qkvcache.batching import server as serving  # noqa: E402
from qkvcache.batching.requests import ASKED, Asked, StopStrings  # noqa: E402
from qkvcache.batching.transformers import processor  # noqa: E402

KEYS = "first-key", "second-key"
LIMITS = gate.Limits(max_waiting=8, max_waiting_per_client=4, max_n=2, max_connections=12, read_seconds=0.5)


@pytest.fixture(scope="module")
def server():
    with served(api_keys=KEYS, limits=LIMITS) as started:
        yield started


def ask(server, path: str = COMPLETIONS, key: str | None = KEYS[0], body: bytes | None = None, **fields):
    """Status, body and headers of an answer."""
    if path == COMPLETIONS:
        fields = {"prompt": "A", "max_tokens": 2} | fields
    return send(server, path, body or fields or None, **key_of(key) if key else {})


# Keys.


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/v1/sessions/one", "/metrics", "/reset"])
def test_a_key_is_needed(server, path):
    before = server.observed.outcomes["unauthorized"]
    for key in (None, "other", KEYS[0] + "x", "", "é"):
        status, answer, headers = ask(server, path, key)
        assert (status, answer["error"]["code"], headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
    assert server.observed.outcomes["unauthorized"] == before + 5


def test_probes_need_no_key(server):
    assert ask(server, "/health", None)[0] == 200


def test_the_digest_of_the_key_names_the_tenant(server, monkeypatch):
    seen = []
    monkeypatch.setattr(server, "admit", lambda client, n: seen.append(client))
    for key in KEYS:
        assert ask(server, key=key)[0] == 200
    assert seen == [sha256(key.encode()).hexdigest() for key in KEYS]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_other_machines_need_a_key_or_an_open_server(host):
    with pytest.raises(ValueError, match="--api-key"):
        gate.Keys((), host)
    assert gate.Keys((), host, open=True).tenant("") is None and gate.Keys(["a"], host)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_this_machine_needs_no_key(host):
    assert gate.Keys((), host).tenant("Bearer anything") is None


@pytest.mark.parametrize("key", ["", "a b", "é", "a\n"])
def test_keys_that_no_header_carries_are_refused(key):
    with pytest.raises(ValueError, match="printable ASCII"):
        gate.Keys([key], "localhost")


def test_limits_that_contradict_each_other_are_refused():
    for wrong in ({"max_n": 200}, {"max_waiting": 5}, {"read_seconds": 0.0}, {"max_connections": -1}):
        with pytest.raises(ValueError, match=r"Limits\("):
            gate.Limits(**wrong)


# What a request may have.


@pytest.mark.parametrize(
    "given",
    [
        {"chat_template": "{% for i in range(99999) %}{% endfor %}"},
        {"tokenize": False},
        {"padding": "max_length", "max_length": 10**7},
        {"return_tensors": "pt"},
        {"add_generation_prompt": False},
        {"enable_thinking": "yes"},
        {"reasoning_effort": 300 * "a"},
        {"thinking_budget": [1]},
    ],
)
def test_options_of_templates_are_on_a_list(server, given):
    status, answer, _ = ask(server, CHAT, messages=[{"role": "user", "content": "A"}], chat_template_kwargs=given)
    assert status == 400 and answer["error"]["param"] == "chat_template_kwargs" and next(iter(given)) in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"stop": ["a"] * 5}, "stop"),
        (COMPLETIONS, {"stop": "a" * 257}, "stop"),
        (COMPLETIONS, {"n": 3}, "n"),
        (COMPLETIONS, {"seed": 2**63}, "seed"),
        (CHAT, {"messages": [{"role": "a", "content": ""}] * 4097}, "messages"),
        (CHAT, {"messages": [{"role": "a" * 65, "content": ""}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "A"}], "tools": [{}] * 129}, "tools"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}]}, "messages"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}]}, "input"),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": ["a"]}]}, "input"),
    ],
)
def test_fields_have_limits(server, path, fields, param):
    status, answer, _ = ask(server, path, **fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert len(json.dumps(answer)) < 1000


def test_a_request_has_few_fields(server):
    status, answer, _ = ask(server, **{f"a{i}": i for i in range(100)})
    assert status == 400 and "at most 64" in answer["error"]["message"]


def test_images_are_not_fetched_nor_opened():
    data = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert serving.carries_its_data(data) and serving.carries_its_data({"type": "input_image", "image_url": "data:image/png;base64,AA"})
    assert serving.carries_its_data({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}})
    for part in (
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
        {"type": "image_url", "image_url": "/etc/passwd"},
        {"type": "input_audio", "input_audio": {"data": "/etc/passwd"}},
        {"type": "input_audio", "input_audio": "/etc/passwd"},
        {"type": "video_url"},
        {},
    ):
        assert not serving.carries_its_data(part)


def test_bodies_are_bounded_before_they_are_parsed(server):
    assert server.max_body_bytes == 65_536 + 16 * 4096
    begin = server.observed.outcomes["refused"]
    status, answer, _ = ask(server, body=b" " * (server.max_body_bytes + 1))
    assert status == 413 and str(server.max_body_bytes) in answer["error"]["message"]
    assert server.observed.outcomes["refused"] == begin + 1


def test_a_prompt_is_made_once_and_not_in_the_event_loop(server, monkeypatch):
    """For all answers, and for one client after the other."""
    tokenizer, threads = server._seen[1]._processor, []
    stock = type(tokenizer).__call__

    def watched(self, text, *args, **kwargs):
        threads.append(threading.current_thread().name)
        return stock(self, text, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "__call__", watched)
    for fields in ({"n": 2}, {"prompt": demo.text()[:100_000]}):
        status, _, _ = ask(server, **fields)
        assert status == (200 if "n" in fields else 400)
    assert len(threads) == 2 and all(name.startswith("render") for name in threads)


def test_answers_are_parsed_in_pieces_after_a_prompts_end():
    """transformers parses a prompt whole, and an answer at once: half a minute for 500 kB without a beginning of an answer."""
    tokenizer = models.load("demo")[1]
    seen = prompts.Processor(tokenizer)
    ids = tokenizer("A b " * 5000)["input_ids"]
    token = ASKED.set(Asked("a"))
    try:
        assert seen.decode(ids) == tokenizer.decode(ids[-64:])
        assert seen.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_special_tokens=True)
    finally:
        ASKED.reset(token)
    template = next(template for types, template in _RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3" in types)
    for text in ('<think>A b</think>C d\n<tool_call>{"name": "a", "arguments": {"b": 1}}</tool_call>', "A  b \n c", "<think>A"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prefix = "<|im_start|>assistant\n"
        assert seen.parse_response(ids, template, prefix=prefix) == tokenizer.parse_response(ids, template, prefix=prefix)


WIDE = {f"a{i}": 1 for i in range(9000)}
WORST = [
    (COMPLETIONS, {"prompt": "A b " * 30_000, "n": 2}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 20, "stop": [letter * 255 + "!" for letter in "ae t"], "stream": True}),
    (COMPLETIONS, {"prompt": "a" * 30_000, "stop": "a" * 90_000}),
    (CHAT, {"messages": [{"role": "a", "content": ""}] * 4000}),
    (CHAT, {"messages": [{"role": "a", "content": [{"type": "text", "text": ""}] * 3500}]}),
    (CHAT, {"messages": [{"role": "a", "content": "", "x": [[]] * 30}] * 800}),
    (CHAT, {"messages": [{"role": "a", "content": ""}], "tools": [{"function": WIDE}]}),
    (CHAT, {"messages": [{"role": "a", "content": "A"}], "metadata": WIDE}),
    (CHAT, WIDE),
    (RESPONSES, {"input": [{"type": "function_call"}] * 3000}),
]


@pytest.mark.parametrize(("path", "fields"), WORST)
def test_no_field_takes_long_in_the_event_loop(server, monkeypatch, path, fields):
    """A tenth of a second of the processor at once, which is less than it would take to tokenize these prompts for each answer."""
    longest, stock = [0.0], asyncio.Handle._run

    def timed(handle):
        begin = time.thread_time()
        stock(handle)
        longest.append(time.thread_time() - begin)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    assert ask(server, path, **{"max_output_tokens" if path == RESPONSES else "max_tokens": 1} | fields)[0] in (200, 400)
    assert max(longest) < 0.1


def test_stop_strings_are_found_in_the_last_tokens():
    tokenizer = models.load("demo")[1]
    decoded, stock = [], tokenizer.decode

    class Counted:
        all_special_ids = tokenizer.all_special_ids

        def decode(self, ids):
            decoded.append(len(ids))
            return stock(ids)

    ids = tokenizer(demo.text()[:9000], add_special_tokens=False)["input_ids"]
    text = stock(ids)
    stop = StopStrings(Counted(), [text[-256:], "nowhere"])
    assert stop.end(reversed(ids)) and not stop.end(reversed(ids[:-40]))
    assert max(decoded) <= 256 < len(ids)


# Requests that wait.


def asking(threads, server, count: int, key: str | None = KEYS[0], **fields) -> list:
    """`count` requests that wait for their first token."""
    before = sum(exchange.waiting for exchange in server.exchanges)
    asked = [threads.submit(ask, server, key=key, **fields) for _ in range(count)]
    assert until(lambda: sum(exchange.waiting for exchange in server.exchanges) == before + count * fields.get("n", 1))
    return asked


def test_requests_beyond_the_limits_wait_elsewhere(server):
    limited = server.observed.outcomes["limited"]
    with ThreadPoolExecutor(8) as threads, waiting(server._model):
        asked = asking(threads, server, 1, n=2) + asking(threads, server, 2)
        status, answer, headers = ask(server)
        assert status == 429 and "4 of yours" in answer["error"]["message"] and int(headers["retry-after"]) >= 1
        asked += asking(threads, server, 2, KEYS[1], n=2)
        assert ask(server, key=KEYS[1])[0] == 429 and ask(server, "/health", None)[0] == 200
    assert [future.result()[0] for future in asked] == [200] * 5
    assert server.observed.outcomes["limited"] == limited + 2
    assert ask(server)[0] == 200


def test_clients_take_turns(server):
    """Of a client that sent three requests before, and one that sent one, the second is not last."""
    scheduler = server.batching.manager.batch_processor.scheduler
    order, stock = [], scheduler._get_waiting_candidates

    def watched():
        found = stock()
        order.append([state.asked.client for state in found])
        return found

    scheduler._get_waiting_candidates = watched
    first, second = (sha256(key.encode()).hexdigest() for key in KEYS)
    try:
        with ThreadPoolExecutor(8) as threads, waiting(server._model):
            asking(threads, server, 3)
            asking(threads, server, 1, KEYS[1])
    finally:
        del scheduler._get_waiting_candidates
    assert all(clients.index(second) <= 1 for clients in order if second in clients)


def test_a_client_gives_way_to_another(monkeypatch):
    """Its requests fill the pool, and have thousands of tokens to go."""
    monkeypatch.setattr(processor, "TURN", 0.0)
    with served(api_keys=KEYS, cb_num_blocks=2) as server, ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(ask, server, max_tokens=60) for _ in range(2)]
        assert until(lambda: server.metrics().running == 2)
        assert ask(server, key=KEYS[1])[0] == 200 and not any(future.done() for future in asked)
        answers = [future.result()[1] for future in asked]
        assert server.metrics().preemptions
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {60}


# Connections.


def closed(connection: socket.socket) -> bool:
    connection.settimeout(PATIENCE)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"])
def test_connections_without_a_request_are_closed(server, sent):
    with socket.create_connection(place(server)) as connection:
        connection.sendall(sent)
        assert closed(connection)


def test_a_body_that_does_not_come_is_not_waited_for(server):
    with socket.create_connection(place(server)) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEYS[0]}\r\ncontent-length: 99\r\n\r\n"
        connection.sendall(head.encode())
        assert b" 408 " in connection.recv(100)


def test_more_connections_close_the_idle_ones(server):
    """And never one whose request runs."""
    with ThreadPoolExecutor(1) as threads, waiting(server._model):
        asked = asking(threads, server, 1)
        idle = [socket.create_connection(place(server)) for _ in range(3 * LIMITS.max_connections)]
        assert until(lambda: len(server.server.server_state.connections) <= LIMITS.max_connections)
        assert closed(idle[0]) and ask(server, "/health", None)[0] == 200
    assert asked[0].result()[0] == 200
    for connection in idle:
        connection.close()


# A worker that does not work.


@contextmanager
def hanging(server, tokens: int = 3000):
    """A step of the server hangs until the block ends; yields the answer of its request."""
    with ThreadPoolExecutor(1) as threads, waiting(server._model):
        asked = threads.submit(ask, server, key=None, max_tokens=tokens)
        assert until(lambda: server.metrics().running == 1)
        yield asked


def test_health_is_progress():
    with served(limits=gate.Limits(stall_seconds=0.3)) as server:
        with hanging(server, 2):
            assert until(lambda: ask(server, "/health", None)[0] == 503) and not server.dead
        assert until(lambda: ask(server, "/health", None)[0] == 200) and not server.raised


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the worker, when it goes on after all
def test_a_worker_that_hangs_does_not_hold_the_server(monkeypatch):
    monkeypatch.setattr(serving, "LAST_STEP", 0.1)
    with served(grace_seconds=0.1) as server, hanging(server) as asked:
        server.server.handle_exit(15, None)
        assert asked.result()[0] == 503
        assert until(lambda: server.hung)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_exits_ends_the_server(monkeypatch):
    with served(grace_seconds=PATIENCE) as server:
        monkeypatch.setattr(server._model, "forward", lambda **_: sys.exit())
        status, answer, _ = ask(server, key=None)
        assert status == 503 and "has died" in answer["error"]["message"]
        assert until(lambda: bool(server.raised))


def test_a_second_signal_ends_requests_in_order():
    with served(grace_seconds=PATIENCE) as server:
        with hanging(server) as asked:
            server.server.handle_exit(15, None)
            server.server.handle_exit(15, None)
            status, answer, _ = asked.result()
        assert status == 503 and "stopping" in answer["error"]["message"] and not server.raised
