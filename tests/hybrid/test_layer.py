"""Layers that hold attention's tokens and recurrent states: both parts go through every operation of a cache."""

import copy

import pytest
import torch
from families_models import build
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from qkvcache import CompressedCache, H2OCache, PrefixStore, policies
from qkvcache.evict.layer import EvictingLayer
from qkvcache.evict.recurrent import EvictingHybridLayer
from qkvcache.hybrid.layer import HybridLayer
from qkvcache.releases import passing
from tests.matrix import model
from tests.reference import assert_close
from tests.tolerance import of_model

ZONES = {"num_sink_tokens": 2, "residual_length": 4}
OPTIONS = {
    "growing": {"format": "int8"},
    "preallocated": {"format": "int8", "max_length": 96},
    "evicting": {"format": "int8", "policy": policies.H2O(budget=16)},
}


def read(cache, ids):
    with torch.no_grad():
        return model("falcon_h1")(ids, **passing(cache)).logits


def filled(name, rows=2, tokens=30):
    cache = CompressedCache(model("falcon_h1").config, **ZONES | OPTIONS[name])
    read(cache, ids(rows, tokens))
    return cache


def ids(rows, tokens, seed=0):
    return torch.randint(3, 100, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["falcon_h1", "zamba", "zamba2", "zaya", "inkling_text"])
def test_the_attention_of_hybrid_layers_is_compressed(name):
    config = AutoConfig.for_model(name).get_text_config(decoder=True)
    stock, cache = DynamicCache(config=config).layers, CompressedCache(config, format="int8")
    assert any(type(layer) is LinearAttentionAndFullAttentionLayer for layer in stock)
    assert cache.is_linear == DynamicCache(config=config).is_linear  # what is offloaded and fetched ahead depends on it
    for layer, expected in zip(cache.layers, stock, strict=True):
        hybrid = type(expected) is LinearAttentionAndFullAttentionLayer
        assert type(layer) is (HybridLayer if hybrid else type(expected))
        assert getattr(layer, "number_of_states", 0) == getattr(expected, "number_of_states", 0)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_repeat_interleave(3),
    ],
    ids=["beams", "select", "repeat"],
)
def test_rows_move_with_their_states(name, change):
    cache = filled(name)
    rows = torch.arange(2)
    single = [filled(name) for _ in range(2)]
    for row, one in enumerate(single):
        one.batch_select_indices([row])
    change(cache)
    count = len(cache.layers[0].conv_states[0])
    rows = {1: [1], 2: [1, 1], 6: [0, 0, 0, 1, 1, 1]}[count]
    new = ids(1, 1, 5)
    got, alone = read(cache, new.expand(count, -1)), [read(one, new) for one in single]
    assert_close(got, torch.cat([alone[row] for row in rows]), of_model(model("falcon_h1")))


@pytest.mark.parametrize("name", OPTIONS)
def test_branches_have_states_of_their_own(name):
    cache = filled(name)
    copies = [copy.deepcopy(cache) for _ in range(2)]
    for tokens in (1, 3, 1):
        for seed, (ours, theirs) in enumerate(zip([cache, *cache.fork(1)], copies, strict=True)):
            new = ids(2, tokens, seed)
            assert torch.equal(read(ours, new), read(theirs, new))
        copies = [copies[0], copy.deepcopy(copies[0])]


@pytest.mark.parametrize("name", OPTIONS)
def test_reset_forgets_both_parts(name):
    cache = filled(name)
    cache.reset()
    assert not cache.has_previous_state() and not cache.get_seq_length()
    rows = 2 if name == "preallocated" else 1  # transformers' states at a fixed address keep their batch
    again = ids(rows, 20, 3)
    assert torch.equal(read(cache, again), read(CompressedCache(model("falcon_h1").config, **ZONES | OPTIONS[name]), again))


@pytest.mark.parametrize("name", OPTIONS)
def test_crop_is_refused_and_changes_nothing(name):
    cache, twin = filled(name), filled(name)
    with pytest.raises(NotImplementedError, match=r"crop\(-2\)"):
        cache.crop(-2)
    new = ids(2, 1, 1)
    assert torch.equal(read(cache, new), read(twin, new))


