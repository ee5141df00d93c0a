"""A cache filled from one reading is the cache that the model would have filled; what is measured with it."""

import pytest
import torch
from transformers import DynamicCache

from qkvcache import CompressedCache, demo
from qkvcache.evaluation.quality import Passages, RecallSet, at_once, divergence, held_bytes, prefill, recall, steps, stream
from qkvcache.policies import H2O, KeyDiff, KVzip, SinkWindow
from qkvcache.releases import passing
from tests.matrix import covering
from tests.matrix import model as tiny
from tests.reference import assert_close
from tests.tolerance import of_model


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = demo.load()
    return model, tokenizer, demo.text_ids(tokenizer)


@pytest.mark.parametrize(
    ("policy", "format"), covering([None, KeyDiff(budget=64), H2O(budget=64)], ["identity", "fp8"], strength=1), ids=str
)
def test_a_cache_is_filled_as_the_model_does(loaded, policy, format):
    model, _, text = loaded
    ids = torch.tensor(text[:300]).view(2, 150)
    prefilled, _ = prefill(model, ids)
    filled, run = (CompressedCache(model.config, format=format, policy=policy) for _ in range(2))
    assert prefilled.fill(filled, model, ids) is filled
    with torch.no_grad():
        model(ids, **passing(run))
        logits = [model(ids[:, :3], **passing(cache)).logits for cache in (filled, run)]
    assert torch.equal(*logits) and filled.nbytes == run.nbytes


def test_a_policy_that_reads_twice_fills_as_compress_does(loaded):
    model, tokenizer, text = loaded
    ids, policy = torch.tensor(text[:150])[None], KVzip(budget=40, recent=8, chunk_size=64)
    filled, run = (CompressedCache(model.config, policy=policy) for _ in range(2))
    prefill(model, ids)[0].fill(filled, model, ids, tokenizer)
    run.compress(model, ids, tokenizer=tokenizer, progress=False)
    assert all(torch.equal(filled.kept_positions(i), run.kept_positions(i)) for i in range(5))


def test_layers_that_slide_are_read_again():
    network = tiny("gemma3")
    ids = torch.arange(3, 43)[None]
    dense, run = (DynamicCache(config=network.config) for _ in range(2))
    prefilled, _ = prefill(network, ids)
    prefilled.fill(dense, network, ids)
    with torch.no_grad():
        network(ids, **passing(run))
    assert not prefilled.copies
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(dense.layers, run.layers, strict=True))


def test_rows_that_are_read_in_groups(loaded, monkeypatch):
    """As rows that are read together, but for the order of sums."""
    model, _, text = loaded
    ids = torch.tensor(text[:300]).view(2, 150)
    together, expected = prefill(model, ids)
    monkeypatch.setattr("qkvcache.evaluation.quality.SCORES", 1)
    apart, logits = prefill(model, ids)
    for a, b in zip(apart.layers, together.layers, strict=True):
        torch.testing.assert_close((a.keys, a.values), (b.keys, b.values), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_divergence_grows_as_the_budget_shrinks(loaded):
    model, _, ids = loaded
    passages = Passages.read(model, torch.tensor(ids[:424]).view(2, -1), 200)
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


def test_states_of_linear_layers_count_in_a_dense_cache_too():
    network = tiny("qwen3_next")
    dense, ours = DynamicCache(config=network.config), CompressedCache(network.config, format="identity")
    with torch.no_grad():
        for cache in (dense, ours):
            network(torch.arange(3, 43)[None], **passing(cache))
    states = [layer for layer in dense.layers if hasattr(layer, "recurrent_states")]
    in_states = sum(x.nbytes for layer in states for of in (layer.conv_states, layer.recurrent_states) for x in of.values())
    in_keys = sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers if layer not in states)
    assert len(states) == 3 and in_states > 0 and held_bytes(dense) == in_states + in_keys == ours.memory().dense
    assert held_bytes(ours) == ours.nbytes >= held_bytes(dense)


KEPT = {"default": {}, "none": {"residual_length": 0}, "short": {"residual_length": 40}, "evicted": {"policy": H2O(budget=100)}}


@pytest.mark.parametrize(("tokens", "kept"), covering([50, 200], KEPT, strength=1))
def test_tokens_read_at_once_see_what_they_see_one_by_one(loaded, tokens, kept):
    model, _, ids = loaded
    ids = torch.tensor(ids[: 2 * (tokens + 20)]).view(2, -1)
    found, sizes = [], []
    for size in (None, 1):
        cache = CompressedCache(model.config, format="turboquant_3bit_nc", **KEPT[kept])
        with torch.no_grad():
            model(ids[:, :tokens], **passing(cache))
        sizes.append(at_once(cache))
        found.append(torch.cat(list(steps(model, cache, ids[:, tokens:], size)), dim=1))
    close = torch.isclose(*found, rtol=1e-3, atol=1e-3)  # a code at a border of two may fall to either side
    assert (~close).float().mean() < 1e-4 and (found[0] - found[1]).abs().max() < 5e-3
    assert (sizes[0] > 1) == (kept == "default" and tokens == 50)  # while the residual is not full


def test_reading_at_once_what_should_come_one_by_one_is_seen(loaded):
    """With more tokens a step than `at_once` allows, they see more of each other."""
    model, _, ids = loaded
    ids = torch.tensor(ids[:280])[None]
    with torch.no_grad():
        found = []
        for size in (None, 80):
            cache = CompressedCache(model.config, format="turboquant_3bit_nc", residual_length=32)
            model(ids[:, :200], **passing(cache))
            found.append(torch.cat(list(steps(model, cache, ids[:, 200:], size)), dim=1))
    assert (found[0] - found[1]).abs().max() > 0.01


def test_chunks_of_a_stream_do_not_change_the_loss(loaded):
    model, _, ids = loaded
    ids = torch.tensor(ids[:202]).view(2, -1)
    whole, parts = (torch.cat(list(stream(model, DynamicCache(config=model.config), ids, n)), dim=1) for n in (100, 33))
    assert whole.shape == (2, 100)
    assert_close(whole, parts, of_model(model, 100))
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert_close(whole.mean(), loss, of_model(model, 100))
