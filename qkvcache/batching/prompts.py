"""Prompts of requests over HTTP: rendered and tokenized once a request, outside of the event loop.

transformers' handlers do both in the event loop, once for each of a request's answers. Here the handler is called first without a prompt:
it ends where it would render one (`Unrendered`). The front makes the prompt in a thread, and calls the handler again, once for each
answer, which then gets the prompt (`Asked.prompt`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from transformers.utils.chat_parsing import ResponseParser

from .requests import ASKED, check_prompt

THREADS = 4
TAIL = 64
"""Tokens at the end of a prompt in which a template begins the answer, such as `<|im_start|>assistant` and `<think>`."""
PIECE = 16
"""Characters of an answer that transformers' parser gets at once: its time grows with the square of their number."""


class Unrendered(Exception):  # noqa: N818  it is no error
    """Raised where a handler renders or tokenizes a prompt; `call` does it."""

    def __init__(self, call: Callable[[], Any]):
        super().__init__()
        self.call = call


class Processor:
    """The tokenizer or processor that handlers see."""

    def __init__(self, processor: Any):
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._processor, name)
        return Processor(found) if name == "tokenizer" else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _prompt(partial(self._processor, *args, **kwargs))

    def decode(self, ids: Any, **kwargs: Any) -> Any:
        """As the tokenizer does. Handlers decode a prompt without options: its end alone, since they parse it all if it has no beginning of
        an answer, in time that grows with the square of its length."""
        return self._processor.decode(ids if kwargs or ASKED.get() is None else ids[-TAIL:], **kwargs)

    def parse_response(self, ids: Any, template: Any, prefix: str, tools: Any = None) -> dict:
        """The message of an answer, as the tokenizer parses it, in time that grows with its length."""
        parser, text = ResponseParser(template, prefix=prefix, tools=tools), self._processor.decode(ids)
        for begin in range(0, len(text), PIECE):
            parser.feed(text[begin : begin + PIECE])
        return parser.finalize()[0]

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return _prompt(partial(self._processor.apply_chat_template, *args, **kwargs))


def _prompt(call: Callable[[], Any]) -> Any:
    asked = ASKED.get()
    if asked is None:  # not of a handler
        return call()
    if asked.prompt is None:
        raise Unrendered(call)
    return asked.prompt


class Renderer:
    """Threads that make prompts, at most one at a time for each client."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "render")
        self._turns: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()

    async def run(self, client: str | None, call: Callable[[], Any]) -> Any:
        """What `call` returns. Raises what it raises."""
        turn = self._turns.setdefault(client, asyncio.Lock())
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def made(model: Any, call: Callable[[], Any]) -> Any:
    """The prompt that `call` makes. Raises what it raises, and what `check_prompt` does."""
    inputs = call()
    ids = inputs["input_ids"]
    check_prompt(model.config, ids if isinstance(ids, list) else ids[0].tolist(), None)
    return inputs
