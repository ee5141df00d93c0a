"""The front of `qkvcache serve`: the paths of OpenAI, before the handlers of transformers' server.

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

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.utils import BaseHandler, CBWorkerDeadError

from .fields import Fields, Refusal, Response
from .gate import body_of
from .prompts import Unrendered
from .requests import ASKED, Asked, StopStrings

logger = logging.getLogger(__name__)
BY_BATCH = {"temperature", "top_p", "seed", "stop"}
"""Fields that the batch takes from `Asked`, not from transformers' handlers."""
HANDLED = {"n", "stream_options", "response_format", "cache_salt", "prompt_cache_key", "user", "metadata"}
"""Fields that transformers' handlers never get."""


def stopping() -> Refusal:
    return Refusal("the server is stopping: send the request to another one", status=503)


def refusal(error: Exception, asked: Asked | None = None) -> Refusal:
    """The refusal that tells the client about an error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HTTPException):
        return Refusal(str(error.detail), status=error.status_code)
    if isinstance(error, ClientDisconnect):
        return Refusal("the client has left", status=499)
    if isinstance(error, CBWorkerDeadError):
        return dead()
    if asked is None or not asked.admitted:
        if isinstance(error, KeyError):
            return Refusal(f"{error} is missing in a part of the request")
        if isinstance(error, ValueError | TypeError | LookupError | RecursionError) or type(error).__module__.startswith("jinja2"):
            return Refusal(str(error))
        if isinstance(error, MemoryError):
            return Refusal(str(error), status=413)
        if isinstance(error, RuntimeError):
            return Refusal(str(error), status=503)
    return failed(error, asked)


def dead() -> Refusal:
    return Refusal("the thread that generates has died: send the request to another server", status=503)


def failed(error: Any, asked: Asked | None) -> Refusal:
    """The refusal of a request that failed while it ran: the log has the reason, which is none of the client's."""
    name = uuid.uuid4().hex if asked is None else asked.request_id
    logger.error("request %s failed: %s", name, error, exc_info=error if isinstance(error, Exception) else None)
    return Refusal(f"the request failed: the server's log has the reason, under {name}", status=500)


def answer_of(error: Exception) -> JSONResponse:
    found = refusal(error)
    return JSONResponse(found.body, found.status, found.headers)


class Front:
    """The ASGI application of a path of a `server.Server`: requests with these `fields`, which `handler` answers."""

    def __init__(self, server: Any, handler: BaseHandler, fields: type[Fields]):
        self.server, self.handler, self.fields = server, handler, fields

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        server = self.server
        try:
            fields: Any = self.fields.of(await body_of(receive, server.max_body_bytes, server.limits.read_seconds))
            if server.stopping:
                raise stopping()
            server.check(fields)
            request = Request(scope)
            server.admit(request.state.client, fields.n)
            exchange = Exchange(server, self.handler, fields, request.state.client, server.sharing(request, fields))
        except (Refusal, ClientDisconnect) as error:
            server.observed.add(refusal(error).outcome)
            await answer_of(error)(scope, receive, send)
        else:
            await exchange.run(scope, receive, send)


def schema_of(fields: Fields) -> dict | None:
    """The JSON schema that answers follow; None: any text does."""
    return getattr(fields, "schema_of_answer", None)


