"""The checks of promises: they pass what is right, and say what is wrong with the rest."""

from dataclasses import dataclass

import pytest
import torch

from qkvcache.formats import Buffer, Codec, Format, Int4, QuantizedValues
from qkvcache.policies import H2O, AdaKV, Custom, Policy, SnapKV
from tests.evict.matrix import POLICIES
from tests.matrix import slowly
from tests.promises import check_format, check_policy


@dataclass(frozen=True)
class Steps(Codec):
    """INT8 with one fp32 scale a token."""

    def buffers(self, head_dim):
        return Buffer("bytes", torch.int8, head_dim), Buffer("steps", torch.float32, 1, "scales")

    def quantize(self, x, statistics):
        steps = self.amax(x.float()) / 127
        return {"bytes": (x / steps.clamp_min(1e-30)).round().clamp(-127, 127).to(torch.int8), "steps": steps}

    def amax(self, x):
        return x.abs().amax(-1, keepdim=True)

    def unpack(self, codes, head_dim):
        return QuantizedValues(codes["bytes"].float(), codes["steps"])


class Undecorated(Steps):
    __hash__, __eq__ = object.__hash__, object.__eq__


class Wide(Steps):
    def quantize(self, x, statistics):
        return super().quantize(x, statistics) | {"steps": self.amax(x.float()).double() / 127}


class OfTheBlock(Steps):
    def amax(self, x):
        return super().amax(x).amax(2, keepdim=True).expand(-1, -1, x.shape[2], -1)


class OfTheBatch(Steps):
    def amax(self, x):
        return super().amax(x).amax(0, keepdim=True).expand(x.shape[0], -1, -1, -1)


class InPlace(Steps):
    def quantize(self, x, statistics):
        codes = super().quantize(x, statistics)
        x.clamp_(-1, 1)
        return codes


class Halved(Steps):
    def dequantize(self, codes, head_dim, dtype=torch.float32):
        return super().dequantize(codes, head_dim, dtype) / 2


class Floored(Steps):
    def amax(self, x):
        return super().amax(x).nan_to_num(0, 1, 1)


class Fours(Steps):
    def unpack(self, codes, head_dim):
        return QuantizedValues(codes["bytes"].float().unflatten(-1, (-1, 4)).flatten(-2), codes["steps"])


class Negative(Steps):
    def unpack(self, codes, head_dim):
        return QuantizedValues(-codes["bytes"].float(), codes["steps"])


@dataclass(frozen=True)
class Own(Format):
    codec: Codec
    name = "own"

    def codecs(self):
        return Steps(), self.codec


@pytest.mark.parametrize(
    ("codec", "says"),
    [
        (Undecorated, "values: a copy of Undecorated differs from it: decorate the class with @dataclass"),
        (Wide, "values: quantize and calibrate return .*float64.* and buffers declares .*float32"),
        (OfTheBlock, r"values: the codes of a token depend on the tokens that are quantized with it \(buffer '(steps|bytes)'\)"),
        (OfTheBatch, "values: the codes of a row depend on other rows"),
        (InPlace, "values: quantize changes its input"),
        (Halved, "values: .* differs from query times dequantize"),
        (Floored, "values: nan dequantizes to the finite number"),
        (Fours, r"values: head_dim 1 is not refused, and raises \w+Error"),
        (Negative, "values on normal data have an error of 2 of their size, above 1"),
    ],
)
def test_a_broken_format_is_told_its_fault(codec, says):
    with pytest.raises(AssertionError, match=says):
        check_format(Own(codec()))


def test_a_format_that_keeps_its_promises_passes():
    check_format(Own(Steps()), max_error=0.01)
    with pytest.raises(AssertionError, match="error of 0.00.* of their size, above 0.001"):
        check_format(Own(Steps()), max_error=0.001)
    with pytest.raises(AssertionError, match="head_dim 80 is refused: .*; pass the head_dims that it holds"):
        check_format(Int4(), head_dims=(80,))


@pytest.mark.parametrize("name", slowly(POLICIES, ["h2o", "keydiff", "tova"]))
def test_policies_of_the_library_pass(name):
    check_policy(POLICIES[name](32))


def test_heads_that_share_a_budget_pass():
    check_policy(AdaKV(Custom(function=lambda tokens: tokens.score * tokens.value_norm, budget=32, recent=2)))


@dataclass(frozen=True, kw_only=True)
class OfTheRows(Policy):
    def score(self, tokens):
        keys = tokens.keys.float()
        return -(keys - keys.mean(0)).norm(dim=-1)


@dataclass(frozen=True, kw_only=True)
class OfTheHeads(OfTheRows):
    def score(self, tokens):
        return tokens.keys.float().norm(dim=-1).mean(1, keepdim=True).expand(-1, tokens.keys.shape[1], -1)


@dataclass(frozen=True, kw_only=True)
class WithPadding(OfTheRows):
    def score(self, tokens):
        keys = tokens.keys.float()
        return (keys - keys.mean(2, keepdim=True)).norm(dim=-1)


def custom(function):
    return Custom(function=function, budget=32)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (OfTheRows(budget=32), "what is kept of a row depends on other rows"),
        (OfTheHeads(budget=32), "what a head keeps depends on other heads"),
        (WithPadding(budget=32), "what is kept of a row depends on the padding before it"),
        (custom(lambda tokens: torch.rand(tokens.positions.shape)), "order of slots|depends on more than its arguments"),
        (custom(lambda tokens: tokens.score.cumsum(-1)), "priorities depend on the order of slots: use tokens.positions"),
        (custom(lambda tokens: tokens.score.mul_(2)), "priority changes its arguments"),
    ],
)
def test_a_broken_policy_is_told_its_fault(policy, says):
    with pytest.raises(AssertionError, match=says):
        check_policy(policy)


@pytest.mark.parametrize("policy", [SnapKV(budget=1024), H2O(budget=[40, 32])], ids=repr)
def test_a_budget_that_no_short_text_fills(policy):
    with pytest.raises(ValueError, match="pass one budget for all layers, of 24 to 128 tokens"):
        check_policy(policy)
