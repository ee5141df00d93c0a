"""Keys, and in HadaQuant values, around their mean: what it saves, and what counts for it."""

import dataclasses

import pytest
import torch

from qkvcache.formats import FP8, NVFP4, HadaQuant, Int4, Int8, TurboQuant
from qkvcache.formats.centered import FEW, Centered
from tests.promises import rms_error as error

CENTERED = [
    Int8(),
    Int8(scale="token"),
    Int8(symmetric=False),
    FP8(),
    FP8("e5m2", scale="token"),
    FP8(scale="tensor"),
    Int4(),
    Int4("vllm"),
    Int4("group"),
    NVFP4("amax"),
    NVFP4("mse"),
    TurboQuant(),
    TurboQuant("k8v4"),
    HadaQuant(),
]
each = pytest.mark.parametrize("format", CENTERED, ids=[format.name for format in CENTERED])


def biased(tokens: int = 4096, spread: float = 1.0) -> torch.Tensor:
    """Keys of which a few channels have a mean far from zero, another one in each row and head."""
    mean = torch.zeros(2, 3, 1, 128)
    mean[..., 5], mean[..., 64], mean[..., 100] = torch.randn(3, 2, 3, 1) + torch.tensor([20.0, -35.0, 50.0])[:, None, None, None]
    return torch.randn(2, 3, tokens, 128) * spread + mean


def turning(tokens: int) -> torch.Tensor:
    """A constant vector as RoPE turns it from token to token, `[1, 1, T, 128]`."""
    angle = torch.arange(tokens)[:, None] * 1e4 ** (-torch.arange(64) / 64)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)[None, None]


@each
def test_a_mean_costs_next_to_nothing(format):
    x, plain = biased(1024), dataclasses.replace(format, center=False)
    assert error(format.key, x) < 0.35 * error(plain.key, x)
    noise = x - x.mean(2, keepdim=True)
    share = (noise.norm() / x.norm()).item()
    assert error(format.key, x) == pytest.approx(error(plain.key, noise) * share, rel=0.3)
    if isinstance(format, HadaQuant):
        assert error(format.value, x) < 0.35 * error(plain.value, x)
    else:
        assert format.value == plain.value
    assert format.bytes_per_token(128) == plain.bytes_per_token(128)
    assert plain.name == f"{format.name}_uncentered" and not isinstance(plain.key, Centered)


@each
def test_padding_does_not_count(format):
    x = biased(300)
    alone = format.key.calibrate(x[1:, :, 200:])
    x[1, :, :200] = 1e4
    is_valid = torch.arange(300).expand(2, -1) >= torch.tensor([[0], [200]])
    statistics = format.key.calibrate(x, is_valid)
    assert torch.equal(statistics["center"][1:], alone["center"])
    assert torch.equal(statistics["center"][:1], format.key.calibrate(x[:1])["center"])
    assert torch.equal(statistics["center"][:1, 1:2], format.key.calibrate(x[:1, 1:2])["center"])  # as on a rank that holds one head
    nothing = format.key.calibrate(x, torch.zeros_like(is_valid))
    assert not nothing["center"].any()


@pytest.mark.parametrize("tokens", [1, 2, 16, 200])
def test_few_tokens_say_little_except_of_biased_channels(tokens):
    x = biased(200)
    center, plain = Int8().key.calibrate(x[:, :, :tokens])["center"], x[:, :, :tokens].mean(2, keepdim=True)
    kept = center / plain
    biases = torch.zeros(128, dtype=torch.bool)
    biases[[5, 64, 100]] = True
    assert (kept[..., biases] > 0.75).all() and (kept[..., [64, 100]] > 0.9).all()
    assert kept[..., ~biases].median() < 1.2 * tokens / (tokens + FEW) and (kept <= 1).all() and (kept > 0).all()


def test_one_token_of_even_channels_is_next_to_no_mean():
    x = torch.ones(1, 1, 1, 64)
    torch.testing.assert_close(Int8().key.calibrate(x)["center"], x / (1 + FEW))


@each
@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_a_short_first_block_is_no_worse_than_no_mean(format, tokens):
    """Of channels that turn with the position, as RoPE turns them: what is constant in a few tokens is not in many."""
    x, plain = torch.randn(1, 2, 1024, 128) + turning(1024), dataclasses.replace(format, center=False)
    statistics, alone = format.key.calibrate(x[:, :, :tokens]), plain.key.calibrate(x[:, :, :tokens])

    def off(codec, statistics):
        return (codec.dequantize(codec.quantize(x, statistics) | statistics, 128) - x).norm()

    assert off(format.key, statistics) < 1.1 * off(plain.key, alone)


def test_what_is_not_finite_has_no_mean():
    x = biased(8)
    x[0, 1, 3, 7] = torch.inf
    center = HadaQuant().key.calibrate(x)["center"]
    assert not center[0, 1].any() and center[0, 0].all() and center.isfinite().all()


def test_constant_channels_come_back():
    x = torch.zeros(1, 1, 512, 64)
    x[..., 3] = 7
    codec = Int8().key
    statistics = codec.calibrate(x)
    torch.testing.assert_close(codec.dequantize(codec.quantize(x, statistics) | statistics, 64), x, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "format", [format for format in CENTERED if getattr(format, "scale", "") != "tensor"], ids=lambda format: format.name
)
def test_a_mean_of_something_else_costs_at_most_its_length(format):
    """Tokens around the opposite of the mean that was calibrated are twice as far from it as from zero; tokens around zero, as far as those
    that it was calibrated to are from zero. (A scale for all tokens saturates what is twice as far.)"""
    x, plain = biased(1024), dataclasses.replace(format, center=False)

    def off(codec, y):
        statistics = codec.calibrate(x)
        return (codec.dequantize(codec.quantize(y, statistics) | statistics, 128) - y).norm()

    assert off(format.key, -x) < 2.4 * off(plain.key, -x)  # a float's error doubles by binades
    assert off(format.key, x - x.mean(2, keepdim=True)) < 1.1 * off(plain.key, x)
