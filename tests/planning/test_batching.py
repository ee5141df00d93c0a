"""Planned pages are those that are then allocated, and the planned requests are those that fit into them."""

import copy
import json
import re

import pytest
import torch
from transformers import PretrainedConfig

from qkvcache import formats, plan
from qkvcache.planning import plan_all
from qkvcache.planning.batching import fitting
from tests.command import run
from tests.matrix import MODELS, model
from tests.releases import BATCHING

if not BATCHING:
    pytest.skip("continuous batching needs transformers 5.24", allow_module_level=True)

from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import PagedAttentionCache, RequestState
from transformers.generation.continuous_batching import cache as stock
from transformers.generation.continuous_batching.distributed import DistributedHelper

from qkvcache import continuous_batching
from qkvcache.batching.transformers import cache, pool

FREE, WEIGHTS = 40_000_000, 1_000_000
MIX = [(3, 1000, 200), (1, 3001, 512)]


@pytest.fixture
def config(monkeypatch) -> PretrainedConfig:
    """Of a model on a GPU with so much free memory."""
    monkeypatch.setattr(stock, "get_device_and_memory_breakdown", lambda: (torch.device("cpu"), FREE + WEIGHTS, 0, WEIGHTS))
    monkeypatch.setattr(pool, "CHUNK_BYTES", 2**20)
    return MODELS["llama"]()


def batching_config() -> ContinuousBatchingConfig:
    """As it is resolved on a GPU."""
    return ContinuousBatchingConfig(
        max_memory_percent=0.9, max_requests_per_batch=1024, max_blocks_per_request=0, use_async_batching=True
    )  # fmt: skip


def allocated(format: str | None, name: str = "llama", **options) -> PagedAttentionCache:
    network = model(name)
    config = copy.deepcopy(network.config)
    same = {
        "config": config, "continuous_batching_config": batching_config(), "device": network.device, "dtype": network.dtype,
        "model_supports_logits_to_keep": True,
    }  # fmt: skip
    if format is None:
        config._attn_implementation = "flash_attention_2"
        helper = DistributedHelper(device_mesh=None, cpu_group_timeout=None, tp_plan={})
        return PagedAttentionCache(distributed_helper=helper, **same)
    with continuous_batching(network, format=format, **options):
        manager = network.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(num_blocks=1))
        config._attn_implementation = network.config._attn_implementation
        made = cache.CompressedPagedCache(distributed_helper=manager.distributed_helper, **manager.cache_options, **same)
        manager.stop()
        manager.destroy()
    return made


def planned(config, format, **options):
    return plan(config, format=format, requests=MIX, gpu_memory=FREE + WEIGHTS, weights_memory=WEIGHTS, dtype="float32", **options)


def stores(cache: PagedAttentionCache, number: int, tokens: int) -> bool:
    return cache.can_store_request_tokens(RequestState(f"{number}", [0]), tokens)


