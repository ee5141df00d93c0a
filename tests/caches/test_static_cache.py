"""`max_length`: every feature of `generate` on storage that stays in its place, and what torch.compile makes of its steps."""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from matrix import FORMATS, UNSUPPORTED, model, slowly
from reference import MODES, ZONES, Mode, assert_close, count_decoded_layers, forward, steps
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation.configuration_utils import CompileConfig

from qkvcache import CompressedCache, NVFP4Cache, QuantizedPerTokenCache, TurboQuantCache, attach
from qkvcache.formats import REGISTRY
from qkvcache.kernels import attend_on_codes
from qkvcache.layers.static import StaticLayer

NAMES = ("llama", "qwen3", "gemma3", "gemma2", "gpt_oss", "phi3")
LEGAL = [(name, attention) for name in NAMES for attention in ("sdpa", "eager") if (name, attention) not in UNSUPPORTED]
ZONE = ZONES["zones"]
FOUR_BIT = "turboquant_4bit_nc"
NEW = 24
CACHES = {"int8": QuantizedPerTokenCache, "nvfp4": NVFP4Cache, "turboquant": functools.partial(TurboQuantCache, preset="3bit_nc")}


def make(network, format: str = FOUR_BIT, length: int = 40 + NEW, **options) -> CompressedCache:
    return CompressedCache(network.config, format=format, max_length=length, **ZONE | options)


class DenseStatic(StaticLayer):
    """The same layer, which hands attention its codes decoded, as many as there are."""

    def get_mask_sizes(self, query_length):
        super().get_mask_sizes(query_length)
        return self.get_seq_length() + query_length, 0

    def update(self, *args, **kwargs):
        return tuple(x if isinstance(x, Tensor) else x.dense() for x in super().update(*args, **kwargs))


def decoded(cache):
    cache = copy.deepcopy(cache)
    for layer in getattr(cache, "self_attention_cache", cache).layers:
        if type(layer) is StaticLayer:
            layer.__class__ = DenseStatic
    return cache


def prompt(rows: int = 1, length: int = 40) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 100, (rows, length))
    mask = torch.ones_like(ids)
    for row in range(1, rows):  # left padding
        mask[row, : 5 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def run(network, cache, inputs=None, **options):
    torch.manual_seed(2)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    return network.generate(**(inputs or prompt()), past_key_values=cache, **options)


def snapshot(cache) -> list:
    tensors = [x for layer in cache.layers if isinstance(layer, StaticLayer) for _, x in layer.tensors()]
    return [cache.get_seq_length(), *((x.data_ptr(), x.flatten().view(torch.uint8).tolist()) for x in tensors)]


# Forwards


@pytest.mark.parametrize(("mode", "zones"), [*((mode, "zones") for mode in MODES), ("chunked_padded", "bare")])
@pytest.mark.parametrize(("name", "attention"), LEGAL)
def test_exact_format_equals_dynamic_cache(name, attention, mode, zones):
    network = model(name, attention)
    ours = make(network, "identity", 37, **ZONES[zones])
    pairs = zip(steps(network, ours, MODES[mode]), steps(network, DynamicCache(config=network.config), MODES[mode]), strict=True)
    for got, expected in pairs:
        assert_close(got, expected, 1e-5)


def check_against_decoded(network, mode: Mode, cache) -> None:
    ids, mask = mode.inputs()
    begin = 0
    for size in mode.sizes:
        expected = forward(network, decoded(cache), ids, mask, begin, begin + size)
        with count_decoded_layers() as dense:
            assert_close(forward(network, cache, ids, mask, begin, begin + size), expected, 1e-4)
        assert not dense or (size > 16 and network.config._attn_implementation == "sdpa")
        begin += size


@pytest.mark.parametrize("mode", slowly(MODES, ["chunked_padded"]))
@pytest.mark.parametrize(("name", "attention"), LEGAL)
def test_four_bits_equal_their_codes_decoded(name, attention, mode):
    network = model(name, attention)
    check_against_decoded(network, MODES[mode], make(network))


@pytest.mark.parametrize("attention", slowly(["sdpa", "eager"], ["sdpa"]))
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_equals_its_codes_decoded(format, attention):
    network = model("llama", attention)
    check_against_decoded(network, MODES["chunked_padded"], make(network, format))


@pytest.mark.parametrize("mode", [Mode((0,), (30, *[1] * 6)), Mode((0, 5, 9), (25, *[1] * 6))], ids=["single", "padded"])
@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc", "turboquant_3bit_nc"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_steps_equal_those_of_a_growing_cache(name, format, mode):
    """With bare zones both hold the same tokens exactly: the one that runs."""
    network = model(name)
    static, growing = make(network, format, **ZONES["bare"]), CompressedCache(network.config, format=format, **ZONES["bare"])
    for got, expected in zip(steps(network, static, mode), steps(network, growing, mode), strict=True):
        assert_close(got, expected, 1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_without_a_config_all_layers_are_static(attention):
    network = model("mistral", attention)
    static, growing = CompressedCache(format="identity", max_length=60, **ZONE), DynamicCache()
    for mode in ("padded", "chunked_padded"):
        static.reset(), growing.reset()
        growing = DynamicCache()
        for got, expected in zip(steps(network, static, MODES[mode]), steps(network, growing, MODES[mode]), strict=True):
            assert_close(got, expected, 1e-5)
    assert [type(layer) for layer in static.layers] == [StaticLayer] * 3


def test_exact_layers_are_static_and_exact():
    network = model("gemma3")
    cache = make(network, FOUR_BIT, exact_layers=[-1])
    assert [type(layer).__name__ for layer in cache.layers] == ["StaticSlidingWindowLayer", "StaticLayer"] * 2
    assert [layer.format.name for layer in cache.layers[1::2]] == [FOUR_BIT, "identity"]
    every = make(network, FOUR_BIT, exact_layers=[1, 3])
    pairs = zip(steps(network, every, MODES["padded"]), steps(network, DynamicCache(config=network.config), MODES["padded"]), strict=True)
    for got, expected in pairs:
        assert_close(got, expected, 1e-5)


def test_positions_come_from_the_cache():
    """Forwards without mask and positions."""
    network = model("llama")
    ids = torch.randint(3, 100, (2, 40))
    ours, theirs = make(network, "identity", 40), DynamicCache(config=network.config)
    for begin, end in ((0, 20), (20, 37), (37, 38), (38, 40)):
        with torch.no_grad():
            got, expected = (network(ids[:, begin:end], past_key_values=cache).logits for cache in (ours, theirs))
        assert_close(got, expected, 1e-5)


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
        ({"max_length": 60, "offloading": True}, NotImplementedError, "offloading=True with max_length"),
    ],
)
def test_constructors_refuse(options, error, says):
    with pytest.raises(error, match=says):
        CompressedCache(model("llama").config, format="int8", **options)