class Exchange:
    """A request and its answers."""

    def __init__(self, server: Any, handler: Any, fields: Any, client: str | None, sharing: dict[str, Any]):
        self.server, self.handler, self.fields, self.client, self.sharing = server, handler, fields, client, sharing
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[Choice, str | None | Refusal]] = asyncio.Queue()
        """A choice with a part of its answer, or None at its end; or any choice with what ends the request."""
        self.id, self.begin, self.outcome, self.started = uuid.uuid4().hex, time.perf_counter(), "cancelled", False
        self.choices = [Choice(self._asked(i), fields.stop, i) for i in range(fields.n)]

    @property
    def waiting(self) -> int:
        """Answers that have no token yet."""
        return sum(not choice.done and not choice.asked.first_token for choice in self.choices)

    def _asked(self, index: int) -> Asked:
        options = self.fields.model_dump(include=BY_BATCH - {"stop"}, exclude_unset=True) | self.sharing
        if "seed" in options:
            options["seed"] += index
        if self.fields.stop:
            options["stop"] = StopStrings(self.server.tokenizer, self.fields.stop)
        return Asked(f"{self.id}-{index}" if index else self.id, options, self.client)

    def end(self, error: Refusal) -> None:
        """Ends the request with an error, from the thread of the event loop."""
        self.events.put_nowait((self.choices[0], error))

    async def run(self, scope: dict, receive: Callable, send: Callable) -> None:
        self.server.exchanges.add(self)
        prompt = asyncio.create_task(self._rendered())
        tasks = [asyncio.create_task(self._left(receive)), prompt]
        for choice in self.choices:
            context = copy_context()
            context.run(ASKED.set, choice.asked)
            tasks.append(asyncio.create_task(self._handle(choice, prompt), context=context))
        try:
            if self.fields.stream:
                await self._answer_stream(send)
            else:
                await JSONResponse(await self._whole())(scope, receive, send)
            self.outcome = "finished"
        except Refusal as error:
            self.outcome = error.outcome
            if self.started:
                await _event(send, json.dumps(error.body), last=True)
            else:
                await answer_of(error)(scope, receive, send)
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
        self.end(refusal(ClientDisconnect()))

    @property
    def _body(self) -> dict[str, Any]:
        """What the handlers of transformers get."""
        handled = HANDLED | (BY_BATCH if self.server.options_by_batch else {"stop"})
        return self.fields.model_dump(exclude=handled, exclude_unset=True) | {"stream": self.fields.stream}

    async def _rendered(self) -> Any:
        """The prompt of all choices, which get their grammar."""
        ASKED.set(Asked(self.id))
        try:
            await self.handler.handle_request(self._body, self.id)
        except Unrendered as found:
            prompt, grammar = await self.server.render(self.client, found.call, schema_of(self.fields))
        for choice in self.choices:
            if grammar is not None:
                choice.asked.options["grammar"] = grammar.copy()
        return prompt

    async def _handle(self, choice: Choice, prompt: asyncio.Task) -> None:
        """Runs the handler of transformers for a choice."""
        try:
            choice.asked.prompt = await prompt
            answer = await self.handler.handle_request(self._body, choice.asked.request_id)
            if isinstance(answer, StreamingResponse):
                self.events.put_nowait((choice, ""))  # it begins
                async for part in answer.body_iterator:
                    self.events.put_nowait((choice, str(part)))
            else:
                self.events.put_nowait((choice, answer.body.decode()))
            self.events.put_nowait((choice, None))
        except Exception as error:
            self.end(refusal(error, choice.asked))

    async def _parts(self) -> AsyncIterator[tuple[Choice, str]]:
        """Yields the parts of the answers until all are done. Raises Refusal if a handler refuses or the client leaves."""
        left = len(self.choices)
        while left:
            choice, part = await self.events.get()
            if isinstance(part, Refusal):
                raise part
            if part is None:
                choice.done = True
                left -= 1
            else:
                yield choice, part

    async def _whole(self) -> dict:
        found = {choice.index: choice.whole(json.loads(part)) async for choice, part in self._parts()}
        answer = found[0]
        if "choices" in answer:
            choices = [found[i]["choices"][0] for i in range(len(found))]
            answer |= {"id": self.id, "choices": choices, "usage": self._sum()}
        return answer

    async def _answer_stream(self, send: Callable) -> None:
        """Sends the parts as they come. With `include_usage`, a last chunk without choices has the usage, which is null in the others."""
        chunk: dict[str, Any] = {}
        counted = self.fields.stream_options.include_usage
        usage = {"usage": None} if counted else {}
        async for choice, part in self._parts():
            if not self.started:
                self.started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            for data in choice.events(part):
                choice.asked.first_token = choice.asked.first_token or time.perf_counter()
                if "choices" in data:
                    data.pop("usage", None)
                    data |= {"id": self.id} | usage
                    chunk = data
                await _event(send, json.dumps(data))
        if counted:
            await _event(send, json.dumps(chunk | {"choices": [], "usage": self._sum()}))
        if isinstance(self.fields, Response):
            await send({"type": "http.response.body", "body": b""})
        else:
            await _event(send, "[DONE]", last=True)

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
        self.done = False
        self.usage: dict[str, int] = {}
        self._stop, self._held, self._stopped = stop, "", False

    def whole(self, answer: dict) -> dict:
        if "choices" in answer:
            choice, self.usage = answer["choices"][0], answer["usage"]
            holder, name = (choice, "text") if "text" in choice else (choice["message"], "content")
            if holder.get(name):
                holder[name] = self._cut(holder[name], last=True)
            self._finish(choice)
        else:
            self._count(answer)
        return answer

    def events(self, part: str) -> list[dict]:
        return [event for line in part.split("\n\n") if line and (event := self._event(line))]

    def _event(self, line: str) -> dict | None:
        try:
            data = json.loads(line.removeprefix("data: "))
        except ValueError:  # transformers does not quote the message
            data = {"error": line.removeprefix('data: {"error": "').removesuffix('"}')}
        if isinstance(data.get("error"), str):
            raise failed(data["error"], self.asked)
        if "response" in data:
            self._count(data["response"])
        if "choices" not in data:
            return data
        choice = data["choices"][0]
        holder, name = (choice, "text") if "text" in choice else (choice["delta"], "content")
        text, last = holder.get(name), bool(choice.get("finish_reason"))
        if text or last:
            holder[name] = self._cut(text or "", last)
        if last:
            self.usage = data.get("usage") or {}
            self._finish(choice)
        elif text and not holder[name]:
            return None
        choice["index"] = self.index
        return data

    def _cut(self, text: str, last: bool) -> str:
        """The next part of the answer, before a stop string and, unless it is the last part, before what may be the beginning of one."""
        if self._stopped:
            return ""
        text = self._held + text
        ends = [text.find(string) for string in self._stop if string in text]
        sizes = ((string, size) for string in self._stop for size in range(1, min(len(string), len(text) + 1)))
        begins = [size for string, size in sizes if text.endswith(string[:size])]
        self._stopped = bool(ends)
        end = min(ends) if ends else len(text) - max(begins, default=0) if not last else len(text)
        self._held = text[end:]
        return text[:end]

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


async def _event(send: Callable, data: str, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": not last})
