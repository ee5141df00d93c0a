"""A cache that is used again: what goes on is taken, and what cannot be meant is said."""

import copy
import warnings
from pathlib import Path

import pytest
import torch

from qkvcache import CompressedCache, attach
from qkvcache.releases import CACHE_ARGUMENT, passing
from tests.evict.matrix import POLICIES
from tests.matrix import covering, model

KINDS = {
    "growing": {"format": "int8", "residual_length": 8},
    "preallocated": {"format": "int8", "residual_length": 8, "max_length": 200},
    "evicting": {"policy": POLICIES["h2o"](24)},
    "evicting_preallocated": {"policy": POLICIES["h2o"](24), "max_length": 200},
}
OPTIONS = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
SEEN = 34  # after a prompt of 30: the last token that is generated has not been read


@pytest.fixture(params=covering(["llama-sdpa", "llama-eager", "gemma3-sdpa"], KINDS, strength=1), ids="-".join)
def pair(request):
    """A model with an attention implementation, and a kind of cache."""
    return request.param


@pytest.fixture
def network(pair):
    return model(*pair[0].split("-"))


def ids(tokens: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 90, (rows, tokens))


@pytest.fixture
def used(pair, network):
    """A cache after a turn, and the text so far."""
    cache = CompressedCache(network.config, **KINDS[pair[1]])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* and the cache has seen")
        text = network.generate(ids(30), **passing(cache), **OPTIONS)
    assert cache.get_seq_length() == SEEN
    return cache, text


@pytest.mark.parametrize("tokens", [10, SEEN // 2])
def test_a_prompt_of_half_the_length_is_refused(tokens, network, used):
    """Of which nothing would be left."""
    cache, text = used
    with pytest.raises(ValueError, match=rf"no token comes after the {SEEN} .*reset\(\)"):
        network.generate(ids(tokens), **passing(cache), **OPTIONS)
    again = network.generate(torch.cat([text, ids(3)], dim=1), **passing(cache), **OPTIONS)  # nothing has happened to it
    assert again.shape[1] == 43 and cache.get_seq_length() == 42


@pytest.mark.parametrize(("tokens", "begins"), [(SEEN - 2, 2), (24, 10)])
def test_a_shorter_prompt_is_said(tokens, begins, network, used):
    with pytest.warns(UserWarning, match=rf"begin at position {begins}, and the cache has seen \d+ tokens: .*reset\(\)"):
        network.generate(ids(tokens), **passing(used[0]), **OPTIONS)


def test_another_prompt_of_the_same_length_is_refused(network, used):
    cache, _ = used
    with pytest.raises(ValueError, match=rf"begin at position 0, and the cache has seen {SEEN} tokens: .*reset\(\)"):
        network.generate(ids(SEEN), **passing(cache), **OPTIONS)


def test_going_on_is_not_said(network, used):
    cache, text = used
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* and the cache has seen")
        for _ in range(2):
            text = network.generate(torch.cat([text, ids(7)], dim=1), **passing(cache), **OPTIONS)
        cache.reset()
        network.generate(ids(SEEN), **passing(cache), **OPTIONS)


def test_padding_in_chunks_is_not_said(pair, network):
    """Not even where all rows begin with more of it than a chunk."""
    inputs, mask = ids(40, rows=2), torch.ones(2, 40, dtype=torch.long)
    mask[0, :20] = mask[1, :9] = 0
    cache = CompressedCache(network.config, **KINDS[pair[1]])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* and the cache has seen")
        text = network.generate(inputs, attention_mask=mask, **passing(cache), prefill_chunk_size=8, **OPTIONS)
        more = torch.cat([text, ids(20, rows=2)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, 25), value=1)
        network.generate(more, attention_mask=mask, **passing(cache), **OPTIONS)


@pytest.mark.parametrize("length", [None, 200, 36])
def test_a_cache_that_is_not_to_be_used_is_refused(length, network):
    """`generate` would give it the whole text at every step."""
    cache = CompressedCache(network.config, format="int8", max_length=length)
    with pytest.raises(ValueError, match="with use_cache=False"):
        network.generate(ids(30), **passing(cache), use_cache=False, **OPTIONS)


def test_masks_of_flex_attention_tell_padding_too():
    network = model("llama", "flex_attention")
    inputs, mask = ids(40, rows=2), torch.ones(2, 40, dtype=torch.long)
    mask[0, :20] = mask[1, :9] = 0
    cache = CompressedCache(network.config, **KINDS["growing"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* and the cache has seen")
        text = network.generate(inputs, attention_mask=mask, **passing(cache), prefill_chunk_size=8, **OPTIONS)
    with pytest.raises(ValueError, match="begin at position 0, and the cache has seen 35 tokens"):
        network.generate(text[:, 1:], attention_mask=torch.nn.functional.pad(mask, (0, 4), value=1), **passing(cache), **OPTIONS)


def test_another_longer_prompt_is_noticed_by_its_ids():
    """In calls that have them: `attach`, with the cache that the caller passes or gets, and `custom_generate`."""
    network, cache = model("llama"), CompressedCache(model("llama").config, format="int8")
    hub = {"custom_generate": str(Path(__file__).parents[2]), "trust_remote_code": True}
    says = r"token 0 of the prompt differs from the \d+ tokens that the cache has seen: .*reset\(\)"
    other = torch.full((1, 60), 95)
    with attach(network, lambda config: CompressedCache(config, format="int8")):
        first = network.generate(ids(30), return_dict_in_generate=True, **OPTIONS)
        with pytest.raises(ValueError, match=says):
            network.generate(other, **passing(first[CACHE_ARGUMENT]), **OPTIONS)
        text = network.generate(ids(30), **passing(cache), **OPTIONS)
        answer = text.clone()
        answer[0, 31] += 1
        with pytest.raises(ValueError, match="token 31 of"):
            network.generate(torch.cat([answer, ids(9)], dim=1), **passing(cache), **OPTIONS)
        assert cache.get_seq_length() == SEEN
    with pytest.raises(ValueError, match=says):
        network.generate(other, **passing(copy.deepcopy(cache)), **hub, **OPTIONS)
    text = network.generate(torch.cat([text, ids(5)], dim=1), **passing(cache), **hub, **OPTIONS)
    cache.crop(-10)
    assert cache.seen_ids.shape[1] == cache.get_seq_length()
    text[0, -8:] = 7
    network.generate(torch.cat([text, ids(3)], dim=1), **passing(cache), **hub, **OPTIONS)
    cache.reset()
    network.generate(other, **passing(cache), **hub, **OPTIONS)


def test_beams_and_rows_are_not_taken_for_another_prompt():
    network, cache = model("llama"), CompressedCache(model("llama").config, format="int8")
    prompt = ids(30, rows=2)
    with attach(network, lambda config: CompressedCache(config, format="int8")):
        for options in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
            out = network.generate(prompt, **passing(cache), **OPTIONS | options)
            cache.batch_select_indices([0])
            network.generate(torch.cat([out[:1], ids(20)], dim=1), **passing(cache), **OPTIONS)
            cache.reset()
