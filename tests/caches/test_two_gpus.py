"""A model of which each half is on a GPU of its own, as `device_map` has it, computes what it does on one, with the cache on both."""

import copy

import pytest
import torch

from qkvcache import CompressedCache, H2OCache
from qkvcache.prefix import PrefixStore
from qkvcache.releases import passing
from tests.matrix import COVER, FORMATS, model
from tests.reference import ZONES, assert_close
from tests.test_gpu import on_gpu, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
OPTIONS = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(scope="module")
def halves():
    accelerate = pytest.importorskip("accelerate")
    network = copy.deepcopy(model("llama"))
    layers = network.config.num_hidden_layers
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{i}": 2 * i // layers for i in range(layers)}
    return accelerate.dispatch_model(network, places)


def made(kind: str, config, **options):
    return (
        H2OCache(config, budget=96, **options)
        if kind == "h2o"
        else CompressedCache(config, format=FORMATS[kind], **ZONES["zones"] | options)
    )


@pytest.mark.parametrize("options", [{}, {"max_length": 384}], ids=["grows", "in place"])
@pytest.mark.parametrize("kind", [*COVER, "h2o"])
def test_generate_equals_one_gpu(halves, kind, options):
    expected = on_gpu(torch.float32).generate(**prompt(), **passing(made(kind, halves.config, **options)), **OPTIONS)
    cache = made(kind, halves.config, **options)
    for _ in range(3):  # what is read too soon differs from run to run
        cache.reset()
        got = halves.generate(**prompt(), **passing(cache), **OPTIONS)
        assert_close(torch.stack(got.logits), torch.stack(expected.logits).to(got.logits[0].device), 0.02)
    devices = [{x.device.index for _, x in layer.tensors()} for layer in cache.layers]
    assert devices[0] == {0} and devices[-1] == {1}


def test_a_stored_prefix_returns_to_both(halves):
    store = PrefixStore(halves, max_bytes=2**26, format="int8")
    ids = prompt(1)["input_ids"]
    cache = CompressedCache(halves.config, format="int8")
    with torch.no_grad():
        halves(ids[:, :200], **passing(cache))
    assert store.store(ids[:, :200], cache)
    found = store.fetch(ids)
    assert found.length == 200
    for layer, kept in zip(found.cache.layers, cache.layers, strict=True):
        assert {x.device for _, x in layer.tensors()} == {x.device for _, x in kept.tensors()}
    got, expected = (halves.generate(ids, **passing(past), **OPTIONS) for past in (found.cache, cache))
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(torch.stack(got.logits), torch.stack(expected.logits), 1e-4)
