"""The embedded model: that it is what the README says, and that caches see real attention patterns through it."""

import random

import pytest
import torch
from transformers import DynamicCache

from qkvcache import CompressedCache, demo
from qkvcache.evaluation.quality import Passages, RecallSet, at_once, divergence, recall
from qkvcache.evaluation.recall import recall_case
from qkvcache.policies import SnapKV
from qkvcache.releases import passing
from tests.matrix import slowly


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = demo.load()
    return model, tokenizer, demo.text_ids(tokenizer)


@pytest.fixture(scope="module")
def passages(loaded):
    model, _, ids = loaded
    return Passages.read(model, torch.tensor(ids[: 2 * 632]).view(2, -1), 600)


def test_it_is_small_and_loads_offline(loaded):
    model, tokenizer, _ = loaded
    size = (demo.MODEL_PATH / "model.safetensors").stat().st_size
    assert 4e6 < size < 10e6
    config = model.config
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (128, 4, 2)
    assert config.max_position_embeddings == 4096
    assert tokenizer.decode(tokenizer("The code word of Anna is 12345.")["input_ids"][1:]) == "The code word of Anna is 12345."


@pytest.mark.slow
def test_it_recalls_code_words_that_it_read(loaded):
    model, tokenizer, ids = loaded

    def filler(rng: random.Random) -> str:
        at = rng.randrange(len(ids) - 600)
        return tokenizer.decode(ids[at : at + 600])

    rng, right = random.Random(0), 0
    for number in range(6):
        case = recall_case(rng, filler(rng), number / 5)
        prompt = tokenizer(case.prompt, return_tensors="pt")
        out = model.generate(**prompt, **passing(DynamicCache(config=model.config)), max_new_tokens=12, do_sample=False)
        right += tokenizer.decode(out[0, prompt["input_ids"].shape[1] :]).startswith(case.answer + ".")
    assert right >= 5


@pytest.mark.parametrize("format", slowly(["int8", "nvfp4", "turboquant_4bit_nc"], ["turboquant_4bit_nc"]))
def test_recall_survives_compression(loaded, format):
    model, tokenizer, ids = loaded
    cases = RecallSet.make(model, tokenizer, ids, 500, 4)
    assert recall(model, tokenizer, cases, lambda: DynamicCache(config=model.config)) >= 0.75
    assert recall(model, tokenizer, cases, lambda: CompressedCache(model.config, format=format)) >= 0.75


def test_a_fact_asked_for_later_is_found_by_a_budget_alone(loaded):
    model, tokenizer, ids = loaded
    cases = RecallSet.make(model, tokenizer, ids, 800, 2)

    def recalled(**options) -> float:
        return recall(model, tokenizer, cases, lambda: CompressedCache(model.config, format="turboquant_4bit_nc", **options))

    assert recalled(attention_budget=64) == 1
    assert recalled(policy=SnapKV(budget=64)) == 0


def kl(loaded, passages, **options) -> float:
    model = loaded[0]
    return divergence(model, passages, lambda: CompressedCache(model.config, **options)).kl


def test_a_budget_counts_in_each_step_that_is_compared(loaded, passages):
    model = loaded[0]
    little = CompressedCache(model.config, format="int8", attention_budget=32)
    assert at_once(passages.prefilled.fill(little, model, passages.context)) == 1
    assert kl(loaded, passages, format="int8", attention_budget=32) > 10 * kl(loaded, passages, format="int8")


def test_divergence_of_the_dense_and_the_exact_cache_is_nothing(loaded, passages):
    model = loaded[0]
    assert divergence(model, passages, lambda: DynamicCache(config=model.config)).kl == pytest.approx(0, abs=1e-6)
    assert kl(loaded, passages, format="identity") == pytest.approx(0, abs=1e-6)


def test_more_bits_and_exact_zones_mean_less_divergence(loaded, passages):
    bare = {"num_sink_tokens": 0, "residual_length": 0}
    eight, four, three = (kl(loaded, passages, format=f, **bare) for f in ("int8", "turboquant_4bit_nc", "turboquant_3bit_nc"))
    assert 0 < eight < four / 10 < three / 10
    assert kl(loaded, passages, format="turboquant_3bit_nc") < three / 2


def test_bytes_are_measured(loaded, passages):
    model = loaded[0]
    dense = divergence(model, passages, lambda: DynamicCache(config=model.config)).bytes_per_token
    assert dense == 5 * 2 * 2 * 128 * 4  # layers, heads, K and V, channels, fp32
    packed = divergence(
        model, passages, lambda: CompressedCache(model.config, format="int8", num_sink_tokens=0, residual_length=0)
    ).bytes_per_token
    assert 264 * 10 <= packed <= 264 * 10 * 1.25
