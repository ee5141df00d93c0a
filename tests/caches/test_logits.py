"""Logits of `generate` with a cache that holds every token exactly, against those without a cache."""

import functools
import warnings

import pytest
import torch

from qkvcache import CompressedCache, attach, policies
from tests.matrix import covering, model
from tests.reference import assert_close, run
from tests.seeds import SEED
from tests.tolerance import of_model

CACHES = {
    "identity": {"format": "identity"},
    "int8_residual": {"format": "int8", "residual_length": 100},
    "preallocated": {"format": "identity", "max_length": 120},
    "h2o": {"policy": policies.H2O(budget=128)},
}
PADDING = {"none": (0, 0), "left": (39, 0), "right": (0, 39)}
"""Hidden tokens before and after those of the prompt of 64."""
MODES = {
    "plain": {},
    "chunked_prefill": {"prefill_chunk_size": 32},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4},
    "assisted": {"assistant_model": "qwen3"},
    "assisted_in_chunks": {"assistant_model": "qwen3", "prefill_chunk_size": 16},
}

REFUSED_BY_NONE = ("plain", "chunked_prefill")
"""Modes that take no step back, which a cache that evicts cannot."""


def inputs(before: int, after: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)
    mask = torch.ones(1, 64, dtype=torch.long)
    mask[:, :before] = mask[:, 64 - after :] = 0
    return {"input_ids": torch.randint(3, 100, (1, 8)).repeat(1, 8) * mask, "attention_mask": mask}


def logits(network, cache, padding, mode, **options) -> torch.Tensor:
    """Of the generated tokens, `[T, V]`."""
    options |= {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True} | MODES[mode]
    if draft := options.get("assistant_model"):
        options["assistant_model"] = model(draft)
    return torch.cat(run(network, cache, inputs(*PADDING[padding]), **options).logits)


@functools.lru_cache
def without_a_cache(padding: str) -> torch.Tensor:
    return logits(model("llama"), None, padding, "plain", use_cache=False)


CASES = [("identity", mode, padding) for mode, padding in covering(MODES, PADDING, strength=1)]
CASES += [(cache, mode, "right") for cache in CACHES for mode in MODES if cache != "identity"]


@pytest.mark.parametrize(("cache", "mode", "padding"), [case for case in CASES if case[0] != "h2o" or case[1] in REFUSED_BY_NONE])
def test_logits_are_those_without_a_cache(cache, mode, padding):
    network, options = model("llama"), dict(CACHES[cache])
    with warnings.catch_warnings(), attach(model("qwen3"), lambda config: CompressedCache(config, **options)):
        warnings.filterwarnings("error", message=".* and the cache has seen")
        got = logits(network, CompressedCache(network.config, **options), padding, mode, disable_compile=True)
    assert_close(got, without_a_cache(padding), of_model(network))
