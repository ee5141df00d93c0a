"""Answers that follow a JSON schema (`response_format`), beside others that do not."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from qkvcache import continuous_batching, demo, models
from qkvcache.cli import app
from tests.releases import BATCHING

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
if not BATCHING:
    pytest.skip("continuous batching needs transformers 5.24", allow_module_level=True)

from qkvcache.batching import server as serving  # noqa: E402
from tests.batching.requests import PATIENCE, listening, llama, prompts  # noqa: E402
from tests.batching.requests import serving as running  # noqa: E402

OPTIONS = {"host": "127.0.0.1", "port": 0, "device": "cpu", "dtype": "float32", "cb_num_blocks": 16, "cb_max_batch_tokens": 512}
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
    model, tokenizer = models.load("demo")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    folder = tmp_path_factory.mktemp("chat")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    started = serving.Server(str(folder), {"format": "int8"}, metrics_interval=0, structured_outputs=True, **OPTIONS)
    with listening(started):
        host, port = started.server.servers[0].sockets[0].getsockname()
        yield openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="-", max_retries=0, timeout=PATIENCE)


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
    with continuous_batching(network, format="int8"), running(network) as manager, refused:
        manager.add_request(prompts(5)[0], grammar=object())


def test_grammars_need_batches():
    result = CliRunner().invoke(app, ["serve", "demo", "--structured-outputs", "--no-continuous-batching", "--device", "cpu"])
    assert result.exit_code == 2 and "structured_outputs=True" in result.output
