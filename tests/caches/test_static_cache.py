"""`max_length`: every feature of `generate` on storage that stays in its place."""

import copy

import pytest
import torch
from transformers import DynamicCache

from qkvcache import CompressedCache, policies
from qkvcache.layers.compressed import CompressedLayer
from qkvcache.releases import passing
from tests.matrix import FORMATS, model
from tests.reference import MODES, NEW, ZONES, Mode, assert_steps_alike, forward, prompt, run
from tests.tolerance import of_model

ZONE = ZONES["zones"]
FOUR_BIT = "turboquant_4bit_nc"


def make(network, format: str = FOUR_BIT, length: int = 40 + NEW, **options) -> CompressedCache:
    return CompressedCache(network.config, format=FORMATS[format], max_length=length, **ZONE | options)


def snapshot(cache) -> list:
    tensors = [x for layer in cache.layers if isinstance(layer, CompressedLayer) for _, x in layer.tensors()]
    return [cache.get_seq_length(), *((x.data_ptr(), x.flatten().view(torch.uint8).tolist()) for x in tensors)]


# Forwards


def test_a_long_second_turn_with_flex_attention():
    """The masks are for all tokens that may come, the layer's decoded keys only for those that have."""
    network, mode = model("gemma3", "flex_attention"), Mode((0, 5), (30, 20, 1))
    assert_steps_alike(network, make(network, "identity", 200), DynamicCache(config=network.config), mode, of_model(network))


def test_skipped_layers_are_static_and_exact():
    network = model("gemma3")
    cache = make(network, FOUR_BIT, skip_layers=[-1])
    assert [type(layer).__name__ for layer in cache.layers] == ["StaticSlidingLayer", "CompressedLayer"] * 2
    assert [layer.format.name for layer in cache.layers[1::2]] == [FOUR_BIT, "identity"]
    with pytest.warns(UserWarning, match="nothing will be compressed"):
        every = make(network, FOUR_BIT, skip_layers=[1, 3])
    assert_steps_alike(network, every, DynamicCache(config=network.config), MODES["padded"], of_model(network))


# generate, uncompiled


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prompt_of_one_token(name):
    network = model(name)
    inputs = {"input_ids": torch.tensor([[7]])}
    expected = run(network, DynamicCache(config=network.config), inputs)
    assert torch.equal(run(network, make(network, "identity", NEW), inputs), expected)


# Too many tokens


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_more_than_max_length_is_refused_before_writing(name):
    network = model(name)
    cache = make(network, length=42)
    ids, mask = prompt(2, 50).values()
    forward(network, cache, ids, mask, 0, 40)
    before, fork = snapshot(cache), copy.deepcopy(cache)
    with pytest.raises(ValueError, match="40 tokens and 3 more do not fit in max_length=42: make the cache with a larger one"):
        forward(network, cache, ids, mask, 40, 43)
    assert snapshot(cache) == before
    got, expected = (forward(network, cache, ids, mask, 40, 42) for cache in (cache, fork))
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="42 tokens and 1 more"):
        forward(network, cache, ids, mask, 42, 43)


def test_generate_fills_the_cache_to_the_last_token():
    network = model("llama")
    cache = make(network, length=40 + NEW - 1)
    run(network, cache)
    assert cache.get_seq_length() == 40 + NEW - 1
    with pytest.raises(ValueError, match=f"max_length={40 + NEW - 1}"):
        run(network, cache, {"input_ids": torch.full((1, 65), 5)})


@pytest.mark.parametrize(
    "zones", [{"residual_length": 10**12}, {"num_sink_tokens": 10**12}, {"num_sink_tokens": 30, "residual_length": 30}]
)
@pytest.mark.parametrize("length", [1, 47])
def test_zones_take_no_more_than_max_length(zones, length):
    """Which then holds all tokens as they came."""
    network, inputs = model("llama"), {"input_ids": torch.randint(3, 90, (1, min(length, 40)))}
    cache = CompressedCache(network.config, format="nvfp4", max_length=length, **zones)
    dense = DynamicCache(config=network.config)
    options = {"max_new_tokens": length - inputs["input_ids"].shape[1] + 1, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    got, expected = (network.generate(**inputs, **passing(x), disable_compile=True, **options) for x in (cache, dense))
    assert torch.equal(got, expected) and cache.get_seq_length() == length
    assert cache.memory().exact == cache.memory().dense


def test_a_budget_takes_no_more_than_max_length():
    network, ids = model("llama"), torch.randint(3, 90, (1, 40))
    sizes, tokens = [], []
    for budget in (47, 10**9):
        cache = CompressedCache(network.config, policy=policies.H2O(budget=budget, recent=3), max_length=47)
        tokens.append(network.generate(ids, **passing(cache), max_new_tokens=8, eos_token_id=None, disable_compile=True))
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1] and torch.equal(*tokens)
