"""The front of `qkvcache serve`: an ASGI middleware before transformers' handlers.

A request is checked, given a unique id, and split into the `n` answers that it asks for. The handlers' answers are cut
at stop strings, completed and merged. A request ends when its client leaves, and refusals have OpenAI's error body.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextvars import copy_context
from typing import Any

from transformers.cli.serving.utils import CBWorkerDeadError

from .fields import ENDPOINTS, Endpoint, Refusal
from .requests import ASKED, Asked, StopStrings

logger = logging.getLogger(__name__)
OTHER = {"/v1/systemone", "/v1/audio/transcriptions"}
"""Paths of transformers' server that call the model themselves."""


def stopping() -> Refusal:
    return Refusal("the server is stopping: send the request to another one", status=503)


def client_left() -> Refusal:
    """The answer that nobody reads: without one, the middleware of transformers fails."""
    return Refusal("the client has left", status=499)


def refusal(error: BaseException, asked: Asked | None = None) -> Refusal:
    """The refusal that tells the client about a handler's error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, CBWorkerDeadError):
        return Refusal(str(error), status=503)
    if asked is None or not asked.admitted:
        if isinstance(error, MemoryError):
            return Refusal(str(error), status=413)
        if isinstance(error, RuntimeError):
            return Refusal(str(error), status=503)
        if isinstance(error, ValueError | TypeError | LookupError) or type(error).__module__.startswith("jinja2"):
            return Refusal(f"{error}")
    logger.error("a request failed", exc_info=error)
    return Refusal(str(error), status=500)


class Front:
    """The middleware of a `server.Server`."""

    def __init__(self, app: Callable, server: Any):
        self.app, self.server = app, server

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path == "/health" and self.server.stopping:
            return await _respond(send, stopping())
        if scope["type"] == "http" and path in OTHER and self.server.options_by_batch:
            return await _respond(send, Refusal(f"{path} is not served with continuous batching", status=404))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in ENDPOINTS:
            return await self.app(scope, receive, send)
        try:
            body = await _read(receive)
            if self.server.stopping:
                raise stopping()
            exchange = Exchange(self, scope, ENDPOINTS[path], body)
        except Refusal as error:
            self.server.observed.add("refused")
            await _respond(send, error)
        else:
            await exchange.run(receive, send)


class Exchange:
    """A request and its answers."""

    def __init__(self, front: Front, scope: dict, endpoint: Endpoint, body: bytes):
        self.app, self.server, self.scope, self.loop = front.app, front.server, scope, asyncio.get_running_loop()
        try:
            given = json.loads(body)
        except ValueError as error:
            raise Refusal(f"the body is not JSON: {error}") from None
        self.fields = self.server.check(endpoint.check(given))
        self.stream = self.fields.get("stream", False)
        self.events: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        """Events with the number of their choice: a message of its handler, the error that ended it, or None at its
        end.

        Choice -1 is the request: an error, or None if the client has left.
        """
        stop = self.fields.get("stop", [])
        self.stop = [stop] if isinstance(stop, str) else stop
        self.id, self.begin, self.outcome = uuid.uuid4().hex, time.perf_counter(), "cancelled"
        count = self.fields.get("n", 1)
        self.choices = [Choice(self._asked(i), self.stop, i) for i in range(count)]
        self.usage = self.fields.get("stream_options", {}).get("include_usage", True)

    def _asked(self, index: int) -> Asked:
        names = self.fields.keys() & {"temperature", "top_p", "seed"}
        options: dict[str, Any] = {name: self.fields[name] for name in names}
        if "seed" in options:
            options["seed"] += index
        if self.stop:
            options["stop"] = StopStrings(self.server.tokenizer, self.stop)
        return Asked(f"{self.id}-{index}" if index else self.id, options)

    def end(self, error: Refusal) -> None:
        """Ends the request with an error, from the thread of the event loop."""
        self.events.put_nowait((-1, error))

    async def run(self, receive: Callable, send: Callable) -> None:
        self.server.exchanges.add(self)
        tasks = [asyncio.create_task(self._left(receive))]
        for i, choice in enumerate(self.choices):
            context = copy_context()
            context.run(ASKED.set, choice.asked)
            tasks.append(asyncio.create_task(self._handle(i, choice.asked), context=context))
        try:
            await (self._answer_stream(send) if self.stream else self._answer_whole(send))
        finally:
            self.server.exchanges.discard(self)
            first = min(choice.asked.first_token for choice in self.choices)
            tokens = max(choice.usage.get("completion_tokens", 0) for choice in self.choices)
            self.server.observed.add(self.outcome, self.begin, first, tokens)
            for task in tasks:
                task.cancel()
            for choice in self.choices:
                if not choice.done:
                    self.server.cancel(choice.asked)

    async def _left(self, receive: Callable) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.events.put_nowait((-1, None))

    async def _handle(self, index: int, asked: Asked) -> None:
        """Runs the handler of transformers for a choice."""
        handled = {"n", "stream_options", "user", "metadata"}
        if self.server.options_by_batch:
            handled |= {"temperature", "top_p", "seed", "stop"}
        fields = {name: value for name, value in self.fields.items() if name not in handled} | {"stream": self.stream}
        messages = [{"type": "http.request", "body": json.dumps(fields).encode()}]
        headers = [(name, value) for name, value in self.scope["headers"] if name != b"content-type"]
        scope = self.scope | {
            "headers": [*headers, (b"content-type", b"application/json")],
            "state": self.scope["state"] | {"request_id": asked.request_id},
        }

        async def receive() -> dict:
            return messages.pop() if messages else await asyncio.Future()  # leaving cancels this task

        async def send(message: dict) -> None:
            self.events.put_nowait((index, message))

        try:
            await self.app(scope, receive, send)
            self.events.put_nowait((index, None))
        except Exception as error:
            self.events.put_nowait((index, refusal(error, asked)))

    async def _messages(self) -> AsyncIterator[tuple[Choice, dict]]:
        """Yields the messages of the handlers until all are done. Raises Refusal if a handler refuses or the client
        leaves."""
        left = len(self.choices)
        while left:
            index, message = await self.events.get()
            if isinstance(message, Refusal):
                raise message
            if index < 0:
                raise client_left()
            choice = self.choices[index]
            if message is None:
                choice.done = True
                left -= 1
            else:
                if message["type"] == "http.response.start":
                    choice.status = message["status"]
                yield choice, message

    async def _answer_whole(self, send: Callable) -> None:
        try:
            async for choice, message in self._messages():
                choice.received += message.get("body", b"")
            wrong = next((choice for choice in self.choices if choice.status != 200), None)
            if wrong is not None:
                raise _refusal_of(wrong)
            answers = [choice.whole(json.loads(choice.received)) for choice in self.choices]
        except Refusal as error:
            self._refused(error)
            await _respond(send, error)
        else:
            self.outcome, answer = "finished", answers[0]
            if "choices" in answer:
                answer |= {"id": self.id, "choices": [found["choices"][0] for found in answers], "usage": self._sum()}
            await _respond(send, answer)

    def _refused(self, error: Refusal) -> None:
        self.outcome = {499: "cancelled", 500: "failed"}.get(error.status, "refused")

    async def _answer_stream(self, send: Callable) -> None:
        started = False
        try:
            async for choice, message in self._messages():
                if choice.status != 200:
                    choice.received += message.get("body", b"")
                    if message["type"] == "http.response.body" and not message.get("more_body"):
                        raise _refusal_of(choice)
                elif message["type"] == "http.response.start":
                    if not started:
                        started = True
                        await send(message)
                else:
                    for data in choice.events(message.get("body", b"")):
                        choice.asked.first_token = choice.asked.first_token or time.perf_counter()
                        await self._event(send, data, choice)
            self.outcome = "finished"
            if self.scope["path"] != "/v1/responses":
                await _event(send, "[DONE]")
        except Refusal as error:
            self._refused(error)
            if not started:
                await _respond(send, error)
                return
            await _event(send, json.dumps(error.body))
        await send({"type": "http.response.body", "body": b""})

    async def _event(self, send: Callable, data: dict, choice: Choice) -> None:
        if "choices" in data:
            data["id"] = self.id
            ended = data.pop("usage", None) is not None and all(other.usage for other in self.choices)
            if ended and self.usage:
                data["usage"] = self._sum()
        await _event(send, json.dumps(data))

    def _sum(self) -> dict[str, Any]:
        """The usage of all choices: the prompt counts once."""
        first = self.choices[0]
        prompt, tokens = first.usage["prompt_tokens"], sum(choice.usage["completion_tokens"] for choice in self.choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        return counts | {"prompt_tokens_details": {"cached_tokens": first.asked.cached_tokens}}


class Choice:
    """One of a request's answers, as its handler sends it."""

    def __init__(self, asked: Asked, stop: list[str], index: int):
        self.asked, self.index = asked, index
        self.status, self.received, self.done = 200, b"", False
        self.usage: dict[str, int] = {}
        self._stop, self._held, self._stopped = stop, "", False

    def whole(self, answer: dict) -> dict:
        if "choices" in answer:
            choice, self.usage = answer["choices"][0], answer["usage"]
            holder, name = (choice, "text") if "text" in choice else (choice["message"], "content")
            if holder.get(name):
                holder[name] = self._cut(holder[name]) + self._rest()
            self._finish(choice)
        else:
            self._count(answer)
        return answer

    def events(self, received: bytes) -> list[dict]:
        """The events that are complete with these bytes."""
        *lines, self.received = (self.received + received).split(b"\n\n")
        return [event for line in lines for event in self._event(line.decode())]

    def _event(self, line: str) -> list[dict]:
        try:
            data = json.loads(line.removeprefix("data: "))
        except ValueError:  # transformers does not quote the message
            data = {"error": line.removeprefix('data: {"error": "').removesuffix('"}')}
        if isinstance(data.get("error"), str):
            raise Refusal(data["error"], status=500)
        if "response" in data:
            self._count(data["response"])
        if "choices" not in data:
            return [data]
        choice = data["choices"][0]
        holder, name = (choice, "text") if "text" in choice else (choice["delta"], "content")
        text = holder.get(name)
        if text:
            holder[name] = self._cut(text)
        if choice.get("finish_reason"):
            holder[name] = (holder.get(name) or "") + self._rest()
            self.usage = data.get("usage") or {}
            self._finish(choice)
        elif text and not holder[name]:
            return []
        choice["index"] = self.index
        return [data]

    def _cut(self, text: str) -> str:
        """The part of the answer so far in which no stop string can begin, or the part before a stop string."""
        if self._stopped or not self._stop:
            return "" if self._stopped else text
        text = self._held + text
        ends = [text.find(string) for string in self._stop if string in text]
        if ends:
            self._stopped, self._held = True, ""
            return text[: min(ends)]
        sizes = ((string, size) for string in self._stop for size in range(1, len(string)))
        begins = (size for string, size in sizes if text.endswith(string[:size]))
        held = max(begins, default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _rest(self) -> str:
        rest, self._held = self._held, ""
        return rest

    def _finish(self, choice: dict) -> None:
        if self._stopped:
            choice["finish_reason"] = "stop"
        elif choice["finish_reason"] == "stop" and self.usage.get("completion_tokens") == self.asked.max_new_tokens:
            choice["finish_reason"] = "length"  # the model's last position
        choice["index"] = self.index

    def _count(self, response: dict) -> None:
        """Fills the cached tokens of an answer of /v1/responses."""
        if response.get("usage"):
            response["usage"]["input_tokens_details"] = {"cached_tokens": self.asked.cached_tokens}


def _refusal_of(choice: Choice) -> Refusal:
    """The error in a handler's answer, which the server's exception handlers made."""
    error = json.loads(choice.received)["error"]
    return Refusal(error["message"], error["param"], choice.status, error["code"])


async def _read(receive: Callable) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_left()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _respond(send: Callable, answer: dict | Refusal) -> None:
    status, found = (answer.status, answer.body) if isinstance(answer, Refusal) else (200, answer)
    body = json.dumps(found).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _event(send: Callable, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
