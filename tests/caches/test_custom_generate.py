"""The repository's `custom_generate`."""

from pathlib import Path

import pytest
import torch
import transformers

from qkvcache import H2OCache, TurboQuantCache
from qkvcache.releases import CACHE_ARGUMENT, passing
from tests.matrix import model
from tests.reference import assert_close

IDS = torch.arange(3, 83)[None]


def generate(network, **options):
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True} | options
    return network.generate(IDS, attention_mask=torch.ones_like(IDS), **options)


def same(a, b):
    assert torch.equal(a.sequences, b.sequences)
    assert_close(torch.stack(a.logits), torch.stack(b.logits), 1e-5)


@pytest.fixture
def by_options(monkeypatch, tmp_path):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    return {"custom_generate": str(Path(__file__).parents[2]), "trust_remote_code": True}


def test_custom_generate_makes_the_cache_of_its_options(by_options):
    network = model("llama")
    same(generate(network, **by_options), generate(network, **passing(TurboQuantCache(network.config))))
    found = generate(network, **by_options, policy="h2o", budget=40, format="fp8", num_sink_tokens=0, residual_length=20)
    same(found, generate(network, **passing(H2OCache(network.config, budget=40, format="fp8", residual_length=20))))
    mine = TurboQuantCache(network.config)
    assert generate(network, **by_options, **passing(mine))[CACHE_ARGUMENT] is mine
    with pytest.raises(ValueError, match="format='int9' is unknown"):
        generate(network, **by_options, format="int9")
