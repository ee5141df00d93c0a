"""Servers of the embedded model in a thread, and what clients send to them."""

from __future__ import annotations

import http.client
import json
from contextlib import contextmanager

import pytest

from qkvcache import models

from .requests import PATIENCE, listening

OPTIONS = {"host": "127.0.0.1", "port": 0, "device": "cpu", "dtype": "float32", "cb_num_blocks": 16, "cb_max_batch_tokens": 512}
WORDS = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
"""The same as words of a command."""
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def saved(folder, bare: bool = False) -> str:
    """The embedded model in `folder`, with a chat template; `bare`: with a tokenizer that adds no token to a text."""
    model, tokenizer = models.load("demo")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    if bare:
        tokenizer.backend_tokenizer.post_processor = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@contextmanager
def served(model: str = "demo", cache=(("format", "int8"),), **options):
    """A server that answers. What its thread raises is in its list `raised`."""
    pytest.importorskip("uvicorn")
    from qkvcache.batching.server import Server

    server = Server(model, dict(cache), **{"metrics_interval": 0} | OPTIONS | options)
    server.raised = []

    def run() -> None:
        try:
            server.run()
        except RuntimeError as error:
            server.raised.append(error)

    with listening(server, run):
        yield server


def place(server) -> tuple[str, int]:
    """Host and port."""
    return server.server.servers[0].sockets[0].getsockname()


def address(server) -> str:
    return "http://{}:{}".format(*place(server))


def send(server, path: str, body: dict | bytes | None = None, method: str | None = None, **headers: str):
    """Status, body and headers of what a server, or an address, answers: of a stream the events, of others the JSON, or the text where it
    is none."""
    where = server if isinstance(server, str) else address(server)
    connection = http.client.HTTPConnection(where.removeprefix("http://"), timeout=PATIENCE)
    try:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request(method or ("GET" if data is None else "POST"), path, data, {"content-type": "application/json"} | headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if text.startswith("data: "):
        events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
        return answer.status, [json.loads(event) for event in events if event != "[DONE]"], answer.headers
    return answer.status, json.loads(text) if text[:1] in ("{", "[") else text, answer.headers


def key_of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
