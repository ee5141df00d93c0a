"""Caches with an attention budget, against attention over dense tensors of which a mask hides what is not read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from qkvcache import CompressedCache, TurboQuantCache
from qkvcache.attention.compressed_kv import warn_once
from qkvcache.kernels.pages import BLOCK
from qkvcache.releases import passing
from qkvcache.select.arguments import budget_of
from qkvcache.select.dispatch import MOST_QUERIES
from qkvcache.select.select_blocks import GROUP, SAMPLED
from tests.matrix import model
from tests.reference import ZONES, assert_close, prompt, run

ZONE = ZONES["zones"]
EXACT = ZONE["num_sink_tokens"], ZONE["residual_length"] + 1
BUDGET = 2 * BLOCK


def read_few(module, query, key, value, attention_mask, scaling, paged: bool = False, **options):
    """Attention of few queries to the exact tokens and to the `BUDGET` quantized tokens in the blocks of the largest weights. `paged`:
    blocks are counted from the first token on, as in pages of requests, which hold sinks too."""
    queries, tokens, sinks = query.shape[2], key.shape[2], EXACT[0]
    group = query.shape[1] // key.shape[1]
    stored = max(tokens - (queries if queries > 1 else 0) - sum(EXACT), 0)
    scores = query @ key.repeat_interleave(group, 1).mT * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -1e30)
    elif queries > 1:
        scores = scores.masked_fill(torch.ones(queries, tokens).triu(tokens - queries + 1).bool(), -1e30)
    for few in scores.split(GROUP, dim=2) if queries <= MOST_QUERIES and stored > BUDGET else ():
        before, sampled = sinks if paged else 0, few.flip(2)[:, :, :: -(-few.shape[2] // SAMPLED)]
        region = F.pad(sampled[..., sinks : sinks + stored], (before, -(before + stored) % BLOCK), value=-torch.inf)
        hidden = region.amax(-1) < -1e29
        weights = region.softmax(-1).masked_fill(hidden[..., None], 0).unflatten(-1, (-1, BLOCK)).sum(-1)
        weights = weights.unflatten(1, (-1, group)).sum((2, 3))
        chosen = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, weights.topk(BUDGET // BLOCK).indices, True)
        left_out = ~chosen.repeat_interleave(BLOCK, -1)[..., before : before + stored].repeat_interleave(group, 1)[:, :, None]
        few[..., sinks : sinks + stored].masked_fill_(left_out, -1e30)
    return (scores.softmax(-1) @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register("read_few", read_few)
AttentionMaskInterface.register("read_few", sdpa_mask)
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "chunked_prefill": {"prefill_chunk_size": 12},
}


@pytest.mark.parametrize(("mode", "options"), [*((mode, {}) for mode in MODES), ("beams", {"max_length": 300})])
def test_generate_reads_the_chosen_blocks(mode, options):
    network, reference = model("llama"), model("llama", "read_few")
    inputs, how = prompt(rows=2, length=150), MODES[mode] | {"suppress_tokens": [0]}  # whose query is 0, so that blocks weigh the same
    expected = run(reference, DynamicCache(config=reference.config), inputs, **how)
    cache = CompressedCache(network.config, format="identity", attention_budget=BUDGET, **ZONE, **options)
    assert torch.equal(run(network, cache, inputs, **how), expected)
    everything = run(network, CompressedCache(network.config, format="identity", **ZONE, **options), inputs, **how)
    assert not torch.equal(everything, expected)


@pytest.mark.parametrize("new", [17, GROUP, GROUP + 20, MOST_QUERIES + 1])
@pytest.mark.parametrize("padded", [False, True])
def test_many_new_tokens_share_choices(new, padded):
    """Those of a group, but for more tokens than any turn has: these read everything."""
    network, reference = model("llama"), model("llama", "read_few")
    ids = torch.randint(3, 60, (2, 150 + new), generator=torch.Generator().manual_seed(new))
    mask = torch.ones_like(ids)
    mask[1, :40] = 1 - padded
    cache = CompressedCache(network.config, format="identity", attention_budget=BUDGET, **ZONE)
    dense, whole = (DynamicCache(config=network.config) for _ in range(2))
    with torch.no_grad():
        for begin, end in ((0, 150), (150, 150 + new)):
            given = {"attention_mask": mask[:, :end], "position_ids": (mask[:, :end].cumsum(1) - 1).clamp_min(0)[:, begin:]}
            ways = (network, cache), (reference, dense), (network, whole)
            got, expected, everything = (one(ids[:, begin:end], **passing(past), **given).logits for one, past in ways)
    assert_close(got[mask[:, 150:] > 0], expected[mask[:, 150:] > 0], 1e-4)
    assert torch.allclose(got, everything, atol=1e-4) == (new > MOST_QUERIES)


def test_a_budget_changes_nothing_until_it_is_exceeded():
    """Bit for bit, whether it is a number of tokens or a share."""
    network, ids = model("llama"), torch.randint(3, 60, (2, 120))
    whole = TurboQuantCache(network.config, **ZONE)
    caches = [TurboQuantCache(network.config, attention_budget=budget, **ZONE) for budget in (128, 0.5, BUDGET)]
    with torch.no_grad():
        for begin, end in ((0, 116), (116, 119), (119, 120)):
            expected, *logits = (network(ids[:, begin:end], **passing(cache)).logits for cache in (whole, *caches))
            assert all(torch.equal(each, expected) for each in logits[:2])
    assert not torch.equal(logits[2], expected)


def test_a_cache_tells_its_budget():
    cache = TurboQuantCache(model("llama").config, attention_budget=0.125)
    assert "attention_budget=0.125, " in repr(cache)


@pytest.mark.parametrize("length", [None, 256])
def test_compiled_steps(length):
    network, ids = model("llama"), torch.randint(3, 60, (2, 150))
    options = {"format": "turboquant_4bit_nc", "attention_budget": BUDGET, **ZONE}
    eager = CompressedCache(network.config, **options)
    cache = CompressedCache(network.config, **options, max_length=length, compile=True)
    step = torch.compile(network.forward, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for caches in (eager, cache):
            network(ids[:, :140], **passing(caches))
        for at in range(140, 143):
            cache.get_mask_sizes(1, 0)
            mask = torch.ones(2, 1, 1, cache.get_mask_sizes(1, 0)[0], dtype=torch.bool)
            mask[..., at + 1 :] = False
            got = step(ids[:, at : at + 1], attention_mask=mask, **passing(cache)).logits
            assert_close(got, network(ids[:, at : at + 1], **passing(eager)).logits, 1e-4)


@pytest.mark.parametrize("change", ["fork", "reorder"])
def test_caches_that_change_their_rows(change):
    """They answer as a cache that saw the same rows."""
    network, ids = model("llama"), torch.randint(3, 60, (2, 150))
    cache, fresh = (CompressedCache(network.config, format="int8", attention_budget=BUDGET, **ZONE) for _ in range(2))
    with torch.no_grad():
        network(ids[:, :140], **passing(cache))
        rows = ids
        if change == "reorder":
            cache.reorder_cache(torch.tensor([1, 0]))
            rows = ids.flip(0)
        else:
            (cache,) = cache.fork(1)
        network(rows[:, :140], **passing(fresh))
        for at in range(140, 144):
            got, expected = (network(rows[:, at : at + 1], **passing(one)).logits for one in (cache, fresh))
            assert_close(got, expected, 1e-4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention_budget": 0}, ValueError, "attention_budget=0"),
        ({"attention_budget": 1.0}, ValueError, "attention_budget=1.0"),
        ({"attention_budget": -0.5}, ValueError, "attention_budget=-0.5"),
        ({"attention_budget": "automatic"}, TypeError, "attention_budget='automatic'"),
        ({"attention_budget": True}, TypeError, "attention_budget=True"),
    ],
)
def test_wrong_budgets_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        CompressedCache(model("llama").config, **{"format": "int8"} | options)


def test_auto_is_a_quarter_from_a_floor_on():
    budget = budget_of("auto")
    assert [budget.blocks(stored) * BLOCK for stored in (10, 64, 256, 4096)] == [320, 2048, 2048, 32_768]


def test_eager_attention_warns_that_it_reads_everything():
    network = model("llama", "eager")
    warn_once.cache_clear()
    cache = CompressedCache(network.config, format="int8", attention_budget=BUDGET, **ZONE)
    with pytest.warns(UserWarning, match="attention_budget with eager attention"):
        run(network, cache, prompt(length=150))
