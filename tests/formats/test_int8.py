import numpy as np
import pytest
import torch

from qkvcache.formats import Int8
from qkvcache.formats.int8 import SymmetricInt8
from qkvcache.formats.uniform import Uniform
from tests.promises import encode, roundtrip
from tests.promises import rms_error as error


def test_symmetric_codes_by_hand():
    x = torch.tensor([127.0, -127.0, 2.5, -2.5, 2.4, -0.5, 0.0, 64.0])[None, None, None]
    codes = encode(Int8().value, x)
    assert codes["scale"].item() == 1.0
    assert codes["codes"].flatten().tolist() == [127, -127, 3, -3, 2, -1, 0, 64]  # halves away from zero


@pytest.mark.parametrize("scale", ["token_head", "token"])
def test_halves_are_the_same_codes(scale):
    """Bit for bit, at the ends of their range too; the upper one is read alone to within half of the sixteen codes that share it."""
    x = torch.randn(2, 3, 40, 64)
    x[..., 0], x[..., 1] = 5, -5
    codec = Int8(scale, center=False, halves=True).key
    codes, plain = encode(codec, x), encode(Int8(scale, center=False).key, x)
    assert torch.equal(codec.unpack(codes, 64).levels, plain["codes"]) and torch.equal(codes["scale"], plain["scale"])
    levels, factor, offset, _ = codec.unpack_upper({name: codes[name] for name in ("high", "scale")}, 64)
    assert ((levels * factor + offset - codec.dequantize(codes, 64)).abs() <= 7.5001 * codes["scale"]).all()
    assert Int8(scale, halves=True).value == Int8(scale).value
    assert Int8(scale).bytes_per_token(64, 3) == Int8(scale, halves=True).bytes_per_token(64, 3)


def test_a_token_shares_its_scale_over_heads():
    x = torch.randn(2, 3, 5, 64)
    codes = encode(Int8(scale="token").value, x)
    assert torch.equal(codes["scale"], x.abs().amax(dim=(1, 3), keepdim=True) / 127)
    assert error(Int8(scale="token").value, x) > error(Int8().value, x)


def naive_uniform(x: np.ndarray, bits: int) -> np.ndarray:
    """One vector, as `uniform.py` states its rule."""
    zero = np.float16(x.min())
    scale = np.float16((x.max() - np.float32(zero)) / (2**bits - 1))
    codes = np.clip(np.floor((x - np.float32(zero)) / np.float32(scale) + 0.5), 0, 2**bits - 1)
    return codes * np.float32(scale) + np.float32(zero)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_uniform_against_numpy(bits):
    x = torch.randn(1, 2, 30, 64) + 0.5
    expected = np.stack([naive_uniform(row, bits) for row in x.reshape(-1, 64).numpy()])
    torch.testing.assert_close(roundtrip(Uniform(bits), x).reshape(-1, 64), torch.from_numpy(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [0.1, -0.3, 1e-7, 7.7, -1e4])
def test_uniform_keeps_constants(value):
    x = torch.full((1, 1, 3, 64), value)
    torch.testing.assert_close(roundtrip(Uniform(4), x), x, rtol=2**-11, atol=2**-25)


def test_fp16_scale_overflows_to_inf_and_underflows_to_zero():
    codec = SymmetricInt8(scale_dtype=torch.float16)
    x = torch.randn(1, 1, 3, 64)
    assert not roundtrip(codec, x * 1e8).isfinite().any()
    assert torch.equal(roundtrip(codec, x * 1e-9), torch.zeros_like(x))
    assert not roundtrip(Uniform(4), x * 1e8).isfinite().any()
    assert roundtrip(Uniform(4), x * 1e-9).abs().max() < 1e-7
