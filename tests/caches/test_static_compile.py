"""`max_length`: what torch.compile makes of the steps of `generate`."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import StaticCache
from transformers.generation.configuration_utils import CompileConfig

from qkvcache import CompressedCache
from qkvcache.kernels import attend_on_codes
from qkvcache.layers.compressed import CompressedLayer
from tests.matrix import FORMATS, model, slowly
from tests.reference import NEW, ZONES, assert_close, prompt, run
from tests.tolerance import TURNED, of_model, rounding, turned

FOUR_BIT = "turboquant_4bit_nc"


def make(network, format: str = FOUR_BIT, length: int = 40 + NEW) -> CompressedCache:
    return CompressedCache(network.config, format=format, max_length=length, **ZONES["zones"])


class Compiled:
    """A model of its own, for `generate` to compile its steps with."""

    def __init__(self, name: str, attention: str, backend: str = "aot_eager", mode: str | None = None):
        self.network = copy.deepcopy(model(name, attention, layers=1 if name == "llama" else None))
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


@pytest.mark.parametrize(("name", "attention"), slowly([("deepseek_v3", "sdpa"), ("gptj", "eager")], [("deepseek_v3", "sdpa")]))
def test_attention_of_other_kinds_compiles(name, attention, compiling, monkeypatch):
    """On the codes of latents, and on dense columns."""
    if name == "deepseek_v3":
        monkeypatch.setattr("qkvcache.kernels.host.dispatch.unfold", None)  # which dequantizes
    this = compiling(name, attention)
    expected, got = (logits(this.run(make(this.network, "int8"), compiled=how, max_new_tokens=4)) for how in (False, True))
    assert_close(got, expected, TURNED)
    assert graphs() == 1


@pytest.mark.parametrize(("format", "attention"), [("identity", "sdpa"), *slowly([(FOUR_BIT, "sdpa"), ("int4", "eager")], [])])
def test_generate_compiles_one_graph(format, attention, compiling):
    """For 50 tokens, of any cache in any format, after any prompt."""
    this = compiling("llama", attention)
    limit = of_model(this.network, 140) if format == "identity" else turned(format)
    plain, first, second, third = (make(this.network, format, 90) for _ in range(4))
    expected = this.run(plain, compiled=False, max_new_tokens=50)
    assert not graphs()
    got = this.run(first, max_new_tokens=50)
    assert graphs() == 1
    assert_close(logits(got), logits(expected), limit)
    assert first.get_seq_length() == plain.get_seq_length() == 89
    assert_close(logits(this.run(second, max_new_tokens=10)), logits(expected)[:10], limit)
    second.reset()
    shorter = {name: x[:, 11:] for name, x in prompt(3).items()}
    found = [this.run(cache, shorter, compiled=compiled, max_new_tokens=10) for cache, compiled in ((second, True), (third, False))]
    assert_close(logits(found[0]), logits(found[1]), limit)
    other = [logits(this.run(make(this.network, "nvfp4", 90), compiled=how, max_new_tokens=4)) for how in (True, False)]
    assert_close(*other, turned("nvfp4"))
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
    assert_close(logits(sequences[1]), logits(sequences[0]), TURNED)
    assert graphs() == 1


def test_a_compiled_step_that_would_overrun_is_refused(compiling):
    this = compiling("llama", "sdpa")
    cache, plain = make(this.network, length=45), make(this.network, length=60)
    with pytest.raises(ValueError, match="45 tokens and 1 more do not fit in max_length=45"):
        this.run(cache)
    assert cache.get_seq_length() == 45
    this.run(plain, compiled=False, max_new_tokens=6)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        for got, expected in zip(ours.dense(), theirs.dense(), strict=True):
            assert_close(got, expected, of_model(this.network))
    cache.crop(-2)
    assert cache.get_seq_length() == 43


def test_chunks_compile_after_early_initialization(compiling):
    this = compiling("llama", "sdpa")
    plain, cache = make(this.network, "identity"), make(this.network, "identity")
    expected = this.run(plain, compiled=False)
    cache.early_initialization(3, 2, 32, torch.float32, torch.device("cpu"))
    assert_close(logits(this.run(cache, prefill_chunk_size=20)), logits(expected), of_model(this.network))
    found = graphs()
    again = make(this.network, "identity")
    again.early_initialization(3, 2, 32, torch.float32, torch.device("cpu"))
    assert_close(logits(this.run(again, prefill_chunk_size=20)), logits(expected), of_model(this.network))
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
    assert_close(logits(got), logits(expected), of_model(this.network))
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
        assert_close(logits(this.run(cache)), logits(expected), of_model(this.network))
    assert len(code) == graphs() == 1
    check_code(code[0], cache.layers, "qkvcache.attend" if attention == "sdpa" else "qkvcache.unfold")


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_inductor_copies_no_payload_of_a_layer(compiling):
    layers = [CompressedLayer(FORMATS[FOUR_BIT], 3, 9, 200) for _ in range(2)]
    x = torch.randn(2, 3, 2, 20, 64)
    for layer in layers:
        layer.update(*x)
        layer.commit()  # which attention on what it returned does
    new, query, mask = torch.randn(2, 3, 2, 1, 64), torch.randn(3, 4, 1, 64), torch.ones(3, 1, 1, 200, dtype=torch.bool)

    def step(layer):
        layer.update(new[0], new[1])
        key, _ = layer.update(new[1], new[0])  # writes are kept in order
        return attend_on_codes(query, key.attention_inputs, mask)

    with torch.no_grad(), generated_code() as code:
        compiled = torch.compile(step, fullgraph=True)
        for _ in range(4):
            assert_close(compiled(layers[0]), step(layers[1]), rounding(64, 24))
    assert len(code) == graphs() == 1
    check_code(code[0], layers[:1], "qkvcache.attend")


def check_code(code: str, layers, reads: str) -> None:
    """Neither planes nor rings are made anew, and they are passed to the operators as they came. Means have the shape of a new token."""
    for layer in layers:
        for shape in {str(tuple(tensor.shape)) for _, tensor in layer.tensors() if tensor.dim() < 3 or tensor.shape[2] > 1}:
            assert f"empty_strided_cpu({shape}" not in code, f"inductor makes another {shape}"
    calls = code[code.index("def call(") :]
    assert "qkvcache.step" in calls and reads in calls
    if reads == "qkvcache.attend":  # what is unfolded for eager attention is repeated for the heads of a group
        assert "clone" not in calls and "copy_(" not in calls
