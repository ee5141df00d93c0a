"""What clients can send to `qkvcache serve`: every field has an effect or is refused, nobody reads the tokens of others, and it ends."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from qkvcache import demo
from tests.processes import Program

from .clients import CHAT, COMPLETIONS, RESPONSES, WORDS, place, saved, send, served
from .requests import PATIENCE, until, waiting

pytest.importorskip("openai")
pytest.importorskip("uvicorn")
CACHE = {"format": "turboquant_4bit_nc", "residual_length": 16}
FEW = {"cache": CACHE, "cb_num_blocks": 4}
PROMPT = "The code word of Anna is dilzon. What is the code word of Anna? The code word of Anna is"
SAID = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("plain"), bare=True)


@pytest.fixture(scope="module")
def server(folder):
    with served(folder, **FEW) as started:
        yield started


def complete(server, headers=(), **fields):
    counted = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | counted | fields
    status, answer, found = send(server, COMPLETIONS, body, **dict(headers))
    assert status == 200 and dict(headers).items() <= dict(found).items(), answer
    return answer


def texts(answer) -> list[str]:
    """Of each choice of a whole answer or a stream."""
    found: dict[int, str] = {}
    for event in answer if isinstance(answer, list) else [answer]:
        for choice in event["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[index] for index in sorted(found)]


def ends(answer) -> tuple[dict, int]:
    """The last choice of a whole answer or a stream, and its tokens, which a stream tells in an event of its own."""
    events = answer if isinstance(answer, list) else [answer]
    return [choice for event in events for choice in event["choices"]][-1], events[-1]["usage"]["completion_tokens"]


def test_an_empty_prompt_is_refused_beside_a_request(server):
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(complete, server, max_tokens=40)
        assert until(lambda: server.metrics().running == 1)
        for stream in (False, True):
            status, answer, _ = send(server, COMPLETIONS, {"prompt": "", "max_tokens": 2, "stream": stream})
            assert (status, "empty" in answer["error"]["message"]) == (400, True)
        assert len(other.result()["choices"][0]["text"]) > 40
    assert send(server, "/health")[0] == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "text"}, "messages"),
        (CHAT, {"messages": [{"content": "A"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "-"}}]}]}, "messages"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools"),
        (CHAT, {"logit_bias": {"5": 3}}, "logit_bias"),
        (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (CHAT, {"presence_penalty": -1}, "presence_penalty"),
        (CHAT, {"generation_config": "junk"}, "generation_config"),
        (CHAT, {"top_k": 4}, "top_k"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": ["A"]}, "prompt"),
        (COMPLETIONS, {"logprobs": 0}, "logprobs"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"max_tokens": "x"}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": -5}, "max_tokens"),
        (COMPLETIONS, {"temperature": "hot"}, "temperature"),
        (COMPLETIONS, {"temperature": -1}, "temperature"),
        (COMPLETIONS, {"top_p": 0}, "top_p"),
        (COMPLETIONS, {"seed": "x"}, "seed"),
        (COMPLETIONS, {"n": 0}, "n"),
        (COMPLETIONS, {"stop": ""}, "stop"),
        (COMPLETIONS, {"model": "other"}, "model"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"previous_response_id": "a"}, "previous_response_id"),
    ],
)
def test_fields_that_are_wrong_or_not_supported_are_named(server, path, fields, param):
    required = {CHAT: {"messages": SAID}, COMPLETIONS: {"prompt": PROMPT}, RESPONSES: {"input": PROMPT}}[path]
    status, answer, _ = send(server, path, required | {"stream": True} | fields)
    assert status == 400, answer
    assert answer["error"]["param"] == param and param in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"} and answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b'"text"'])
def test_bodies_that_are_no_objects_are_refused(server, body):
    for path in (COMPLETIONS, CHAT, RESPONSES):
        status, answer, _ = send(server, path, body)
        assert status == 400 and answer["error"]["message"]


def test_values_that_ask_for_nothing_are_accepted(server):
    """As clients send them by default."""
    nothing = {"n": 1, "logprobs": False, "frequency_penalty": 0, "presence_penalty": 0.0, "tool_choice": "auto", "stop": None, "user": "a"}
    status, answer, _ = send(server, CHAT, nothing | {"messages": SAID, "max_tokens": 2, "response_format": {"type": "text"}})
    assert status == 200 and answer["choices"][0]["message"]["content"]


def test_requests_sample_as_they_ask(server):
    """Each for itself, together as alone, with the same seed the same."""
    greedy = complete(server)
    assert texts(greedy)[0].startswith(" dilzon")
    asked = [{}, {"temperature": 2, "seed": 1}, {"temperature": 2, "seed": 2}, {"temperature": 2, "top_p": 1e-6}]
    alone = [texts(complete(server, **fields)) for fields in asked]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda fields: texts(complete(server, **fields)), asked)) == alone
    assert alone[0] == alone[3] == texts(greedy) and len({text for (text,) in alone}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(server, stream):
    answer = complete(server, n=2, temperature=2, seed=1, stream=stream)
    seeds = [texts(complete(server, temperature=2, seed=seed))[0] for seed in (1, 2)]
    assert texts(answer) == seeds
    usage = [event["usage"] for event in (answer if stream else [answer]) if event["usage"]]
    assert [(found["prompt_tokens"], found["completion_tokens"]) for found in usage] == [(28, 16)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "kept"), [("zon", " dil"), (["nothing", "on.\n"], " dilz"), (["nothing"], None)])
def test_answers_end_before_a_stop_string(server, stop, kept, stream):
    whole = texts(complete(server))[0]
    answer = complete(server, stop=stop, stream=stream)
    last, count = ends(answer)
    assert texts(answer) == [whole if kept is None else kept]
    assert last["finish_reason"] == ("length" if kept is None else "stop")
    assert count == 8 if kept is None else count < 8


@pytest.mark.parametrize("stream", [False, True])
def test_answers_end_at_the_last_position(server, stream, monkeypatch):
    monkeypatch.setattr(server._model.config, "max_position_embeddings", 31)
    last, count = ends(complete(server, stream=stream))
    assert (count, last["finish_reason"]) == (4, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_tokens_that_were_cached(server, stream):
    prompt = ("again, " if stream else "first, ") + demo.text()[:900]
    for cached in (0, 256):
        answer = complete(server, prompt=prompt, max_tokens=2, stream=stream)
        usage = (answer[-1] if stream else answer)["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
    _, answer, _ = send(server, CHAT, {"messages": [{"role": "user", "content": prompt}], "max_tokens": 2})
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 256}
    _, answer, _ = send(server, RESPONSES, {"input": prompt, "max_output_tokens": 2, "stream": stream})
    usage = (answer[-1]["response"] if stream else answer)["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 256


@pytest.mark.parametrize(("count", "status", "says"), [(6000, 413, "does not fit into a pool of 1024"), (20_000, 400, "4096 positions")])
def test_prompts_that_are_too_long_get_a_status(server, count, status, says):
    """Streams too, always: refused before they begin."""
    prompt = demo.text()[:count]
    for stream in (False, True, True, True):
        got, answer, _ = send(server, COMPLETIONS, {"prompt": prompt, "max_tokens": 2, "stream": stream})
        assert got == status and says in answer["error"]["message"]
    assert not server.batching.manager.output_router.result_handlers


def test_the_same_request_id_does_not_mix_answers(server):
    prompts = [PROMPT, demo.text()[:200]]
    alone = [texts(complete(server, prompt=prompt)) for prompt in prompts]
    with ThreadPoolExecutor(2) as threads:
        together = threads.map(lambda prompt: texts(complete(server, {"x-request-id": "same"}, prompt=prompt)), prompts)
        assert list(together) == alone


@pytest.mark.parametrize("path", ["/reset", "/load_model", "/v1/systemone", "/v1/audio/transcriptions", "/docs", "/openapi.json", "/redoc"])
def test_other_paths_are_not_served(server, path):
    before = server.observed.outcomes["refused"]
    for body in (None, {"model": "demo"}):
        status, answer, _ = send(server, path, body)
        assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    assert server.observed.outcomes["refused"] == before + 2


def leave(server, tokens: int = 900) -> None:
    """Asks for a long whole answer, and closes the connection while it runs."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": tokens}).encode()
    with socket.create_connection(place(server)) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert until(lambda: server.metrics().running == 1)


