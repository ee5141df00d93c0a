"""The fields of a request to `qkvcache serve`. Each has an effect, has a value that asks for nothing, or is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

UNSUPPORTED = "unsupported_parameter"
KEYS, MESSAGES, TOOLS, STOPS, LONGEST_STOP = 64, 4096, 128, 4, 256
"""The most fields, messages (and parts of one), tools (and calls of them) and stop strings of a request; characters of a stop string."""
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

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None, headers: dict[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def outcome(self) -> str:
        """Under which `metrics.Observed` counts it."""
        return {401: "unauthorized", 429: "limited", 499: "cancelled", 500: "failed"}.get(self.status, "refused")

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Function(BaseModel, extra="allow"):
    name: str
    arguments: str | dict


class ToolCall(BaseModel, extra="allow"):
    function: Function


Parts = Annotated[list[dict], Field(max_length=MESSAGES, fail_fast=True)]
Tools = Annotated[list[dict], Field(max_length=TOOLS, fail_fast=True)]


class Message(BaseModel, extra="allow"):
    role: Annotated[str, Field(max_length=64)]
    content: str | Parts | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=TOOLS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.tool_calls is None:
            raise ValueError("a message has a content, or tool_calls")
        return self


Word = Annotated[str, Field(max_length=256)]


class TemplateOptions(BaseModel, extra="forbid", strict=True):
    """Variables of chat templates that a client may set. Everything else that `apply_chat_template` takes is the server's: a template,
    for example, is code."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    clear_thinking: bool | None = None
    thinking_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    reasoning_effort: Word | None = None
    add_vision_id: bool | None = None
    date_string: Word | None = None
    model_identity: Word | None = None


class StreamOptions(BaseModel, extra="forbid"):
    include_usage: bool = False


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class JsonSchema(BaseModel, extra="forbid", strict=True):
    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    strict: bool | None = None
    given: Annotated[dict, Field(alias="schema")]


class ResponseFormat(BaseModel, extra="forbid", strict=True):
    type: Literal["json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema")
        return self


Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class Fields(BaseModel, extra="forbid", strict=True):
    """The fields that have an effect, or label the request, at all paths."""

    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    cache_salt: Name | None = None
    prompt_cache_key: Name | None = None
    user: Any = None
    metadata: Any = None

    @model_validator(mode="before")
    @classmethod
    def _that_ask_for_something(cls, given: Any) -> Any:
        def asks(name: str, value: Any) -> bool:
            return value is not None and not any((type(value), value) == (type(nothing), nothing) for nothing in NOTHING.get(name, ()))

        if not isinstance(given, dict):
            return given
        if len(given) > KEYS:
            raise ValueError(f"it has {len(given)} fields, at most {KEYS} are read")
        return {name: value for name, value in given.items() if asks(name, value)}

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
        name = f"{place[0]:.80}"
        if kind == "extra_forbidden" and len(place) == 1:
            raise Refusal(f"{name} is not supported", name, code=UNSUPPORTED)
        if kind == "missing" and len(place) == 1:
            raise Refusal(f"{name} is missing", name)
        raise Refusal(f"{'.'.join(map(str, place))}={value!r:.80}: {found[0]['msg']}", name)


class Samples(Fields):
    """Fields of requests whose answers have choices."""

    max_tokens: Count | None = None
    n: Count = 1
    stop: Annotated[list[Stop], BeforeValidator(_listed), Field(min_length=1, max_length=STOPS)] = []
    stream_options: StreamOptions = StreamOptions()


class Completion(Samples):
    prompt: str


class Chat(Samples):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES, fail_fast=True)]
    max_completion_tokens: Count | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def schema_of_answer(self) -> dict | None:
        """The JSON schema that answers follow, if any."""
        if (wanted := self.response_format) is None:
            return None
        return {"type": "object"} if wanted.json_schema is None else wanted.json_schema.given


class Response(Fields):
    n: ClassVar = 1
    stop: ClassVar[list[str]] = []
    stream_options: ClassVar[StreamOptions] = StreamOptions()
    input: Text | Annotated[Parts, Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Tools | None = None
