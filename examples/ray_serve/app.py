"""Replicas of `qkvcache serve` behind one address, with Ray Serve: a conversation returns to the replica that has its pages.

    serve run examples.ray_serve.app:app model=smollm2 replicas=2 store=/shared/sessions
    python examples/serve_client.py --model smollm2 "Name three fruits." "What is the capital of France?"

`Front` names the conversation of a request, by the header `x-session-id` or by the beginning of its prompt, and Ray's
router sends it to the replica that this name hashes to; to the next one, if that has `together` requests already. Where
a replica is lost, its conversations go on in others, which find their pages in the folder `store`. Replicas ask for an API
key if QKVCACHE_API_KEY has one, or several, separated by spaces.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Gauge

from qkvcache.batching.api import answer_of
from qkvcache.batching.fields import Refusal
from qkvcache.batching.gate import body_of
from qkvcache.batching.server import Server

BEGINNING = 256
"""Characters of a prompt without messages that name its conversation."""
MOST_BYTES, READ_SECONDS = 16 * 10**6, 10.0
"""Of a request, in `Front`; replicas have the limit of their model."""
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers", "client")
front = FastAPI()


class Options(BaseModel):
    """Options of `Server`."""

    device: str = "auto"
    dtype: str = "auto"
    cb_num_blocks: int | None = None
    cb_max_batch_tokens: int | None = None
    store: str | None = None
    store_bytes: int = 50 * 10**9
    api_keys: list[str] = Field(default_factory=lambda: os.environ.get("QKVCACHE_API_KEY", "").split())


class Arguments(Options):
    """Arguments after `serve run examples.ray_serve.app:app`, and under `args` in a file for `serve deploy`."""

    model: str = "demo"
    format: str = "turboquant_4bit_nc"
    replicas: int = 2
    gpus: float = 0
    """GPUs of a replica."""
    together: int = 64
    """Requests that a replica takes at once."""


@serve.deployment
class Replica:
    """The server of `qkvcache serve`, called by Ray in place of uvicorn."""

    def __init__(self, model: str, cache: dict[str, Any], options: dict[str, Any]):
        self.server = Server(model, cache, **options)
        self.gauges = {name: Gauge(f"qkvcache_{name}") for name in asdict(self.server.metrics())}

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """The ASGI messages that answer a request."""
        messages, received = asyncio.Queue(), [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            return received.pop() if received else await asyncio.Future()

        task = asyncio.create_task(self.server.app(scope | {"state": {}}, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while message := await messages.get():
                yield message
        finally:
            task.cancel()  # the client has left

    def check_health(self) -> None:
        """Ray calls it every ten seconds, and replaces a replica where it raises."""
        if not self.server.alive:
            raise RuntimeError("the thread of continuous batching has died")
        for name, value in asdict(self.server.metrics()).items():
            self.gauges[name].set(value)

    def __del__(self) -> None:
        self.server.close()


def conversation(body: bytes) -> str:
    """A name that all turns of a conversation have: that of its messages up to the first of the user. "": there is no prompt."""
    try:
        given = json.loads(body)
        prompt = given.get("messages") or given.get("input") or given.get("prompt")
        end = BEGINNING if isinstance(prompt, str) else [message["role"] for message in prompt].index("user") + 1
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return ""
    return sha256(json.dumps(prompt[:end]).encode()).hexdigest()


@serve.deployment(max_ongoing_requests=1000)
@serve.ingress(front)
class Front:
    def __init__(self, replicas: DeploymentHandle):
        self.replicas = replicas.options(stream=True, method_name="answer")

    @front.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(self, request: Request) -> StreamingResponse | JSONResponse:
        try:
            body = await body_of(request.receive, MOST_BYTES, READ_SECONDS)
        except Refusal as error:
            return answer_of(error)
        replicas = self.replicas.options(session_id=request.headers.get("x-session-id") or conversation(body))
        for tries_left in (1, 0):
            messages = aiter(replicas.remote({name: request.scope[name] for name in SCOPE}, body))
            try:
                begin = await anext(messages)
                break
            except RayActorError:  # the replica is lost before its answer has begun: one other answers, since the request may be why
                if not tries_left:
                    raise
        headers = {name.decode(): value.decode() for name, value in begin["headers"]}
        return StreamingResponse((message.get("body", b"") async for message in messages), begin["status"], headers)


def app(arguments: Arguments) -> serve.Application:
    options = arguments.model_dump(include=set(Options.model_fields)) | {"metrics_interval": 0}
    replicas = Replica.options(
        num_replicas=arguments.replicas,
        max_ongoing_requests=arguments.together,
        graceful_shutdown_timeout_s=60,  # for running requests
        ray_actor_options={"num_cpus": 1, "num_gpus": arguments.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class="ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
        ),
    )
    return Front.bind(replicas.bind(arguments.model, {"format": arguments.format}, options))
