"""`attach`: a fresh cache for every later generate, undone without a trace."""

import copy
import functools
import pickle

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from qkvcache import CompressedCache, TurboQuantCache, attach, detach
from qkvcache.releases import CACHE_ARGUMENT, passing
from tests.matrix import model

IDS = {"llama": torch.arange(3, 23).view(2, 10), "t5": torch.arange(3, 23).view(2, 10)}


class Factory:
    """Keeps the caches it makes."""

    def __init__(self, make=lambda config: CompressedCache(config, format="identity", num_sink_tokens=0, residual_length=0)):
        self.make, self.caches = make, []

    def __call__(self, config):
        self.caches.append(self.make(config))
        return self.caches[-1]


def generate(network, **options):
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True} | options
    return network.generate(IDS[network.config.model_type], attention_mask=torch.ones(2, 10, dtype=torch.long), **options)


@pytest.fixture(params=["llama", "t5"])
def network(request):
    network = model(request.param)
    yield network
    assert "_prepare_cache_for_generation" not in vars(network)


def test_every_generate_gets_a_fresh_cache(network):
    expected, factory = generate(network), Factory()
    with attach(network, factory) as same:
        assert same is network
        for calls in (1, 2):
            out = generate(network)
            assert torch.equal(out.sequences, expected.sequences)
            assert len(factory.caches) == calls
            held = out[CACHE_ARGUMENT]
            assert getattr(held, "self_attention_cache", held) is factory.caches[-1]
            assert factory.caches[-1].get_seq_length() == expected[CACHE_ARGUMENT].get_seq_length()
    after = generate(network)
    assert len(factory.caches) == 2 and type(after[CACHE_ARGUMENT]) is type(expected[CACHE_ARGUMENT])


def test_an_old_attachment_leaves_a_later_one_alone():
    network = model("llama")
    first = attach(network, TurboQuantCache)
    first.detach()
    with attach(network, TurboQuantCache):
        first.detach()
        assert "_prepare_cache_for_generation" in network.__dict__
    assert "_prepare_cache_for_generation" not in network.__dict__


@pytest.mark.parametrize("undo", [lambda network, attachment: attachment.detach(), lambda network, attachment: detach(network)])
def test_detach(network, undo):
    attachment = attach(network, TurboQuantCache)
    for _ in range(2):
        undo(network, attachment)
        assert type(generate(network)[CACHE_ARGUMENT]) in (DynamicCache, EncoderDecoderCache)
    detach(network)


def test_an_error_inside_detaches_too(network):
    with pytest.raises(RuntimeError, match="mine"), attach(network, TurboQuantCache):
        raise RuntimeError("mine")


def test_a_factory_may_wrap_by_itself():
    network = model("t5")
    factory = Factory(lambda config: EncoderDecoderCache(CompressedCache(config, format="int8"), DynamicCache()))
    with attach(network, factory):
        assert generate(network)[CACHE_ARGUMENT] is factory.caches[0]


def test_a_cache_of_the_users_and_none_at_all_win():
    network, factory, given = model("llama"), Factory(), DynamicCache()
    with attach(network, factory):
        assert generate(network, **passing(given))[CACHE_ARGUMENT] is given
        generate(network, use_cache=False)
    assert not factory.caches


@pytest.mark.parametrize("implementation", ["static", "dynamic", "offloaded"])
def test_the_attached_cache_or_an_error(implementation, network, monkeypatch):
    """Where transformers is asked for a cache, too."""
    factory = Factory()
    with attach(network, factory):
        with pytest.raises(ValueError, match=rf"cache_implementation='{implementation}' .*detach\(model\)"):
            generate(network, cache_implementation=implementation)
        monkeypatch.setattr(network.generation_config, "cache_implementation", implementation)
        held = generate(network)[CACHE_ARGUMENT]
    assert getattr(held, "self_attention_cache", held) is factory.caches[-1] and held.get_seq_length()
    assert network.generation_config.cache_implementation == implementation


def test_two_caches_cannot_be_attached():
    network = model("llama")
    with attach(network, TurboQuantCache):
        with pytest.raises(ValueError, match="detach it first"):
            attach(network, Factory())
        assert isinstance(generate(network)[CACHE_ARGUMENT], TurboQuantCache)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (None, TypeError, "NoneType"),
        ("int9", ValueError, "'int9' is unknown"),
        (DynamicCache(), TypeError, "such as DynamicCache or 'turboquant_4bit_nc': one DynamicCache cannot serve two calls"),
    ],
)
def test_what_makes_no_cache_is_refused(wrong, error, says):
    network = model("llama")
    with pytest.raises(error, match=says):
        attach(network, wrong)
    assert "_prepare_cache_for_generation" not in vars(network)


def test_a_format_is_attached_and_the_cache_is_seen():
    network = model("llama")
    attachment = attach(network, "int8")
    try:
        assert attachment.last is None
        held = generate(network)[CACHE_ARGUMENT]
        assert isinstance(held, CompressedCache) and held.format.name == "int8"
        assert attachment.last == repr(held) and "tokens=17" in attachment.last
    finally:
        attachment.detach()


@pytest.mark.parametrize("call", [lambda x: attach(x, TurboQuantCache), detach], ids=["attach", "detach"])
@pytest.mark.parametrize("wrong", [None, "llama", torch.nn.Linear(1, 1), model("llama").model], ids=lambda wrong: type(wrong).__name__)
def test_what_does_not_generate_is_refused(call, wrong):
    with pytest.raises(TypeError, match=f"needs a transformers model that has `generate`.*got {type(wrong).__name__}"):
        call(wrong)


@pytest.mark.parametrize("made", [None, "int8"])
def test_a_factory_of_something_else_is_refused(made):
    with attach(model("llama"), lambda config: made), pytest.raises(TypeError, match=f"returned {type(made).__name__}, expected a"):
        generate(model("llama"))


def identity(config):
    return CompressedCache(config, format="identity")


@pytest.mark.parametrize("own", [False, True], ids=["early_exit", "itself"])
def test_an_assistant_with_sliding_layers_takes_its_steps_back(own):
    network, ids = model("mistral"), torch.arange(3, 43).view(1, 40)  # beyond its window
    options = {"assistant_model": network} if own else {"assistant_early_exit": 2}
    options |= {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = network.generate(ids, **options)
    with pytest.warns(UserWarning, match="nothing will be compressed"), attach(network, identity):
        assert torch.equal(network.generate(ids, **options), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))], ids=["deepcopy", "pickle"])
def test_a_copy_of_the_model_has_an_attachment_of_its_own(copied):
    network = model("llama")
    with attach(network, functools.partial(CompressedCache, format="int8")):
        twin = copied(network)
    assert type(generate(network)[CACHE_ARGUMENT]) is DynamicCache
    held = generate(twin)[CACHE_ARGUMENT]
    assert isinstance(held, CompressedCache) and held.get_seq_length() == 17
    detach(twin)
    assert type(generate(twin)[CACHE_ARGUMENT]) is DynamicCache


def test_a_copy_makes_caches_for_its_own_config():
    configs = []

    def factory(config):
        configs.append(config)
        return identity(config)

    with attach(model("llama"), factory):
        twin = copy.deepcopy(model("llama"))
        generate(twin)
    assert configs == [twin.config] and configs[0] is twin.config


def test_a_factory_that_cannot_be_pickled_is_named():
    with attach(model("llama"), lambda config: identity(config)), pytest.raises(pickle.PicklingError, match=r"lambda.*functools.partial"):
        pickle.dumps(model("llama"))
