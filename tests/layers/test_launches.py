"""How many kernels a layer launches in a second turn: on a GPU, each costs the host as much as its work costs the GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

import qkvcache
from qkvcache import CompressedCache
from qkvcache.attention.route import MAX_FUSED_ROWS, route
from qkvcache.evict.layer import EvictingLayer
from qkvcache.kernels.attend import chunked as attend_chunked
from qkvcache.kernels.attend import launches as fused
from qkvcache.kernels.host import dispatch, launch
from qkvcache.kernels.host.launch import Launcher
from qkvcache.kernels.host.tables import tables
from qkvcache.layers.compressed import CompressedLayer
from qkvcache.policies import H2O, TOVA, AdaKV, KeyDiff, Policy, SnapKV
from qkvcache.releases import passing
from qkvcache.storage import GROUP
from tests.launches import counted
from tests.matrix import FORMATS as REGISTRY
from tests.matrix import model

HEADS, GROUPS, DIM = 1, 4, 64
PAST = 141
"""Tokens before, of which 128 are quantized and fill a chunk: tokens that cross from one to the next take a launch more."""
FEW, MANY = 16, MAX_FUSED_ROWS // GROUPS + 1
"""New tokens for the fused kernel, and for attention in chunks."""


def attention(query: Tensor, key: Tensor, *rest: object, **options: object) -> tuple[Tensor, Tensor]:
    """Allocates the result of attention by the library, whose launches are its own."""
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.no_grad()
def turn(patch: pytest.MonkeyPatch, format: str, queries: int, max_length: int | None = None) -> list[str]:
    """What a turn of `queries` tokens launches where no chunk has to be added."""
    patch.setenv("QKVCACHE_KERNELS", "triton")
    patch.setattr(attend_chunked, "library_attention", attention)
    patch.setattr(attend_chunked, "causal_attention", lambda query, folded, *rest, **options: [attention(query, *rest)])
    layer = CompressedLayer(REGISTRY[format], 4, 8, max_length)
    new = [torch.randn(1, n, HEADS, DIM).transpose(1, 2) for n in (PAST, queries)]
    query = torch.randn(1, queries, HEADS * GROUPS, DIM).transpose(1, 2)
    codecs = REGISTRY[format].codecs()
    tables(codecs, DIM, DIM, query.device)  # makes constants
    for codec in codecs:
        attend_chunked.rotate(query, codec)  # likewise
    layer.update(new[0], new[0])
    layer.reserve(queries + GROUP)
    with counted(patch) as launches:
        key, value = layer.update(new[1], new[1])
        route(lambda *args: pytest.fail("attention of the model"), "sdpa", SimpleNamespace(is_causal=True), query, key, value, None)
    return launches.names


STORING = 3
"""Launches that store new tokens."""
FORMATS = {"int8": 0, "turboquant_4bit_nc": 1, "hadaquant_k4v4": 2}
"""Products that rotate queries, and outputs back."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("format", FORMATS)
def test_many_new_tokens(monkeypatch, format):
    """With the attention of the library on the past and on exact tokens, of at most two launches each, 10 (int8) to 12 (hadaquant)."""
    growing, preallocated = (turn(monkeypatch, format, MANY, max_length) for max_length in (None, 600))
    assert growing == preallocated and len(growing) == STORING + 3 + FORMATS[format], growing


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("format", FORMATS)
def test_a_past_of_several_chunks(monkeypatch, format):
    """A further chunk takes, beside the attention of the library, one launch. Outputs that are to be rotated back are merged before."""
    one = turn(monkeypatch, format, MANY)
    monkeypatch.setattr(attend_chunked, "CHUNK_TOKENS", 32)
    assert len(turn(monkeypatch, format, MANY)) == len(one) + 3 + (FORMATS[format] == 2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_few_new_tokens(monkeypatch):
    monkeypatch.setattr(fused, "LEAST_SPLIT", 512)  # few programs to interpret
    growing, preallocated = (turn(monkeypatch, "int8", FEW, max_length) for max_length in (None, 600))
    assert growing == preallocated and len(growing) == STORING + 2, growing


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_prompt_compiles_the_kernels_of_a_step_once(monkeypatch):
    """While its attention has not run yet; nothing is launched, and what is stored is the same."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    monkeypatch.setattr(dispatch, "_STEPS", set())
    ahead, call = [], Launcher.__call__

    def note(self, *args, **kwargs):
        if launch._AHEAD.on:
            ahead.append(self.kernel.__name__)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Launcher, "__call__", note)
    x = torch.randn(1, 9, HEADS, DIM).transpose(1, 2)
    query = torch.randn(1, 9, HEADS * GROUPS, DIM).transpose(1, 2)
    layers = [CompressedLayer(REGISTRY["int8"], 4, 8) for _ in range(2)]
    for layer in layers:
        with counted(monkeypatch) as launches:
            route(lambda *args, **kwargs: (None, None), "sdpa", SimpleNamespace(is_causal=True), query, *layer.update(x, x), None)
        assert len(ahead) == 3
        assert len([name for name in launches.names if name in ahead]) == 1  # that stores the prompt
    assert layers[0].get_seq_length() == 9 and all(torch.equal(a, b) for a, b in zip(*(layer.dense() for layer in layers), strict=True))


@torch.no_grad()
def observed_turn(patch: pytest.MonkeyPatch, policy: Policy) -> list[str]:
    """What the attention of a turn launches in a layer that evicts, from `update` to the report of the weights."""
    patch.setenv("QKVCACHE_KERNELS", "triton")
    patch.setattr(attend_chunked, "library_attention", attention)
    patch.setattr(attend_chunked, "causal_attention", lambda query, folded, *rest, **options: [attention(query, *rest)])
    layer = EvictingLayer(REGISTRY["int8"], policy, policy.budgets[0], 4, 8)
    stock = SimpleNamespace(is_causal=True)
    for tokens in (PAST, MANY):
        key, value = layer.update(*(torch.randn(1, HEADS, tokens, DIM, dtype=torch.float16) for _ in range(2)))
        query = torch.randn(1, HEADS * GROUPS, tokens, DIM, dtype=torch.float16)
        layer.begin_attention(None, query, 1.0)
        if tokens == PAST:
            layer.end_attention(torch.zeros(1, HEADS, PAST) if policy.observation_window else None)
            continue
        with patch.context() as within, counted(patch) as launches:
            within.setattr(layer, "end_attention", lambda *args: None)
            route(lambda *args: pytest.fail("attention of the model"), "sdpa", stock, query, key, value, None)
    return launches.names


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_many_new_tokens_over_a_layer_that_evicts(monkeypatch):
    """Two copies join the exact tokens. The sums take a kernel for each part; the chunk is still there."""
    joined, attended, summed = 2, 2, 2
    assert len(observed_turn(monkeypatch, KeyDiff(budget=PAST))) == joined + attended
    names = observed_turn(monkeypatch, H2O(budget=PAST, num_sink_tokens=4))
    assert len(names) == 1 + joined + attended + 2 * summed + 1, names


@torch.no_grad()
def decoded(patch: pytest.MonkeyPatch, policy: Policy, steps: int) -> list[list[str]]:
    """What a layer that evicts launches in steps of one token: to store it, to attend, to note the weights, and to evict."""
    patch.setenv("QKVCACHE_KERNELS", "triton")
    layer = EvictingLayer(REGISTRY["int8"], policy, policy.budgets[0], 4, 8)
    found = []
    for tokens in (PAST, *[1] * steps):
        new = [torch.randn(1, 2, tokens, DIM, dtype=torch.float16) for _ in range(2)]
        query = torch.randn(1, 2 * GROUPS, tokens, DIM, dtype=torch.float16)
        if tokens == PAST:
            layer.update(*new)
            layer.begin_attention(None)
            layer.end_attention(torch.rand(1, 2, PAST) if policy.observation_window else None)
            continue
        with counted(patch) as launches:
            key, value = layer.update(*new)
            route(lambda *args: pytest.fail("attention of the model"), "sdpa", SimpleNamespace(is_causal=True), query, key, value, None)
        found.append(launches.names)
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_steps_of_heads_that_share_a_budget(monkeypatch):
    """Between evictions, three more than where each head has its own, whose one launch writes and counts the token; after an eviction, one
    that reads the scores of pages."""
    one = H2O(budget=100, num_sink_tokens=4, recent=8, interval=4)
    own, shared = (decoded(monkeypatch, policy, 6) for policy in (one, AdaKV(one)))
    assert len(own[1]) == len(own[2]) == 6 and len(shared[1]) == len(shared[2]) == 9
    assert len(shared[4]) == 10  # and again after an eviction


BETWEEN, OF_EVICTION = {"SnapKV": 6, "H2O": 6, "KeyDiff": 3, "TOVA": 6}, {"SnapKV": 20, "H2O": 14, "KeyDiff": 27, "TOVA": 10}
"""Launches of a step between evictions, and the most that an eviction adds."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("policy", [SnapKV, H2O, KeyDiff, TOVA], ids=lambda kind: kind.__name__)
def test_an_eviction_launches_few(monkeypatch, policy):
    """Between evictions, tokens are stored and attended to, and scores of the pages and of the ring are updated."""
    monkeypatch.setattr(fused, "LEAST_SPLIT", 512)  # few programs to interpret
    _, between, evicts, *_ = decoded(monkeypatch, policy(budget=100, num_sink_tokens=4, recent=8, interval=3), 3)
    assert len(between) == BETWEEN[policy.__name__], between
    assert len(evicts) <= len(between) + OF_EVICTION[policy.__name__], evicts


EVICTING = {kind.__name__: kind(budget=128, interval=1) for kind in (SnapKV, H2O, KeyDiff, TOVA)}
MOST_CALLS = {"decode": 50, "evict": 90, "prompt": 168}
"""The most Python calls of a layer and step. 120 is the target for a prompt."""


def calls_of_a_layer(step: Callable[[], object]) -> list[str]:
    """The functions of the package, `file name`, that `step` calls from the last update of a cache on."""
    package, calls, update = str(Path(qkvcache.__file__).parent), [], CompressedCache.update.__code__

    def enter(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is update:
            calls.clear()
        if frame.f_code.co_filename.startswith(package):
            calls.append(f"{frame.f_code.co_filename[len(package) + 1 :]} {frame.f_code.co_qualname}")

    sys.settrace(enter)
    try:
        step()
    finally:
        sys.settrace(None)
    return calls


@torch.no_grad()
@pytest.mark.parametrize("policy", [None, *EVICTING])
def test_a_layer_of_a_step_makes_few_calls(monkeypatch, policy):
    """Beside the kernels, which do nothing here. Between evictions, a layer that evicts makes few more than one that grows."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    monkeypatch.setattr(GridExecutor, "__call__", lambda kernel, *args, **kwargs: None)
    network, ids = model("llama"), torch.randint(3, 100, (1, 200))

    def calls(**options) -> list[list[str]]:
        cache = CompressedCache(network.config, format="turboquant_4bit_nc", **options)
        prompt = calls_of_a_layer(lambda: network(ids, **passing(cache)))
        assert options or len(prompt) <= MOST_CALLS["prompt"], prompt
        network(ids[:, :1], **passing(cache))
        return [calls_of_a_layer(lambda: network(ids[:, :1], **passing(cache))) for _ in range(2)]

    if policy is None:
        assert all(0 < len(step) <= MOST_CALLS["decode"] for step in calls()), calls()
        return
    often, seldom = EVICTING[policy], replace(EVICTING[policy], interval=16)
    assert all(0 < len(step) <= MOST_CALLS["evict"] for step in calls(policy=often)), [len(x) for x in calls(policy=often)]
    assert len(calls(policy=seldom)[-1]) <= MOST_CALLS["decode"] + 12, calls(policy=seldom)[-1]
