"""Models that read a text anew once it passes a length: the cache that was given holds it, and not one of transformers."""

import pytest
import torch
import transformers

from qkvcache import CompressedCache, PrefixStore, plan, policies
from qkvcache.releases import CACHE_ARGUMENT, passing
from tests.matrix import covering

pytestmark = pytest.mark.contract

LIMIT = 48
KINDS = {"growing": {}, "max_length": {"max_length": 128}, "policy": {"policy": policies.KeyDiff(budget=200)}}
PROMPTS = {"during_the_answer": LIMIT - 8, "prompt": LIMIT + 8}


def rereading(name):
    """A Phi-3 or PhiMoE whose rotations change after `LIMIT` tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "original_max_position_embeddings": LIMIT, "pad_token_id": 0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    rope |= {"short_mscale": 1.0, "long_mscale": 1.2, "original_max_position_embeddings": LIMIT} if name == "phimoe" else {}
    config = transformers.AutoConfig.for_model(name, **sizes, rope_parameters=rope, bos_token_id=None, eos_token_id=None)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(("name", "prompt", "kind"), covering(["phi3", "phimoe"], PROMPTS, KINDS, strength=1))
def test_a_text_read_anew_stays_in_the_cache(name, prompt, kind):
    prompt, options = PROMPTS[prompt], KINDS[kind]
    network, ids = rereading(name), torch.randint(3, 100, (2, prompt))
    more = {"max_new_tokens": 20, "do_sample": False, "disable_compile": True}
    expected = network.generate(ids, **more, use_cache=False)
    cache = CompressedCache(network.config, format="identity", **options)
    out = network.generate(ids, **passing(cache), **more, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert out[CACHE_ARGUMENT] is cache and cache.get_seq_length() == prompt + 20 - 1


def test_a_prefix_store_holds_no_text_whose_rotations_change():
    network, ids = rereading("phi3"), torch.randint(3, 100, (1, LIMIT + 8))
    store = PrefixStore(network, max_bytes=2**20, format="identity")
    for tokens, new, found in ((LIMIT - 8, 4, 0), (LIMIT - 4, 12, LIMIT - 8), (LIMIT + 8, 4, 0)):
        prompt, options = ids[:, :tokens], {"max_new_tokens": new, "do_sample": False}
        with store.reuse(prompt) as past:
            assert past.get_seq_length() == found
            answer = network.generate(prompt, **passing(past), **options)
        assert torch.equal(answer, network.generate(prompt, use_cache=False, **options))
        assert len(store) == 1  # the first prompt alone


def test_new_tokens_alone_cannot_be_read_anew():
    network, ids = rereading("phi3"), torch.randint(3, 100, (1, 20))
    cache = CompressedCache(network.config, format="int8")
    network.generate(ids, **passing(cache), max_new_tokens=2)
    more, mask = torch.randint(3, 100, (1, LIMIT + 1)), torch.ones(1, 21 + LIMIT + 1, dtype=torch.long)
    with pytest.raises(ValueError, match=f"{LIMIT + 1} new tokens after 21: .* pass all of it"):
        network.generate(more, attention_mask=mask, **passing(cache), max_new_tokens=2)
    assert cache.get_seq_length() == 21


@pytest.mark.parametrize("prompt", [LIMIT - 8, LIMIT + 8])
def test_the_plan_says_what_is_read_anew(prompt):
    network, cache = rereading("phi3"), CompressedCache(rereading("phi3").config, format="int8")
    network.generate(torch.randint(3, 100, (1, prompt)), **passing(cache), max_new_tokens=61, eos_token_id=None)
    found = plan(network.config, format="int8", prompt=prompt, context=prompt + 60, dtype="float32")
    assert found.bytes_per_request == cache.nbytes
    assert any("anew" in note for note in found.notes) == (prompt < LIMIT)
