"""Keys whose channels have means far above their spread, as in models of the Qwen2 family: formats that keep a mean read on as if there
were none, the authors' forms break, and a cache says so."""

import warnings
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from qkvcache import CompressedCache, HadaQuantCache, NVFP4Cache, QuantizedPerTokenCache, TurboQuantCache, demo
from qkvcache.evaluation.quality import RecallSet, prefill, recall
from qkvcache.formats import NVFP4, REGISTRY, Int4
from qkvcache.planning.recommend import RECOMMENDED
from qkvcache.releases import passing
from tests import twins
from tests.evict.matrix import KeyNorm
from tests.matrix import FORMATS, slowly

CONTEXT, READ_ON = 1000, 32
MOST = 0.05
"""KL divergence of next tokens from the dense run, in nats: what `recommend` may name, and whatever has four bits or more, stays below."""


FEWER_BITS = [name for name in REGISTRY if "3bit" in name or "k3" in name or "k2" in name or "v3" in name or "v2" in name]
NAMED = {*RECOMMENDED, "turboquant_4bit_nc"}
JUDGED = [
    name for name, format in REGISTRY.items() if name in NAMED or getattr(format, "center", False) and name not in FEWER_BITS
]  # fmt: skip


class Reader:
    """What `model` thinks of 2 x 32 tokens after 2 x 1,000."""

    def __init__(self, model, tokenizer):
        self.model, ids = model, demo.text_ids(tokenizer)
        x = torch.tensor([ids[at : at + CONTEXT + READ_ON] for at in (40_000, 90_000)])
        self.context, self.rest = x.split((CONTEXT, READ_ON), dim=1)
        self.prefilled, _ = prefill(model, self.context)
        self.dense = self.read(DynamicCache(config=model.config))

    @torch.no_grad()
    def read(self, cache):
        cache = self.prefilled.fill(cache, self.model, self.context)
        return self.model(self.rest, **passing(cache)).logits.log_softmax(-1)

    def kl(self, **options) -> float:
        return (self.dense.exp() * (self.dense - self.read(CompressedCache(self.model.config, **options)))).sum(-1).mean().item()


@pytest.fixture(scope="module")
def twin():
    return Reader(*twins.biased())


@pytest.fixture(scope="module")
def embedded():
    return Reader(*demo.load())


@pytest.mark.slow
def test_the_twin_reads_and_recalls_and_its_keys_are_biased(twin, embedded):
    losses = [-reader.dense[:, :-1].gather(-1, reader.rest[:, 1:, None]).mean().item() for reader in (twin, embedded)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    model, tokenizer = twins.biased()
    cases = RecallSet.make(model, tokenizer, demo.text_ids(tokenizer), 500, 4)
    assert recall(model, tokenizer, cases, lambda: DynamicCache(config=model.config)) >= 0.75
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(twin.context, **passing(cache), logits_to_keep=1)
    for layer in cache.layers:
        times = (layer.keys.mean(2).abs() / layer.keys.std(2)).sort(-1).values
        assert (times[..., -2 * twins.PAIRS :] > 15).all() and times[..., -2 * twins.PAIRS :].amax() < 130
        assert (times[..., : -2 * twins.PAIRS] < 15).all()


@pytest.mark.parametrize("name", slowly(JUDGED, ["int8", "fp8", "int4", "nvfp4_mse", "turboquant_4bit_nc", "hadaquant_k4v4"]))
def test_formats_stay_close(twin, name):
    assert 0 < twin.kl(format=name) < MOST


@pytest.mark.parametrize(("name", "least"), [("int4", 0.5), ("nvfp4", 0.5), ("turboquant_3bit_nc", 1.0), ("fp8", 0.1)])
def test_the_authors_forms_break(twin, name, least):
    with pytest.warns(UserWarning, match=f"format='{name}_uncentered': .* pass center=True"):
        assert twin.kl(format=replace(REGISTRY[name], center=False)) > least


NAMED_CACHES = {
    "int8": lambda config, **options: QuantizedPerTokenCache(config, **options),
    "fp8": lambda config, **options: QuantizedPerTokenCache(config, dtype="fp8", **options),
    "int4": lambda config, **options: QuantizedPerTokenCache(config, dtype="int4", **options),
    "nvfp4_mse": NVFP4Cache,
    "turboquant_4bit_nc": TurboQuantCache,
    "hadaquant_k4v3": HadaQuantCache,
}


@pytest.mark.parametrize("name", NAMED_CACHES)
def test_named_caches_center_unless_told(name):
    assert NAMED_CACHES[name](None).format == FORMATS[name]
    assert NAMED_CACHES[name](None, center=False).format.name == f"{name}_uncentered"


PROMPT = torch.arange(3, 103)[None]
KINDS = {"growing": {}, "static": {"max_length": 128}, "evicting": {"policy": KeyNorm(budget=80)}}


def warned(model, *prompts, **options) -> int:
    """How often a cache warns while it reads these."""
    cache = CompressedCache(model.config, **options)
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        for prompt in prompts:
            model(prompt, **passing(cache), logits_to_keep=1)
    return sum("center=True" in str(warning.message) for warning in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_without_a_mean_warns_once_of_biased_keys(kind):
    model, _ = twins.biased()
    assert warned(model, PROMPT, PROMPT[:, :20], format=NVFP4("amax", center=False), **KINDS[kind]) == 1


def test_of_nothing_else_it_warns():
    (model, _), (plain, tokenizer) = twins.biased(), demo.load()
    assert not warned(model, PROMPT, format="nvfp4")
    assert not warned(model, PROMPT[:, :1], format=NVFP4("amax", center=False)), "one token says nothing of means"
    assert not warned(model, PROMPT, format="identity", policy="keydiff")
    assert not warned(plain, PROMPT, format=NVFP4("amax", center=False))
    text = torch.tensor([demo.text_ids(tokenizer)[:900]])
    assert not warned(plain, text[:, :16], text[:, 16:], format=Int4(center=False), skip_layers=(0,))
    assert warned(model, PROMPT, format=Int4(center=False), skip_layers=(0, 1, 2, 3)) == 1