@pytest.mark.parametrize("way", ["prompt lookup", "another model", "the model itself"])
def test_assisted_decoding_takes_states_back(way):
    """States of convolutions, which record the tokens that may be taken back, against steps without a cache. transformers refuses models
    with a recurrence."""
    options = {"prompt lookup": {"prompt_lookup_num_tokens": 3}, "another model": {"assistant_model": build("llama")}}
    for name in ("lfm2", "qwen3_next"):
        network, prompt = build(name), ids(1, 15).repeat(1, 2)
        chosen = options.get(way) or {"assistant_model": network}
        chosen |= {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        cache = CompressedCache(network.config, format="int8", **ZONES | {"residual_length": 64})
        if name == "qwen3_next":
            with pytest.raises(ValueError, match="not supported with stateful models"):
                network.generate(prompt, **passing(cache), **chosen)
            continue
        expected = prompt
        for _ in range(12):
            with torch.no_grad():
                expected = torch.cat([expected, network(expected, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(network.generate(prompt, **passing(cache), **chosen), expected)


def test_memory_counts_states():
    cache, dense = filled("growing", tokens=80), DynamicCache(config=model("falcon_h1").config)
    read(dense, ids(2, 80))
    states = sum(x.nbytes for layer in cache.layers for x in (layer.conv_states[0], layer.recurrent_states[0]))
    kept = sum(x.nbytes for layer in dense.layers for x in (layer.keys, layer.values, layer.conv_states[0], layer.recurrent_states[0]))
    assert cache.memory().exact >= states and cache.memory().dense == kept > cache.nbytes
    assert "layers=2 of 2 compressed" in repr(cache)


def test_h2o_evicts_tokens_and_leaves_states():
    cache = H2OCache(model("falcon_h1").config, budget=16)
    dense = DynamicCache(config=model("falcon_h1").config)
    text = ids(1, 40)
    read(cache, text), read(dense, text)
    assert all(type(layer) is EvictingHybridLayer and isinstance(layer, EvictingLayer) for layer in cache.layers)
    assert cache.stored_length() == 16 and cache.get_seq_length() == 40
    assert torch.equal(cache.layers[0].recurrent_states[0], dense.layers[0].recurrent_states[0])  # of a prompt read whole


def test_kvzip_is_refused():
    cache = CompressedCache(model("falcon_h1").config, policy=policies.KVzip(budget=80))
    with pytest.raises(NotImplementedError, match="recurrent states beside attention"):
        cache.compress(model("falcon_h1"), ids(1, 40), progress=False)


def test_relative_position_bias_is_not_evicted():
    with pytest.raises(NotImplementedError, match="inkling_text: relative position bias"):
        H2OCache(AutoConfig.for_model("inkling_text"), budget=16)


@pytest.mark.parametrize("dense", [False, True])
def test_a_stored_prompt_brings_its_states(dense, tmp_path):
    network = model("falcon_h1")
    options = {"max_bytes": 2**24, "format": "identity", "directory": tmp_path, "dense": dense, **ZONES}
    text = torch.cat([ids(1, 40), ids(1, 9, 2)], 1)
    store = PrefixStore(network, **options)
    with store.reuse(text[:, :40]):
        pass
    for kept, source in ((store, "memory"), (PrefixStore(network, **options), "disk")):
        found = kept.fetch(text)
        assert (found.length, found.source) == (39, source) and type(found.cache) is (DynamicCache if dense else CompressedCache)
        expected = read(DynamicCache(config=network.config), text)[:, 39:]
        for _ in range(2):  # what the first one computed did not reach the store
            assert_close(read(kept.fetch(text).cache, text[:, 39:]), expected, of_model(network))


def test_a_dense_cache_is_stored_quantized():
    network, text = model("falcon_h1"), ids(1, 40)
    store = PrefixStore(network, max_bytes=2**24, format="int8", min_quantize_tokens=16, **ZONES)
    dense = DynamicCache(config=network.config)
    read(dense, text)
    assert store.store(text, dense)
    found = store.fetch(torch.cat([text, ids(1, 4, 1)], 1))
    assert found.length == 40 and isinstance(found.cache.layers[0], HybridLayer)
    new = ids(1, 1, 1)
    assert_close(read(found.cache, new), read(dense, new), 0.1)


def test_compiled_steps_say_what_uncompiled_ones_say():
    network, text = model("falcon_h1"), ids(1, 20)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = network.generate(text, **passing(CompressedCache(network.config, format="int8")), **options)
    cache = CompressedCache(network.config, format="int8", max_length=40)
    assert cache.is_compileable
    assert torch.equal(network.generate(text, **passing(cache), disable_compile=True, **options), expected)


def test_a_tiny_zamba_runs_on_codes():
    """Its layers hold a state alone, or one beside attention."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
    small = {"vocab_size": 100, "mamba_headdim": 16, "n_mamba_heads": 8, "intermediate_size": 64, "num_key_value_heads": 4}
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model("zamba2", **sizes | small, chunk_size=16, mamba_d_state=16)).eval()
    caches = DynamicCache(config=network.config), CompressedCache(network.config, format="identity")
    for tokens in (20, 1, 1):
        logits = [network(ids(2, tokens, tokens), **passing(cache)).logits for cache in caches]
        assert_close(logits[1], logits[0], of_model(network))
