"""Every feature of `generate` with a compressed cache: the same tokens as from the same codes decoded into dense tensors."""

import pytest
import torch
import transformers
from families_models import CAUSAL, shrunk
from transformers import CONFIG_MAPPING, DynamicCache

from qkvcache import CompressedCache, H2OCache, NVFP4Cache, TurboQuantCache, attach
from qkvcache.releases import CACHE_ARGUMENT, passing
from tests.matrix import CACHES, covering, model, slowly
from tests.reference import ZONES, assert_close, decoded, prompt, run
from tests.seeds import SEED
from tests.tolerance import of_model

ZONE = ZONES["zones"]
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 4},
    "beam_sampling": {"num_beams": 3, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "several_beams": {"num_beams": 4, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4},
    "chunked_prefill": {"prefill_chunk_size": 16},
}
STORES = {"growing": {}, "preallocated": {"max_length": 100}}


def exact(network, store="growing") -> CompressedCache:
    return CompressedCache(network.config, format="identity", **ZONE | STORES[store])


@pytest.mark.contract
@pytest.mark.parametrize(("name", "mode", "store", "rows"), covering(["llama", "gemma3"], MODES, STORES, [1, 3]))
def test_the_exact_cache_gives_the_tokens_of_dynamic_cache(name, mode, store, rows):
    if (name, mode, store) == ("gemma3", "prompt_lookup", "preallocated"):
        pytest.skip("sliding layers of a StaticCache cannot be cropped")
    network, inputs = model(name), prompt(1 if mode == "prompt_lookup" else rows)
    expected = run(network, DynamicCache(config=network.config), inputs, **MODES[mode])
    got = run(network, exact(network, store), inputs, **MODES[mode])
    assert torch.equal(got, expected)


CODES = covering(slowly(CACHES, ["fp8", "turboquant_3bit", "by_layer"]), MODES, STORES, [1], strength=1)
CODES += covering(["nvfp4", "turboquant"], ["greedy", "sampling", "beams", "several"], ["growing"], [3], strength=1)


@pytest.mark.parametrize(("cache", "mode", "store", "rows"), CODES)
def test_every_cache_gives_the_tokens_of_its_codes_decoded(cache, mode, store, rows):
    """The rows of some cases are padded."""
    network, inputs = model("llama"), prompt(rows)
    ours = CACHES[cache](network.config, **ZONE, **STORES[store])
    expected = run(network, decoded(ours), inputs, **MODES[mode])
    assert torch.equal(run(network, ours, inputs, **MODES[mode]), expected)


@pytest.mark.contract
@pytest.mark.parametrize(("name", "store"), [("llama", "growing"), ("gemma3", "growing"), ("llama", "preallocated")])
def test_assisted_decoding_rolls_back(name, store):
    network, draft = model(name), model("llama" if name == "gemma3" else "qwen3")
    plain = run(network, exact(network, store))
    with attach(draft, lambda config: NVFP4Cache(config, **ZONE | STORES[store])):
        assisted = run(network, exact(network, store), assistant_model=draft)
    assert torch.equal(assisted, plain)


@pytest.mark.parametrize("store", STORES)
def test_multi_turn_with_all_ids(store):
    network = model("llama")
    reference, same, ours = DynamicCache(config=network.config), exact(network, store), turboquant(**STORES[store])
    ids = {cache: prompt()["input_ids"] for cache in (reference, same, ours)}
    for turn in range(3):
        for cache in ids:
            torch.manual_seed(SEED + turn)
            new = torch.randint(3, 100, (1, 7))
            ids[cache] = run(network, cache, {"input_ids": torch.cat([ids[cache], new], dim=1)}, max_new_tokens=9)
    assert torch.equal(ids[same], ids[reference])
    assert ours.get_seq_length() == reference.get_seq_length() == ids[ours].shape[1] - 1


def test_inputs_embeds():
    network = model("llama")
    embedded = {"inputs_embeds": network.get_input_embeddings()(prompt()["input_ids"])}
    expected = run(network, DynamicCache(config=network.config), embedded)
    assert torch.equal(run(network, exact(network), embedded), expected)


def turboquant(**options):
    return TurboQuantCache(model("llama").config, **ZONE | options)


@pytest.mark.parametrize("store", STORES)
def test_reset_makes_it_new(store):
    """Also for another batch; preallocated storage stays."""
    network = model("llama")
    cache = turboquant(**STORES[store])
    first = run(network, cache)
    for inputs in (prompt(3), prompt()):
        cache.reset()
        assert cache.get_seq_length() == 0 and (store == "preallocated" or cache.nbytes == 0)
        last = run(network, cache, inputs)
    assert torch.equal(last, first)


def test_output_attentions_under_eager():
    network = model("llama", "eager")
    inputs = prompt()
    dense, ours = (
        network.generate(
            **inputs, **passing(cache), max_new_tokens=4, do_sample=False, output_attentions=True, return_dict_in_generate=True
        )
        for cache in (DynamicCache(config=network.config), exact(network))
    )
    for theirs, mine in zip(dense.attentions, ours.attentions, strict=True):
        for a, b in zip(theirs, mine, strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_gradients_are_harmless():
    network = model("llama")
    ids = prompt()["input_ids"]
    graded, plain = turboquant(), turboquant()
    for begin, end in ((0, 30), (30, 38), (38, 39)):
        with_grad = network(ids[:, begin:end], **passing(graded)).logits
        with torch.no_grad():
            without = network(ids[:, begin:end], **passing(plain)).logits
        assert with_grad.requires_grad
        assert_close(with_grad.detach(), without, of_model(network))
    with_grad.sum().backward()
    network.zero_grad()


@pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="transformers speculates with heads of the model from 5.24 on")
@pytest.mark.parametrize(("name", "store", "heads"), covering(["glm4_moe", "deepseek_v3"], STORES, [1, 2]))
def test_speculation_with_heads_of_the_model(name, store, heads, monkeypatch):
    """`use_mtp`; the heads have random weights. Drafts that are refused are cropped."""
    from transformers.modeling_layers import MtpModel

    kind = CONFIG_MAPPING[name]
    torch.manual_seed(SEED)
    network = getattr(transformers, CAUSAL[name])(kind(**shrunk(kind(), {"num_nextn_predict_layers": heads}))).eval()
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda main, **options: MtpModel(main, heads).eval())
    inputs = {"input_ids": prompt(length=24)["input_ids"].repeat(1, 2)}
    expected = run(network, DynamicCache(config=network.config), inputs)
    cache = exact(network, store)
    assert torch.equal(run(network, cache, inputs, use_mtp=True), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    with pytest.raises((ValueError, NotImplementedError), match="cropped|expands latents"):
        run(network, H2OCache(network.config, budget=16), inputs, use_mtp=True)
