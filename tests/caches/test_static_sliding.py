"""Sliding windows at fixed addresses, beside those that grow; and storage taken early, for one batch and then for another."""

import pytest
import torch
from transformers import DynamicCache

from qkvcache import CompressedCache, policies
from qkvcache.layers.static_sliding import StaticSlidingLayer
from qkvcache.releases import passing
from tests.matrix import model
from tests.reference import assert_close
from tests.tolerance import of_model

IDS = torch.arange(3, 93).view(2, 45)


def made(network, length=60, **options) -> CompressedCache:
    return CompressedCache(network.config, format="identity", max_length=length, **options)


def read(network, cache, ids):
    with torch.no_grad():
        return network(ids, **passing(cache)).logits


def addresses(cache) -> list[int]:
    held = (layer.stored if isinstance(layer, StaticSlidingLayer) else layer.storage.residual for layer in cache.layers)
    return [x.data_ptr() for pair in held for x in pair]


def lengths(cache) -> list[int]:
    return [int(layer.get_seq_length()) for layer in cache.layers]


@pytest.mark.filterwarnings("ignore:no layer of this model")
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_no_token_beyond_max_length_is_taken(name):
    network = model(name)
    cache, growing = made(network, 20), DynamicCache(config=network.config)
    for at in range(20):
        assert_close(read(network, cache, IDS[:, at : at + 1]), read(network, growing, IDS[:, at : at + 1]), of_model(network))
    with pytest.raises(ValueError, match="20 tokens and 1 more do not fit in max_length=20"):
        read(network, cache, IDS[:, 20:21])
    assert lengths(cache) == [20] * len(cache.layers)


@pytest.mark.parametrize("tokens", [10, 25])  # of a window of 16
def test_rows_are_repeated_selected_and_reordered(tokens):
    network = model("gemma3")
    ours, theirs = made(network), CompressedCache(network.config, format="identity")
    for cache in (ours, theirs):
        read(network, cache, IDS[:, :tokens])
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([0, 4, 5]))
        cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert_close(read(network, ours, IDS[[0, 1, 0], 30:31]), read(network, theirs, IDS[[0, 1, 0], 30:31]), of_model(network))


@pytest.mark.parametrize("policy", [None, policies.SlidingWindow(window_length=40)])
def test_another_batch_after_reset(policy):
    network = model("gemma3")
    cache = made(network, policy=policy)
    for ids in (IDS[:, :20], IDS[:1, :30], IDS[[0, 1, 1], :9]):
        cache.reset()
        assert_close(read(network, cache, ids), read(network, DynamicCache(config=network.config), ids), of_model(network))
    with pytest.raises(ValueError, match=r"reset\(\) for another batch"):
        read(network, cache, IDS[:, :1])
    assert lengths(cache) == [9] * 4


def test_cropping_within_the_window():
    network = model("gemma3")
    cache = made(network)
    read(network, cache, IDS[:, :14])
    cache.crop(-5)
    got = read(network, cache, IDS[:, 9:12])
    assert_close(got, read(network, DynamicCache(config=network.config), IDS[:, :12])[:, 9:], of_model(network))


def test_what_left_the_window_does_not_come_back():
    network = model("gemma3")
    cache = made(network)
    read(network, cache, IDS[:, :30])
    cache.crop(0)
    with pytest.raises(NotImplementedError, match="keeps the last 16: leave out max_length"):
        cache.crop(-3)
    assert lengths(cache) == [30] * 4  # nothing was cropped of the layers that could


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_storage_is_taken_early_for_another_batch(name, monkeypatch):
    network = model(name)
    config = network.config
    cache = made(network)
    of = config.num_key_value_heads, config.head_dim, torch.float32, torch.device("cpu")
    cache.early_initialization(2, *of)
    full = cache.layers[-1]
    kept = addresses(cache)
    cache.reset()
    cache.early_initialization(2, *of)
    assert kept and addresses(cache) == kept  # where a CUDA graph knows them
    cache.reset()
    cache.early_initialization(3, *of)
    assert full.storage.residual[0].shape[0] == 3
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.zeros(2, config.num_key_value_heads, 1, config.head_dim)
    with pytest.raises(ValueError, match=r"storage is for keys and values like \[3"):
        full.update(x, x)
