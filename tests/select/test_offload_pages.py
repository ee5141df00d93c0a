"""Caches with their pages in host memory, against the same caches with everything on the device."""

from __future__ import annotations

import copy

import pytest
import torch

from qkvcache import CompressedCache
from qkvcache.kernels import attend_on_codes
from qkvcache.layers.compressed import CompressedLayer
from qkvcache.releases import passing
from qkvcache.select import budget
from qkvcache.select.arguments import AttentionBudget
from qkvcache.select.host_pages import index_of
from tests.kernels.test_pages import DEVICE, KERNELS
from tests.matrix import FORMATS, model, slowly
from tests.reference import ZONES, assert_close, prompt, run
from tests.select.test_attention_budget import BUDGET, MODES
from tests.updates import new

ZONE = ZONES["zones"]
CHANGES = "fork", "copy", "crop", "reorder", "select", "reset"
BY_KERNELS = slowly([("fork", None), ("select", None), ("reorder", 320)], [("select", None)])
"""Changes, and `max_length`."""
KERNEL = pytest.param("triton", marks=KERNELS)


@pytest.fixture(autouse=True)
def few_tokens_pay(monkeypatch):
    """A GPU chooses blocks without `offload_pages`, too."""
    monkeypatch.setattr(budget, "LEAST_SKIPPED", 0)


def caches(**options) -> tuple[CompressedCache, CompressedCache]:
    """One with its pages in host memory, and one without."""
    options = {"format": "turboquant_4bit_nc", "attention_budget": BUDGET, **ZONE} | options
    return tuple(CompressedCache(model("llama").config, **options, offload_pages=offload) for offload in (True, False))


def assert_same(mine: CompressedCache, other: CompressedCache, pieces: list[torch.Tensor], **options) -> None:
    """Both caches give the same logits for the pieces of a text, bit for bit."""
    network = model("llama")
    with torch.no_grad():
        for ids in pieces:
            got, expected = (network(ids, **passing(cache), **options).logits for cache in (mine, other))
            assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *((mode, {}) for mode in slowly(MODES, ["chunked_prefill"])), ("beams", {"max_length": 300}), ("greedy", {"attention_budget": 0.3}),
    ],
)  # fmt: skip
def test_generate_gives_the_same_tokens(mode, options):
    """As without `offload_pages`: with padding, beams and prompts in pieces."""
    inputs = prompt(rows=2, length=150)
    outputs = []
    for cache in caches(**options):
        torch.manual_seed(1)
        outputs.append(run(model("llama"), cache, inputs, **MODES[mode]))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("length", [None, 256], ids=["growing", "preallocated"])
@pytest.mark.parametrize("format", ["turboquant_4bit_nc", "int8", "fp8"])
def test_steps_and_pieces_give_the_same_logits(format, length):
    ids = torch.randint(3, 60, (2, 150))
    pieces = [ids[:, a:b] for a, b in ((0, 60), (60, 140), (140, 141), (141, 144), (144, 145))]
    assert_same(*caches(format=format, max_length=length), pieces)


def layers(format: str = "int8", **options) -> list[CompressedLayer]:
    """One with its pages in host memory, and one without."""
    options |= {"num_sink_tokens": 2, "residual_length": 4}
    return [CompressedLayer(FORMATS[format], **options, new_pages=AttentionBudget(BUDGET).pages(host)) for host in (True, False)]


