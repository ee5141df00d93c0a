"""Keys, and in HadaQuant values, around their mean: what it saves, what counts for it, and that attention gets it back."""

import dataclasses

import pytest
import torch
from formats.roundtrip import error

from qkvcache.formats import FP8, NVFP4, HadaQuant, Int4, Int8, TurboQuant
from qkvcache.formats.centered import FEW

CENTERED = [
    Int8(center=True),
    Int4(center=True),
    Int4("vllm", center=True),
    NVFP4("mse", center=True),
    TurboQuant(center=True),
    HadaQuant(),
]
each = pytest.mark.parametrize("format", CENTERED, ids=[format.name for format in CENTERED])


def biased(tokens: int = 4096, spread: float = 1.0) -> torch.Tensor:
    """Keys of which a few channels have a mean far from zero, another one in each row and head."""
    mean = torch.zeros(2, 3, 1, 128)
    mean[..., 5], mean[..., 64], mean[..., 100] = torch.randn(3, 2, 3, 1) + torch.tensor([20.0, -35.0, 50.0])[:, None, None, None]
    return torch.randn(2, 3, tokens, 128) * spread + mean


@each
def test_a_mean_costs_next_to_nothing(format):
    x, plain = biased(), dataclasses.replace(format, center=False)
    assert error(format.key, x) < 0.35 * error(plain.key, x)
    noise = x - x.mean(2, keepdim=True)
    share = (noise.norm() / x.norm()).item()
    assert error(format.key, x) == pytest.approx(error(plain.key, noise) * share, rel=0.3)
    if isinstance(format, HadaQuant):
        assert error(format.value, x) == error(format.key, x)
    else:
        assert format.value == plain.value
    assert format.bytes_per_token(128) == plain.bytes_per_token(128)


@each
def test_padding_does_not_count(format):
    x = biased(300)
    alone = format.key.fit(x[1:, :, 200:])
    x[1, :, :200] = 1e4
    real = torch.arange(300).expand(2, -1) >= torch.tensor([[0], [200]])
    once = format.key.fit(x, real)
    assert torch.equal(once["center"][1:], alone["center"])
    assert torch.equal(once["center"][:1], format.key.fit(x[:1])["center"])
    nothing = format.key.fit(x, torch.zeros_like(real))
    assert not nothing["center"].any()


@each
def test_few_tokens_say_little(format):
    x = biased(2)
    center = format.key.fit(x[:, :, :1])["center"]
    torch.testing.assert_close(center, format.key.rotate(x[:, :, :1]) / (1 + FEW))


def test_what_is_not_finite_has_no_mean():
    x = biased(8)
    x[0, 1, 3, 7] = torch.inf
    center = HadaQuant().key.fit(x)["center"]
    assert not center[0, 1].any() and center[0, 0].all() and center.isfinite().all()


def test_constant_channels_come_back():
    x = torch.zeros(1, 1, 512, 64)
    x[..., 3] = 7
    codec = Int8(center=True).key
    once = codec.fit(x)
    torch.testing.assert_close(codec.decode(codec.encode(x, once) | once, 64), x, rtol=1e-6, atol=1e-5)


@each
def test_a_mean_of_something_else_costs_at_most_its_length(format):
    """Tokens around the opposite of the mean that was fitted are twice as far from it as from zero; tokens around zero, as far as those
    that it was fitted to are from zero."""
    x, plain = biased(1024), dataclasses.replace(format, center=False)
    once = format.key.fit(x)

    def off(codec, y):
        return (codec.decode(codec.encode(y, once) | once, 128) - y).norm()

    assert off(format.key, -x) < 2.2 * off(plain.key, -x)
    assert off(format.key, x - x.mean(2, keepdim=True)) < 1.1 * off(plain.key, x)


def test_heads_and_rows_have_means_of_their_own():
    x = biased(64)
    whole = HadaQuant().key.fit(x)["center"]
    assert torch.equal(HadaQuant().key.fit(x[1:, 1:2])["center"], whole[1:, 1:2])  # as on a rank that holds one head


def test_names_and_refusals():
    names = ["int8_centered", "int4_centered", "int4_vllm_centered", "nvfp4_mse_centered", "turboquant_4bit_nc_centered", "hadaquant_k4v4"]
    assert [format.name for format in CENTERED] == names
    assert HadaQuant(3, 2, center=False).name == "hadaquant_k3v2_uncentered"
    with pytest.raises(ValueError, match="key_bits=5: expected 2, 3 or 4"):
        HadaQuant(5)
    with pytest.raises(TypeError):
        FP8(center=True)
