"""A cache filled from one recorded reading is the cache that the model would have filled."""

import pytest
import torch
from recording import record
from transformers import DynamicCache
from workload import sixteen_bit

from qkvcache import CompressedCache, demo
from qkvcache.evaluation.quality import prefill
from qkvcache.policies import H2O, TOVA, ExpectedAttention, KeyDiff, KVzip, Random, SinkWindow, SnapKV
from qkvcache.releases import passing
from tests.matrix import model as tiny
from tests.matrix import slowly

POLICIES = [
    H2O(budget=64), H2O(budget=64, decay=0.9), TOVA(budget=64), SnapKV(budget=64),
    KeyDiff(budget=64), Random(budget=64), SinkWindow(window_length=60),
    ExpectedAttention(budget=64, recent=16),
]  # fmt: skip
of_policy = pytest.mark.parametrize("policy", POLICIES, ids=str)


@pytest.fixture(scope="module")
def loaded():
    return demo.load()


@pytest.fixture(scope="module")
def ids(loaded):
    return torch.tensor(demo.text_ids(loaded[1])[:300]).view(2, 150)


@pytest.fixture(scope="module")
def recorded(loaded, ids):
    return record(loaded[0], ids)[0]


@pytest.mark.parametrize("format", slowly([None, "fp8"], ["fp8"]))
@of_policy
def test_the_record_fills_a_cache_as_the_model_does(loaded, ids, recorded, policy, format):
    model = loaded[0]
    filled, run = (CompressedCache(model.config, format=format, policy=policy) for _ in range(2))
    recorded.fill(filled, model, ids)
    with torch.no_grad():
        model(ids, **passing(run))
        logits = [model(ids[:, :3], **passing(cache)).logits for cache in (filled, run)]
    assert torch.equal(*logits)
    assert all(torch.equal(filled.kept_positions(i), run.kept_positions(i)) for i in range(5))
    assert filled.nbytes == run.nbytes


@of_policy
def test_bytes_are_those_of_sixteen_bit(loaded, ids, recorded, policy):
    """Whatever the model computes in, and although it reads nothing again."""
    row = sixteen_bit(recorded, loaded[0])
    model, _ = demo.load(torch.bfloat16)
    filled, run = (CompressedCache(model.config, policy=policy) for _ in range(2))
    row.fill(filled, loaded[0], ids[:1])
    with torch.no_grad():
        model(ids[:1], **passing(run))
    assert filled.nbytes == run.nbytes


@pytest.mark.parametrize("options", [{}, *slowly([{"layerwise": True}], [])], ids=str)
def test_a_second_reading_fills_several_caches_as_compress_does(loaded, ids, options):
    model, tokenizer = loaded
    recorded, _ = record(model, ids)
    for budget in (0.5, 40):
        policy = KVzip(budget=budget, recent=8, chunk_size=64, **options)
        filled, run = (CompressedCache(model.config, policy=policy, format="fp8") for _ in range(2))
        recorded.fill(filled, model, ids, tokenizer)
        run.compress(model, ids, tokenizer=tokenizer, progress=False)
        assert all(torch.equal(filled.kept_positions(i), run.kept_positions(i)) for i in range(5))
        assert filled.nbytes == run.nbytes
    assert len(recorded._read_twice) == 1


def test_calls_are_recorded_beside_what_a_prefill_holds(loaded, ids, recorded):
    model, (prefilled, logits) = loaded[0], prefill(loaded[0], ids)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(recorded.layers, prefilled.layers, strict=True))
    assert torch.equal(record(model, ids)[1], logits)
    assert [tuple(call.query.shape) for call in recorded.calls] == [(2, 4, 150, 128)] * 5
    dense = recorded.fill(DynamicCache(config=model.config), model, ids)
    assert torch.equal(dense.layers[0].values, prefilled.layers[0].values)


def test_rows_that_are_read_in_groups(loaded, ids, recorded, monkeypatch):
    """As rows that are read together, but for the order of sums."""
    monkeypatch.setattr("qkvcache.evaluation.quality.SCORES", 1)
    apart, logits = record(loaded[0], ids)
    for index, (a, b) in enumerate(zip(apart.layers, recorded.layers, strict=True)):
        torch.testing.assert_close((a.keys, a.values), (b.keys, b.values), rtol=1e-4, atol=1e-4)
        for policy in (H2O(budget=64), SnapKV(budget=64)):
            torch.testing.assert_close(apart.observed(index, policy), recorded.observed(index, policy), rtol=1e-4, atol=1e-4)
    assert logits.shape == (2, loaded[0].config.vocab_size)


def test_without_a_record_the_model_reads_again():
    network = tiny("gemma3")
    ids = torch.arange(3, 43)[None]
    recorded, _ = record(network, ids)
    assert not recorded.calls
    dense, run = (DynamicCache(config=network.config) for _ in range(2))
    recorded.fill(dense, network, ids)
    with torch.no_grad():
        network(ids, **passing(run))
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(dense.layers, run.layers, strict=True))
