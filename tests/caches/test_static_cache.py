"""`max_length`: every feature of `generate` on storage that stays in its place."""

import copy
import functools

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from qkvcache import CompressedCache, NVFP4Cache, QuantizedPerTokenCache, TurboQuantCache, policies
from qkvcache.layers.compressed import CompressedLayer
from qkvcache.releases import passing
from tests import matrix
from tests.matrix import COVER, FORMATS, THREE, UNSUPPORTED, covering, model, slowly
from tests.reference import MODES, NEW, ZONES, Mode, assert_close, count_decoded_layers, decoded, forward, prompt, run, steps
from tests.tolerance import of_model

NAMES = ("llama", "qwen3", "gemma3", "gemma2", "gpt_oss", "phi3")
LEGAL = [(name, attention) for name in NAMES for attention in ("sdpa", "eager") if (name, attention) not in UNSUPPORTED]
IN_TURN = [[pair for pair in LEGAL if pair[0] == name][-1 if i % 2 else 0] for i, name in enumerate(NAMES)]
"""Models with one implementation, in turn."""
ZONE = ZONES["zones"]
FOUR_BIT = "turboquant_4bit_nc"
CACHES = {
    "int8": QuantizedPerTokenCache,
    "nvfp4": NVFP4Cache,
    "turboquant": functools.partial(TurboQuantCache, preset="3bit_nc"),
    "by_layer": matrix.CACHES["by_layer"],
}


def make(network, format: str = FOUR_BIT, length: int = 40 + NEW, **options) -> CompressedCache:
    return CompressedCache(network.config, format=FORMATS[format], max_length=length, **ZONE | options)


def snapshot(cache) -> list:
    tensors = [x for layer in cache.layers if isinstance(layer, CompressedLayer) for _, x in layer.tensors()]
    return [cache.get_seq_length(), *((x.data_ptr(), x.flatten().view(torch.uint8).tolist()) for x in tensors)]


# Forwards


FEEDS = [*((mode, "zones") for mode in MODES), ("chunked_padded", "bare")]


@pytest.mark.parametrize("case", [(*pair, *feed) for pair, feed in covering(LEGAL, FEEDS, strength=1)], ids="-".join)
def test_exact_format_equals_dynamic_cache(case):
    name, attention, mode, zones = case
    network = model(name, attention)
    ours = make(network, "identity", 37, **ZONES[zones])
    pairs = zip(steps(network, ours, MODES[mode]), steps(network, DynamicCache(config=network.config), MODES[mode]), strict=True)
    for got, expected in pairs:
        assert_close(got, expected, of_model(network))


def test_a_long_second_turn_with_flex_attention():
    """The masks are for all tokens that may come, the layer's decoded keys only for those that have."""
    network, mode = model("gemma3", "flex_attention"), Mode((0, 5), (30, 20, 1))
    ours = make(network, "identity", 200)
    for got, expected in zip(steps(network, ours, mode), steps(network, DynamicCache(config=network.config), mode), strict=True):
        assert_close(got, expected, of_model(network))


def check_against_decoded(network, mode: Mode, cache) -> None:
    ids, mask = mode.inputs()
    begin = 0
    for size in mode.sizes:
        expected = forward(network, decoded(cache), ids, mask, begin, begin + size)
        with count_decoded_layers() as dense:
            assert_close(forward(network, cache, ids, mask, begin, begin + size), expected, of_model(network))
        assert not dense or (size > 16 and network.config._attn_implementation == "sdpa")
        begin += size


@pytest.mark.parametrize("mode", slowly(MODES, ["chunked_padded"]))
@pytest.mark.parametrize(("name", "attention"), slowly(LEGAL, IN_TURN))
def test_four_bits_equal_their_codes_decoded(name, attention, mode):
    network = model(name, attention)
    check_against_decoded(network, MODES[mode], make(network))


@pytest.mark.parametrize("attention", slowly(["sdpa", "eager"], ["sdpa"]))
@pytest.mark.parametrize("format", COVER)
def test_every_format_equals_its_codes_decoded(format, attention):
    network = model("llama", attention)
    check_against_decoded(network, MODES["chunked_padded"], make(network, format))


STEPS = {"single": Mode((0,), (30, *[1] * 6)), "padded": Mode((0, 5, 9), (25, *[1] * 6))}


