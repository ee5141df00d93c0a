"""Budgets that the heads of a layer share (AdaKV), in models: what holds for budgets of each head holds for them too."""

import copy

import pytest
import torch

from qkvcache import CompressedCache
from qkvcache.caches.memory import bytes_by_role
from qkvcache.evict import observer, sum_attention
from qkvcache.evict.sum_attention import observe_pages as observe_in_torch
from qkvcache.kernels.attend import chunked as attend_chunked
from qkvcache.policies import H2O, AdaKV, KVzip, SnapKV
from tests.evict.matrix import BY_HEAD, SHARED
from tests.evict.test_eviction import LENGTH, inputs, kept, live_bytes, run
from tests.evict.test_eviction_features import llama
from tests.matrix import FORMATS, model, slowly
from tests.reference import assert_close, count_decoded_layers, forward
from tests.tolerance import of_model, turned


def cache_of(name="snapkv", budget=14, format=None, **options):
    return CompressedCache(llama().config, policy=SHARED[name](budget), format=format, **options)


def counts(cache, layer=0):
    """Tokens of each head, `[B, H]`."""
    return (cache.kept_positions(layer) >= 0).sum(-1)


@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize("policy", [*(SHARED[name](14) for name in slowly(SHARED, ["snapkv", "h2o"])), *BY_HEAD], ids=str)
def test_the_budget_holds_at_every_step_and_bytes_are_counted(policy, format):
    """A copy goes on alike."""
    cache, differ = CompressedCache(llama().config, policy=policy, format=format, num_sink_tokens=2, residual_length=3), []

    def check(seen):
        for layer in range(2):
            held = counts(cache, layer)
            assert held.sum() <= 2 * max(policy.size(policy.budgets[0], seen), 8) and cache.stored_length(layer) == held.max()
            differ.append(bool((held != held[:, :1]).any()))
        assert cache.nbytes == live_bytes(cache)

    run(llama(), cache, (30, *[1] * 6, 3, 1), inputs((0,), 40), check)
    assert any(differ)
    assert torch.equal(*(forward(llama(), each, *inputs((0,), 41), 40, 41) for each in (copy.deepcopy(cache), cache)))


@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
def test_memory_is_for_the_tokens_of_all_heads(format):
    """One head retains nearly everything: pages are not allocated for others that retain nothing."""
    budget, tokens, heads = 512, 2048, 4
    layer = CompressedCache(
        policy=AdaKV(SnapKV(budget=budget, interval=1, window_size=8, recent=8, kernel_size=1), 0.0),
        format=format,
        residual_length=8,
    )._maker.new()
    generator = torch.Generator().manual_seed(0)
    layer.update(*(torch.randn(1, heads, tokens, 32, generator=generator) for _ in range(2)))
    layer.begin_attention(None)
    layer.end_attention(torch.rand(1, heads, tokens, generator=generator) * torch.tensor([1.0, 0.01, 0.01, 0.01])[:, None])
    held = (layer.positions() >= 0).sum(-1)[0].tolist()
    assert sum(held) == heads * budget and held[0] > 3.5 * budget
    found = bytes_by_role(layer.tensors())
    assert found["codes"] + found["scales"] <= 1.1 * layer.format.bytes_per_token(32, 1) * heads * budget + 10_000
    assert found["bookkeeping"] <= 1.1 * 8 * heads * budget + 2_000  # a position and a score; and a table of a 64th of it for each head


