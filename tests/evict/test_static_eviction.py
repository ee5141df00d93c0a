"""Policies with `max_length`: what the growing cache keeps and answers with `interval=1`, in place and in one graph."""

import copy
import functools

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from transformers.generation.configuration_utils import CompileConfig

from qkvcache import CompressedCache
from qkvcache.formats import FP8
from qkvcache.releases import CACHE_ARGUMENT, passing
from tests.evict.matrix import POLICIES
from tests.evict.test_eviction import inputs, kept, run
from tests.matrix import covering, model, slowly
from tests.reference import assert_close
from tests.tolerance import of_model

ZONES = {"num_sink_tokens": 4, "residual_length": 8}


def llama():
    return model("llama", layers=2)


def both(name: str, format: str | None) -> tuple[CompressedCache, CompressedCache]:
    """One that grows, and one that is preallocated."""
    make = functools.partial(CompressedCache, llama().config, policy=POLICIES[name](32), format=format, **ZONES)
    return make(), make(max_length=140)


def assert_alike(name: str, format: str | None, sizes: tuple[int, ...], text: tuple[torch.Tensor, torch.Tensor]) -> CompressedCache:
    """Both answer and keep the same. Returns the preallocated one."""
    growing, static = both(name, format)
    for ours, theirs in zip(*(run(llama(), cache, sizes, text) for cache in (static, growing)), strict=True):
        assert_close(ours, theirs, of_model(llama()))
    assert kept(static) == kept(growing)
    return static


SIZES = (40, 1, 1, 6, 1, 1, 1, 9, 1, 1), (1, 1, 1, 5, *[1] * 34), (3, 2, *[1] * 40), (12, 1, 4, 1, 30, 1, 1)


@pytest.mark.parametrize(("name", "sizes"), covering(POLICIES, SIZES, strength=1))
@pytest.mark.parametrize("format", slowly([None, "int8"], ["int8"]))
def test_turns_and_steps(name, format, sizes):
    static = assert_alike(name, format, sizes, inputs((0,), sum(sizes)))
    assert static.stored_length() == min(sum(sizes), 32) and static.get_seq_length() == sum(sizes)


@pytest.mark.parametrize("name", slowly(POLICIES, ["h2o", "snapkv", "keydiff", "sink_window"]))
def test_padding_to_the_left_and_rows_that_end(name):
    """And that go on."""
    sizes = (40, *[1] * 20, 6, 1)
    ids, mask = inputs((17, 0, 0), sum(sizes))
    mask[1, 40:60] = 0
    assert_alike(name, "int8", sizes, (ids * mask, mask))


@pytest.mark.parametrize("name", slowly(POLICIES, ["h2o"]))
def test_one_graph(name):
    network, (ids, mask) = copy.deepcopy(llama()), inputs((5, 0), 40)
    options = {"attention_mask": mask, "max_new_tokens": 12, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    _, eager = both(name, "int8")
    expected = torch.stack(network.generate(ids, **passing(eager), disable_compile=True, **options).logits)
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
            got = torch.stack(network.generate(ids, **passing(compiled), compile_config=config, **options).logits)
            assert_close(got, expected, of_model(network))
            assert kept(eager) == kept(compiled)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert not [name for name in moved if CACHE_ARGUMENT in name]  # a CUDA graph would copy them at each replay
    addresses = [x.data_ptr() for x in compiled.layers[0].storage.static.tensors()]
    compiled.reorder_cache(torch.tensor([1, 0]))
    assert [x.data_ptr() for x in compiled.layers[0].storage.static.tensors()] == addresses


@torch.no_grad()
def test_a_step_that_failed_is_not_forgotten(monkeypatch):
    network, (ids, mask) = llama(), inputs((0,), 43)
    _, cache = both("h2o", "int8")
    run(network, cache, (40, 1), (ids, mask))
    monkeypatch.setattr("qkvcache.evict.observer.observe_on_codes", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        network(ids[:, 41:42], **passing(cache))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"ended between two layers.*: call reset\(\)"):
        network(ids[:, 41:42], **passing(cache))


@pytest.mark.parametrize("format", [None, FP8(scale="tensor")])
def test_reset_forgets_all_and_memory_tells_what_is_held(format):
    _, cache = both("keydiff", format)
    expected = run(llama(), cache, (40, 1, 1), inputs((0,), 42))
    held = cache.nbytes
    for x in cache.layers[0].storage.static.tensors():
        if x.is_floating_point():
            x.fill_(torch.nan)
    cache.reset()
    assert cache.nbytes == held
    assert all(map(torch.equal, run(llama(), cache, (40, 1, 1), inputs((0,), 42)), expected))
    _, short = both("keydiff", format)
    assert all(logits.isfinite().all() for logits in run(llama(), short, (2, 1, 1), inputs((0,), 42)))


@pytest.mark.parametrize("options", [{"policy": POLICIES["h2o"](32)}, {}], ids=["evicts", ""])
@pytest.mark.parametrize("sizes", [(40,), (40, 1)])
def test_copies_leave_inference_mode(options, sizes):
    with torch.inference_mode():
        cache = CompressedCache(llama().config, format="int8", max_length=100, **ZONES, **options)
        run(llama(), cache, sizes, inputs((0,), 42))
        twin = copy.deepcopy(cache)
    with torch.no_grad():
        assert torch.equal(*(llama()(torch.tensor([[5]]), **passing(each)).logits for each in (twin, cache)))
