"""Answers that follow a JSON schema (`response_format`), beside others that do not."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from qkvcache import continuous_batching, demo
from tests.command import refuses

from .clients import address, saved, served
from .requests import PATIENCE, llama, prompts, serving

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Anna", "Otto"]},
        "words": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "words"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with served(saved(tmp_path_factory.mktemp("chat")), structured_outputs=True) as server:
        yield openai.OpenAI(base_url=f"{address(server)}/v1", api_key="-", max_retries=0, timeout=PATIENCE)


def chat(client, said: str, schema: dict | None = SCHEMA, **options):
    wanted = {} if schema is None else {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    model = client.models.list().data[0].id
    tokens = 10 if schema is None else 80
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": said}], max_tokens=tokens, **wanted, **options)


def follows(text: str) -> bool:
    found = json.loads(text)
    return found["name"] in ("Anna", "Otto") and 2 <= len(found["words"]) <= 3 and set(found["words"]) <= {"a", "b"} and len(found) == 2


def test_answers_follow_their_schema(client):
    """Each of several, whole and as streams, sampled and greedy, beside requests without a schema, which answer as alone."""
    plain = chat(client, "The code word", None, temperature=0).choices[0].message.content
    with ThreadPoolExecutor(6) as threads:
        others = [threads.submit(chat, client, "The code word", None, temperature=0) for _ in range(2)]
        asked = [threads.submit(chat, client, demo.text()[:count], temperature=2, seed=count, n=2) for count in (20, 200)]
        stream = threads.submit(lambda: list(chat(client, "Otto", temperature=0, stream=True)))
        for choice in (choice for answer in asked for choice in answer.result().choices):
            assert follows(choice.message.content) and choice.finish_reason == "stop"
        assert follows("".join(event.choices[0].delta.content or "" for event in stream.result()))
        assert {other.result().choices[0].message.content for other in others} == {plain}


def test_any_object_is_json(client):
    model = client.models.list().data[0].id
    said = [{"role": "user", "content": "A"}]
    answer = client.chat.completions.create(
        model=model, messages=said, max_tokens=30, temperature=2, seed=1, response_format={"type": "json_object"}
    )
    text = answer.choices[0].message.content
    assert text.startswith("{") and (answer.choices[0].finish_reason == "length" or isinstance(json.loads(text), dict))


@pytest.mark.parametrize("schema", [{"type": "nope"}, {"$ref": "http://127.0.0.1/"}, {"type": "string", "pattern": "("}])
def test_schemas_that_are_not_supported_are_refused(client, schema):
    with pytest.raises(openai.BadRequestError):
        chat(client, "A", schema)
    assert chat(client, "A", None, temperature=0).choices


def test_a_config_that_prepares_steps_ahead_takes_no_grammar():
    network = llama()
    refused = pytest.raises(ValueError, match="use_async_batching=False")
    with continuous_batching(network, format="int8"), serving(network) as manager, refused:
        manager.add_request(prompts(5)[0], grammar=object())


def test_grammars_need_batches():
    refuses("structured_outputs=True", "serve", "demo", "--structured-outputs", "--no-continuous-batching", "--device", "cpu")