@pytest.mark.parametrize(
    ("name", "format", "mode"), covering(["llama", "gemma3"], ["int8", "turboquant_4bit_nc", "turboquant_3bit_nc"], STEPS)
)
def test_steps_equal_those_of_a_growing_cache(name, format, mode):
    """With bare zones both hold the same tokens exactly: the one that runs."""
    network, mode = model(name), STEPS[mode]
    static, growing = make(network, format, **ZONES["bare"]), CompressedCache(network.config, format=format, **ZONES["bare"])
    for got, expected in zip(steps(network, static, mode), steps(network, growing, mode), strict=True):
        assert_close(got, expected, of_model(network))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_without_a_config_all_layers_are_static(attention):
    network = model("mistral", attention)
    static, growing = CompressedCache(format="identity", max_length=60, **ZONE), DynamicCache()
    for mode in ("padded", "chunked_padded"):
        static.reset(), growing.reset()
        growing = DynamicCache()
        for got, expected in zip(steps(network, static, MODES[mode]), steps(network, growing, MODES[mode]), strict=True):
            assert_close(got, expected, of_model(network))
    assert [type(layer) for layer in static.layers] == [CompressedLayer] * 3


def test_skipped_layers_are_static_and_exact():
    network = model("gemma3")
    cache = make(network, FOUR_BIT, skip_layers=[-1])
    assert [type(layer).__name__ for layer in cache.layers] == ["StaticSlidingLayer", "CompressedLayer"] * 2
    assert [layer.format.name for layer in cache.layers[1::2]] == [FOUR_BIT, "identity"]
    with pytest.warns(UserWarning, match="nothing will be compressed"):
        every = make(network, FOUR_BIT, skip_layers=[1, 3])
    pairs = zip(steps(network, every, MODES["padded"]), steps(network, DynamicCache(config=network.config), MODES["padded"]), strict=True)
    for got, expected in pairs:
        assert_close(got, expected, of_model(network))


def test_positions_come_from_the_cache():
    """Forwards without mask and positions."""
    network = model("llama")
    ids = torch.randint(3, 100, (2, 40))
    ours, theirs = make(network, "identity", 40), DynamicCache(config=network.config)
    for begin, end in ((0, 20), (20, 37), (37, 38), (38, 40)):
        with torch.no_grad():
            got, expected = (network(ids[:, begin:end], **passing(cache)).logits for cache in (ours, theirs))
        assert_close(got, expected, of_model(network))


# What it says of itself


def test_what_generate_looks_at():
    network = model("llama")
    cache = make(network, length=70)
    assert cache.is_compileable and cache.is_croppable and cache.is_sliding == [False] * 3
    assert cache.max_length == cache.get_max_length() == 70
    assert not CompressedCache(network.config, format="int8").is_compileable
    assert make(model("gemma3")).is_compileable


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_length": 0}, ValueError, "max_length=0"),
        ({"max_length": 3.5}, TypeError, "max_length"),
        ({"max_length": True}, TypeError, "max_length"),
    ],
)
def test_constructors_refuse(options, error, says):
    with pytest.raises(error, match=says):
        CompressedCache(model("llama").config, format="int8", **options)


@pytest.mark.parametrize("format", THREE)
def test_memory_is_constant_and_in_its_place(format):
    network = model("llama")
    cache = make(network, format, 80)
    assert cache.nbytes == 0
    forward(network, cache, *prompt(2).values(), 0, 1)
    before, places = cache.memory(), [x.data_ptr() for layer in cache.layers for _, x in layer.tensors()]
    forward(network, cache, *prompt(2).values(), 1, 30)
    cache.reorder_cache(torch.tensor([1, 0])), cache.crop(-10), cache.reset()
    run(network, cache, prompt(2), max_new_tokens=4)
    after = cache.memory()
    assert places == [x.data_ptr() for layer in cache.layers for _, x in layer.tensors()]
    assert after.total == before.total == cache.nbytes == sum(x.nbytes for layer in cache.layers for _, x in layer.tensors())
    dense = 2 * 43 * 2 * 2 * 32 * 4 * 3  # rows, tokens, sides, heads, head_dim, bytes, layers
    assert after.dense == dense and before.dense == dense // 43


def test_early_initialization_takes_the_storage():
    network = model("llama")
    cache = make(network, "identity")
    cache.early_initialization(1, 2, 32, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.get_seq_length() == 0
    before = snapshot(cache)
    assert torch.equal(run(network, cache), run(network, DynamicCache(config=network.config)))
    assert [place for place, _ in snapshot(cache)[1:]] == [place for place, _ in before[1:]]


# generate, uncompiled


GENERATE = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 4},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "several_beams": {"num_beams": 4, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4},
    "chunked_prefill": {"prefill_chunk_size": 16},
}


