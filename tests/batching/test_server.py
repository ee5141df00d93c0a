"""`qkvcache serve` with the `openai` package as client, on the embedded model: what users type, and what they do to a server."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest

from qkvcache import CompressedCache, demo, models
from qkvcache.formats import TurboQuant
from tests.command import refuses, run

from .clients import WORDS, address, saved, send, served
from .requests import PATIENCE, listening, until

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from qkvcache.batching import server as serving  # noqa: E402

FORMAT = "turboquant_4bit_nc"
CACHE = {
    "format": TurboQuant(center=False),
    "residual_length": 16,
}  # a mean would be that of the first prompts, and of each one in `generate`
PROMPT = "The code word of Anna is dilzon. {} What is the code word of Anna? The code word of Anna is"


def client(server):
    return openai.OpenAI(base_url=f"{address(server)}/v1", api_key="-", max_retries=0, timeout=PATIENCE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def server(folder):
    with served(folder, CACHE, metrics_interval=0.2) as started:
        yield started


def prompts(count: int) -> list[str]:
    text = demo.text()
    return [PROMPT.format(text[300 * i : 300 * i + 150 + 90 * i]) for i in range(count)]


def generated(folder: str, asked: list[str], tokens: int) -> list[str]:
    """The answers of `generate` to each prompt alone, with a cache of the same options."""
    model, tokenizer = models.load(folder)
    found = []
    for prompt in asked:
        inputs = tokenizer(prompt, return_tensors="pt")
        cache = CompressedCache(model.config, **CACHE)
        ids = model.generate(**inputs, cache=cache, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)
        assert cache.get_seq_length() == ids.shape[1] - 1 and cache.memory().ratio > 1
        found.append(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return found


def complete(server, folder: str, prompt: str, tokens: int = 6) -> str:
    return client(server).completions.create(model=folder, prompt=prompt, max_tokens=tokens, temperature=0).choices[0].text


def test_served_answers_are_those_of_generate(server, folder):
    asked = prompts(3)
    expected = generated(folder, asked, 6)
    assert expected[0].startswith(" dilzon")
    assert [complete(server, folder, prompt) for prompt in asked] == expected
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda prompt: complete(server, folder, prompt), asked * 2)) == expected * 2
    layout = server.batching.manager.cache.store.groups[0].layout
    assert layout.page.nbytes < 0.2 * 2 * layout.heads * layout.head_dim * 4 * layout.page_size  # in fp32


def test_streaming(server, folder):
    (prompt,) = prompts(1)
    whole = complete(server, folder, prompt)
    asked = {"model": folder, "prompt": prompt, "max_tokens": 6, "stream": True}
    *events, last = client(server).completions.create(**asked, stream_options={"include_usage": True})
    assert "".join(event.choices[0].text for event in events) == whole and len(events) > 4
    assert events[-1].choices[0].finish_reason == "length" and {event.usage for event in events} == {None}
    assert not last.choices and last.usage.completion_tokens == 6 and {event.id for event in events} == {last.id}
    without = list(client(server).completions.create(**asked))
    assert len(without) == len(events) and "usage" not in without[-1].model_fields_set


@pytest.mark.parametrize("stream", [False, True])
def test_chats(server, folder, stream):
    said = [{"role": "user", "content": prompts(1)[0]}]
    answer = client(server).chat.completions.create(model=folder, messages=said, max_tokens=4, stream=stream)
    text = "".join(event.choices[0].delta.content or "" for event in answer) if stream else answer.choices[0].message.content
    assert text


def test_a_client_that_leaves_frees_its_pages(server, folder):
    (prompt,) = prompts(1)
    complete(server, folder, prompt)
    with client(server).completions.create(model=folder, prompt=prompt, max_tokens=3000, stream=True) as events:
        next(iter(events))
        assert until(lambda: server.metrics().running == 1)
        assert server.metrics().pages_used >= 1
    assert until(lambda: server.metrics().running == 0)
    assert complete(server, folder, prompt, 4)


def scraped(server) -> dict[str, str]:
    """Over HTTP: the loop that answers has counted every request answered before."""
    _, text, headers = send(server, "/metrics")
    assert headers["content-type"].startswith("text/plain")
    return dict(line.split() for line in text.splitlines() if not line.startswith("#"))


def test_metrics(server, folder, capfd):
    observed, before = scraped(server), server.metrics()
    complete(server, folder, prompts(1)[0], 10)
    with pytest.raises(openai.BadRequestError):
        complete(server, folder, "A", 0)
    found = server.metrics()
    assert found.tokens_generated == before.tokens_generated + 10 and found.page_size == 256 and found.pages_total >= 16
    assert found.prompt_tokens - before.prompt_tokens > 20 and found.rings <= found.pages_total
    values = scraped(server)
    assert int(values["qkvcache_tokens_generated_total"]) == found.tokens_generated
    assert int(values["qkvcache_pages_total"]) == found.pages_total
    assert int(values["qkvcache_prompt_tokens_total"]) == found.prompt_tokens and values["qkvcache_worker_alive"] == "1"
    assert int(values["qkvcache_ring_bytes"]) == server.batching.manager.cache.store.rings.tensor.nbytes
    assert int(values["qkvcache_page_bytes"]) == server.batching.manager.cache.cache_tensor.nbytes
    for kind in ("finished", "refused"):
        key = f'qkvcache_requests_total{{outcome="{kind}"}}'
        assert int(values[key]) == int(observed[key]) + 1
    for name in ("time_to_first_token", "time_per_output_token", "request"):
        counts = [int(values[key]) for key in values if key.startswith(f"qkvcache_{name}_seconds_bucket")]
        assert counts == sorted(counts) and counts[-1] == int(values[f"qkvcache_{name}_seconds_count"]) > 0
    assert until(lambda: "tokens/s" in capfd.readouterr().err)


def test_requests_for_another_model_are_refused(server):
    with pytest.raises(openai.BadRequestError) as found:
        complete(server, "other", "A")
    assert "pinned" in found.value.response.text


def test_the_served_model_is_listed(server, folder):
    assert [(model.id, model.status["value"]) for model in client(server).models.list()] == [(folder, "loaded")]


# The command.


def serve(monkeypatch, *arguments: str):
    """Runs the command; the server answers one request. Returns what typer says, and what was answered."""
    answers, run_server = [], serving.Server.run

    def answer(server):
        with listening(server, functools.partial(run_server, server)):
            answers.append((type(server.batching).__name__, complete(server, "demo", prompts(1)[0])))

    monkeypatch.setattr(serving.Server, "run", answer)
    return run("serve", "demo", *WORDS, *arguments), answers


def test_the_command_serves_a_model_by_its_name(monkeypatch):
    result, ((_, text),) = serve(monkeypatch, "--format", "int8", "--metrics-interval", "0")
    assert result.exit_code == 0, result.output
    assert text.startswith(" dilzon")


def test_without_continuous_batching_generate_gets_the_cache(monkeypatch):
    made, stock = [], CompressedCache.__init__

    def init(cache, *args, **kwargs):
        made.append(kwargs)
        stock(cache, *args, **kwargs)

    monkeypatch.setattr(CompressedCache, "__init__", init)
    result, ((batching, text),) = serve(monkeypatch, "--no-continuous-batching", "--residual-length", "32", "--attention-budget", "64")
    assert result.exit_code == 0, result.output
    assert batching == "NoneType" and text.startswith(" dilzon")
    reading = {"attention_budget": 64, "offload_pages": False}
    assert {"format": FORMAT, "num_sink_tokens": 4, "residual_length": 32, **reading} in made


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["./nowhere"], "'./nowhere' does not exist"),
        (["demo", "--format", "int9"], "int9"),
        (["demo", "--residual-length", "-1"], "--residual-length"),
        (["demo", "--attention-budget", "1.5"], "--attention-budget"),
        (["demo", "--attention-budget", "0"], "attention_budget=0"),
        (["demo", "--no-such-option"], "--no-such-option"),
        (["demo", "demo"], "one model"),
        (["demo", "--quantization", "3bit"], "3bit"),
        (["demo", "--store", "folder", "--store-bytes", "many"], "'many': expected a size such as 80GB"),
        (["demo", "--store", __file__], "test_server.py' cannot be used"),
        (["demo", "--store", "folder", "--no-continuous-batching"], "without continuous batching"),
        (["demo", "--reproducible", "--no-continuous-batching"], "reproducible=True without continuous batching"),
        (["demo", "--host", "0.0.0.0"], "pass --api-key, or set QKVCACHE_API_KEY"),
        (["demo", "--api-key", "a b"], "an API key has printable ASCII"),
        (["demo", "--max-n", "200"], "Limits(max_waiting=512"),
        (["demo", "--max-body-bytes", "many"], "'many': expected a size"),
        (["demo", "--device", "cuda:99"], "device='cuda:99' is not on this machine"),
    ],
)
def test_wrong_input_is_explained(arguments, says):
    refuses(says, "serve", arguments[0], "--device", "cpu", *arguments[1:])