@pytest.mark.parametrize("format", FORMATS)
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


@pytest.mark.parametrize("mode", GENERATE)
@pytest.mark.parametrize("name", slowly(["llama", "gemma3"], ["llama"]))
def test_the_exact_cache_gives_the_tokens_of_dynamic_cache(name, mode):
    if (name, mode) == ("gemma3", "prompt_lookup"):
        pytest.skip("sliding layers of a StaticCache cannot be cropped")
    network = model(name)
    expected = run(network, DynamicCache(config=network.config), **GENERATE[mode])
    assert torch.equal(run(network, make(network, "identity", 70), **GENERATE[mode]), expected)


@pytest.mark.parametrize("mode", slowly(GENERATE, ["greedy", "beams", "prompt_lookup"]))
@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_gives_the_tokens_of_its_codes_decoded(cache, mode):
    network = model("llama")
    ours = CACHES[cache](network.config, max_length=70, **ZONE)
    expected = run(network, decoded(ours), **GENERATE[mode])
    assert torch.equal(run(network, ours, **GENERATE[mode]), expected)


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams", "several"])
def test_left_padded_batches(mode):
    network = model("llama")
    expected = run(network, DynamicCache(config=network.config), prompt(3), **GENERATE[mode])
    assert torch.equal(run(network, make(network, "identity"), prompt(3), **GENERATE[mode]), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prompt_of_one_token(name):
    network = model(name)
    inputs = {"input_ids": torch.tensor([[7]])}
    expected = run(network, DynamicCache(config=network.config), inputs)
    assert torch.equal(run(network, make(network, "identity", NEW), inputs), expected)


def test_assisted_decoding_rolls_back():
    network, draft = model("llama"), model("qwen3")
    plain = run(network, make(network, "identity"))
    with attach(draft, lambda config: NVFP4Cache(config, max_length=100, **ZONE)):
        assisted = run(network, make(network, "identity", 80), assistant_model=draft)
    assert torch.equal(assisted, plain)


def test_multi_turn():
    network = model("llama")
    ours, reference = make(network, "identity", 100), DynamicCache(config=network.config)
    ids = {cache: prompt()["input_ids"] for cache in (reference, ours)}
    for turn in range(3):
        for cache in ids:
            torch.manual_seed(turn)
            new = torch.randint(3, 100, (1, 7))
            ids[cache] = run(network, cache, {"input_ids": torch.cat([ids[cache], new], dim=1)}, max_new_tokens=9)
    assert torch.equal(ids[ours], ids[reference])
    assert ours.get_seq_length() == ids[ours].shape[1] - 1


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
    assert_close(forward(network, wide, ids.flip(0), mask.flip(0), 39, 40), expected.flip(0), 1e-5)


def test_reset_serves_another_batch():
    network = model("llama")
    cache = make(network, length=70)
    first = run(network, cache)
    cache.reset()
    run(network, cache, prompt(3))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(run(network, cache), first)


@pytest.mark.parametrize("name", ["t5", "whisper"])
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_encoder_decoders(name, mode):
    network = model(name)
    inputs = {"input_features": torch.randn(2, 16, 60)} if name == "whisper" else {"input_ids": torch.randint(3, 100, (2, 12))}
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **mode}
    ours, four = (CompressedCache(network.config, format=format, max_length=40, **ZONE) for format in ("identity", FOUR_BIT))
    expected, got, codes, dense = (
        network.generate(**inputs, past_key_values=EncoderDecoderCache(cache, DynamicCache()), **options)
        for cache in (DynamicCache(), ours, four, decoded(CompressedCache(network.config, format=FOUR_BIT, max_length=40, **ZONE)))
    )
    assert torch.equal(got, expected)
    assert torch.equal(codes, dense)


