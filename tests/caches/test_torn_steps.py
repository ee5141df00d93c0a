"""A step that ends between two layers, and two threads in one cache: the next step is right, or refused."""

import threading

import pytest
import torch
from families_models import build
from transformers import CONFIG_MAPPING, DynamicCache

from qkvcache import CompressedCache
from qkvcache.releases import passing
from tests.evict.matrix import POLICIES
from tests.matrix import covering, model
from tests.reference import assert_close
from tests.tolerance import of_model

KINDS = {
    "growing": {"residual_length": 40},
    "preallocated": {"max_length": 80, "residual_length": 40},
    "attention_budget": {"attention_budget": 32, "residual_length": 40},
    "evicting": {"policy": POLICIES["h2o"](16)},
    "evicting_by_head": {"policy": POLICIES["snapkv"](16)},
}
CROPPABLE = {"growing", "preallocated", "attention_budget"}
MODELS = ("llama", "gemma3", "qwen3_next", "falcon_h1", "deepseek_v3", "gemma3n")


class Torn(Exception):
    pass


def forward(network, cache, ids):
    with torch.no_grad():
        return network(ids, **passing(cache)).logits


def tear(network, cache, ids, layer: int, after: bool) -> None:
    """Begins a step that ends before layer `layer`, or `after` its attention or recurrence."""

    def end(*_):
        raise Torn

    decoder = network.model.layers[layer]
    handle = decoder.register_forward_hook(end) if after else decoder.register_forward_pre_hook(end)
    with handle, pytest.raises(Torn):
        forward(network, cache, ids)


def made(name: str, kind: str) -> CompressedCache:
    try:
        return CompressedCache(model(name).config, format="int8", **KINDS[kind])
    except NotImplementedError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    ("name", "kind", "after", "tokens"),
    [*covering(MODELS, KINDS, (False, True), (1, 5), strength=1), *covering(["llama"], KINDS, (False, True), (1, 5))],
)
def test_a_step_after_a_torn_one_is_refused(name, kind, after, tokens):
    network, ids = model(name), torch.randint(3, 100, (2, 40))
    cache, expected = made(name, kind), made(name, kind)
    for given in (cache, expected):
        for part in (ids[:, :20], ids[:, 20:21]):
            forward(network, given, part)
    step = ids[:, 21 : 21 + tokens]
    tear(network, cache, step, 0 if after else 1, after)
    for _ in range(2):  # the refusal changes nothing
        with pytest.raises(ValueError, match=r"the step before ended .* reset\(\)"):
            forward(network, cache, step)
    if kind in CROPPABLE and name in ("llama", "deepseek_v3"):
        cache.crop(0)
        torch.testing.assert_close(forward(network, cache, step), forward(network, expected, step))
    cache.reset(), expected.reset()
    torch.testing.assert_close(forward(network, cache, ids), forward(network, expected, ids))


@pytest.mark.parametrize(("name", "kind"), covering(MODELS, KINDS, strength=1))
def test_a_prompt_after_a_torn_one_is_refused(name, kind):
    network, ids, cache = model(name), torch.randint(3, 100, (2, 20)), made(name, kind)
    tear(network, cache, ids, 0, True)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"layer 1 holds nothing of the steps before.* reset\(\)"):
            forward(network, cache, ids)
    cache.reset()
    torch.testing.assert_close(forward(network, cache, ids), forward(network, made(name, kind), ids))


def test_an_interrupted_eviction_is_refused(monkeypatch):
    network, ids, cache = model("llama"), torch.randint(3, 100, (1, 40)), made("llama", "evicting")
    forward(network, cache, ids)

    def interrupt(storage):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("qkvcache.evict.storage.EvictingStorage.evict", interrupt)
        forward(network, cache, ids[:, :1])
    with pytest.raises((NotImplementedError, ValueError), match=r"reset\(\)"):
        forward(network, cache, ids[:, :1])


def test_two_threads_in_one_cache_are_refused():
    """A thread that comes between two layers of another one's step; the other one goes on."""
    network, ids = model("llama"), torch.randint(3, 100, (1, 30))
    cache, expected, errors = made("llama", "growing"), made("llama", "growing"), []
    for given in (cache, expected):
        forward(network, given, ids)

    def other():
        with pytest.raises(RuntimeError, match=r"two threads use this cache at once.*cache\.fork\(n\)"):
            forward(network, cache, ids[:, :1])
        errors.append(cache.get_seq_length())

    def run(*_):
        thread = threading.Thread(target=other)
        thread.start(), thread.join()

    with network.model.layers[1].register_forward_hook(run):
        got = forward(network, cache, ids[:, :1])
    assert errors == [31] and torch.equal(got, forward(network, expected, ids[:, :1]))


def test_a_step_of_another_thread_after_the_masks_is_refused():
    network, ids, cache = model("llama"), torch.randint(3, 100, (1, 30)), made("llama", "growing")
    forward(network, cache, ids)

    def run(*_):
        thread = threading.Thread(target=forward, args=(network, cache, ids[:, :1]))
        handle.remove(), thread.start(), thread.join()

    handle = network.model.layers[0].register_forward_pre_hook(run)
    with pytest.raises(RuntimeError, match="two threads use this cache at once"):
        forward(network, cache, ids[:, :1])


def test_a_cache_goes_from_thread_to_thread():
    network, ids = model("llama"), torch.randint(3, 100, (1, 30))
    cache, expected, found = made("llama", "growing"), made("llama", "growing"), []
    for begin in range(0, 30, 6):
        step = ids[:, begin : begin + 6]
        thread = threading.Thread(target=lambda step=step: found.append(forward(network, cache, step)))
        thread.start(), thread.join()
        assert torch.equal(found[-1], forward(network, expected, step))


def test_steps_that_pass_layers_several_times_are_whole():
    """The layer that ends a step is not the last of the cache."""
    if "inkling2_loop_text" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no inkling2_loop_text")
    network, ids = build("inkling2_loop_text"), torch.randint(3, 100, (1, 30))
    cache, stock = CompressedCache(network.config, format="identity"), DynamicCache(config=network.config)
    for part in ids.split([20, 1, 9], dim=1):
        assert_close(forward(network, cache, part), forward(network, stock, part), of_model(network))
    tear(network, cache, ids[:, :1], 4, after=False)
    with pytest.raises(ValueError, match="the step before ended"):
        forward(network, cache, ids[:, :1])
