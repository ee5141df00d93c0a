"""Policies with `max_length`: what the growing cache keeps and answers with `interval=1`, in place and in one graph."""

import copy
import functools

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import CompileConfig

from qkvcache import CompressedCache
from qkvcache.formats import FP8
from qkvcache.releases import CACHE_ARGUMENT, passing
from tests.evict.matrix import POLICIES
from tests.matrix import covering, slowly
from tests.reference import assert_close
from tests.seeds import SEED
from tests.tolerance import of_model

ZONES = {"num_sink_tokens": 4, "residual_length": 8}
CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=101,
    max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(SEED)
    return LlamaForCausalLM(CONFIG).eval()


def both(name: str, format: str | None, **options) -> tuple[CompressedCache, CompressedCache]:
    make = functools.partial(CompressedCache, CONFIG, policy=POLICIES[name](32), format=format, **ZONES, **options)
    return make(), make(max_length=140)


def text(rows: int, length: int, seed: int) -> torch.Tensor:
    """Rows that hold no token twice: in layer 0 only rounding would tell the norms of its keys apart."""
    generator = torch.Generator().manual_seed(SEED + seed)
    return 1 + torch.stack([torch.randperm(100, generator=generator)[:length] for _ in range(rows)])


@torch.no_grad()
def feed(model, cache, ids, sizes, mask=None):
    """Logits of the last token of each step."""
    out, begin = [], 0
    for size in sizes:
        given = None if mask is None else mask[:, : begin + size]
        positions = torch.arange(begin, begin + size)[None] if mask is None else (given.cumsum(-1) - 1).clamp_min(0)[:, -size:]
        x = model(ids[:, begin : begin + size], attention_mask=given, position_ids=positions, **passing(cache))
        out.append(x.logits[:, -1])
        begin += size
    return torch.stack(out)


def same(growing, static):
    for layer in range(len(growing.layers)):
        expected, got = growing.kept_positions(layer), static.kept_positions(layer)
        width = max(expected.shape[-1], got.shape[-1])
        pad = lambda x: torch.nn.functional.pad(x, (width - x.shape[-1], 0), value=-1)  # noqa: B023, E731
        assert torch.equal(pad(got), pad(expected))


SIZES = (40, 1, 1, 6, 1, 1, 1, 9, 1, 1), (1, 1, 1, 5, *[1] * 34), (3, 2, *[1] * 40), (12, 1, 4, 1, 30, 1, 1)


@pytest.mark.parametrize(("name", "sizes"), covering(POLICIES, SIZES, strength=1))
@pytest.mark.parametrize("format", slowly([None, "int8"], ["int8"]))
def test_turns_and_steps(name, format, sizes, model):
    ids = text(1, sum(sizes), 1)
    growing, static = both(name, format)
    assert_close(feed(model, static, ids, sizes), feed(model, growing, ids, sizes), of_model(model))
    same(growing, static)
    assert static.stored_length() == min(sum(sizes), 32) and static.get_seq_length() == sum(sizes)


@pytest.mark.parametrize("name", slowly(POLICIES, ["h2o", "snapkv", "keydiff", "sink_window"]))
def test_padding_to_the_left_and_rows_that_end(name, model):
    sizes = (40, *[1] * 20, 6, 1)
    ids = text(3, sum(sizes), 2)
    mask = torch.ones_like(ids)
    mask[0, :17] = mask[1, 40:60] = 0
    growing, static = both(name, "int8")
    got, expected = feed(model, static, ids, sizes, mask), feed(model, growing, ids, sizes, mask)
    assert_close(got[:, 0], expected[:, 0], of_model(model))
    assert_close(got[:, 2], expected[:, 2], of_model(model))
    assert_close(got[-2:, 1], expected[-2:, 1], of_model(model))  # the row goes on
    same(growing, static)


@pytest.mark.parametrize("name", slowly(POLICIES, ["h2o"]))
def test_one_graph(name, model):
    ids = text(2, 40, 3)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    _, eager = both(name, "int8")
    expected = torch.stack(model.generate(ids, **passing(eager), disable_compile=True, **options).logits)
    moved = []

    def backend(graph, inputs):
        names = [node.target for node in graph.graph.nodes if node.op == "placeholder"]
        moved.extend(name for name, x in zip(names, inputs, strict=True) if not hasattr(x, "_dynamo_static_input_type"))
        return aot_eager(graph, inputs)

    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    torch.compiler.reset()
    counters.clear()
    with torch.compiler.set_stance("default"):
        for _ in range(2):
            _, compiled = both(name, "int8")
            got = torch.stack(model.generate(ids, **passing(compiled), compile_config=config, **options).logits)
            assert_close(got, expected, of_model(model))
            same(eager, compiled)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert not [name for name in moved if CACHE_ARGUMENT in name]  # a CUDA graph would copy them at each replay
    addresses = [x.data_ptr() for x in compiled.layers[0].storage.static.tensors()]
    compiled.reorder_cache(torch.tensor([1, 0]))
    assert [x.data_ptr() for x in compiled.layers[0].storage.static.tensors()] == addresses


def test_a_step_that_failed_is_not_forgotten(model, monkeypatch):
    ids = text(1, 60, 4)
    _, cache = both("h2o", "int8")
    feed(model, cache, ids, (40, 1))
    monkeypatch.setattr("qkvcache.evict.observer.observe_on_codes", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        feed(model, cache, ids[:, 41:], (1,))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"ended between two layers.*: call reset\(\)"):
        feed(model, cache, ids[:, 41:], (1,))


def test_reset_forgets_all_and_memory_tells_what_is_held(model):
    ids = text(1, 60, 5)
    for format in (None, FP8(scale="tensor")):
        _, cache = both("keydiff", format)
        expected = feed(model, cache, ids, (40, 1, 1))
        held = cache.nbytes
        for x in cache.layers[0].storage.static.tensors():
            if x.is_floating_point():
                x.fill_(torch.nan)
        cache.reset()
        assert cache.nbytes == held
        torch.testing.assert_close(feed(model, cache, ids, (40, 1, 1)), expected, rtol=0, atol=0)
        _, short = both("keydiff", format)
        assert feed(model, short, ids, (2, 1, 1)).isfinite().all()


def test_copies_leave_inference_mode(model):
    ids = text(1, 60, 6)
    for options in ({"policy": POLICIES["h2o"](32)}, {}):
        for sizes in ((40,), (40, 1)):
            with torch.inference_mode():
                cache = CompressedCache(CONFIG, format="int8", max_length=100, **ZONES, **options)
                feed(model, cache, ids, sizes)
                twin = copy.deepcopy(cache)
            torch.testing.assert_close(feed(model, twin, ids[:, 41:], (1,)), feed(model, cache, ids[:, 41:], (1,)), rtol=0, atol=0)
