"""The fields of a request to `qkvcache serve`. Each has an effect, has a value that asks for nothing, or is refused by
its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

UNSUPPORTED = "unsupported_parameter"


class Refusal(Exception):
    """Raised for a request that gets no answer: an HTTP status, and the fields of OpenAI's error body."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _parts(value: Any) -> bool:
    return _objects(value) and all(_text(part.get("text" if part.get("type") in TEXTS else "type")) for part in value)


def _messages(value: Any) -> bool:
    return _objects(value) and bool(value) and all(map(_message, value))


def _message(message: dict) -> bool:
    content, calls = message.get("content"), message.get("tool_calls")
    has_content = _text(content) or _parts(content) or (content is None and _objects(calls))
    return _text(message.get("role")) and has_content


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _input(value: Any) -> bool:
    return bool(value) and (_text(value) or _objects(value))


def _stream_options(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"include_usage"} and isinstance(value["include_usage"], bool)


def _strings(value: Any) -> bool:
    texts = [value] if _text(value) else value
    return isinstance(texts, list) and 1 <= len(texts) <= 16 and all(_text(text) and text for text in texts)


TEXTS = ("text", "input_text", "output_text")
"""Types of the message parts that a language model reads."""
MESSAGES = "a list of at least one message, each with a role and a content of text"
POSITIVE: tuple[Callable[[Any], bool], str] = (lambda value: _integer(value) and value >= 1, "an integer of at least 1")
ANYTHING: tuple[Callable[[Any], bool], str] = (lambda value: True, "anything")
ACCEPTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_text, "a string"),
    "prompt": (_text, "a string"),
    "messages": (_messages, MESSAGES),
    "input": (_input, "a text or a list of items"),
    "instructions": (_text, "a string"),
    "stream": (lambda value: isinstance(value, bool), "true or false"),
    "stream_options": (_stream_options, '{"include_usage": true or false}'),
    "max_tokens": POSITIVE,
    "max_completion_tokens": POSITIVE,
    "max_output_tokens": POSITIVE,
    "n": (lambda value: _integer(value) and 1 <= value <= 128, "an integer from 1 to 128"),
    "temperature": (lambda value: _number(value) and 0 <= value <= 2, "a number from 0 to 2"),
    "top_p": (lambda value: _number(value) and 0 < value <= 1, "a number above 0, at most 1"),
    "seed": (_integer, "an integer"),
    "stop": (_strings, "a string, or a list of at most 16 strings, none of them empty"),
    "tools": (_objects, "a list of objects"),
    "chat_template_kwargs": (lambda value: isinstance(value, dict), "an object"),
    "user": ANYTHING,
    "metadata": ANYTHING,
}
"""Fields that have an effect or label the request, each with a test of its value and a description of valid values."""

NOTHING: dict[str, list[Any]] = {
    "background": [False],
    "best_of": [1],
    "echo": [False],
    "frequency_penalty": [0, 0.0],
    "functions": [[]],
    "include": [[]],
    "logit_bias": [{}],
    "logprobs": [False],
    "modalities": [["text"]],
    "parallel_tool_calls": [True],
    "presence_penalty": [0, 0.0],
    "reasoning": [{}],
    "response_format": [{"type": "text"}],
    "service_tier": ["auto", "default"],
    "store": [False],
    "suffix": [""],
    "text": [{}, {"format": {"type": "text"}}],
    "tool_choice": ["auto"],
    "top_logprobs": [0],
    "truncation": ["disabled"],
}
"""Values of other fields that ask for nothing; clients send them by default."""


@dataclass(frozen=True)
class Endpoint:
    """A path, its required field, and the fields that have an effect there."""

    required: str
    fields: frozenset[str]

    def check(self, body: Any) -> dict[str, Any]:
        """The fields of a request that have an effect. Raises Refusal for fields that are wrong or would be ignored."""
        if not isinstance(body, dict):
            raise Refusal("the body must be a JSON object")
        given = {name: value for name, value in body.items() if value is not None}
        if self.required not in given:
            raise Refusal(f"{self.required} is missing", self.required)
        found = {}
        for name, value in given.items():
            if name in self.fields:
                accepts, expected = ACCEPTED[name]
                if not accepts(value):
                    raise Refusal(f"{name}={value!r:.80}: expected {expected}", name)
                found[name] = value
            elif not any((type(value), value) == (type(nothing), nothing) for nothing in NOTHING.get(name, ())):
                raise Refusal(f"{name} is not supported", name, code=UNSUPPORTED)
        return found


_ALL = frozenset({"model", "stream", "temperature", "top_p", "seed", "user", "metadata"})
_SAMPLES = _ALL | {"max_tokens", "n", "stop", "stream_options"}
ENDPOINTS = {
    "/v1/completions": Endpoint("prompt", _SAMPLES | {"prompt"}),
    "/v1/chat/completions": Endpoint("messages", _SAMPLES | {"messages", "max_completion_tokens", "tools", "chat_template_kwargs"}),
    "/v1/responses": Endpoint("input", _ALL | {"input", "instructions", "max_output_tokens", "tools"}),
}
