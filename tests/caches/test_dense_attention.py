"""Models that expand keys and values after the cache, or compute attention on their own: preallocated caches give them the columns of the
mask."""

import copy

import pytest
import torch
import transformers as hf
from families_models import build
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qkvcache import CompressedCache, H2OCache
from qkvcache.attention import compressed_kv
from qkvcache.releases import CACHE_ARGUMENT, passing
from tests import matrix
from tests.reference import ZONES, assert_close, prompt, run
from tests.tolerance import of_model

FAMILIES = {"deepseek_v3": "sdpa", "minicpm3": "sdpa", "jetmoe": "sdpa", "gptj": "eager", "bloom": "eager", "mpt": "eager"}
"""With the attention implementation that each has."""


def model(name: str) -> hf.PreTrainedModel:
    if not hasattr(hf.models, name):
        pytest.skip(f"this transformers has no {name}")
    if name == "bloom" and "create_masks_for_generate" not in vars(hf.BloomForCausalLM):
        pytest.skip("this transformers cannot run BLOOM with a StaticCache")
    return matrix.model(name, FAMILIES[name])


def make(network: hf.PreTrainedModel, format: str = "identity", **options) -> CompressedCache:
    return CompressedCache(network.config, format=format, **ZONES["zones"] | options)


ROOMS = {"preallocated": {"max_length": 90}, "growing": {"compile": True}}


def logits(network: hf.PreTrainedModel, cache, inputs: dict, **options) -> torch.Tensor:
    options = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True} | options
    return torch.stack(run(network, cache, inputs, **options).logits)


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 16}], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", FAMILIES)
def test_padded_rows_equal_those_of_dynamic_cache(name, options):
    network, inputs = model(name), prompt(3)
    expected = logits(network, DynamicCache(config=network.config), inputs, **options)
    assert_close(logits(network, make(network, max_length=60), inputs, **options), expected, of_model(network))


@pytest.mark.parametrize(("name", "room"), matrix.covering(FAMILIES, ROOMS, strength=1))
def test_turns_and_crops_equal_those_of_dynamic_cache(name, room):
    network = model(name)
    found = []
    for cache in (make(network, **ROOMS[room]), DynamicCache(config=network.config)):
        ids, turns = prompt()["input_ids"], []
        for turn in range(3):
            turns.append(logits(network, cache, {"input_ids": ids}))
            cache.crop(-2)
            ids = torch.cat([ids, torch.full((1, 9 + turn), 5 + turn)], dim=1)
        found.append(torch.cat(turns))
    assert_close(*found, of_model(network))


@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
@pytest.mark.parametrize("name", ["deepseek_v3", "gptj", "bloom"])
def test_codes_equal_those_of_a_growing_cache(name, format):
    """With bare zones both hold the same tokens exactly."""
    network = model(name)
    got, expected = (logits(network, make(network, format, **ZONES["bare"], **room), prompt()) for room in ({"max_length": 60}, {}))
    assert_close(got, expected, of_model(network))


def flash(module, query, key, value, mask, **options):
    """Without a mask, flash attention takes all keys for tokens."""
    assert mask is None
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return sdpa_attention_forward(module, query, key, value, mask[None, None], **options)


def test_flash_attention_sees_no_empty_column():
    for registry, function in ((ALL_ATTENTION_FUNCTIONS, flash), (ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask)):
        registry.register("flash_in_torch", function)
    try:
        network = copy.deepcopy(model("deepseek_v3"))
        network.config._attn_implementation = "flash_in_torch"
        expected = logits(network, DynamicCache(config=network.config), prompt())
        assert_close(logits(network, make(network, max_length=60), prompt()), expected, of_model(network))
    finally:
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            registry._global_mapping.pop("flash_in_torch")


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_policies_see_what_goes_through_the_interface(name):
    """The attention of both is in code of its own before transformers 5.24."""
    if CACHE_ARGUMENT == "cache":
        network = build(name)
        inputs = prompt(2)
        cache = H2OCache(network.config, budget=16)
        network.generate(**inputs, **passing(cache), max_new_tokens=3, eos_token_id=None, pad_token_id=0)
        assert cache.get_seq_length() == inputs["input_ids"].shape[1] + 2 > cache.stored_length(0)
    else:
        with pytest.raises(NotImplementedError, match=f"on {name}: its attention does not go through"):
            H2OCache(config_of(name), budget=16)


def config_of(name: str, **options) -> hf.PreTrainedConfig:
    if name not in hf.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    return hf.AutoConfig.for_model(name, **options)


def test_a_mask_that_is_not_known_is_refused():
    network = build("doge")
    with pytest.raises(NotImplementedError, match="pass the model's config to the cache"):
        logits(network, CompressedCache(format="int8", max_length=60), prompt())


def test_dequantizing_is_told_once_a_process(recwarn):
    compressed_kv.warn_once.cache_clear()
    network = build("doge")
    for _ in range(2):
        logits(network, make(network, "int8"), prompt())
    told = [str(w.message) for w in recwarn if "dequantizes the whole layer" in str(w.message)]
    assert len(told) == len(set(told)) == 1