def test_a_client_of_a_whole_answer_that_leaves_is_cancelled(server):
    before = server.observed.outcomes["cancelled"]
    leave(server)
    assert until(lambda: server.observed.outcomes["cancelled"] > before and not server.metrics().running)
    assert not server.batching.manager.output_router.result_handlers and not server.exchanges
    assert texts(complete(server))[0].startswith(" dilzon")


def test_fields_have_the_same_effects_without_batching(folder):
    with served(folder, continuous_batching=False, **FEW) as started:
        assert send(started, COMPLETIONS, {"prompt": ""})[0] == 400
        status, answer, _ = send(started, COMPLETIONS, {"prompt": PROMPT, "seed": 1})
        assert (status, answer["error"]["param"]) == (400, "seed")
        for stream in (False, True):
            answer = complete(started, stop="zon", stream=stream, n=2, max_tokens=50)
            assert texts(answer) == [" dil"] * 2
            assert (answer[-1] if stream else answer)["usage"]["completion_tokens"] < 20
        assert texts(complete(started, temperature=2, max_tokens=12)) != texts(complete(started, max_tokens=12))
        assert 'qkvcache_requests_total{outcome="refused"} 2' in send(started, "/metrics")[1]


# The end.


@pytest.fixture
def ending(folder):
    with served(folder, grace_seconds=1.0, **FEW) as started:
        yield started


@pytest.mark.parametrize("tokens", [30, 900])
def test_a_server_that_stops_answers_what_runs(ending, tokens):
    """Requests that end within the grace are answered, others get 503; new ones do too."""
    server = ending
    with ThreadPoolExecutor(1) as threads:
        with waiting(server._model):
            running = threads.submit(send, server, COMPLETIONS, {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0})
            assert until(lambda: server.metrics().running == 1)
            server._grace = PATIENCE if tokens == 30 else 0.5
            server.server.handle_exit(15, None)
            assert send(server, COMPLETIONS, {"prompt": PROMPT})[0] == send(server, "/health")[0] == 503
        assert running.result()[0] == (200 if tokens == 30 else 503)
    assert until(lambda: server.batching is None) and not server.raised  # shut down


def test_a_dead_thread_ends_the_server_with_an_error(ending, monkeypatch):
    monkeypatch.setattr(ending._model, "forward", lambda **_: 1 / 0)
    status, answer, _ = send(ending, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2})
    assert status in (500, 503) and "division" not in answer["error"]["message"]
    assert until(lambda: bool(ending.raised)) and "has died" in str(ending.raised[0])


def test_the_process_ends_within_its_grace():
    """Without an error, although a request runs that does not end."""
    program = Program("qkvcache.cli", ["serve", "demo", *WORDS, "--grace-seconds", "0.2"])
    address = next(found for text in program.lines if (found := re.search(r"http://127.0.0.1:(\d+)", text)))
    body = json.dumps({"prompt": PROMPT, "max_tokens": 900, "stream": True}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(address[0] + COMPLETIONS, body, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert answer.readline().startswith(b"data: ")
        program.process.terminate()
        assert "stopping" in answer.read().decode().split("\n\n")[-2]
    program.result()
