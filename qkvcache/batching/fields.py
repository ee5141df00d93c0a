"""The fields of a request to `qkvcache serve`. Each has an effect, has a value that asks for nothing, or is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

UNSUPPORTED = "unsupported_parameter"
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


class Refusal(Exception):
    """Raised for a request that gets no answer: an HTTP status, and the fields of OpenAI's error body."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Message(BaseModel, extra="allow"):
    role: str
    content: str | list[dict] | None = None
    tool_calls: list[dict] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.tool_calls is None:
            raise ValueError("a message has a content, or tool_calls")
        return self


class StreamOptions(BaseModel, extra="forbid"):
    include_usage: bool = True


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(min_length=1)]


class Fields(BaseModel, extra="forbid", strict=True):
    """The fields that have an effect, or label the request, at all paths."""

    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: int | None = None
    cache_salt: Name | None = None
    prompt_cache_key: Name | None = None
    user: Any = None
    metadata: Any = None

    @model_validator(mode="before")
    @classmethod
    def _that_ask_for_something(cls, given: Any) -> Any:
        def asks(name: str, value: Any) -> bool:
            return value is not None and not any((type(value), value) == (type(nothing), nothing) for nothing in NOTHING.get(name, ()))

        return {name: value for name, value in given.items() if asks(name, value)} if isinstance(given, dict) else given

    @classmethod
    def of(cls, body: bytes) -> Fields:
        """The fields of a JSON object. Raises Refusal for fields that are wrong or would be ignored."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            found = error.errors(include_url=False)
        kind, place, value = (found[0][key] for key in ("type", "loc", "input"))  # type: ignore[literal-required]
        if not place:
            raise Refusal(f"the body must be a JSON object: {found[0]['msg']}")
        name = str(place[0])
        if kind == "extra_forbidden" and len(place) == 1:
            raise Refusal(f"{name} is not supported", name, code=UNSUPPORTED)
        if kind == "missing" and len(place) == 1:
            raise Refusal(f"{name} is missing", name)
        raise Refusal(f"{'.'.join(map(str, place))}={value!r:.80}: {found[0]['msg']}", name)


class Samples(Fields):
    """Those of answers with choices."""

    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: Annotated[list[Text], BeforeValidator(_listed), Field(min_length=1, max_length=16)] = []
    stream_options: StreamOptions = StreamOptions()


class Completion(Samples):
    prompt: str


class Chat(Samples):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: list[dict] | None = None
    chat_template_kwargs: dict | None = None


class Response(Fields):
    n: ClassVar = 1
    stop: ClassVar[list[str]] = []
    input: Text | Annotated[list[dict], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[dict] | None = None
