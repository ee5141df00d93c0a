"""Budgets that the heads of a layer share (AdaKV): shares, pages, and that codes do not change. `test_kept.py` has which tokens stay."""

from dataclasses import replace

import pytest
import torch

from qkvcache.evict.by_head import StorageByHead
from qkvcache.policies import H2O, AdaKV, SnapKV
from qkvcache.storage import PAGE
from tests.evict.matrix import SHARED
from tests.evict.oracle import HEADS, Text, drive
from tests.evict.test_kept import LONG, TEXTS, ZONES, check, held
from tests.matrix import covering, slowly


@pytest.mark.parametrize("format", slowly(["identity", "int8"], ["int8"]))
def test_heads_of_several_pages(format):
    policy = AdaKV(H2O(budget=150, num_sink_tokens=4, recent=20, interval=8))
    check(policy, LONG, format=format, num_sink_tokens=4, residual_length=20)


@pytest.mark.parametrize(("guaranteed", "text"), covering([(0, 0), (3, 20), (22, 3), (28, 0)], TEXTS, strength=1), ids=str)
def test_heads_are_guaranteed_different_shares(monkeypatch, text, guaranteed):
    """Also more tokens than a row has, which others then take."""
    own = torch.tensor(guaranteed)[None, :, None]
    monkeypatch.setattr(StorageByHead, "_guaranteed", lambda self, _: (own - self.num_sink_tokens - self.residual_length).clamp_min(0))
    for zones in ({}, ZONES[0]):
        check(SHARED["snapkv"](14), TEXTS[text], guaranteed, **zones)


@pytest.mark.parametrize(("name", "format"), covering(slowly(SHARED, ["snapkv", "h2o"]), ["identity", "int8"], strength=1))
def test_a_share_of_everything_is_a_budget_for_each_head(name, format):
    shared, own = (replace(SHARED[name](14), alpha_safeguard=alpha) for alpha in (1.0, None))
    for text in TEXTS.values():
        options = {"num_sink_tokens": 2, "residual_length": 2}
        for ours, theirs in zip(drive(shared, text, format, **options), drive(own, text, format, **options), strict=True):
            assert held(ours) == held(theirs)


def codes_of(layer):
    """The codes of every token of the region, by row, head and position."""
    tokens, found = layer.storage.tokens, {}
    positions = layer.storage.metadata.region["positions"]
    gathered = [x for side in (0, 1) for x in tokens.pages.gather(side, tokens.length)[0].items()]
    planes = [x for name, x in gathered if x.shape[2] == positions.shape[2] > 1]
    for row, head, slot in (positions >= 0).nonzero().tolist():
        found[row, head, int(positions[row, head, slot])] = [plane[row, head, slot] for plane in planes]
    return found


@pytest.mark.parametrize("format", slowly(["identity", "int8", "turboquant_3bit_nc", "fp8_token"], ["fp8_token"]))
def test_survivors_are_never_encoded_again(format):
    policy, before, survived = AdaKV(SnapKV(budget=100, window_size=8, recent=10, interval=2)), {}, 0
    for layer in drive(policy, LONG, format, num_sink_tokens=2, residual_length=3):
        found = codes_of(layer)
        lengths = layer.storage.tokens.lengths
        assert torch.equal((layer.storage.metadata.region["positions"] >= 0).sum(-1), lengths)
        for token in found.keys() & before.keys():
            survived += 1
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found[token], before[token], strict=True))
        before = found
    assert survived > 10_000


def test_pages_belong_to_one_head_and_fit_the_budget():
    policy, budget = AdaKV(SnapKV(budget=200, window_size=8, recent=10, interval=2), 0.1), 200
    text = Text((0, 5), (300, *[1] * 20, 100, *[1] * 20), skew=8.0)
    for layer in drive(policy, text):
        tokens = layer.storage.tokens
        pages = -(-tokens.lengths.numpy() // PAGE)
        assert ((tokens.numbers >= 0).sum(-1) == pages).all() and (tokens.numbers[..., 0][pages > 0] >= 0).all()
        taken = tokens.numbers[tokens.numbers >= 0].tolist()
        assert len(taken) == len(set(taken)) <= tokens.pool.capacity
        assert tokens.pool.capacity <= len(text.pads) * (-(-HEADS * budget // PAGE) + HEADS)
    lengths = tokens.lengths.amax(-1)
    assert (lengths > 1.5 * budget).all()  # more than a head could hold of its own