# Too many tokens


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_more_than_max_length_is_refused_before_anything_is_written(name):
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
    with pytest.raises(ValueError, match="max_length=63"):
        run(network, cache, {"input_ids": torch.full((1, 65), 5)})


# Compiled, through generate itself


class Compiled:
    """A model of its own, for `generate` to compile its steps with."""

    def __init__(self, name: str, attention: str, backend: str = "aot_eager", mode: str | None = None):
        self.network = copy.deepcopy(model(name, attention))
        self.config = CompileConfig(fullgraph=True, backend=backend, mode=mode)
        self.config._compile_all_devices = True

    def run(self, cache, inputs=None, compiled: bool = True, **options):
        how = {"compile_config": self.config} if compiled else {"disable_compile": True}
        return run(self.network, cache, inputs or prompt(3), return_dict_in_generate=True, output_logits=True, **how | options)


@pytest.fixture
def compiling():
    torch.compiler.reset()
    counters.clear()
    with torch.compiler.set_stance("default"):
        yield Compiled
    torch.compiler.reset()


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def logits(out) -> Tensor:
    return torch.stack(out.logits)


@pytest.mark.parametrize(("format", "attention"), [("identity", "sdpa"), (FOUR_BIT, "sdpa"), ("int4", "eager")])
def test_generate_compiles_one_graph(format, attention, compiling):
    """For 50 tokens, of any cache, after any prompt."""
    this = compiling("llama", attention)
    plain, first, second, third = (make(this.network, format, 90) for _ in range(4))
    expected = this.run(plain, compiled=False, max_new_tokens=50)
    assert not graphs()
    got = this.run(first, max_new_tokens=50)
    assert graphs() == 1
    assert_close(logits(got), logits(expected), 1e-4)
    assert first.get_seq_length() == plain.get_seq_length() == 89
    assert_close(logits(this.run(second, max_new_tokens=10)), logits(expected)[:10], 1e-4)
    second.reset()
    shorter = {name: x[:, 11:] for name, x in prompt(3).items()}
    found = [this.run(cache, shorter, compiled=compiled, max_new_tokens=10) for cache, compiled in ((second, True), (third, False))]
    assert_close(logits(found[0]), logits(found[1]), 1e-4)
    assert graphs() == 1


def test_a_turn_after_a_compiled_one(compiling):
    """Uncompiled, compiled and cropped steps follow one another as if none had been compiled."""
    this = compiling("llama", "sdpa")
    plain, cache = make(this.network, "int8", 120), make(this.network, "int8", 120)
    sequences = []
    for tried, compiled in ((plain, (False, False, False)), (cache, (True, False, True))):
        inputs = prompt(3)
        for turn, how in enumerate(compiled):
            out = this.run(tried, inputs, compiled=how, max_new_tokens=12)
            assert tried.get_seq_length() == 51 + turn * 19
            tried.crop(-2)
            ids = torch.cat([out.sequences[:, :-2], torch.full((3, 9), 5 + turn)], 1)
            inputs = {"input_ids": ids, "attention_mask": torch.cat([prompt(3)["attention_mask"], torch.ones_like(ids[:, 40:])], 1)}
        sequences.append(out)
    assert_close(logits(sequences[1]), logits(sequences[0]), 1e-3)
    assert graphs() == 1


