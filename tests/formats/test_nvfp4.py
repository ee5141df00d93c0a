import math

import pytest
import torch

from qkvcache.formats import NVFP4, REGISTRY
from tests.promises import encode, roundtrip

SEARCHES = ["amax", "four_over_six", "mse"]

# Code to value, every one of the sixteen.
POINTS = {0: 0, 1: 0.5, 2: 1, 3: 1.5, 4: 2, 5: 3, 6: 4, 7: 6, 8: -0.0, 9: -0.5, 10: -1, 11: -1.5, 12: -2, 13: -3, 14: -4, 15: -6}
# Every midpoint, and the even one of the two codes that it lies between.
MIDPOINTS = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}


def codes_of(values: list[float]) -> list[int]:
    """Codes of up to 15 values under the scale 1, which a 6 beside them makes."""
    x = torch.tensor([6.0, *values, *[0.0] * (15 - len(values))])[None, None, None]
    codes = encode(NVFP4("amax").value, x)
    assert codes["scale"].item() == 0x38  # 1.0
    return unpack(codes["codes"])[1 : 1 + len(values)]


def unpack(packed: torch.Tensor) -> list[int]:
    """Codes of four channels to a word, whose magnitudes and signs are where the format's docstring says."""
    words = packed.view(torch.uint16).flatten().tolist()
    places = ((9, 15), (6, 12), (3, 14), (0, 13))
    return [word >> low & 7 | (word >> sign & 1) << 3 for low, sign in places for word in words]


def test_every_code_point():
    values = list(POINTS.values())
    assert codes_of(values[1:]) == list(POINTS)[1:]
    x = torch.tensor(values)[None, None, None].float()
    assert torch.equal(roundtrip(NVFP4("amax").value, x), x)
    assert unpack(encode(NVFP4("amax").value, x)["codes"]) == list(POINTS)


@pytest.mark.parametrize("sign", [1, -1])
def test_every_midpoint(sign):
    bit = 8 if sign < 0 else 0
    assert codes_of([sign * m for m in MIDPOINTS]) == [code | bit for code in MIDPOINTS.values()]
    below, above = ([sign * torch.tensor(m).nextafter(torch.tensor(end)).item() for m in MIDPOINTS] for end in (0.0, 9.0))
    assert codes_of(below) == [code | bit for code in range(7)]
    assert codes_of(above) == [code | bit for code in range(1, 8)]


E4M3 = [math.ldexp(byte & 7 | (8 if byte >> 3 else 0), max(byte >> 3, 1) - 10) for byte in range(127)]


def naive_scale(target: float) -> int:
    """The byte of E4M3 nearest to `target`, but not 0."""
    return max(1, min(range(127), key=lambda byte: (abs(E4M3[byte] - target), byte & 1)))


def naive_levels(block: list[float], byte: int) -> list[float]:
    """Each number by itself: the nearest of the eight magnitudes, and of two the even code."""
    levels = []
    for number in block:
        magnitude = abs(number) / E4M3[byte]
        code = min(range(8), key=lambda code: (abs(POINTS[code] - magnitude), code & 1))
        levels.append(math.copysign(POINTS[code], number))
    return levels


def naive_error(block: list[float], byte: int) -> float:
    return sum((level * E4M3[byte] - x) ** 2 for level, x in zip(naive_levels(block, byte), block, strict=True))


def naive_candidates(block: list[float], search: str) -> list[int]:
    on_six, on_four = (naive_scale(max(map(abs, block)) / top) for top in (6, 4))
    nearby = [min(max(on_four - below, 1), 126) for below in range(8)]
    return {"amax": [on_six], "four_over_six": [on_six, on_four], "mse": nearby}[search]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("magnitude", [1e-3, 0.05, 1.0, 30.0, 900.0, 3000.0])
def test_against_one_number_at_a_time(search, magnitude):
    x = torch.randn(1, 1, 6, 32) * magnitude
    x = x.bfloat16().float()  # few bits, so that quotients of the naive code and of fp32 meet the same ties
    codes = encode(NVFP4(search).value, x)
    bytes_, levels = codes["scale"].flatten().tolist(), NVFP4(search).value.unpack(codes, 32).levels.reshape(-1, 16).tolist()
    for block, byte, got in zip(x.reshape(-1, 16).tolist(), bytes_, levels, strict=True):
        least = min(naive_error(block, candidate) for candidate in naive_candidates(block, search))
        assert byte in naive_candidates(block, search)
        assert naive_error(block, byte) == pytest.approx(least, rel=1e-5)
        assert got == naive_levels(block, byte)


@pytest.mark.parametrize("scale", ["n", "outliers", "uniform", "tiny", "huge"])
def test_searching_never_errs_more(scale):
    x = {
        "n": torch.randn(1, 2, 100, 64),
        "outliers": torch.randn(1, 2, 100, 64) ** 5,
        "uniform": torch.rand(1, 2, 100, 64) - 0.5,
        "tiny": torch.randn(1, 2, 100, 64) * 2e-3,
        "huge": torch.randn(1, 2, 100, 64) * 1e3,
    }[scale]
    amax, four_over_six, mse = (
        (roundtrip(NVFP4(search).value, x) - x).unflatten(-1, (-1, 16)).double().square().sum(-1) for search in SEARCHES
    )
    assert (four_over_six <= amax * (1 + 1e-5)).all()
    assert (mse <= four_over_six * (1 + 1e-5)).all()
    assert scale == "tiny" or mse.sum() < four_over_six.sum() < amax.sum()


@pytest.mark.parametrize("search", SEARCHES)
def test_scale_has_a_floor_and_a_ceiling(search):
    small, large = torch.full((1, 1, 1, 16), 1e-5), torch.full((1, 1, 1, 16), -1e5)
    assert encode(NVFP4(search).value, small)["scale"].item() == 1
    assert torch.equal(roundtrip(NVFP4(search).value, small), torch.zeros(1, 1, 1, 16))
    assert torch.equal(roundtrip(NVFP4(search).value, large), torch.full((1, 1, 1, 16), -6 * 448.0))


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_only_the_block_of_what_is_not_finite_is_lost(search, bad):
    x = torch.randn(1, 1, 1, 64)
    clean = roundtrip(NVFP4(search).value, x)
    x[..., 20] = bad
    decoded = roundtrip(NVFP4(search).value, x)
    assert not decoded[..., 16:32].isfinite().any()
    assert torch.equal(decoded[..., :16], clean[..., :16])
    assert torch.equal(decoded[..., 32:], clean[..., 32:])


def test_a_search_unless_its_name_is_the_authors():
    assert NVFP4() == REGISTRY["nvfp4_mse"] and REGISTRY["nvfp4"] == NVFP4("amax")
