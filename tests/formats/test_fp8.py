import math

import pytest
import torch

from qkvcache.formats import FP8
from qkvcache.formats.fp8 import VALUES
from tests.promises import encode

TOP = {"e4m3": 448.0, "e5m2": 57344.0}
DTYPES = ["e4m3", "e5m2"]


def value_of(byte: int, dtype: str) -> float:
    """A byte read by the definition of its format."""
    bits, bias = (3, 7) if dtype == "e4m3" else (2, 15)
    sign, exponent, mantissa = -1 if byte >> 7 else 1, byte >> bits & 2 ** (7 - bits) - 1, byte & 2**bits - 1
    if dtype == "e4m3" and byte & 127 == 127:
        return math.nan
    if dtype == "e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    return sign * math.ldexp(mantissa + (2**bits if exponent else 0), max(exponent, 1) - bias - bits)


def nearest_byte(x: float, dtype: str) -> int:
    """The byte of least distance among all finite ones, and of two the even one."""
    magnitudes = [(abs(value_of(byte, dtype) - abs(x)), byte & 1, byte) for byte in range(128) if math.isfinite(value_of(byte, dtype))]
    return min(magnitudes)[2] | (128 if math.copysign(1, x) < 0 else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_table_reads_every_byte(dtype):
    expected = torch.tensor([value_of(byte, dtype) for byte in range(256)])
    assert torch.equal(torch.tensor(VALUES[dtype]).nan_to_num(1e9, 1e8, -1e8), expected.nan_to_num(1e9, 1e8, -1e8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_to_nearest_even(dtype):
    values = sorted({abs(v) for v in VALUES[dtype] if math.isfinite(v)})
    midpoints = [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)]
    below, above = ([math.nextafter(m, end) * (1 + sign * 2**-20) for m in midpoints] for end, sign in ((0, -1), (math.inf, 1)))
    numbers = [*values, *midpoints, *below, *above, *torch.randn(100).tolist()]
    numbers = [*numbers, *(-n for n in numbers)]
    # The greatest value in the same vector makes the scale 1.
    x = torch.tensor([TOP[dtype], *numbers, 0.0])[None, None, None]
    codes = encode(FP8(dtype).value, x)
    assert codes["scale"].item() == 1.0
    assert codes["codes"].flatten().tolist() == [nearest_byte(n, dtype) for n in x.flatten().tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "span"), [("token_head", (3,)), ("token", (1, 3)), ("tensor", (1, 2, 3))])
def test_scale_spans_what_it_says(dtype, scale, span):
    x = torch.randn(2, 3, 5, 64)
    expected = x.abs().amax(dim=span, keepdim=True) / TOP[dtype]
    assert torch.equal(encode(FP8(dtype, scale).value, x)["scale"], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_of_all_tokens_saturates_what_comes_later(dtype):
    codec = FP8(dtype, scale="tensor").value
    first = torch.randn(1, 2, 5, 64).clamp(-1, 1) * 0.25
    statistics = codec.calibrate(first)
    later = torch.randn(1, 2, 5, 64) * 10
    decoded = codec.dequantize(codec.quantize(later, statistics) | statistics, 64)
    torch.testing.assert_close(decoded.abs().max(), first.abs().max())
    assert torch.equal(decoded.sign(), later.sign())
    assert not codec.dequantize(codec.quantize(torch.full((1, 1, 1, 64), torch.inf), statistics) | statistics, 64).isfinite().any()


def test_scale_of_all_tokens_survives_a_first_block_of_zeros():
    codec = FP8(scale="tensor").value
    statistics = codec.calibrate(torch.zeros(1, 2, 5, 64))
    x = torch.randn(1, 2, 5, 64)
    assert (codec.dequantize(codec.quantize(x, statistics) | statistics, 64) - x).norm() < 0.03 * x.norm()
