"""Requests of the library that are refused where they are added, and options that each has for itself."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import GenerationConfig

from qkvcache import continuous_batching
from qkvcache.formats import Int8

from .requests import answers, collect, pool, prompts, serving, tiniest, waiting

ZONES = {"num_sink_tokens": 2, "residual_length": 4}


@pytest.mark.parametrize(
    ("ids", "options", "error", "says"),
    [
        ([], {}, ValueError, "empty"),
        ([5, 10**6], {}, ValueError, "1000000 is not in the vocabulary"),
        ([-1], {}, ValueError, "-1 is not in the vocabulary"),
        ("text", {}, TypeError, "expected a list of token ids"),
        ([1.5], {}, TypeError, "expected a list of token ids"),
        ([5] * 2000, {}, ValueError, "2000 tokens, and the model .* positions"),
        ([5], {"max_new_tokens": 0}, ValueError, "max_new_tokens=0"),
        ([5], {"no_such_option": 1}, ValueError, "no_such_option"),
    ],
)
def test_wrong_requests_are_refused_at_the_call(ids, options, error, says, monkeypatch):
    network = tiniest()
    monkeypatch.setattr(network.config, "max_position_embeddings", 1000)
    with continuous_batching(network, "int8", **ZONES) as batching, serving(network, new=4) as manager:
        for add in (manager.add_request, lambda ids, **options: manager.add_requests([prompts(3)[0], ids], **options)):
            with pytest.raises(error, match=says):
                add(ids, **options)
        assert not batching.metrics().waiting and not batching.metrics().running
        assert len(answers(manager, prompts(20))) == 1  # the thread lives
    with continuous_batching(network, "int8"), pytest.raises((ValueError, TypeError)):
        network.generate_batch([prompts(3)[0], ids], continuous_batching_config=pool(), **options)


def test_an_id_belongs_to_one_request_at_a_time():
    """Two would read each other's pages."""
    network, (first, other) = tiniest(), prompts(20, 30)
    with continuous_batching(network, "int8", **ZONES), serving(network, new=4) as manager:
        with waiting(network):
            manager.add_request(first, request_id="a")
            for _ in range(2):  # queued, then running
                with pytest.raises(ValueError, match="request_id='a'"):
                    manager.add_request(other, request_id="a")
                while manager.input_queue.qsize():
                    time.sleep(0.01)
        collect(manager, ["a"])
        manager.add_request(other, request_id="a")
        assert len(collect(manager, ["a"])["a"].prompt_ids) == 30


def test_ids_that_the_manager_makes_are_not_searched_for(monkeypatch):
    """A thousand prompts would each be compared with all before."""
    network, searched = tiniest(), []
    with continuous_batching(network, "int8", **ZONES):
        manager = network.init_continuous_batching(continuous_batching_config=pool())
        monkeypatch.setattr(manager, "_check_unused", searched.append)
        assert len({*manager.add_requests(prompts(3, 4, 5)), manager.add_request(prompts(3)[0])}) == 4
        assert not searched and not manager._issued
        manager.add_request(prompts(3)[0], request_id="req_0")
    assert searched == ["req_0"]


def test_an_answer_ends_at_the_last_position(monkeypatch):
    network = tiniest()
    monkeypatch.setattr(network.config, "max_position_embeddings", 64)
    with continuous_batching(network, "int8", **ZONES), serving(network, new=10) as manager:
        names = manager.add_requests(prompts(60, 64, 5))
        found = collect(manager, names)
    assert [len(found[name].generated_tokens) for name in names] == [5, 1, 10]


def sampling(network, **options):
    network.generation_config.eos_token_id = -1
    return serving(network, new=12, per_request_processors=True, **options)


def test_each_request_has_its_own_sampling_options():
    """Together as alone, and after a preemption; greedy ones are not affected."""
    network, ids = tiniest(), prompts(40)[0]
    asked = [{}, {"seed": 1, "temperature": 5.0}, {"temperature": 0}, {"seed": 2, "temperature": 5.0}, {"temperature": 9.0, "top_p": 1e-6}]
    with continuous_batching(network, Int8(center=False), **ZONES), sampling(network) as manager:

        def run(*wanted: dict) -> list[list[int]]:
            names = [manager.add_request(ids, **options) for options in wanted]
            found = collect(manager, names)
            return [found[name].generated_tokens for name in names]

        alone = [run(options)[0] for options in asked]
        together = run(*asked)
        with pytest.raises(ValueError, match="top_p=2"):
            manager.add_request(ids, top_p=2)
    assert alone == together
    greedy, first, zero, second, nucleus = together
    assert greedy == zero == nucleus and len({tuple(tokens) for tokens in (greedy, first, second)}) == 3


def test_children_of_a_seed_differ():
    network = tiniest()
    config = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=5.0, num_return_sequences=3, eos_token_id=-1)
    with continuous_batching(network, Int8(center=False), **ZONES):
        found = network.generate_batch(prompts(9), config, pool(per_request_processors=True))
    assert len({tuple(output.generated_tokens) for output in found.values()}) == 3


def test_tokens_are_drawn_with_their_probabilities():
    from qkvcache.batching.sampling import gumbel

    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    keys = torch.randint(-(2**31), 2**31, (40_000, 1), generator=torch.Generator().manual_seed(0)).int()
    drawn = (logits + gumbel(keys, 5)).argmax(1)
    assert torch.allclose(drawn.bincount(minlength=5) / len(keys), logits.softmax(0), atol=0.01)
