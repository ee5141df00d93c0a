"""Which tokens a layer keeps: for every policy those that a plain Python oracle keeps, in every row and head, after every step."""

import pytest
import torch

from qkvcache.evict.policies import expected_attention
from qkvcache.kernels.attend import matmul
from qkvcache.policies import H2O, AdaKV, Custom, ExpectedAttention, KeyDiff, Random, SinkWindow, SnapKV
from tests.codes import codes_of
from tests.evict.matrix import CUT_FREE, NAMED, POLICIES, SHARED, KeyNorm
from tests.evict.oracle import Text, columns, drive, kept
from tests.matrix import COVER, THREE, covering, slowly
from tests.tolerance import rounding, same_decoded

TEXTS = {
    "even": Text((0,) * 3, (20, 1, 1, 17, *[1] * 8), skew=4.0),
    "padded": Text((0, 3, 9, 14, 23), (20, 1, 1, 3, *[1] * 12), skew=4.0),  # one row begins in the fourth step
    "chunked": Text((0, 3, 9, 14, 23), (4, 7, 10, 9, 1, 1, 1, 5, 2, 1), skew=4.0),
}
LONG = Text((0, 5, 40), (300, *[1] * 60, 40, *[1] * 10), skew=3.0)
"""A text whose heads take several pages."""
SPARSE = {
    "snapkv": SnapKV(budget=14, interval=3, window_size=4, recent=3),
    "h2o": H2O(budget=14, interval=4, recent=2),
    "key_norm": KeyNorm(budget=14, interval=2),
    "keydiff": KeyDiff(budget=14, interval=5, recent=3),
    "expected_attention": ExpectedAttention(budget=14, interval=5, recent=3, n_future_positions=16),
}


def held(layer):
    """Positions of each row and head; the order of kept_positions is checked on the way."""
    positions = layer.positions()
    assert positions.dtype == torch.int32 and positions.shape[-1] == layer.stored
    found = [[[p for p in head if p >= 0] for head in row] for row in positions.tolist()]
    assert all(head == sorted(set(head)) for row in found for head in row)
    return found


def check(policy, text, guaranteed=(), **options):
    for step, (layer, expected) in enumerate(zip(drive(policy, text, **options), kept(policy, text, guaranteed), strict=True)):
        assert held(layer) == expected, f"step {step}"


BUDGETS = slowly([12, 21], [12])


@pytest.mark.parametrize(
    ("name", "text", "budget"),
    [
        *covering(POLICIES, ["chunked"], BUDGETS),
        *covering(POLICIES, ["even", "padded"], BUDGETS, strength=1),
        *((f"{name}_shared", text, 14) for name, text in covering(SHARED, TEXTS, strength=1)),
    ],
)
def test_those_with_the_highest_score_are_kept(name, budget, text):
    """Of the head, or of all heads that share a budget."""
    check(NAMED[name](budget), TEXTS[text])


@pytest.mark.parametrize(("name", "text"), covering(SPARSE, TEXTS, strength=1))
def test_intervals(name, text):
    """The tokens of an interval's decode steps are scored together, each by what was known at its step."""
    check(SPARSE[name], TEXTS[text])


@pytest.mark.parametrize(
    "policy",
    [SinkWindow(window_length=1, num_sink_tokens=0), H2O(budget=1, recent=1), H2O(budget=6, num_sink_tokens=2, recent=4)],
    ids=repr,
)
def test_smallest_budgets(policy):
    check(policy, TEXTS["chunked"])


@pytest.mark.parametrize("norm", ["key_norm", "value_norm"])
def test_norms_are_those_of_the_tokens(norm):
    text = TEXTS["chunked"]
    custom = Custom(function=lambda tokens: -getattr(tokens, norm), budget=12, recent=3)
    for layer in drive(custom, text):
        region = layer.storage.metadata.region
        x = (text.keys if norm == "key_norm" else text.values).norm(dim=-1)
        at = (region["positions"].long() + torch.tensor(text.pads)[:, None, None]).clamp_min(0)
        is_valid = region["positions"] >= 0
        torch.testing.assert_close(region[norm][is_valid], x.gather(-1, at)[is_valid], rtol=rounding(x.shape[-1]), atol=0)
    if norm == "key_norm":
        for ours, theirs in zip(drive(custom, text), drive(KeyNorm(budget=12, recent=3), text), strict=True):
            assert torch.equal(ours.positions(), theirs.positions())


