"""The caches that transformers makes by itself: compressed within `qkvcache.default`, and by the repository's `custom_generate`."""

import threading
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

from qkvcache import CompressedCache, H2OCache, TurboQuantCache, attach, default
from tests.matrix import model
from tests.reference import assert_close

IDS = torch.arange(3, 83)[None]
STOCK = DynamicCache.__init__, EncoderDecoderCache.__init__


@pytest.fixture(autouse=True)
def restored():
    yield
    assert (DynamicCache.__init__, EncoderDecoderCache.__init__) == STOCK


def generate(network, **options):
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True} | options
    ids = IDS[:, :10] if network.config.is_encoder_decoder else IDS
    return network.generate(ids, attention_mask=torch.ones_like(ids), **options)


def same(a, b):
    assert torch.equal(a.sequences, b.sequences)
    assert_close(torch.stack(a.logits), torch.stack(b.logits), 1e-5)


def test_generate_is_that_with_the_cache():
    network = model("llama")
    with default(format="int8", residual_length=8):
        found = generate(network)
    same(found, generate(network, past_key_values=CompressedCache(network.config, format="int8", residual_length=8)))
    cache = found.past_key_values
    assert type(cache) is CompressedCache and cache.format.name == "int8" and cache.memory().codes
    assert type(generate(network).past_key_values) is DynamicCache


def test_the_innermost_context_counts():
    network = model("llama")
    with default(format="int8"):
        with pytest.raises(RuntimeError, match="mine"), default(policy="h2o", max_length=200):
            assert generate(network).past_key_values.policy.name == "H2O"
            raise RuntimeError("mine")
        assert generate(network).past_key_values.format.name == "int8"
        assert type(generate(network, past_key_values=TurboQuantCache(network.config)).past_key_values) is TurboQuantCache
        assert type(DynamicCache(config=network.config)) is DynamicCache  # not made by transformers


def test_a_context_is_of_its_thread():
    network, found, both = model("llama"), {}, threading.Barrier(3)

    def run(format):
        if format is None:
            both.wait(60)
            found[format] = type(generate(network).past_key_values)
            return
        with default(format=format):
            both.wait(60)
            found[format] = generate(network).past_key_values.format.name

    threads = [threading.Thread(target=run, args=(format,)) for format in ("int8", "fp8", None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"int8": "int8", "fp8": "fp8", None: DynamicCache}


def test_states_of_an_encoder_are_left_as_they_are():
    network = model("t5")
    with default(format="int8", residual_length=2):
        found = generate(network, max_new_tokens=12)
    cache = found.past_key_values
    assert type(cache.self_attention_cache) is CompressedCache and type(cache.cross_attention_cache) is DynamicCache
    with attach(network, lambda config: CompressedCache(config, format="int8", residual_length=2)):
        same(found, generate(network, max_new_tokens=12))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({}, TypeError, "pass a format"),
        ({"format": "int9"}, ValueError, "'int9' is unknown"),
        ({"policy": "h3o"}, ValueError, "'h3o' is unknown"),
        ({"format": "int8", "residual_lenght": 3}, TypeError, "residual_lenght=3: did you mean 'residual_length'"),
    ],
)
def test_wrong_options_are_refused_at_the_context(options, error, says):
    with pytest.raises(error, match=says), default(**options):
        pass


@pytest.fixture
def by_options(monkeypatch, tmp_path):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    return {"custom_generate": str(Path(__file__).parents[2]), "trust_remote_code": True}


def test_custom_generate_makes_the_cache_of_its_options(by_options):
    network = model("llama")
    same(generate(network, **by_options), generate(network, past_key_values=TurboQuantCache(network.config)))
    found = generate(network, **by_options, policy="h2o", budget=40, format="fp8", num_sink_tokens=0, residual_length=20)
    same(found, generate(network, past_key_values=H2OCache(network.config, budget=40, format="fp8", residual_length=20)))
    mine = TurboQuantCache(network.config)
    assert generate(network, **by_options, past_key_values=mine).past_key_values is mine
    with pytest.raises(ValueError, match="format='int9' is unknown"):
        generate(network, **by_options, format="int9")
