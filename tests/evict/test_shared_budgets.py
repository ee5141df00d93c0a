"""Budgets that the heads of a layer share (AdaKV): which tokens stay, against a plain Python oracle, and that their codes do not change."""

from dataclasses import replace

import pytest
import torch

from qkvcache.evict.by_head import StorageByHead
from qkvcache.policies import H2O, AdaKV, SnapKV
from qkvcache.storage import PAGE
from tests.evict.matrix import SHARED
from tests.evict.oracle import HEADS, Text, columns, drive
from tests.evict.test_kept import ZONES, check, held
from tests.matrix import THREE, covering, slowly
from tests.tolerance import same_decoded

TEXTS = {
    "even": Text((0,) * 5, (20, 1, 1, 3, *[1] * 12), skew=4.0),
    "padded": Text((0, 3, 9, 14, 23), (20, 1, 1, 3, *[1] * 12), skew=4.0),
    "chunked": Text((0, 3, 9, 14, 23), (4, 7, 10, 9, 1, 1, 1, 5, 2, 1), skew=4.0),
}
LONG = Text((0, 5, 40), (300, *[1] * 60, 40, *[1] * 10), skew=3.0)
"""Whose heads take several pages."""


@pytest.mark.parametrize(("name", "text"), covering(SHARED, TEXTS, strength=1))
def test_those_with_the_highest_score_in_all_heads_are_kept(name, text):
    check(SHARED[name](14), TEXTS[text])


@pytest.mark.parametrize("format", slowly(["identity", "int8"], ["int8"]))
def test_heads_of_several_pages(format):
    policy = AdaKV(H2O(budget=150, num_sink_tokens=4, recent=20, interval=8))
    check(policy, LONG, format=format, num_sink_tokens=4, residual_length=20)


@pytest.mark.parametrize("name", SHARED)
def test_the_budget_holds_and_each_head_has_its_share(name):
    policy, differ = SHARED[name](20), False
    for layer in drive(policy, TEXTS["padded"], "int8", num_sink_tokens=2, residual_length=2):
        counts = (layer.positions() >= 0).sum(-1)
        assert (counts.sum(-1) <= HEADS * 20).all()
        seen = layer.storage.metadata.lengths()[:, 0, 0]
        limit = 20 - layer.interval + 1
        assert (counts.amin(-1) >= seen.clamp_max(int(policy.alpha_safeguard * limit))).all()
        assert (counts.sum(-1) >= HEADS * seen.clamp_max(limit)).all()  # no room is left unused
        differ |= bool((counts != counts[:, :1]).any())
    assert differ


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


@pytest.mark.parametrize("format", THREE)
def test_every_format_keeps_what_the_exact_one_keeps(format):
    policy = SHARED["expected_attention"](16)
    expected = [held(layer) for layer in drive(policy, TEXTS["chunked"])]
    for zones in ZONES[:2]:
        assert [held(layer) for layer in drive(policy, TEXTS["chunked"], format, **zones)] == expected


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


@pytest.mark.parametrize("format", ["identity", "int8", "int8_token", "fp8_token", "nvfp4", "hadaquant_k3v3"])
def test_a_slot_decodes_to_the_token_whose_position_it_records(format):
    *_, layer = drive(AdaKV(SnapKV(budget=100, window_size=8, recent=10, interval=2)), LONG, format)
    positions = columns(layer).long()
    at = (positions + torch.tensor(LONG.pads)[:, None, None])[..., None].expand(-1, -1, -1, LONG.keys.shape[-1])
    tokens = layer.storage.tokens
    for side, x, codec, statistics in zip(layer.dense(), (LONG.keys, LONG.values), tokens.codecs, tokens.statistics, strict=True):
        stored = codec.dequantize(codec.quantize(x, statistics) | statistics, x.shape[-1])
        exact = (x.gather(2, at.clamp_min(0)) == side).all(-1) | (positions < 0)
        assert same_decoded(side[~exact], stored.gather(2, at.clamp_min(0))[~exact], codec)
        assert exact.all() == (format == "identity")


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
