"""Requests together answer as each alone, and as single `generate` with the same cache."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from qkvcache import CompressedCache, continuous_batching, demo
from qkvcache.formats import TurboQuant
from qkvcache.kernels.pages import BLOCK
from qkvcache.releases import passing
from qkvcache.select import arguments
from tests.matrix import FORMATS, model, slowly
from tests.select.test_attention_budget import BUDGET, ZONE, read_few

from .requests import LENGTHS, NEW, ZONES, answers, assert_same, greedy, llama, pool, prompts, serving, single

AttentionInterface.register("read_few_of_pages", functools.partial(read_few, paged=True))
AttentionMaskInterface.register("read_few_of_pages", sdpa_mask)


@pytest.mark.parametrize("format", slowly(FORMATS, ["int8", "hadaquant_k3v3"]))
def test_alone_together_and_single(format):
    """The first request alone, whose prompt the statistics come from, equals a cache; the others alone equal all together."""
    network, ids = llama(), prompts(*LENGTHS)
    chosen = FORMATS[format]
    with continuous_batching(network, chosen, **ZONES), serving(network, allow_block_sharing=False) as manager:
        alone = [answers(manager, [one])[0] for one in ids]
        assert answers(manager, ids) == alone
    assert assert_same(alone[0], single(network, ids[0], chosen))
    with continuous_batching(network, chosen, num_sink_tokens=0, residual_length=0), serving(network) as manager:
        (bare,) = answers(manager, ids[:1])
    assert assert_same(bare, single(network, ids[0], chosen, num_sink_tokens=0, residual_length=0))


@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
def test_pages_of_every_layer_hold_each_token_compressed(format):
    """All tokens of prompts and answers, but the last one of an answer, which no step reads."""
    network, ids = llama(), prompts(70, 5, 140)
    with continuous_batching(network, format, **ZONES), serving(network) as manager:
        answers(manager, ids)
        (group,) = manager.cache.store.groups
        for (keys, values), _ in group.views.values():
            for plane in (*keys.values(), *values.values()):
                written = (plane.view(torch.uint8) != 0).any(-1).any(1)
                assert int(written.sum()) == sum(map(len, ids)) + len(ids) * (NEW - 1)
    dense = 2 * group.layout.heads * group.layout.head_dim * group.layout.dtype.itemsize
    assert len(group.views) == 3 and group.layout.page.nbytes < 0.3 * dense * group.layout.page_size


@pytest.mark.parametrize(("sinks", "budget"), [(0, BLOCK), (BLOCK, BLOCK), (0, 0.5)])
def test_each_request_reads_chosen_blocks_of_its_own(sinks, budget, monkeypatch):
    """As a cache with the same budget does, whose blocks begin after the first tokens."""
    monkeypatch.setattr(arguments, "LEAST_READ", BLOCK)
    network, ids, zones = llama(), prompts(150, 5, 140, 230), {"num_sink_tokens": sinks, "residual_length": 4}
    with continuous_batching(network, "identity", attention_budget=budget, **zones), serving(network, max_batch_tokens=300) as manager:
        got = answers(manager, ids)
    for one, tokens in zip(ids, got, strict=True):
        assert assert_same(tokens, single(network, one, "identity", attention_budget=budget, **zones)) > 2
    everything = [single(network, one, "identity", **zones)[0] for one in ids]
    assert got[1] == everything[1] and all(got[i] != everything[i] for i in (0, 2, 3))


def test_blocks_are_those_of_pages():
    """As attention over dense tensors that reads the sinks, the last tokens and the chosen blocks."""
    network, ids = llama(), prompts(150, 5, 140)
    with continuous_batching(network, "identity", attention_budget=BUDGET, **ZONE), serving(network) as manager:
        got = answers(manager, ids)
    reference = model("llama", "read_few_of_pages")
    for one, tokens in zip(ids, got, strict=True):
        assert assert_same(tokens, single(reference, one, None, cache=DynamicCache(config=reference.config))) > 2


def test_requests_together_answer_as_generate_does():
    """With its default zones, growing or preallocated: the last tokens that are exact are the same ones everywhere."""
    network, tokenizer = demo.load()
    network, ids = network.float(), iter(tokenizer(demo.text()[:4000])["input_ids"])
    asked = [[next(ids) for _ in range(length)] for length in (300, 37, 520, 5, 150)]
    format = TurboQuant(center=False)  # a mean would be that of all prompts here, and of one there
    with continuous_batching(network, format):
        config = pool(page_size=256, max_batch_tokens=2048)
        together = network.generate_batch(asked, generation_config=greedy(), continuous_batching_config=config)
    for one, output in zip(asked, together.values(), strict=True):
        for max_length in (None, 532):
            cache = CompressedCache(network.config, format=format, max_length=max_length)
            given = torch.tensor([one])
            alone = network.generate(given, attention_mask=given >= 0, generation_config=greedy(), **passing(cache))
            assert alone[0, len(one) :].tolist() == output.generated_tokens