@pytest.mark.parametrize(("cache", "mode"), covering(CACHES, slowly(GENERATE, ["greedy", "beams", "prompt_lookup"]), strength=1))
def test_every_cache_gives_the_tokens_of_its_codes_decoded(cache, mode):
    network = model("llama")
    ours = CACHES[cache](network.config, max_length=70, **ZONE)
    expected = run(network, decoded(ours), **GENERATE[mode])
    assert torch.equal(run(network, ours, **GENERATE[mode]), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prompt_of_one_token(name):
    network = model(name)
    inputs = {"input_ids": torch.tensor([[7]])}
    expected = run(network, DynamicCache(config=network.config), inputs)
    assert torch.equal(run(network, make(network, "identity", NEW), inputs), expected)


def test_deepcopy_forks_a_prefix_and_rows_move():
    network = model("llama")
    ids, mask = prompt(2).values()
    cache = make(network)
    forward(network, cache, ids, mask, 0, 39)
    fork, wide = copy.deepcopy(cache), copy.deepcopy(cache)
    expected = forward(network, cache, ids, mask, 39, 40)
    assert cache.get_seq_length() == fork.get_seq_length() + 1
    assert torch.equal(forward(network, fork, ids, mask, 39, 40), expected)
    wide.batch_repeat_interleave(2)
    wide.batch_select_indices(torch.tensor([0, 3]))
    wide.reorder_cache(torch.tensor([1, 0]))
    assert_close(forward(network, wide, ids.flip(0), mask.flip(0), 39, 40), expected.flip(0), of_model(network))


@pytest.mark.parametrize("name", ["t5", "whisper"])
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_encoder_decoders(name, mode):
    network = model(name)
    inputs = {"input_features": torch.randn(2, 16, 60)} if name == "whisper" else {"input_ids": torch.randint(3, 100, (2, 12))}
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **mode}
    ours, four = (CompressedCache(network.config, format=format, max_length=40, **ZONE) for format in ("identity", FOUR_BIT))
    expected, got, codes, dense = (
        network.generate(**inputs, **passing(EncoderDecoderCache(cache, DynamicCache())), **options)
        for cache in (DynamicCache(), ours, four, decoded(CompressedCache(network.config, format=FOUR_BIT, max_length=40, **ZONE)))
    )
    assert torch.equal(got, expected)
    assert torch.equal(codes, dense)


# Too many tokens


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_more_than_max_length_is_refused_before_writing(name):
    network = model(name)
    cache = make(network, length=42)
    ids, mask = prompt(2, 50).values()
    forward(network, cache, ids, mask, 0, 40)
    before, fork = snapshot(cache), copy.deepcopy(cache)
    with pytest.raises(ValueError, match="40 tokens and 3 more do not fit in max_length=42: make the cache with a larger one"):
        forward(network, cache, ids, mask, 40, 43)
    assert snapshot(cache) == before
    got, expected = (forward(network, cache, ids, mask, 40, 42) for cache in (cache, fork))
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="42 tokens and 1 more"):
        forward(network, cache, ids, mask, 42, 43)


def test_a_prompt_that_does_not_fit_leaves_the_cache_empty():
    network = model("llama")
    cache = make(network, length=39)
    with pytest.raises(ValueError, match="0 tokens and 40 more do not fit in max_length=39"):
        run(network, cache)
    assert cache.get_seq_length() == 0 and cache.nbytes == 0


def test_generate_fills_the_cache_to_the_last_token():
    network = model("llama")
    cache = make(network, length=40 + NEW - 1)
    run(network, cache)
    assert cache.get_seq_length() == 40 + NEW - 1
    with pytest.raises(ValueError, match=f"max_length={40 + NEW - 1}"):
        run(network, cache, {"input_ids": torch.full((1, 65), 5)})


@pytest.mark.parametrize(
    "zones", [{"residual_length": 10**12}, {"num_sink_tokens": 10**12}, {"num_sink_tokens": 30, "residual_length": 30}]
)
@pytest.mark.parametrize("length", [1, 47])
def test_zones_take_no_more_than_max_length(zones, length):
    """Which then holds all tokens as they came."""
    network, inputs = model("llama"), {"input_ids": torch.randint(3, 90, (1, min(length, 40)))}
    cache = CompressedCache(network.config, format="nvfp4", max_length=length, **zones)
    dense = DynamicCache(config=network.config)
    options = {"max_new_tokens": length - inputs["input_ids"].shape[1] + 1, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    got, expected = (network.generate(**inputs, **passing(x), disable_compile=True, **options) for x in (cache, dense))
    assert torch.equal(got, expected) and cache.get_seq_length() == length
    assert cache.memory().exact == cache.memory().dense


def test_a_budget_takes_no_more_than_max_length():
    network, ids = model("llama"), torch.randint(3, 90, (1, 40))
    sizes, tokens = [], []
    for budget in (47, 10**9):
        cache = CompressedCache(network.config, policy=policies.H2O(budget=budget, recent=3), max_length=47)
        tokens.append(network.generate(ids, **passing(cache), max_new_tokens=8, eos_token_id=None, disable_compile=True))
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1] and torch.equal(*tokens)