@pytest.mark.parametrize(("format", "prompt"), [(None, 30), ("int8", 30), ("int8", 4)])
def test_a_row_comes_back_from_a_snapshot(format, prompt):
    """Of a batch whose other row has a longer head; and where nothing is quantized yet."""
    snapshots = pytest.importorskip("qkvcache.prefix.snapshot")
    network, (ids, _) = llama(), inputs((0, 0))
    cache = cache_of(format=format, residual_length=3)
    for a, b in ((0, prompt), (prompt, prompt + 1), (prompt + 1, prompt + 2)):
        forward(network, cache, ids, torch.ones_like(ids), a, b)
    for row in range(2):
        again, alone = cache_of(format=format, residual_length=3), copy.deepcopy(cache)
        alone.batch_select_indices([row])
        for into, layer in zip(again.layers, cache.layers, strict=True):
            snapshots.restore(into, snapshots.snapshot(layer, row=row), "cpu")
        assert again.nbytes == alone.nbytes
        for a in range(prompt + 2, LENGTH):
            logits = [forward(network, x, ids[row : row + 1], torch.ones_like(ids[:1]), a, a + 1) for x in (again, alone)]
            assert_close(*logits, of_model(network))  # the ring of one begins elsewhere
            assert kept(again) == kept(alone)


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention", "qkvcache"])
def test_many_new_tokens_run_in_chunks(monkeypatch, attention):
    """Without a dense layer, whatever heads hold."""
    monkeypatch.setattr(attend_chunked, "CHUNK_TOKENS", 7)
    sizes, text = (30, 20, 1, 19), inputs((0, 9, 40), 70)
    reference, cache = (cache_of("snapkv_interval", 21, num_sink_tokens=2) for _ in range(2))
    expected, network = run(llama("eager"), reference, sizes, text), llama(attention)
    logits = [forward(network, cache, *text, 0, 30)]
    with count_decoded_layers() as decoded:
        logits += [forward(network, cache, *text, a, b) for a, b in ((30, 50), (50, 51), (51, 70))]
    assert not decoded
    assert kept(cache) == kept(reference) and (counts(cache) != counts(cache)[:, :1]).any()
    for ours, theirs in zip(logits, expected, strict=True):
        assert_close(ours, theirs, of_model(network))


@pytest.mark.parametrize("format", slowly(["int8", "identity", "turboquant_4bit_nc", "fp8_token", "hadaquant_k3v3"], ["fp8_token"]))
def test_kernels_do_what_torch_operations_do(monkeypatch, format):
    """Steps over the pages of heads of different lengths, in Triton's interpreter: of one token, of a few with padding among them, of
    many."""
    policy = AdaKV(H2O(budget=80, num_sink_tokens=2, recent=10, interval=4))
    network, (ids, mask) = model("llama", layers=1), inputs((0, 9), 97)
    mask[1, 92:94] = 0
    sizes, results, taken = (70, 21, 4, 1, 1), [], []
    observe_pages = observer.observe_pages
    monkeypatch.setattr(observer, "observe_pages", lambda *args, **kwargs: taken.append(1) or observe_pages(*args, **kwargs))
    monkeypatch.setattr("qkvcache.attention.route.MAX_FUSED_ROWS", 16)
    monkeypatch.setattr(attend_chunked, "CHUNK_TOKENS", 64)
    for kernels in ("torch", "triton"):
        monkeypatch.setenv("QKVCACHE_KERNELS", kernels)
        torch_runs = observe_in_torch if kernels == "torch" else lambda *args, **options: pytest.fail("no kernel")
        monkeypatch.setattr(sum_attention, "observe_pages", torch_runs)
        taken.clear()
        cache = CompressedCache(network.config, policy=policy, format=FORMATS[format], num_sink_tokens=2, residual_length=5)
        logits = run(network, cache, sizes, (ids * mask, mask))
        assert len(taken) == 3  # but for the prompt and the many tokens after it
        region = cache.layers[0].storage.metadata.region
        results.append((logits, region["positions"], region["score"], cache.layers[0].dense()))
    (logits, positions, scores, dense), (expected, reference, totals, exact) = results[1], results[0]
    for ours, theirs in zip(logits, expected, strict=True):
        assert_close(ours, theirs, turned(format))
    alike = (positions == reference) & (reference >= 0)
    assert alike.sum() > 0.98 * (reference >= 0).sum()  # of scores that are nearly equal, rounding may choose another
    assert_close(scores[alike], totals[alike], turned(format))
    columns = torch.cat([torch.ones_like(alike[..., :2]), alike, torch.ones_like(alike[..., : dense[0].shape[2] - 2 - alike.shape[2]])], -1)
    for a, b in zip(dense, exact, strict=True):
        assert_close(a[columns], b[columns], turned(format))


def test_a_context_that_is_read_twice():
    """KVzip's scores, and a row that is padded."""
    network, (ids, mask) = llama(), inputs((0, 7), 48)
    found = {}
    for alpha in (0.2, 1.0, None):
        policy = KVzip(budget=20, recent=4, alpha_safeguard=alpha, layerwise=True)
        cache = CompressedCache(network.config, format="int8", policy=policy, num_sink_tokens=2, residual_length=3)
        cache.compress(network, ids[:, :40], attention_mask=mask[:, :40], progress=False)
        assert (counts(cache).sum(-1) == 2 * 20).all() and (counts(cache) >= int(0.2 * 20)).all()
        found[alpha] = kept(cache)
        assert forward(network, cache, ids, mask, 40, 41).isfinite().all()
    assert found[1.0] == found[None] != found[0.2]
