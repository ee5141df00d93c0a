"""Conversations whose pages are in a store: they go on after the process has ended, as if it had not."""

import copy
import os
import random
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from qkvcache import PrefixStore, continuous_batching, demo
from tests.matrix import model
from tests.prefix.made import DAMAGES, failing_open
from tests.processes import Program
from tests.seeds import SEED

from .clients import COMPLETIONS, WORDS, address, send, served
from .requests import ZONES, answers, collect, pool, prompts, serving, tiniest, until
from .test_blocks import assert_nothing_is_left

FORMAT = "turboquant_4bit_nc"


def store(folder, network=None, **options) -> PrefixStore:
    return PrefixStore(network or tiniest(), **{"max_bytes": 2**24, "directory": folder} | options)


def pages(folder) -> list:
    return sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def talk(kept, history: list[int], turns: int, format=FORMAT, **options) -> tuple[list[int], list[int], object]:
    """A conversation that goes on for some turns; the cached tokens of each, and the metrics at its end."""
    with continuous_batching(tiniest(), format, store=kept, **ZONES) as batching, serving(tiniest(), **options) as manager:
        cached = []
        for _ in range(turns):
            history = history + prompts(37, seed=len(history))[0]
            name = manager.add_request(history)
            output = collect(manager, [name])[name]
            assert output.error is None
            cached.append(output.cached_tokens)
            history = history + output.generated_tokens
    return history, cached, batching.metrics()


def test_a_conversation_goes_on_in_another_process(tmp_path):
    """As if it were the same, and reads what is new; each page is written once."""
    whole, expected, _ = talk(None, [], 9)
    history, before, metrics = talk(store(tmp_path), [], 5)
    assert before == expected[:5] and metrics.pages_written == len(pages(tmp_path)) == 3
    goes_on, cached, metrics = talk(store(tmp_path), history, 4)
    assert goes_on == whole and cached == expected[5:] and cached[0] == 192
    assert metrics.pages_fetched == 3 and metrics.pages_written == len(pages(tmp_path)) - 3 > 0


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_pages_that_the_pool_has_lost_come_back(tmp_path, where):
    """Six prompts take turns in a pool that holds two."""
    ids = prompts(*[200] * 6)

    def twice(kept, blocks: int):
        with continuous_batching(tiniest(), FORMAT, store=kept, **ZONES) as batching, serving(tiniest(), blocks=blocks) as manager:
            first = [answers(manager, [prompt])[0] for prompt in ids]
            assert until(lambda: where == "memory" or kept is None or batching.metrics().pages_written == 18)
            second = [answers(manager, [prompt])[0] for prompt in ids]
            assert_nothing_is_left(manager)
        return first, second, batching.metrics()

    kept = store(None) if where == "memory" else store(tmp_path, max_bytes=2**14)
    *found, metrics = twice(kept, 9)
    *expected, whole = twice(None, 40)
    assert found == expected and metrics.cached_tokens == whole.cached_tokens == 6 * 192
    assert metrics.pages_fetched >= 12 and metrics.pages_written == len(pages(tmp_path))


def test_the_pool_loses_no_more_pages_than_it_needs():
    """The pages of the prompt that was used longest ago, its last ones first."""
    ids = prompts(*[200] * 3)
    with continuous_batching(tiniest(), FORMAT, **ZONES) as batching, serving(tiniest(), blocks=9, safety_margin=0.0) as manager:
        for prompt in ids[:2]:
            answers(manager, [prompt])
        assert batching.metrics().pages_cached == 6
        answers(manager, [ids[2]])
        assert batching.metrics().pages_cached == 8
        answers(manager, [ids[1]])
        assert batching.metrics().cached_tokens == 192
        answers(manager, [ids[0]])
        assert batching.metrics().cached_tokens == 192 + 128


@pytest.mark.parametrize(
    "other",
    [{"format": "int8"}, {"residual_length": 8}, {"num_sink_tokens": 3}, {"page_size": 128}, {"seed": 1}],
    ids=lambda x: next(iter(x)),
)
def test_pages_of_another_model_or_format_are_not_found(tmp_path, other):
    talk(store(tmp_path), [], 3)
    network = copy.deepcopy(tiniest())
    if other.pop("seed", 0):
        network.lm_head.weight.data.mul_(-1)
    pool, zones = {name: other.pop(name) for name in ("page_size",) if name in other}, {"format": FORMAT} | ZONES | other
    with continuous_batching(network, store=store(tmp_path, network), **zones) as batching, serving(network, **pool) as manager:
        answers(manager, prompts(200))
    assert batching.metrics().pages_fetched == batching.metrics().cached_tokens == 0


def test_two_processes_share_a_folder(tmp_path):
    """Each finds the pages of the other; they begin and write at the same time, with the statistics of one of them."""
    networks = [tiniest(), copy.deepcopy(tiniest())]
    ids = prompts(*[150] * 6)
    found = []
    for network in networks:
        batching = continuous_batching(network, FORMAT, store=store(tmp_path, network), **ZONES)
        found.append((batching, network))
    with ThreadPoolExecutor(2) as threads:

        def run(at: int):
            batching, network = found[at]
            with batching, serving(network) as manager:
                order = ids if at else ids[::-1]
                return [answers(manager, [prompt])[0] for prompt in order], batching.metrics()

        (first, _), (second, _) = threads.map(run, range(2))
    assert first == second[::-1]
    assert len(pages(tmp_path)) == 2 * 6 and not list(tmp_path.glob("*.writing"))