@pytest.mark.parametrize("options", [{}, {"num_sink_tokens": 0, "residual_length": 30}])
@pytest.mark.parametrize("format", [None, "identity", "int8", "turboquant_4bit_nc", "hadaquant_k3v3"])
def test_plans_are_what_is_allocated_to_the_page(config, format, options):
    if format is None and options:
        pytest.skip("no zones")
    found, cache = planned(config, format, **options).batching, allocated(format, **options)
    (allocator,) = cache.cache_allocators.values()
    assert (allocator.num_blocks, allocator.tokens_per_page) == (found.pages, found.page_size)
    assert cache.cache_tensor.nbytes == (found.pages + 2) * found.bytes_per_page
    if format is not None:
        rings = cache.store.rings
        assert rings.tensor.nbytes == (found.rings + 1) * found.bytes_per_ring and len(rings.free) == found.rings
    kinds = [kind for kind, count in enumerate(found.counts) for _ in range(count)]
    assert all(stores(cache, number, sum(MIX[kind][1:])) for number, kind in enumerate(kinds))
    free = found.pages - sum(-(-sum(MIX[kind][1:]) // found.page_size) for kind in kinds)
    assert cache.pool.num_free_sectors == free
    if found.requests != found.rings:
        assert free < max(-(-sum(kind[1:]) // found.page_size) for kind in MIX)
        assert not stores(cache, -1, 256 * (free + 1))


@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_plans_know_windows(config, name, format):
    """Sliding layers hold the blocks of a window: as many requests fit as are planned, and no more."""
    found, cache = planned(MODELS[name](), format).batching, allocated(format, name)
    assert cache.num_blocks == found.pages and found.requests
    kinds = [kind for kind, count in enumerate(found.counts) for _ in range(count)]
    assert all(stores(cache, number, sum(MIX[kind][1:])) for number, kind in enumerate(kinds))
    if found.requests not in (found.rings, 1024):
        assert not stores(cache, -1, max(sum(kind[1:]) for kind in MIX))
    assert found.requests > (planned(config, format).batching.requests if name == "mistral" else 0)


def test_requests_come_in_proportion():
    assert fitting(((3, 1000, 200), (1, 3000, 500)), 29, 256, 99) == (3, 1)
    assert fitting(((3, 1000, 200), (1, 3000, 500)), 28, 256, 99) == (2, 1)
    assert fitting(((3, 1000, 200), (1, 3000, 500)), 9999, 256, 6) == (5, 1)
    assert fitting(((0.5, 256, 256),), 7, 256, 99) == (3,)
    assert fitting(((1, 256, 257), (1e-6, 1, 1)), 2, 256, 99) == (0, 0)


def test_compressed_pages_hold_more(config):
    dense, exact, four = (planned(config, format).batching for format in (None, "identity", "turboquant_4bit_nc"))
    assert exact.requests <= dense.requests < four.requests
    assert exact.pages < four.pages
    assert re.search(rf"{four.pages:,} pages of 256 tokens hold {four.requests:,} requests", four.reason)


def test_gpus_share_the_heads(config):
    one = planned(config, "int8").batching
    two = plan(
        config, format="int8", requests=MIX, gpu_memory=FREE + WEIGHTS, weights_memory=2 * WEIGHTS, dtype="float32", tensor_parallel=2
    ).batching  # fmt: skip
    assert two.bytes_per_page == pytest.approx(one.bytes_per_page, rel=0.01) and two.pages > 1.5 * one.pages


def test_all_formats_that_pages_can_hold(config):
    found = plan_all(config, requests=MIX, gpu_memory=FREE + WEIGHTS, weights_memory=WEIGHTS)
    names = {row.format for row in found}
    assert names == {None, *formats.REGISTRY} - {"identity"}
    assert all(row.batching is not None and row.context == 3513 for row in found)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"requests": []}, "one or more"),
        ({"requests": [(1, 2)]}, "answer tokens"),
        ({"requests": [(0, 10, 10)]}, "above 0"),
        ({"requests": [(1, 0, 10)]}, "prompt"),
        ({"requests": MIX, "gpu_memory": None}, "gpu_memory="),
        ({"requests": MIX, "policy": "h2o"}, "without policy="),
        ({"requests": MIX, "max_length": 9999}, "max_length="),
        ({}, "context=None"),
    ],
)
def test_wrong_input_is_explained(config, options, says):
    with pytest.raises((ValueError, TypeError), match=says):
        plan(config, **{"gpu_memory": FREE + WEIGHTS, "weights_memory": WEIGHTS} | options)


def test_models_that_pages_cannot_hold(config):
    with pytest.raises(NotImplementedError, match="linear_attention"):
        plan(MODELS["qwen3_next"](), requests=MIX, gpu_memory=FREE, weights_memory=WEIGHTS)


def test_commands():
    arguments = ("demo", "--requests", "3x1000+200,3001+512", "--gpu-memory", "2GB")
    (row,) = json.loads(run("plan", *arguments, "--format", "int8", "--json").stdout)
    assert row["context"] == 3513 and row["batching"]["mix"] == [[3, 1000, 200], [1, 3001, 512]] and row["batching"]["requests"] > 9
    assert "of the mix" in run("plan", *arguments, "--format", "int8").stdout
    assert "expected WEIGHTxPROMPT+ANSWER" in run("plan", "demo", "--requests", "3x1000", "--gpu-memory", "2GB").output
    assert "--context" in run("plan", "demo").output and "--context" in run("recommend", "demo").output


def test_a_small_model_on_a_large_card():
    """Contexts beyond what kernels count in 32 bits are not asked for."""
    assert plan(MODELS["llama"](), format="int8", context=100, gpu_memory=1e13, weights_memory=0).unbounded
