"""`compile=True`: caches that grow while `generate` compiles their steps."""

import pytest
import torch

from qkvcache import CompressedCache, policies
from qkvcache.releases import passing
from tests.caches.test_static_compile import compiling, graphs, logits  # noqa: F401
from tests.matrix import model
from tests.reference import assert_close, prompt

pytest.importorskip("triton")
ZONES = {"num_sink_tokens": 2, "residual_length": 4}


@pytest.mark.slow
def test_generate_compiles_steps_of_a_cache_that_grows(compiling, monkeypatch):  # noqa: F811
    """Past the end of a slab and of a power of two of columns, where masks get wider: once more, whatever comes later."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    this = compiling("llama", "sdpa")
    inputs = {name: x.repeat(1, 2)[:, :66] for name, x in prompt(1).items()}
    plain = CompressedCache(this.network.config, format="int8", max_length=200, **ZONES)
    cache = CompressedCache(this.network.config, format="int8", compile=True, **ZONES)
    expected = this.run(plain, inputs, compiled=False, max_new_tokens=10)
    got = this.run(cache, inputs, max_new_tokens=10)
    assert_close(logits(got), logits(expected), 1e-3)
    assert graphs() == 1
    assert cache.get_seq_length() == 75
    assert {len(layer.storage.tokens.pool.slabs) for layer in cache.layers} == {2}
    assert max(layer.storage.tokens.capacity for layer in cache.layers) == 128


def test_which_caches_are_compiled():
    config = model("llama").config
    assert not CompressedCache(config, format="int8").is_compileable
    assert CompressedCache(config, format="int8", compile=True).is_compileable
    assert CompressedCache(config, format="int8", max_length=9).is_compileable
    assert CompressedCache(config, format="int8", compile=True, skip_layers=(0,)).is_compileable
    assert CompressedCache(config, policy=policies.KeyDiff(budget=40), compile=True).is_compileable
    assert CompressedCache(model("gemma3").config, format="int8", compile=True).is_compileable


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", ZONES), ("gemma3", ZONES), *(("llama", {"policy": policy(budget=20)}) for policy in (policies.KeyDiff, policies.H2O))],
)
def test_uncompiled_it_says_what_max_length_says(name, options):
    """A policy with a budget of tokens needs no `max_length`."""
    network, end = model(name), 0
    caches = [CompressedCache(network.config, format="int8", **options, **room) for room in ({"max_length": 100}, {"compile": True})]
    with torch.no_grad():
        for ids in torch.randint(3, 100, (2, 90)).split([70, 1, 1, 8, *[1] * 10], dim=1):
            first, second = (network(ids, **passing(cache)).logits for cache in caches)
            assert_close(second, first, 0 if "policy" in options else 1e-5)
            end += ids.shape[1]
            assert caches[0].get_seq_length() == caches[1].get_seq_length() == end
