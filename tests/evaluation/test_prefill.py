"""A cache filled from one recorded reading is the cache that the model would have filled."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from qkvcache import CompressedCache, demo
from qkvcache.evaluation.prefill import prefill, refill
from qkvcache.evaluation.quality import Passages, RecallSet, at_once, divergence, held_bytes, recall, steps
from qkvcache.policies import (
    H2O,
    RKV,
    TOVA,
    DropKV,
    ExpectedAttention,
    KeyDiff,
    KVzip,
    LagKV,
    Random,
    SinkWindow,
    SnapKV,
    TriAttention,
)
from qkvcache.policies.base import ALL
from tests.matrix import model as tiny

POLICIES = [
    H2O(budget=64), TOVA(budget=64), SnapKV(budget=64), KeyDiff(budget=64), LagKV(budget=64, lag=16, recent=16), Random(budget=64),
    SinkWindow(window_length=60),
]  # fmt: skip


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = demo.load()
    return model, tokenizer, demo.text_ids(tokenizer)


@pytest.fixture(scope="module")
def prompt(loaded):
    model, _, ids = loaded
    ids = torch.tensor(ids[:300]).view(2, 150)
    return ids, prefill(model, ids, (ALL, 1, 32))[0]


@pytest.mark.parametrize("format", [None, "fp8"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_the_record_fills_a_cache_as_the_model_does(loaded, prompt, policy, format):
    model, (ids, prefilled) = loaded[0], prompt
    filled, run = (CompressedCache(model.config, format=format, policy=policy) for _ in range(2))
    refill(filled, prefilled, model, ids)
    with torch.no_grad():
        model(ids, past_key_values=run)
        logits = [model(ids[:, :3], past_key_values=cache).logits for cache in (filled, run)]
    assert torch.equal(*logits)
    assert all(torch.equal(filled.kept_positions(i), run.kept_positions(i)) for i in range(5))
    assert filled.nbytes == run.nbytes


CALLED = [
    H2O(budget=64, decay=0.9), SnapKV(budget=64), TOVA(budget=64, first_stage_ratio=0.5), DropKV(budget=64), RKV(budget=64),
    TriAttention(budget=64), ExpectedAttention(budget=64, recent=16), KeyDiff(budget=64),
]  # fmt: skip


@pytest.fixture(scope="module")
def called(loaded, prompt):
    return prefill(loaded[0], prompt[0], calls=True)[0]


@pytest.mark.parametrize("policy", CALLED, ids=lambda policy: policy.name)
def test_recorded_calls_fill_a_cache_of_any_policy_as_the_model_does(loaded, prompt, called, policy):
    model, ids = loaded[0], prompt[0]
    filled, run = (CompressedCache(model.config, policy=policy) for _ in range(2))
    refill(filled, called, model, ids)
    with torch.no_grad():
        model(ids, past_key_values=run)
        logits = [model(ids[:, :3], past_key_values=cache).logits for cache in (filled, run)]
    assert torch.equal(*logits)
    assert all(torch.equal(filled.kept_positions(i), run.kept_positions(i)) for i in range(5))


@pytest.mark.parametrize("options", [{}, {"normalized": True}, {"layerwise": True}], ids=str)
def test_a_second_reading_fills_several_caches_as_compress_does(loaded, prompt, options):
    model, tokenizer, _ = loaded
    ids, (prefilled, _) = prompt[0], prefill(model, prompt[0])
    for budget in (0.5, 40):
        policy = KVzip(budget=budget, recent=8, chunk_size=64, **options)
        filled, run = (CompressedCache(model.config, policy=policy, format="fp8") for _ in range(2))
        refill(filled, prefilled, model, ids, tokenizer)
        run.compress(model, ids, tokenizer=tokenizer, progress=False)
        assert all(torch.equal(filled.kept_positions(i), run.kept_positions(i)) for i in range(5))
        assert filled.nbytes == run.nbytes
    assert len(prefilled._read_twice) == 1


def test_calls_are_recorded_beside_what_a_prefill_holds(loaded, prompt, called):
    model, (ids, prefilled) = loaded[0], prompt
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(called.layers, prefilled.layers, strict=True))
    assert [tuple(call.query.shape) for call in called.calls] == [(2, 4, 150, 128)] * 5
    dense = refill(DynamicCache(config=model.config), called, model, ids)
    assert torch.equal(dense.layers[0].values, prefilled.layers[0].values)


def test_rows_that_are_read_in_groups(loaded, prompt, monkeypatch):
    """As rows that are read together, but for the order of sums."""
    model, (ids, together) = loaded[0], prompt
    monkeypatch.setattr("qkvcache.evaluation.prefill.SCORES", 1)
    apart, logits = prefill(model, ids, (ALL, 32))
    for index, (a, b) in enumerate(zip(apart.layers, together.layers, strict=True)):
        torch.testing.assert_close((a.keys, a.values), (b.keys, b.values), rtol=1e-4, atol=1e-4)
        for window in (ALL, 32):
            torch.testing.assert_close(apart.attention[window][index], together.attention[window][index], rtol=1e-4, atol=1e-4)
    assert logits.shape == (2, model.config.vocab_size)


def test_without_a_record_the_model_reads_again(loaded, prompt):
    model, ids = loaded[0], prompt[0]
    prefilled, _ = prefill(model, ids)
    assert prefilled.attention == {}
    cache = refill(CompressedCache(model.config, policy=H2O(budget=64)), prefilled, model, ids)
    assert cache.stored_length() == 64


def test_divergence_grows_as_the_budget_shrinks(loaded):
    model, _, ids = loaded
    passages = Passages.read(model, torch.tensor(ids[:424]).view(2, -1), 200, (ALL,))
    found = [divergence(model, passages, lambda n=n: CompressedCache(model.config, policy=H2O(budget=n))) for n in (20, 100, 400)]
    assert found[0].kl > found[1].kl > found[2].kl
    assert found[2].kl < 1e-6 and found[0].bytes_per_token < found[2].bytes_per_token


def test_a_question_that_was_seen_is_part_of_the_prompt(loaded):
    model, tokenizer, ids = loaded
    unseen, seen = (RecallSet.make(model, tokenizer, ids, 300, 3, seen=seen) for seen in (False, True))
    assert torch.equal(seen.context, torch.cat([unseen.context, unseen.question.expand(3, -1)], dim=1))
    everything = [
        recall(model, tokenizer, cases, lambda: CompressedCache(model.config, policy=H2O(budget=400))) for cases in (unseen, seen)
    ]
    assert everything[0] == everything[1] >= 2 / 3
    assert recall(model, tokenizer, unseen, lambda: CompressedCache(model.config, policy=SinkWindow(window_length=16))) <= 1 / 3


def test_states_of_linear_layers_are_counted_in_a_dense_cache_as_in_ours():
    network = tiny("qwen3_next")
    dense, ours = DynamicCache(config=network.config), CompressedCache(network.config, format="identity")
    with torch.no_grad():
        for cache in (dense, ours):
            network(torch.arange(3, 43)[None], past_key_values=cache)
    states = [layer for layer in dense.layers if hasattr(layer, "recurrent_states")]
    in_states = sum(x.nbytes for layer in states for of in (layer.conv_states, layer.recurrent_states) for x in of.values())
    in_keys = sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers if layer not in states)
    assert len(states) == 3 and in_states > 0 and held_bytes(dense) == in_states + in_keys == ours.memory().dense
    assert held_bytes(ours) == ours.nbytes >= held_bytes(dense)
    with pytest.raises(TypeError, match="StaticCache"):
        held_bytes(StaticCache(config=network.config, max_cache_len=8))


@pytest.mark.parametrize("options", [{}, {"residual_length": 0}, {"residual_length": 40}, {"policy": H2O(budget=100)}], ids=str)
@pytest.mark.parametrize("tokens", [50, pytest.param(90, marks=pytest.mark.slow), 200])
def test_tokens_that_are_read_at_once_see_what_they_see_one_by_one(loaded, tokens, options):
    model, _, ids = loaded
    ids = torch.tensor(ids[: 2 * (tokens + 80)]).view(2, -1)
    found, sizes = [], []
    for size in (None, 1):
        cache = CompressedCache(model.config, format="turboquant_3bit_nc", **options)
        with torch.no_grad():
            model(ids[:, :tokens], past_key_values=cache)
        sizes.append(at_once(cache))
        found.append(torch.cat(list(steps(model, cache, ids[:, tokens:], size)), dim=1))
    close = torch.isclose(*found, rtol=1e-3, atol=1e-3)  # a code at a border of two may fall to either side
    assert (~close).float().mean() < 1e-4 and (found[0] - found[1]).abs().max() < 5e-3
    assert (sizes[0] > 1) == (options in ({}, {"residual_length": 40}))


def test_reading_at_once_what_should_come_one_by_one_is_seen(loaded):
    """With more tokens a step than `at_once` allows, they see more of each other."""
    model, _, ids = loaded
    ids = torch.tensor(ids[:280])[None]
    with torch.no_grad():
        found = []
        for size in (None, 80):
            cache = CompressedCache(model.config, format="turboquant_3bit_nc", residual_length=32)
            model(ids[:, :200], past_key_values=cache)
            found.append(torch.cat(list(steps(model, cache, ids[:, 200:], size)), dim=1))
    assert (found[0] - found[1]).abs().max() > 0.01
