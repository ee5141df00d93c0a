"""Eviction on a GPU: the fused kernels' accumulated attention, memory by the allocator, that the kernels are taken, and CUDA graphs of
steps."""

import gc

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache

from qkvcache import CompressedCache, H2OCache
from qkvcache.releases import passing
from tests import matrix
from tests.caches.test_static_gpu import assert_alike, compiling, generate, text  # noqa: F401
from tests.evict.matrix import POLICIES, SHARED
from tests.reference import assert_close, count_fused, forward
from tests.test_gpu import on_gpu, prompt

pytestmark = pytest.mark.gpu
BUDGET = 96
SIZES = (270, 1, 1, 5, 1, 20, 1, 1)
FORMATS = ("identity", "int8", "turboquant_4bit_nc")


def run(network, cache, rows=slice(None), begin=0):
    """Logits of the real tokens of each forward, and positions kept after the last."""
    ids, mask = (x[rows, begin:] for x in prompt().values())
    at, found = 0, []
    for size in SIZES:
        size -= begin if not at else 0
        found.append(forward(network, cache, ids, mask, at, at + size))
        at += size
    return found, [cache.kept_positions(layer) for layer in range(network.config.num_hidden_layers)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", POLICIES)
def test_kernels_keep_what_torch_operations_keep(monkeypatch, name, format):
    network = on_gpu(torch.float32)
    make = lambda: CompressedCache(network.config, policy=POLICIES[name](BUDGET), format=format, residual_length=8)  # noqa: E731
    logits, kept = run(network, make())
    monkeypatch.setenv("QKVCACHE_KERNELS", "torch")
    expected, reference = run(network, make())
    watches = bool(POLICIES[name](BUDGET).observation_window)
    for layer, (ours, theirs) in enumerate(zip(kept, reference, strict=True)):
        same = (ours == theirs).float().mean()
        # Of scores that are nearly equal, rounding may choose another; those of later layers differ by what was chosen before.
        assert same > ((0.95 if watches else 0.999) if layer == 0 else 0.8)
    if not watches:
        for ours, theirs in zip(logits, expected, strict=True):
            assert_close(ours, theirs, 0.01 if format == "identity" else 0.05)


@pytest.mark.parametrize("name", POLICIES)
def test_a_padded_row_equals_the_prompt_alone(name):
    network = on_gpu(torch.float32)
    together, _ = run(network, CompressedCache(network.config, policy=POLICIES[name](BUDGET)))
    alone, _ = run(network, CompressedCache(network.config, policy=POLICIES[name](BUDGET)), slice(1, 2), 7)
    for batch, row in zip(together, alone, strict=True):
        assert_close(batch[-len(row) :], row, 0.02)  # a choice between nearly equal scores may turn


def test_scores_are_the_sums_of_attention():
    network = on_gpu(torch.float32)
    caches = [H2OCache(network.config, budget=4000), H2OCache(network.config, budget=4000, format="int8")]
    run(network, caches[0])
    run(network, caches[1])
    for exact, packed in zip(caches[0].layers[:1], caches[1].layers[:1], strict=True):
        ledgers = (layer.storage.metadata for layer in (packed, exact))
        ours, theirs = (torch.cat([metadata.region["score"], metadata.residual["score"]], -1) for metadata in ledgers)
        assert torch.equal(ours.sum(-1).round(), theirs.sum(-1).round())  # queries times heads of the group
        assert_close(ours, theirs, 0.02)


@pytest.mark.parametrize("policy", [POLICIES["h2o"], POLICIES["keydiff"], SHARED["snapkv"]])
@pytest.mark.parametrize("format", FORMATS)
def test_decode_takes_the_fused_path(policy, format, monkeypatch):
    network, calls = on_gpu(torch.bfloat16), count_fused(monkeypatch)
    run(network, CompressedCache(network.config, policy=policy(BUDGET), format=format))
    assert len(calls) == (len(SIZES) - 1) * network.config.num_hidden_layers


@pytest.mark.parametrize("format", FORMATS)
def test_memory_follows_the_budget(format):
    network = on_gpu(torch.bfloat16)
    ids = prompt(4, 4096)["input_ids"]
    network.model(ids[:, :64])  # libraries take their workspaces
    held, caches = [], []
    for cache in (DynamicCache(config=network.config), CompressedCache(network.config, policy=POLICIES["h2o"](512), format=format)):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            network.model(ids, **passing(cache))
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        caches.append(cache)
    assert held[1] == pytest.approx(caches[1].nbytes, rel=0.06)
    assert held[1] < held[0] * (0.15 if format == "identity" else 0.1)


@pytest.mark.parametrize(
    ("policy", "format", "rows"),
    [("h2o", "identity", 2), ("h2o", "turboquant_4bit_nc", 1), ("keydiff", "int8", 1), ("tova", "int8_token", 1)],
)
def test_generate_replays_cuda_graphs(policy, format, rows, compiling):  # noqa: F811
    """By itself, compiled before anything else ran: the tokens of uncompiled steps from one graph, of padded rows too. In fp32, so that
    compiled and uncompiled steps choose alike among scores that are nearly equal."""
    compiling.float()
    try:
        make = lambda: CompressedCache(compiling.config, policy=POLICIES[policy](128), format=matrix.FORMATS[format], max_length=512)  # noqa: E731
        inputs, cache = {name: x.repeat(rows, 1) for name, x in text(300).items()}, make()
        inputs["attention_mask"][1:, :70] = 0
        got = generate(cache, inputs)
        assert cache.get_seq_length() == 349 and cache.stored_length() == 128
        expected = generate(make(), inputs, disable_compile=True)
        assert counters["stats"]["unique_graphs"] == 1
        assert_alike(got, expected)
        cache.reset()
        assert_alike(generate(cache, inputs), expected)
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        assert counters["inductor"]["cudagraph_skips"] == 0
    finally:
        compiling.bfloat16()


@pytest.mark.parametrize("policy", ["h2o", "key_norm"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_token_comes_and_goes_in_one_launch_each(policy, format):
    network = on_gpu(torch.bfloat16)
    cache = CompressedCache(network.config, policy=POLICIES[policy](BUDGET), format=format, max_length=400)
    ids = prompt()["input_ids"]
    with torch.no_grad():
        network.model(ids[:, :270], **passing(cache))
        network.model(ids[:, 270:271], **passing(cache))
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            network.model(ids[:, 271:272], **passing(cache))
            torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    for kernel in ("_append_kernel", "_evict_kernel"):
        assert sum(kernel in name for name in launched) == network.config.num_hidden_layers
