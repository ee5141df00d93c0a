"""Every way in which a cache gets into a generation: the cache is this library's, sees all tokens and holds codes."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache

from qkvcache import PrefixStore, TurboQuantCache, attach, demo, releases
from qkvcache.releases import CACHE_ARGUMENT, passing
from tests.matrix import model

pytestmark = pytest.mark.contract

PROMPT, NEW = 24, 8
IDS = torch.randint(3, 100, (1, PROMPT), generator=torch.Generator().manual_seed(0))
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
MODES = {"greedy": {}, "sampling": {"do_sample": True}, "beams": {"num_beams": 2}, "lookup": {"prompt_lookup_num_tokens": 3}}
ROOT = Path(__file__).parents[1]


class Factory:
    """Keeps the caches that it makes."""

    def __init__(self):
        self.made = []

    def __call__(self, config):
        self.made.append(TurboQuantCache(config, num_sink_tokens=0, residual_length=0))
        return self.made[-1]


def by_name(factory, name):
    model("llama").generate(IDS, **{name: factory(model("llama").config)}, **OPTIONS)


def attached(factory, mode):
    with attach(model("llama"), factory):
        model("llama").generate(IDS, **OPTIONS | MODES[mode])


def assistant(factory):
    with attach(model("qwen3"), factory):
        model("llama").generate(IDS, assistant_model=model("qwen3"), **OPTIONS)


def pipeline(factory):
    network, tokenizer = demo.load()
    write = transformers.pipeline("text-generation", model=network, tokenizer=tokenizer)
    with attach(write, factory):
        write("The old harbour " * 20, max_new_tokens=NEW, do_sample=False)


def lm_eval(factory):
    pytest.importorskip("lm_eval")
    from qkvcache.evaluation.model import CacheLM
    from tests.evaluation.asked import instances

    network, tokenizer = demo.load()
    lm = CacheLM(network, tokenizer=tokenizer, batch_size=1, cache="turboquant_4bit_nc")
    lm.new_cache = lambda: factory(network.config)
    lm.generate_until(instances("generate_until", [("one two three " * 20, {"until": ["."], "max_gen_toks": NEW})]), disable_tqdm=True)


def custom_generate(factory, **given):
    options = {"custom_generate": str(ROOT), "trust_remote_code": True, "return_dict_in_generate": True, "residual_length": 0} | given
    factory.made.append(model("llama").generate(IDS, **options, **OPTIONS)[CACHE_ARGUMENT])


def custom_generate_with_a_cache(factory):
    mine = factory(model("llama").config)
    custom_generate(factory, **passing(mine))
    assert factory.made[-1] is mine


def prefix_store(factory):
    store = PrefixStore(model("llama"), max_bytes=2**20, format="turboquant_4bit_nc", num_sink_tokens=0, residual_length=0)
    with store.reuse(IDS) as past:
        model("llama").generate(IDS, **passing(past), **OPTIONS)
        factory.made.append(copy.deepcopy(past))  # the store empties its own


DOORS = {
    "generate": lambda factory: by_name(factory, CACHE_ARGUMENT),
    "past_key_values": lambda factory: by_name(factory, "past_key_values"),
    **{f"attach_{mode}": lambda factory, mode=mode: attached(factory, mode) for mode in MODES},
    **{door.__name__: door for door in (assistant, pipeline, lm_eval, custom_generate, custom_generate_with_a_cache, prefix_store)},
}


@pytest.mark.parametrize("name", DOORS)
def test_the_cache_is_used(name, monkeypatch, tmp_path, recwarn):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))  # of custom_generate
    factory = Factory()
    DOORS[name](factory)
    cache = factory.made[-1]
    assert type(cache).__module__.startswith("qkvcache.")
    assert cache.get_seq_length() >= PROMPT + NEW - 1 - (name == "assistant")  # whose last token is the model's
    assert cache.memory().codes
    said = [str(warning.message) for warning in recwarn]
    assert not [words for words in said if "in place of the attached" in words]
    assert name == "past_key_values" or not [words for words in said if "past_key_values" in words]  # the former name, by a call of ours


@pytest.fixture
def _again():
    """What warns once warns in this test."""
    from qkvcache.attention.compressed_kv import warn_once

    warn_once.cache_clear()
    releases.warn_if_newer.cache_clear()


@pytest.mark.usefixtures("_again")
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prefill_chunk_size": 8}], ids=["greedy", "beams", "chunks"])
def test_attach_says_that_another_cache_is_used(options, monkeypatch):
    """As PEFT's prefix tuning does, which puts the prefix in place of the cache."""
    network = model("llama")
    stock = type(network).prepare_inputs_for_generation

    def prepare(*args, **kwargs):
        inputs = stock(network, *args, **kwargs)
        if isinstance(inputs[CACHE_ARGUMENT], TurboQuantCache):
            inputs[CACHE_ARGUMENT] = DynamicCache(config=network.config)
        return inputs

    monkeypatch.setattr(network, "prepare_inputs_for_generation", prepare)
    with attach(network, Factory()), pytest.warns(UserWarning, match="used a DynamicCache in place of the attached one") as found:
        network.generate(IDS, **OPTIONS | options)
    assert len(found) == 1


@pytest.mark.usefixtures("_again")
def test_attach_says_that_no_cache_is_used(monkeypatch):
    """As in training with gradient checkpointing, before transformers 5.24."""
    network = model("llama")

    def forward(*args, **kwargs):
        return type(network).forward(network, *args, **kwargs | passing(None) | {"use_cache": False})

    monkeypatch.setattr(network, "forward", forward)
    with attach(network, Factory()), pytest.warns(UserWarning, match="used no cache in place of the attached one"):
        network.generate(IDS, **OPTIONS)


@pytest.mark.usefixtures("_again")
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache`")
def test_attach_says_that_transformers_ignores_its_name(monkeypatch):
    wrong = "past_key_values" if CACHE_ARGUMENT == "cache" else "cache"
    monkeypatch.setattr(sys.modules[attach.__module__], "CACHE_ARGUMENT", wrong)
    with attach(model("llama"), Factory()), pytest.warns(UserWarning, match="used a DynamicCache in place of the attached one"):
        model("llama").generate(IDS, **OPTIONS)


@pytest.mark.usefixtures("_again")
def test_a_newer_transformers_is_named_once(monkeypatch):
    monkeypatch.setattr(releases, "INSTALLED", "5.25.0.dev0")
    with pytest.warns(UserWarning, match=r"transformers 5\.25\.0\.dev0 is newer than .*install 'transformers<5\.25'") as found:
        for _ in range(2):
            TurboQuantCache(model("llama").config)
    assert len(found) == 1
