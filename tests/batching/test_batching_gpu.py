"""Continuous batching on a GPU: the answers of a cache, steps replayed as CUDA graphs and prepared ahead, blocks on the host and back."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from qkvcache import CompressedCache, continuous_batching
from qkvcache.batching import shares, varlen
from qkvcache.formats import Int8
from qkvcache.releases import passing
from qkvcache.select import budget
from tests.reference import count_fused

from .requests import ZONES, answers, assert_same, attention, collect, llama, prompts, serving, single, store, watch_offloading

pytestmark = pytest.mark.gpu
FORMATS = ["identity", "int8", "nvfp4_mse", "turboquant_4bit_nc", "hadaquant_k3v3"]
SYNCHRONOUS = {"use_cuda_graph": False, "use_async_batching": False}


@functools.cache
def network(dtype=torch.float16):
    return copy.deepcopy(llama()).to("cuda", dtype)


def steps(net, ids: list[int], format: str, new: int) -> tuple[list[int], list[float]]:
    """As `requests.single`, on the GPU."""
    cache = CompressedCache(net.config, format=format, max_length=len(ids) + new, **ZONES)
    given, tokens, margins = torch.tensor([ids], device="cuda"), [], []
    with torch.no_grad():
        for _ in range(new):
            logits = net(given, **passing(cache)).logits[0, -1].float()
            first, second = logits.topk(2).values.tolist()
            margins.append((first - second) / logits.abs().max().item() / 20)  # fp16 rounds more
            given = logits.argmax().view(1, 1)
            tokens.append(int(given))
    return tokens, margins


@pytest.mark.parametrize(
    ("format", "dtype"), [*((format, torch.float32) for format in FORMATS), ("identity", torch.float16), ("int8", torch.float16)]
)
def test_answers_equal_a_cache(format, dtype, monkeypatch):
    """With graphs and batches prepared ahead, which are the defaults; through the kernels.

    In fp16, another order of sums turns codes of few bits, and with them tokens that are far from as likely as each other.
    """
    net, ids, compared, calls = network(dtype), prompts(150, 70, 30), 0, count_fused(monkeypatch)
    for one in ids:
        calls.clear()
        with continuous_batching(net, format, **ZONES), serving(net, new=12) as manager:
            config = manager.continuous_batching_config
            assert config.use_cuda_graph == (False, True) and config.use_async_batching
            (got,) = answers(manager, [one])
        assert calls
        compared += assert_same(got, steps(net, one, format, 12))
    assert compared > 6


def test_a_manager_that_starts_while_the_default_stream_is_busy(monkeypatch):
    """There it clears the inputs of its batches; these are copied on another stream, and must not be cleared once they are there."""
    net, ids = network(torch.float32), prompts(150)
    with continuous_batching(net, "identity", **ZONES), serving(net) as manager:
        expected = answers(manager, ids)
    from qkvcache.batching.transformers.manager import CompressedManager

    start = CompressedManager.start
    monkeypatch.setattr(CompressedManager, "start", lambda manager: (torch.cuda._sleep(400_000_000), start(manager)))
    with continuous_batching(net, "identity", **ZONES), serving(net) as manager:
        assert answers(manager, ids) == expected


@pytest.mark.parametrize("format", FORMATS)
def test_graphs_equal_eager_steps(format):
    ids, net = prompts(150, 1, 64, 300, 5, 90, 128, 33), network(torch.float32)  # whose sums differ least with what is in a batch
    results: list[tuple] = []
    for options in ({}, SYNCHRONOUS, {"use_cuda_graph": False}, {"use_async_batching": False}):
        with continuous_batching(net, format, **ZONES) as batching:
            if results:
                batching.statistics = results[0][1]
            with serving(net, new=20, allow_block_sharing=False, max_batch_tokens=1024, **options) as manager:
                results.append((answers(manager, ids), batching.statistics))
    assert all(tokens == results[0][0] for tokens, _ in results)


def test_graphs_read_the_chosen_blocks(monkeypatch):
    """Long and short requests together and alone: batches that read few blocks have other graphs than those that read everything."""
    monkeypatch.setattr(budget, "LEAST_SKIPPED", 400)
    net, (long, *short) = network(torch.float32), prompts(300, 10, 30)
    results, reading = [], {"attention_budget": 64, "num_sink_tokens": 0, "residual_length": 4}
    for options in ({"allow_block_sharing": False}, {"allow_block_sharing": False, **SYNCHRONOUS}):
        with continuous_batching(net, "identity", **reading), serving(net, new=20, **options) as manager:
            results.append([answers(manager, ids) for ids in ([long, *short], short, [long])])
    assert results[0] == results[1]
    together, few, (alone,) = results[0]
    wanted = [single(net, one, "identity", 20, **reading) for one in (long, *short)]
    for got, expected in zip([alone, *few, *together], [*wanted, *wanted], strict=True):
        assert_same(got, expected)
    assert assert_same(alone, wanted[0]) > 6


def test_graphs_read_shared_pages_once(monkeypatch):
    """Batches whose rows share pages have other graphs than those whose rows do not; answers are those of prompts alone."""
    monkeypatch.setattr(shares, "LEAST_SPARED", 1)
    net, (begin,), kinds, results = network(torch.float32), prompts(200), set(), []
    ids, kind = [begin + more for more in prompts(10, 30, 5, 60, 1, seed=1)], store.PageStore.kind.fget
    monkeypatch.setattr(store.PageStore, "kind", property(lambda mine: (kinds.add(kind(mine)), kind(mine))[1]))
    for options in ({}, SYNCHRONOUS):
        with continuous_batching(net, "identity", **ZONES), serving(net, new=20, max_batch_tokens=1024, **options) as manager:
            results.append([answers(manager, few) for few in (ids, prompts(90, 30, seed=2), ids[:3])])
    assert kinds == {(False, False), (False, True)} and results[0] == results[1]
    compared = [assert_same(got, steps(net, one, "identity", 20)) for got, one in zip(results[0][0], ids, strict=True)]
    assert sum(compared) > 12


def test_chunks_shared_blocks_and_blocks_on_the_host():
    begin = prompts(128)[0]
    ids = [begin + more for more in prompts(200, 30, 70, 1, 150, seed=1)]
    with continuous_batching(network(), "turboquant_4bit_nc", **ZONES) as batching:
        small = {"max_batch_tokens": 64, "blocks": 14, "cpu_offload_space": 0.01, "safety_margin": 0.0}
        with serving(network(), new=70, **small) as manager:
            assert [len(tokens) for tokens in answers(manager, ids)] == [70] * 5
            metrics = batching.metrics()
            assert metrics.preemptions and metrics.pages_used == 0 and metrics.tokens_generated >= 350


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_prompts_in_one_launch_equal_one_by_one(format, dtype, monkeypatch):
    """Prompts, and chunks with a past, beside requests that are decoded: the same attention, within the rounding of its dtype."""
    net, together, errors = network(dtype), attention.attend_chunks, []

    def both(store, layer, chunks, query, *args, **options):
        out = together(store, layer, chunks, query, *args, **options)
        with monkeypatch.context() as patch:
            patch.setattr(varlen, "in_one_launch", lambda query, value: False)
            alone = together(store, layer, chunks, query, *args, **options)
        size = alone.float().norm().clamp_min(1e-6)  # the padding that warms up attends to nothing but zeros
        errors.append(((out.float() - alone.float()).norm() / size, len(chunks.keys), chunks.past is not None))
        return out

    monkeypatch.setattr(attention, "attend_chunks", both)
    begin = prompts(128)[0]
    ids = [begin + prompts(100)[0], *prompts(150, 70, 300, 5, 1, seed=1), *(begin + more for more in prompts(60, 7, seed=2))]
    with continuous_batching(net, format, **ZONES), serving(net, new=20, max_batch_tokens=256) as manager:
        assert all(len(tokens) == 20 for tokens in answers(manager, ids))
    assert {past for _, _, past in errors} == {True, False} and max(rows for _, rows, _ in errors) > 2
    assert torch.stack([error for error, _, _ in errors]).max() < (2e-3 if dtype == torch.float16 else 1.5e-2)


@pytest.mark.parametrize("options", [{}, SYNCHRONOUS], ids=["ahead", "synchronous"])
def test_blocks_on_the_host_and_back(options):
    """Bit by bit; of exact pages the answers are those of a cache."""
    net, ids = network(torch.float32), prompts(60, 55, 50, 58)
    small = {"blocks": 7, "cpu_offload_space": 0.01, "safety_margin": 0.0, "allow_block_sharing": False}
    with continuous_batching(net, "identity", **ZONES) as batching, serving(net, new=80, **small, **options) as manager:
        moved = watch_offloading(manager) if options else {}
        tokens = answers(manager, ids)
        assert batching.metrics().preemptions and (moved or not options) and batching.metrics().pages_used == 0
    compared = [assert_same(got, steps(net, one, "identity", 80)) for got, one in zip(tokens, ids, strict=True)]
    assert sum(compared) > 8


def test_a_client_that_leaves():
    with continuous_batching(network(), "int8", **ZONES) as batching, serving(network(), new=500, blocks=60) as manager:
        names = manager.add_requests(prompts(100, 60, 20), max_new_tokens=400)
        for name in names:
            manager.cancel_request(name)
        assert len(answers(manager, prompts(10))[0]) == 500
        assert batching.metrics().pages_used == 0


def test_the_pool_and_its_rings_fit():
    """Sized by the free memory, of a copy with as many layers as a model that is served."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(network().config)
    config.num_hidden_layers, config.head_dim, config.num_key_value_heads, config.num_attention_heads = 16, 128, 4, 8
    torch.manual_seed(0)
    large = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16).eval()
    with continuous_batching(large, "turboquant_4bit_nc") as batching:
        outputs = large.generate_batch(prompts(300, 40), max_new_tokens=10)
        assert [len(output.generated_tokens) for output in outputs.values()] == [10, 10]
        assert batching.metrics().tokens_generated == 20


def test_requests_that_sample_are_replayed_as_they_run():
    """Graphs of batches with and without them are different ones; a request draws the same tokens in any."""
    net, ids, found = network(), prompts(40)[0], []
    asked = [{}, {"seed": 1, "temperature": 5.0}, {"seed": 2, "temperature": 5.0, "top_p": 0.9}, {"temperature": 9.0, "top_p": 1e-6}]
    for options in ({}, SYNCHRONOUS):
        options = options | {"per_request_processors": True}
        with continuous_batching(net, Int8(center=False), **ZONES), serving(net, new=12, **options) as manager:
            for together in (asked, *([one] for one in asked)):
                names = [manager.add_request(ids, **one) for one in together]
                outputs = collect(manager, names)
                found.append([outputs[name].generated_tokens for name in names])
    assert [tokens for (tokens,) in found[1:5]] == found[0] == found[5] == [tokens for (tokens,) in found[6:]]
    greedy, first, second, nucleus = found[0]
    assert greedy == nucleus and len({tuple(tokens) for tokens in (greedy, first, second)}) == 3
