"""Prompts that share a part with a stored one, on models whose layers do not return to an earlier token."""

import functools

import pytest
import torch
from families_models import build
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

from qkvcache import CompressedCache, PrefixStore, policies
from qkvcache.prefix.checkpoints import checkpoint_bytes
from qkvcache.prefix.snapshot import checkpoint
from qkvcache.releases import passing
from tests.matrix import MODELS, model, slowly
from tests.reference import assert_close
from tests.tolerance import of_model

ZONES = {"num_sink_tokens": 2, "residual_length": 4}
INTERVAL = 16
NAMES = ["gemma3", "qwen3_next", "falcon_h1", "bamba", "inkling_text", "lfm2", "qwen4_exp_text", "glm5_next"]
SOME = ["gemma3", "falcon_h1", "lfm2", "glm5_next"]
"""Windows, states beside attention, convolutions, an indexer."""


@functools.lru_cache
def network(name):
    if name not in (*MODELS, *CONFIG_MAPPING):
        pytest.skip(f"this transformers has no {name}")
    if name == "qwen4_exp_text" and not hasattr(DynamicIndexedLayer(), "indexer_position_ids"):
        pytest.skip("this transformers keeps positions beside the layers")
    return model(name) if name in MODELS else build(name)


def store(name, **options):
    options = {"format": "identity", "checkpoint_interval": INTERVAL, "max_bytes": 2**24} | options
    return PrefixStore(network(name), **ZONES, **options)


def prompt(count, seed=0):
    return torch.randint(3, 90, (1, count), generator=torch.Generator().manual_seed(seed))


def logits(of, ids, past):
    """Those of the tokens that `past` has not seen, and of three more steps."""
    found, seen = [], past.get_seq_length()
    for end in range(ids.shape[1] - 3, ids.shape[1] + 1):
        with torch.no_grad():
            positions = torch.arange(seen, end)[None]
            found.append(of(ids[:, seen:end], **passing(past), position_ids=positions, use_cache=True).logits[:, -1])
        seen = end
    return torch.stack(found)


def assert_same(of, ids, past, tolerance=1):
    assert_close(logits(of, ids, past), logits(of, ids, DynamicCache(config=of.config)), tolerance * of_model(of))


@pytest.mark.parametrize(("name", "on_disk"), [*((name, False) for name in slowly(NAMES, SOME)), ("gemma3", True), ("falcon_h1", True)])
def test_half_of_a_prompt_and_a_second_turn_resume(name, on_disk, tmp_path):
    of, directory = network(name), tmp_path if on_disk else None
    first = prompt(60)
    half, second = torch.cat([first[:, :40], prompt(20, 1)], 1), torch.cat([first, prompt(25, 2)], 1)
    kept = store(name, directory=directory)
    with kept.reuse(first) as past:
        assert past.get_seq_length() == 59
    for ids, resumed in ((half, 32), (second, 59), (second[:, :70], 64), (half, 32)):
        kept = store(name, directory=directory) if on_disk else kept
        found = kept.fetch(ids)
        assert (found.length, found.source) == (resumed, "disk" if on_disk else "memory")
        assert_same(of, ids, found.cache)
        assert_same(of, ids, kept.fetch(ids).cache)  # which the first did not change
        if ids is second:
            with kept.reuse(ids) as past:
                assert past.get_seq_length() == 84
    if not on_disk:
        (entry,) = kept._memory.entries  # the second turn holds what the first held
        assert entry.cuts == (16, 32, 48, 59, 64, 80, 84)


@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
def test_a_prompt_is_read_as_in_chunks(format):
    of, ids = network("falcon_h1"), prompt(60)
    cache = CompressedCache(of.config, format=format, **ZONES)
    expected = of.generate(ids, **passing(cache), prefill_chunk_size=INTERVAL, max_new_tokens=8, do_sample=False)
    with store("falcon_h1", format=format).reuse(ids) as past:
        got = of.generate(ids, **passing(past), max_new_tokens=8, do_sample=False)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "falcon_h1"])
def test_a_checkpoint_takes_the_bytes_of_states_and_windows(name):
    kept, ids = store(name), prompt(60)
    with kept.reuse(ids):
        pass
    (entry,) = kept._memory.entries
    cache = DynamicCache(config=network(name).config)
    with torch.no_grad():
        network(name)(ids[:, :48], **passing(cache))
    parts = [x for layer in cache.layers if (found := checkpoint(layer)) for x in found.tensors.values()]
    assert checkpoint_bytes(entry.checkpoints[48]) == sum(x.nbytes for x in parts) > 0
    whole = sum(layer.nbytes for layer in entry.layers) + len(entry.key)
    assert kept.stats.nbytes == whole + sum(map(checkpoint_bytes, entry.checkpoints.values()))


@pytest.mark.parametrize("share", [0.4, 1.0, 2.5])
def test_checkpoints_fit_beside_the_tokens(share):
    kept, ids = store("qwen3_next"), prompt(60)
    with kept.reuse(ids):
        pass
    (entry,) = kept._memory.entries
    one = checkpoint_bytes(entry.checkpoints[16])
    most = entry.nbytes - sum(map(checkpoint_bytes, entry.checkpoints.values())) + int(share * one)
    small = store("qwen3_next", max_bytes=most)
    with small.reuse(ids):
        pass
    (entry,) = small._memory.entries
    assert small.stats.nbytes <= most and len(entry.checkpoints) == min(int(share), 1)
    for at in entry.checkpoints:
        assert small.fetch(torch.cat([ids[:, :at], prompt(8, 3)], 1)).length == at


def test_without_an_interval_ends_alone_are_kept():
    kept, ids = store("qwen3_next", checkpoint_interval=0), prompt(60)
    with kept.reuse(ids):
        pass
    assert kept.fetch(torch.cat([ids[:, :40], prompt(8, 1)], 1)).kind == "miss"
    assert kept.fetch(torch.cat([ids, prompt(8, 1)], 1)).length == 59
    with pytest.raises(ValueError, match="checkpoint_interval"):
        store("qwen3_next", checkpoint_interval=-1)


def test_a_cache_that_evicts_has_no_checkpoints():
    """The tokens that a policy keeps depend on the steps in which a prompt is read."""
    kept = PrefixStore(network("falcon_h1"), max_bytes=2**24, policy=policies.H2O(budget=16), checkpoint_interval=INTERVAL)
    with kept.reuse(prompt(60)):
        pass
    (entry,) = kept._memory.entries
    assert entry.cuts == (59,)


@pytest.mark.parametrize("name", ["jamba", "recurrent_gemma"])
@pytest.mark.filterwarnings("ignore:no layer of this model")
def test_models_that_steps_change_are_not_stored(name):
    of, ids = network(name), prompt(40)
    expected = of.generate(ids, max_new_tokens=6, do_sample=False)
    kept = store(name)
    for _ in range(2):
        with kept.reuse(ids) as past:
            assert torch.equal(of.generate(ids, **passing(past), max_new_tokens=6, do_sample=False), expected)
    assert not len(kept) and kept.stats.refused == {f"{name}, whose answers depend on the steps in which a prompt is read": 2}
