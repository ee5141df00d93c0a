"""`cache.fork(n)`: branches of a conversation that hold its past once."""

import copy

import pytest
import torch

from qkvcache import CompressedCache, policies
from qkvcache.releases import passing
from tests.matrix import covering, model
from tests.reference import assert_close
from tests.tolerance import turned

OPTIONS = {
    "growing": {"format": "turboquant_4bit_nc"},
    "preallocated": {"format": "int8", "max_length": 200},
    "evicting": {"format": "int8", "policy": policies.H2O(budget=40, recent=8)},
    "pages of heads": {"format": "int8", "policy": policies.AdaKV(policies.SnapKV(budget=40, recent=8, window_size=8))},
}


def read(cache: CompressedCache, ids: torch.Tensor, network: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return network(ids, **passing(cache)).logits


def slabs(cache: CompressedCache) -> int:
    return sum(slab.data.nbytes for layer in cache.layers for slab in layer.storage.tokens.pool.slabs)


@pytest.mark.parametrize(("architecture", "name"), covering(["llama", "gemma3"], OPTIONS, strength=1))
def test_branches_say_what_copies_say(architecture, name):
    network = model(architecture)
    cache = CompressedCache(network.config, num_sink_tokens=2, residual_length=6, **OPTIONS[name])
    ids = torch.randint(3, 60, (2, 90))
    read(cache, ids, network)
    copies = [copy.deepcopy(cache) for _ in range(3)]
    branches = [cache, *cache.fork(2)]
    for tokens in (3, 1, 20, 1, 1):
        for ours, theirs in zip(branches, copies, strict=True):
            new = torch.randint(3, 60, (2, tokens))
            assert_close(read(ours, new, network), read(theirs, new, network), turned(OPTIONS[name]["format"]))


def test_the_past_is_held_once():
    network = model("llama")
    cache = CompressedCache(network.config, format="int8", num_sink_tokens=2, residual_length=6)
    read(cache, torch.randint(3, 60, (1, 900)), network)
    before = slabs(cache)
    branches = cache.fork(8)
    assert slabs(cache) == before == slabs(branches[0])
    for branch in branches:
        read(branch, torch.randint(3, 60, (1, 5)), network)
    pages = {layer.storage.tokens.pool.layout.nbytes for layer in cache.layers}
    assert before < slabs(cache) <= before + 8 * 3 * len(cache.layers) * max(pages)


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (-1, ValueError), ("2", TypeError)])
def test_a_fork_into_no_caches_is_refused(count, error):
    with pytest.raises(error):
        CompressedCache(model("llama").config, format="int8").fork(count)