def test_a_process_that_has_read_nothing_finds_pages(tmp_path):
    """It began before there were any, and takes the statistics of the process that wrote them."""
    networks, (prompt,) = [tiniest(), copy.deepcopy(tiniest())], prompts(200)
    first, second = (continuous_batching(network, FORMAT, store=store(tmp_path, network), **ZONES) for network in networks)
    with first, second, serving(networks[0]) as one, serving(networks[1]) as other:
        expected = answers(one, [prompt])
        assert until(lambda: first.metrics().pages_written == 3)
        assert answers(other, [prompt]) == expected
    assert second.metrics().pages_fetched == 3 and second.metrics().cached_tokens == 192


def test_requests_that_leave_keep_the_pool_whole(tmp_path):
    """Cancelled, preempted and forked requests, with pages on their way to and from the store."""
    network, draw, begins = tiniest(), random.Random(SEED), prompts(*[130] * 4)
    with continuous_batching(network, FORMAT, store=store(tmp_path), **ZONES) as batching:
        for _ in range(2):
            with serving(network, new=70, blocks=12, max_requests_per_batch=8, safety_margin=0.0) as manager:
                wanted = []
                for i in range(24):
                    name = manager.add_request(draw.choice(begins) + prompts(draw.randint(1, 60), seed=i)[0], request_id=f"{i}")
                    if draw.random() < 0.25:
                        manager.cancel_request(name)
                    else:
                        wanted.append(name)
                found = collect(manager, wanted)
                assert not any(output.error for output in found.values())
                assert until(lambda m=manager: not m.batch_processor.has_pending_requests())
                assert_nothing_is_left(manager)
        assert batching.metrics().preemptions and batching.metrics().pages_fetched


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_statistics_are_computed_again(tmp_path, damage):
    """As a page is: the server starts, and writes others."""
    talk(store(tmp_path), [], 3)
    (path,) = tmp_path.glob("*.statistics")
    content, names = path.read_bytes(), {page.name for page in pages(tmp_path)}
    path.write_bytes(damage(content))
    with pytest.warns(UserWarning, match=f"{path.name} is removed"):
        talk(store(tmp_path), [], 3)
    assert path.stat().st_size == len(content) and {page.name for page in pages(tmp_path)} == names  # which have names of the statistics


def test_statistics_that_cannot_be_read_stay(tmp_path, monkeypatch):
    """The server starts, with statistics of its own."""
    talk(store(tmp_path), [], 3)
    (path,) = tmp_path.glob("*.statistics")
    with failing_open(monkeypatch, path.name), pytest.warns(UserWarning, match="stays, and cannot be used: .*Permission denied"):
        talk(store(tmp_path), [], 3)
    _, cached, _ = talk(store(tmp_path), [], 3)
    assert path.exists() and max(cached) > 0


def test_stores_that_cannot_be_used_are_refused(tmp_path):
    network, folder = copy.deepcopy(tiniest()), tmp_path / "file"
    folder.write_text("")
    with pytest.raises(ValueError, match="the store is of another model"):
        continuous_batching(network, store=store(tmp_path))
    with pytest.raises(TypeError, match="store must be a PrefixStore, got"):
        continuous_batching(network, store=str(tmp_path))
    with pytest.raises(ValueError, match="directory=.*file' cannot be used"):
        store(folder)
    windowed = model("mistral")
    with (
        continuous_batching(windowed, store=store(tmp_path, windowed), **ZONES),
        pytest.raises(NotImplementedError, match="share no pages"),
    ):
        windowed.init_continuous_batching(continuous_batching_config=pool()).start()


# Over HTTP.


def ask(address: str, prompt: str) -> tuple[str, dict]:
    _, found, _ = send(address, COMPLETIONS, {"prompt": prompt, "max_tokens": 4, "temperature": 0})
    return found["choices"][0]["text"], found["usage"]


def written(address: str) -> int:
    return int(re.search(r"qkvcache_pages_written_total (\d+)", send(address, "/metrics")[1])[1])


@contextmanager
def in_thread(folder):
    with served(cache={"format": FORMAT}, store=folder, store_bytes=10**8) as server:
        yield address(server)


@contextmanager
def in_process(folder):
    program = Program("qkvcache.cli", ["serve", "demo", *WORDS, f"--store={folder}", "--store-bytes=100MB"])
    try:
        yield next(found[0] for text in program.lines if (found := re.search(r"http://127.0.0.1:(\d+)", text)))
    finally:
        os.kill(program.process.pid, signal.SIGKILL)
        program.process.join()


@pytest.mark.parametrize("start", [in_thread, pytest.param(in_process, marks=pytest.mark.slow)])
def test_a_conversation_goes_on_after_a_server_is_killed(tmp_path, start):
    """Ten turns, with the answers of a server that lives; after five the other one is lost, with all but the pages that
    were written."""
    pytest.importorskip("uvicorn")
    text, history, answers, usages = demo.text(), "", {}, {}

    def turns(address: str, numbers, said: str) -> str:
        for turn in numbers:
            said += text[700 * turn : 700 * turn + 350]
            answers[turn], usages[turn] = ask(address, said)
            said += answers[turn]
        return said

    with start(tmp_path / "one") as address:
        history = turns(address, range(5), "")
        assert until(lambda: written(address) == (usages[4]["total_tokens"] - 1) // 256 > 1)
        shutil.copytree(tmp_path / "one", tmp_path / "lost")
        whole = turns(address, range(5, 10), history)
        expected = dict(answers), dict(usages)
    with start(tmp_path / "lost") as address:
        assert turns(address, range(5, 10), history) == whole and (answers, usages) == expected
    assert 0 < usages[5]["prompt_tokens"] - usages[5]["prompt_tokens_details"]["cached_tokens"] < 2 * 256