def test_a_compiled_step_that_would_overrun_is_refused(compiling):
    this = compiling("llama", "sdpa")
    cache, plain = make(this.network, length=45), make(this.network, length=60)
    with pytest.raises(ValueError, match="45 tokens and 1 more do not fit in max_length=45"):
        this.run(cache)
    assert cache.get_seq_length() == 45
    this.run(plain, compiled=False, max_new_tokens=6)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours.dense(), theirs.dense(), strict=True))
    cache.crop(-2)
    assert cache.get_seq_length() == 43


def test_chunks_compile_after_early_initialization(compiling):
    this = compiling("llama", "sdpa")
    plain, cache = make(this.network, "identity"), make(this.network, "identity")
    expected = this.run(plain, compiled=False)
    cache.early_initialization(3, 2, 32, torch.float32, torch.device("cpu"))
    assert_close(logits(this.run(cache, prefill_chunk_size=20)), logits(expected), 1e-4)
    found = graphs()
    again = make(this.network, "identity")
    again.early_initialization(3, 2, 32, torch.float32, torch.device("cpu"))
    assert_close(logits(this.run(again, prefill_chunk_size=20)), logits(expected), 1e-4)
    assert graphs() == found == 3


@pytest.mark.slow
def test_sampling_compiled(compiling):
    this = compiling("llama", "sdpa")
    options = {"do_sample": True, "top_k": 20}
    expected = this.run(make(this.network, "int8"), compiled=False, **options)
    assert torch.equal(this.run(make(this.network, "int8"), **options).sequences, expected.sequences)
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gpt_oss", "qwen3", "phi3"])
def test_other_models_compile(name, compiling):
    """As often as with a StaticCache, whose sliding layers count on the host."""
    this = compiling(name, "eager" if name in ("gemma2", "gpt_oss") else "sdpa")
    expected = this.run(make(this.network), compiled=False, max_new_tokens=8)
    got = this.run(make(this.network), max_new_tokens=8)
    assert_close(logits(got), logits(expected), 1e-3)
    ours = graphs()
    counters.clear(), torch.compiler.reset()
    del this.network._compiled_call
    this.run(StaticCache(this.network.config, 64), max_new_tokens=8)
    assert ours == graphs()


@contextmanager
def generated_code() -> Iterator[list[str]]:
    """What inductor generates meanwhile."""
    from torch._inductor.graph import GraphLowering

    code, stock = [], GraphLowering.save_output_code
    GraphLowering.save_output_code = staticmethod(code.append)
    try:
        with torch._inductor.config.patch(force_disable_caches=True):
            yield code
    finally:
        GraphLowering.save_output_code = stock


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_inductor_copies_no_payload(attention, compiling):
    this = compiling("llama", attention, "inductor", "default")
    cache, plain = make(this.network, length=200), make(this.network, length=200)
    expected = this.run(plain, compiled=False)
    with generated_code() as code:
        assert_close(logits(this.run(cache)), logits(expected), 1e-3)
    assert len(code) == graphs() == 1
    check_code(code[0], cache.layers, "qkvcache.attend_store" if attention == "sdpa" else "qkvcache.unfold")


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_inductor_copies_no_payload_of_a_layer(compiling):
    layers = [StaticLayer(REGISTRY[FOUR_BIT], 200, 3, 9) for _ in range(2)]
    x = torch.randn(2, 3, 2, 20, 64)
    for layer in layers:
        layer.update(*x)
    new, query, mask = torch.randn(2, 3, 2, 1, 64), torch.randn(3, 4, 1, 64), torch.ones(3, 1, 1, 200, dtype=torch.bool)

    def step(layer):
        layer.update(new[0], new[1])
        key, _ = layer.update(new[1], new[0])  # writes are kept in order
        return attend_on_codes(query, key.payload, mask)

    with torch.no_grad(), generated_code() as code:
        compiled = torch.compile(step, fullgraph=True)
        for _ in range(4):
            assert_close(compiled(layers[0]), step(layers[1]), 1e-4)
    assert len(code) == graphs() == 1
    check_code(code[0], layers[:1], "qkvcache.attend_store")


def check_code(code: str, layers, reads: str) -> None:
    """Neither planes nor rings are made anew, and they are passed to the operators as they came."""
    for layer in layers:
        for shape in {str(tuple(tensor.shape)) for _, tensor in layer.tensors()}:
            assert f"empty_strided_cpu({shape}" not in code, f"inductor makes another {shape}"
    calls = code[code.index("def call(") :]
    assert "qkvcache.step" in calls and reads in calls
    if reads == "qkvcache.attend_store":  # what is unfolded for eager attention is repeated for the heads of a group
        assert "clone" not in calls and "copy_(" not in calls