def random(tokens: int, rows: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Keys and values, and queries."""
    return tuple(side.to(DEVICE) for side in new(tokens, rows=rows, dims=(64, 64))), torch.randn(rows, 4, tokens, 64).to(DEVICE)


def step(pair: list[CompressedLayer], tokens: int, rows: int = 2) -> None:
    """Both layers attend to the same tokens, with the same result."""
    x, query = random(tokens, rows)
    mine, other = ((layer.update(*x)[0], layer) for layer in pair)
    if not isinstance(mine[0], torch.Tensor):
        mine, other = (attend_on_codes(query, key.attention_inputs, causal=True) for key, _ in (mine, other))
        assert torch.equal(mine, other)


def change(pair: list[CompressedLayer], what: str) -> list[CompressedLayer]:
    if what == "fork":
        return [layer.fork() for layer in pair]
    for layer in pair:
        if what == "crop":
            layer.crop(-50)
        elif what == "reorder":
            layer.reorder_cache(torch.tensor([1, 0]))
        elif what == "select":
            layer.batch_select_indices([1, 1, 0])
        elif what == "reset":
            layer.reset()
    return [copy.deepcopy(layer) for layer in pair] if what == "copy" else pair


@pytest.mark.parametrize(
    ("backend", "what", "length"),
    [
        *(("torch", what, None) for what in CHANGES), ("torch", "reset", 320),
        *(pytest.param("triton", what, n, marks=KERNELS) for what, n in BY_KERNELS),
    ],
)  # fmt: skip
def test_tokens_that_change_are_fetched_anew(backend, what, length, monkeypatch):
    """After a crop, blocks have other tokens; and so on."""
    monkeypatch.setenv("QKVCACHE_KERNELS", backend)
    pair = layers(max_length=length)
    step(pair, 140), step(pair, 1), step(pair, 3)
    held = pair[0].storage.tokens.cache.blocks.clone()
    before, pair, rows = pair, change(pair, what), 3 if what == "select" else 2
    if what in ("reorder", "select"):  # blocks go with their rows
        assert torch.equal(pair[0].storage.tokens.cache.blocks, held[[1, 0] if what == "reorder" else [1, 1, 0]])
    if what in ("crop", "reset"):
        step(pair, 50 if what == "crop" else 120)
    step(pair, 1, rows), step(pair, 1, rows)
    if what in ("fork", "copy"):
        step(before, 2)


@pytest.mark.parametrize("backend", ["torch", KERNEL])
def test_a_snapshot_is_restored(backend, monkeypatch):
    snapshots = pytest.importorskip("qkvcache.prefix.snapshot")
    monkeypatch.setenv("QKVCACHE_KERNELS", backend)
    pair = layers("turboquant_4bit_nc")
    step(pair, 120, 1)
    held = snapshots.snapshot(pair[0])
    pair = layers("turboquant_4bit_nc")
    for layer in pair:
        snapshots.restore(layer, held, DEVICE)
    step(pair, 1, 1), step(pair, 1, 1)
    index = index_of(pair[0].storage.tokens.pages)
    assert index is None or [side.keys() for side in index.slabs[0]] == [{"high", "scale"}, set()]


@pytest.mark.parametrize(("length", "backend"), [pytest.param(None, "triton", marks=KERNELS), (256, "torch")])
def test_compiled_steps(length, backend, monkeypatch):
    monkeypatch.setenv("QKVCACHE_KERNELS", backend)
    torch.compiler.reset()
    compiled, eager = layers("turboquant_4bit_nc", max_length=length, compile=True)

    def one(layer, x, query):
        return attend_on_codes(query, layer.update(*x)[0].attention_inputs)

    with torch.compiler.set_stance("default"), torch.no_grad():
        fast = torch.compile(one, fullgraph=True, backend="aot_eager")
        step([compiled, eager], 110, 1)
        for _ in range(2):
            x, query = random(1, 1)
            for layer in (compiled, eager):
                layer.get_mask_sizes(1)
            assert_close(fast(compiled, x, query), one(eager, x, query), 1e-5)
    torch.compiler.reset()
    assert (compiled.storage.tokens.cache.blocks >= 0).any()


def test_memory_tells_what_is_in_host_memory():
    mine, other = caches()
    for cache in (mine, other):
        model("llama")(torch.randint(3, 60, (2, 150)), **passing(cache))
    memory, held = mine.memory(), other.memory()
    assert held.host == 0 and memory.host == sum(layer.storage.tokens.pool.nbytes for layer in other.layers)
    assert mine.nbytes == memory.total > held.total
    assert "offload_pages=True" in repr(mine)
