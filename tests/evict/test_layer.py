"""What an evicting layer must not do, found by looking for it."""

from types import SimpleNamespace

import pytest
import torch

from qkvcache import CompressedCache, SinkCache
from qkvcache.attention import masks
from qkvcache.attention.route import route
from qkvcache.evict.layer import EvictingLayer
from qkvcache.evict.policies.budget import share_of
from qkvcache.policies import H2O, TOVA, Custom, KeyDiff, SinkWindow
from qkvcache.releases import passing
from tests.evict.test_eviction import inputs, run
from tests.matrix import FORMATS, model
from tests.reference import forward

SHARES = [H2O(budget=0.3), H2O(budget=0.5, recent=1.0), KeyDiff(budget=0.2, interval=8, recent=2), KeyDiff(budget=0.2, recent=0.9)]


@pytest.mark.parametrize("recent", [3, 64])
@pytest.mark.parametrize("policy", SHARES, ids=str)
def test_a_share_holds_in_every_row_with_equal_empty_slots(policy, recent):
    network, (ids, mask) = model("llama", layers=1), inputs((0, 5, 10), 70)
    cache = CompressedCache(network.config, format="int8", policy=policy, num_sink_tokens=2, residual_length=recent)

    def check(seen):
        held = cache.layers[0].storage.metadata.region["positions"] >= 0
        assert (held == held[:, :1]).all()
        kept = (cache.kept_positions() >= 0).sum(-1)[:, 0]
        assert (kept <= policy.size(policy.budgets[0], mask[:, :seen].sum(-1))).all()

    run(network, cache, (30, *[1] * 40), (ids, mask), check)


@pytest.mark.parametrize("format", ["identity", "int8"])
def test_a_prompt_keeps_the_mask_that_the_model_made(monkeypatch, format):
    """None, for one without padding: a mask of all its tokens would outgrow the cache, and take sdpa its fast kernels."""
    seen = []
    stock = torch.nn.functional.scaled_dot_product_attention

    def sdpa(*args, **kwargs):
        seen.append(kwargs.get("attn_mask"))
        return stock(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    network = model("llama")
    run(network, SinkCache(network.config, window_length=16, format=format), (40,), inputs((0,), 40))
    assert seen == [None] * network.config.num_hidden_layers


def test_tokens_whose_priority_is_nan_go_first():
    network = model("llama")
    odd = Custom(function=lambda tokens: torch.where(tokens.positions % 2 == 0, torch.nan, 1.0), budget=20, recent=8, num_sink_tokens=4)
    cache = CompressedCache(network.config, policy=odd)
    run(network, cache, (46,), inputs((0,), 46))
    kept = cache.kept_positions()[0, 0].tolist()
    assert kept[:4] == [0, 1, 2, 3] and kept[-8:] == list(range(38, 46)) and all(p % 2 for p in kept[4:-8])


def test_a_step_of_padding_changes_no_scores_of_shared_keys():
    network = model("gemma3n")
    ids, mask = torch.randint(3, 100, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, 10] = 0
    cache = CompressedCache(network.config, policy=TOVA(budget=100))
    forward(network, cache, ids, mask, 0, 10)
    layer = next(layer for layer in cache.layers if hasattr(layer, "policy"))
    layer.commit()
    before = layer.storage.metadata.region["score"][1].clone()
    forward(network, cache, ids, mask, 10, 11)
    layer.commit()
    assert torch.equal(layer.storage.metadata.region["score"][1, :, : before.shape[-1]], before)


def test_no_graph_is_held():
    network = model("llama")
    cache = CompressedCache(network.config, policy=H2O(budget=16))
    query = network.model.layers[-1].self_attn.q_proj.weight
    for weight in network.parameters():
        weight.requires_grad_(weight is query)
    try:
        for begin in range(3):
            network(torch.randint(3, 100, (1, 20 if not begin else 1)), **passing(cache))
        assert not any(x.requires_grad for layer in cache.layers for _, x in layer.tensors())
    finally:
        for weight in network.parameters():
            weight.requires_grad_(True)


def test_a_refused_crop_changes_no_layer():
    network = model("gemma3")
    cache = CompressedCache(network.config, policy=H2O(budget=100))
    run(network, cache, (11,), inputs((0,), 11))
    before = [layer.get_seq_length() for layer in cache.layers]
    with pytest.raises(NotImplementedError, match="cannot take steps back"):
        cache.crop(-2)
    assert [layer.get_seq_length() for layer in cache.layers] == before


@pytest.mark.parametrize("window", [100, 256, 1020, 4096])
def test_a_window_protects_what_its_interval_leaves(window):
    policy = SinkWindow(window_length=window)
    assert policy.recent + policy.interval_of(policy.budgets[0]) - 1 == window


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.7, 1.0])
def test_shares_are_exact(share):
    counts = torch.arange(200_000)
    expected = (counts.double() * share + 1e-6).floor().long()
    assert torch.equal(share_of(share, counts), expected)
    assert share_of(share, 1000) == round(1000 * share)


def test_all_layers_look_at_a_mask_once(monkeypatch):
    looks = []
    stock = masks.sees_itself
    monkeypatch.setattr(masks, "sees_itself", lambda *args: looks.append(1) or stock(*args))
    network = model("llama")
    run(network, CompressedCache(network.config, policy=H2O(budget=16)), (30,), inputs((0, 5), 30))
    assert len(looks) == 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("policy", "pads"), [(H2O(budget=24, recent=6, interval=2), 7), (KeyDiff(budget=24, recent=6, interval=1), 30)], ids=str
)
def test_the_ring_of_kernels_is_that_of_torch(monkeypatch, policy, pads):
    """Which counts on the device, wraps round and, where padding leaves no empty slot, is read by a plan."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    steps = [[torch.randn(2, heads, tokens, 32) for heads in (1, 1, 2)] for tokens in (40, *[1] * 9)]
    padding = (torch.arange(40) >= torch.tensor([[0], [pads]]))[:, None, None]
    found = []
    for kernels in ("torch", "triton"):
        monkeypatch.setenv("QKVCACHE_KERNELS", kernels)
        layer, outputs = EvictingLayer(FORMATS["int8"], policy, policy.budgets[0], 2, 3), []
        for keys, values, queries in steps:
            new = layer.update(keys, values)
            if keys.shape[2] > 1:
                layer.begin_attention(padding[:, 0, 0], queries, 1.0)
                layer.end_attention(torch.ones(2, 1, 40) * padding[:, 0] if policy.observation_window else None)
                continue
            outputs.append(route(None, "sdpa", SimpleNamespace(is_causal=True), queries, *new, None)[0])
        assert (layer.running.plan is not None) == (kernels == "triton" and pads == 7)
        found.append((outputs, layer.positions()))
    (expected, positions), (ours, kept) = found
    assert torch.equal(kept, positions) and (kept >= 0).all() == (pads == 7)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
