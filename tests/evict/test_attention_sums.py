"""The attention that reaches a policy is that of the model: summed over queries and the group's query heads, in every implementation."""

import pytest
import torch
import transformers as hf
from transformers import DynamicCache

from qkvcache import CompressedCache
from qkvcache.policies import H2O, TOVA, Custom, SnapKV
from tests.evict.matrix import SHARED
from tests.matrix import ATTENTION, model, slowly
from tests.reference import Mode, assert_close, steps
from tests.tolerance import of_model, rounding

PADS = (0, 5, 9)
TEXT = Mode(PADS, (4, 17, 10, 1, 3, 1))  # a boundary within the padding, chunks above and below what attends on codes
LENGTH = sum(TEXT.sizes)


def run(network, cache):
    return list(steps(network, cache, TEXT))


def weights(network, layer):
    """Dense attention `[B, H, Q, T]` of each KV head's group, as eager transformers computes it; padding is 0."""
    ids, mask = TEXT.inputs()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        out = network(input_ids=ids, attention_mask=mask, position_ids=positions, output_attentions=True)
    found = out.attentions[layer].unflatten(1, (network.config.num_key_value_heads, -1)).sum(2)
    return found * mask[:, None, :, None] * mask[:, None, None, :]


def scores(cache, layer):
    """What the layer noted, `[B, H, T]` by column."""
    metadata = cache.layers[layer].storage.metadata
    metadata.describe()
    positions = torch.cat([metadata.region["positions"], metadata.residual["positions"]], -1).long()
    score = torch.cat([metadata.region["score"], metadata.residual["score"]], -1)
    found = torch.zeros(*score.shape[:2], LENGTH + 1)
    at = (positions + torch.tensor(PADS)[:, None, None]).masked_fill(positions < 0, LENGTH)
    return found.scatter_(-1, at, score)[..., :LENGTH]


def expected(name, attention):
    """The score of each token after all steps, while nothing is evicted."""
    if name == "h2o":
        return attention.sum(2)
    if name == "tova":
        return attention[:, :, -1]
    total = torch.zeros_like(attention[:, :, 0])
    begin = 0
    _, mask = TEXT.inputs()
    for size in TEXT.sizes:
        step = slice(begin, begin + size)
        is_valid = mask[:, step].bool()
        if name == "decay":
            count = is_valid.sum(-1)[:, None, None]
            decay = 0.9 ** (is_valid.flip(-1).cumsum(-1).flip(-1) - 1).clamp_min(0)
            total = total * 0.9**count + (attention[:, :, step] * (decay * is_valid)[:, None, :, None]).sum(2)
        else:  # snapkv, window 4
            late = is_valid.flip(-1).cumsum(-1).flip(-1) <= 4
            total = total * 0.75 ** is_valid.sum(-1)[:, None, None] + (attention[:, :, step] * (is_valid & late)[:, None, :, None]).sum(2)
        begin += size
    return total


KINDS = {
    "h2o": H2O(budget=500),
    "decay": H2O(budget=500, decay=0.9),
    "tova": TOVA(budget=500),
    "snapkv": SnapKV(budget=500, window_size=4, interval=1),
}


@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", slowly(ATTENTION, ["sdpa", "eager"]))
def test_scores_equal_sums_of_dense_weights(attention, kind, format):
    """Layer 0 of three, in which keys do not depend on the cache; with a format codes are read, so roughly."""
    cache = CompressedCache(model("llama").config, policy=KINDS[kind], format=format, num_sink_tokens=0, residual_length=2)
    run(model("llama", attention), cache)
    found, dense = scores(cache, 0), expected(kind, weights(model("llama", "eager"), 0))
    assert found.shape == dense.shape and dense.max() > 0.5
    assert (found - dense).abs().max() <= (rounding(64, 64, 32, 2 * LENGTH) if format is None else 0.05) * dense.max()


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
@pytest.mark.parametrize("attention", ["eager", "qkvcache"])
def test_sinks_and_softcaps_count(name, attention):
    """The full-attention layer of models with attention sinks or a softcap, while nothing is evicted."""
    network = model(name, attention)
    cache = CompressedCache(network.config, policy=H2O(budget=500))
    run(network, cache)
    dense = weights(model(name, "eager"), 1).sum(2)
    assert (scores(cache, 1) - dense).abs().max() <= of_model(network) * dense.max()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
def test_groups_of_query_heads(heads):
    config = hf.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    network = hf.LlamaForCausalLM(config).eval()
    dense = weights(network, 0)
    assert dense.shape[1] == heads[1]
    for attention in ("eager", "sdpa"):
        network.set_attn_implementation(attention)
        cache = CompressedCache(config, policy=H2O(budget=500))
        run(network, cache)
        assert (scores(cache, 0) - dense.sum(2)).abs().max() <= rounding(64, 64, 16, 2 * LENGTH) * dense.sum(2).max()


POLICIES = {
    "h2o": H2O(budget=15, recent=4),
    "tova": TOVA(budget=15),
    "snapkv": SnapKV(budget=15, window_size=4, interval=2, recent=3),
    "custom": Custom(function=lambda tokens: tokens.score * tokens.value_norm, budget=15),
    "shared": SHARED["snapkv"](15),
}


@pytest.mark.parametrize("kind", slowly(POLICIES, ["h2o", "snapkv", "shared"]))
@pytest.mark.parametrize("attention", ATTENTION[1:])
def test_every_implementation_keeps_the_same(attention, kind):
    caches, said = [], []
    for implementation in ("sdpa", attention):
        caches.append(CompressedCache(model("llama").config, policy=POLICIES[kind]))
        said.append(run(model("llama", implementation), caches[-1]))
    for ours, theirs in zip(*said, strict=True):
        assert_close(ours, theirs, of_model(model("llama")))
    for layer in range(3):
        assert torch.equal(*(cache.kept_positions(layer) for cache in caches))


def test_an_attention_that_is_not_reported_is_refused():
    """A step never observed raises at the next update, and reset() makes the cache usable again."""
    network = model("llama")
    cache = CompressedCache(network.config, policy="h2o")
    x = torch.randn(1, 2, 3, 32)
    cache.update(x, x, 0)
    with pytest.raises(NotImplementedError, match="AttentionInterface"):
        cache.update(x, x, 0)
    cache.reset()
    before = run(network, cache)
    fresh = run(network, CompressedCache(network.config, policy="h2o"))
    assert all(torch.equal(a, b) for a, b in zip(before, fresh, strict=True))
    assert cache.get_seq_length() == DynamicCache().get_seq_length() + LENGTH