ZONES = (
    {"num_sink_tokens": 2, "residual_length": 2},
    {"num_sink_tokens": 9, "residual_length": 99},
    {"num_sink_tokens": 0, "residual_length": 0},
)


@pytest.mark.parametrize(
    ("name", "format", "text"),
    [
        *((name, *row) for name in slowly(CUT_FREE, ["key_norm"]) for row in covering(COVER, ["chunked", "even"], strength=1)),
        ("keydiff", "int8", "chunked"),
        *(("expected_attention_shared", format, "chunked") for format in THREE),
    ],
)
def test_every_format_keeps_what_the_exact_one_keeps(name, format, text):
    """Keys are looked at before they are encoded, and exact zones hold only protected tokens. Attention is not asked here."""
    policy = NAMED[name](16)
    expected = [held(layer) for layer in drive(policy, TEXTS[text])]
    for zones in ZONES:
        assert [held(layer) for layer in drive(policy, TEXTS[text], format, **zones)] == expected


@pytest.mark.parametrize(("format", "evictions"), [("int8", 300), ("identity", 100), ("fp8_token", 100), ("turboquant_3bit_nc", 100)])
def test_survivors_are_never_encoded_again_nor_moved(format, evictions):
    """The codes in a slot are the same, bit for bit, as long as the slot holds the same position."""
    text = Text((0, 5), (40, *[1] * evictions))
    before = None
    survived = 0
    for layer in drive(Random(budget=24, recent=3), text, format, num_sink_tokens=2, residual_length=3):
        positions = layer.storage.metadata.region["positions"].clone()
        planes = codes_of(layer.storage.tokens)
        if before is not None and before[0].shape == positions.shape:
            same = (before[0] == positions) & (positions >= 0)
            survived += int(same.sum())
            assert len(planes) == len(before[1])
            assert all(torch.equal(new[same], old[same]) for new, old in zip(planes, before[1], strict=True))
            moved = (positions[..., :, None] == before[0][..., None, :]) & (positions >= 0)[..., None]
            assert not (moved & ~torch.eye(positions.shape[-1], dtype=torch.bool)).any()
        before = positions, planes
    assert survived > evictions * 2 * 2 * 15


@pytest.mark.parametrize("format", ["identity", "int8", "int8_token", "fp8_token", "nvfp4", "int4", "hadaquant_k3v3"])
@pytest.mark.parametrize(
    ("policy", "text", "zones"),
    [
        (KeyNorm(budget=20, recent=3), Text((0, 5), (30, *[1] * 40)), {"num_sink_tokens": 2, "residual_length": 3}),
        (AdaKV(SnapKV(budget=100, window_size=8, recent=10, interval=2)), LONG, {}),
    ],
    ids=["each head", "shared"],
)
def test_a_slot_decodes_to_the_token_whose_position_it_records(policy, text, zones, format):
    *_, layer = drive(policy, text, format, **zones)
    positions = columns(layer).long()
    at = (positions + torch.tensor(text.pads)[:, None, None])[..., None].expand(-1, -1, -1, text.keys.shape[-1])
    tokens = layer.storage.tokens
    for side, x, codec, statistics in zip(layer.dense(), (text.keys, text.values), tokens.codecs, tokens.statistics, strict=True):
        stored = codec.dequantize(codec.quantize(x, statistics) | statistics, x.shape[-1])
        exact = (x.gather(2, at.clamp_min(0)) == side).all(-1) | (positions < 0)
        assert same_decoded(side[~exact], stored.gather(2, at.clamp_min(0))[~exact], codec)
        assert exact.all() == (format == "identity")


@pytest.mark.parametrize("text", ["even", "padded"])
def test_blocks_of_any_size(text, monkeypatch):
    """What bounds the memory of scoring a prompt changes no score."""
    for module in (expected_attention, matmul):
        monkeypatch.setattr(module, "BLOCK", 1)
    check(POLICIES["expected_attention"](12), TEXTS[text])
