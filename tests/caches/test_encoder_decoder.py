"""Encoder-decoder models: the decoder's self-attention compressed, the encoder's states beside it, and the ways to mix them up refused."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from qkvcache import CompressedCache, TurboQuantCache, attach, detach
from qkvcache.releases import passing
from tests.matrix import covering, model
from tests.reference import ZONES, assert_close, count_decoded_layers, decoded
from tests.seeds import SEED
from tests.tolerance import of_model

NAMES = ["t5", "whisper"]
ATTENTION = ["sdpa", "eager"]
STORES = {"growing": {}, "preallocated": {"max_length": 40}}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 4},
    "several": {"num_beams": 4, "num_return_sequences": 2},
}


def inputs(name: str, rows: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED + 1)
    if name == "whisper":
        return {"input_features": torch.randn(rows, 16, 60)}
    ids = torch.randint(3, 100, (rows, 12))
    mask = torch.ones_like(ids)
    mask[1:, 9:] = 0  # T5 pads on the right
    return {"input_ids": ids * mask, "attention_mask": mask}


def wrap(cache) -> EncoderDecoderCache:
    return EncoderDecoderCache(cache, DynamicCache())


def run(name, attention, cache, **options):
    torch.manual_seed(SEED + 2)
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False} | options
    return model(name, attention).generate(**inputs(name), **passing(cache), **options)


@pytest.mark.parametrize(("name", "attention", "mode", "store"), covering(NAMES, ATTENTION, MODES, STORES))
def test_the_exact_cache_gives_the_tokens_of_dynamic_cache(name, attention, mode, store):
    config = model(name, attention).config
    expected = run(name, attention, wrap(DynamicCache()), **MODES[mode])
    got = run(name, attention, wrap(CompressedCache(config, format="identity", **ZONES["zones"], **STORES[store])), **MODES[mode])
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("name", "mode", "store"), covering(NAMES, MODES, STORES, strength=1))
def test_codes_give_the_tokens_of_codes_decoded(name, mode, store):
    cache = wrap(TurboQuantCache(model(name).config, **ZONES["zones"], **STORES[store]))
    expected = run(name, "sdpa", decoded(cache), **MODES[mode])
    with count_decoded_layers() as dense:
        assert torch.equal(run(name, "sdpa", cache, **MODES[mode]), expected)
    assert not dense
    assert cache.self_attention_cache.memory().codes


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", NAMES)
def test_logits_in_chunks(name, attention):
    """Several decoder tokens a step: with T5's position bias, and over a past."""
    network = model(name, attention)
    tokens = torch.randint(3, 100, (2, 30))
    caches = wrap(DynamicCache()), wrap(CompressedCache(network.config, format="identity", **ZONES["zones"]))
    begin = 0
    for size in (6, 18, 3, 1, 2):
        step = tokens[:, begin : begin + size]
        with torch.no_grad():
            theirs, ours = (network(**inputs(name), decoder_input_ids=step, **passing(cache)).logits for cache in caches)
        assert_close(ours, theirs, of_model(network))
        begin += size


@pytest.mark.parametrize("name", NAMES)
def test_attach_wraps(name):
    network = model(name)
    expected = run(name, "sdpa", wrap(TurboQuantCache(network.config, **ZONES["zones"])))
    made = []
    with attach(network, lambda config: made.append(TurboQuantCache(config, **ZONES["zones"])) or made[-1]):
        assert torch.equal(run(name, "sdpa", None), expected)
    assert made[0].memory().codes
    detach(network)
    run(name, "sdpa", None)
    assert len(made) == 1


def test_crop_through_the_wrapper():
    network = model("t5")
    cache = wrap(CompressedCache(network.config, format="identity", **ZONES["zones"]))
    tokens = torch.randint(3, 100, (2, 10))
    with torch.no_grad():
        expected = network(**inputs("t5"), decoder_input_ids=tokens, **passing(wrap(DynamicCache()))).logits[:, -1]
        network(**inputs("t5"), decoder_input_ids=tokens, **passing(cache))
        cache.crop(-3)
        got = network(**inputs("t5"), decoder_input_ids=tokens[:, -3:], **passing(cache)).logits[:, -1]
    assert_close(got, expected, of_model(network))


@pytest.mark.parametrize("name", NAMES)
def test_compressed_cross_attention_is_refused(name):
    config = model(name).config
    with pytest.raises((NotImplementedError, ValueError), match="EncoderDecoderCache"):
        run(name, "sdpa", EncoderDecoderCache(*(TurboQuantCache(config) for _ in range(2))))
