import math

import pytest
import torch

from qkvcache.formats import Int8, TurboQuant
from qkvcache.formats.base import affine
from qkvcache.formats.codebooks import LLOYD_MAX, grid_levels, midpoints
from qkvcache.formats.packing import lookup, rank
from qkvcache.formats.rotated import Rotated
from qkvcache.formats.rotation import Hadamard
from qkvcache.formats.uniform import Uniform
from tests.promises import encode, roundtrip
from tests.promises import rms_error as error


def normal_mean(low: float, high: float) -> float:
    density = [math.exp(-end * end / 2) / math.sqrt(2 * math.pi) for end in (low, high)]
    attention_sums = (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))) / 2
    return (density[0] - density[1]) / attention_sums


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_level_is_the_mean_of_its_interval(bits):
    ends = (-math.inf, *midpoints(bits), math.inf)
    expected = [normal_mean(low, high) for low, high in zip(ends, ends[1:], strict=False)]
    assert LLOYD_MAX[bits] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("bits", "cost"), [(2, 1.012), (3, 1.0), (4, 1.006)])
def test_stored_levels_cost_next_to_nothing(bits, cost):
    x = torch.randn(2_000_000, dtype=torch.float64)
    codes, errors = rank(x, midpoints(bits)).long(), []
    for levels in (grid_levels(bits), LLOYD_MAX[bits]):
        y = torch.tensor(levels, dtype=x.dtype)[codes]
        errors.append(1 - (x @ y) ** 2 / ((x @ x) * (y @ y)))  # scales make up for the length
    stored, best = errors
    assert stored / best == pytest.approx(cost, abs=1e-3)
    levels = grid_levels(bits)
    assert levels == tuple(-level for level in reversed(levels))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("bits", [3, 4])
def test_keys_as_vllm_reads_them(bits, head_dim):
    # vLLM: k . q = n (H q . levels) / |levels|, with n = |k|. Compared through the codes of another implementation.
    x = torch.randn(1, 2, 50, head_dim)
    norm = x.norm(dim=-1, keepdim=True)
    unit = Hadamard().apply(x / (norm + 1e-8))
    codes = (unit.unsqueeze(-1) * head_dim**0.5 - torch.tensor(LLOYD_MAX[bits])).abs().argmin(-1)
    levels = torch.tensor(grid_levels(bits))[codes]
    expected = Hadamard().undo(norm * levels / levels.norm(dim=-1, keepdim=True))
    decoded = roundtrip(Rotated(bits), x)
    close = (decoded - expected).abs().amax(-1) < 3e-3  # fp16 scales; not so where a coordinate lies on a midpoint
    assert close.float().mean() > 0.97


@pytest.mark.parametrize("bits", [3, 4])
def test_a_midpoint_goes_up(bits):
    x = torch.zeros(1, 1, 1, 64)
    x[..., :2] = 1  # every second coordinate of its rotation is 0, a midpoint
    codes = Rotated(bits).quantize(x, {})
    codes.pop("scale")
    assert lookup(codes, bits, tuple(range(2**bits)), halves=bits == 4).flatten().tolist()[1::2] == [2 ** (bits - 1)] * 32


@pytest.mark.parametrize("codec", [Rotated(4), TurboQuant("4bit_nc").key], ids=["plain", "centered"])
def test_upper_halves_are_a_coarse_code(codec):
    """The error of the best two bits is .343; these are the upper two of the best four."""
    x = torch.randn(1, 2, 500, 128) + 3 * codec.keeps(128)
    statistics = codec.calibrate(x)
    codes = codec.quantize(x, statistics)
    del codes["low"]
    levels, scale, offset, center = codec.unpack_upper(codes | statistics, 128)
    coarse = codec.unrotate(affine(levels, scale, offset) + (0 if center is None else center))
    assert (coarse - x).square().mean().sqrt() == pytest.approx(0.345, rel=0.02)
    assert set(codec.packed_layout.upper.planes) - {""} == codes.keys()


@pytest.mark.parametrize("codec", [Rotated(3), Uniform(4), TurboQuant("3bit_nc").key], ids=["three", "uniform", "centered"])
def test_codes_without_halves_are_read_whole(codec):
    x = torch.randn(1, 2, 20, 128)
    codes = codec.quantize(x, statistics := codec.calibrate(x)) | statistics
    assert codec.packed_layout.upper is None
    assert torch.equal(codec.unpack_upper(codes, 128).levels, codec.unpack(codes, 128).levels)


@pytest.mark.parametrize("bits", [3, 4])
def test_keys_do_not_mind_outlier_channels(bits):
    x = torch.randn(1, 2, 200, 128)
    expected = math.sqrt(0.0345 if bits == 3 else 0.0095)
    assert error(Rotated(bits), x) == pytest.approx(expected, rel=0.05)
    x[..., [3, 77]] *= 10
    assert error(Rotated(bits), x) < expected * 1.05


def test_every_width_of_code():
    for preset, (key, value) in {"4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}.items():
        assert TurboQuant(preset, center=False).codecs() == (Rotated(key), Uniform(value))
        x = torch.randn(1, 2, 400, 128)
        for codec, bits in zip(TurboQuant(preset).codecs(), (key, value), strict=True):
            assert codec.unpack(encode(codec, x), 128).levels.unique().numel() == 2**bits


def test_k8v4_keys_are_int8_with_an_fp16_scale():
    x = torch.randn(1, 2, 50, 128)
    x[..., 7] *= 40
    key = TurboQuant("k8v4", center=False).key
    assert encode(key, x)["scale"].dtype == torch.float16
    assert error(key, x) == pytest.approx(error(Int8().value, x), rel=0.01)
    large = x * 100  # far beyond 448
    assert error(key, large) == pytest.approx(error(key, x), rel=0.01)


@pytest.mark.parametrize("bits", [3, 4])
def test_scale_beyond_fp16_is_not_a_wrong_number(bits):
    x = torch.randn(1, 1, 3, 128)
    x[0, 0, 1] *= 1e6
    x[0, 0, 2] *= 1e-9
    decoded = roundtrip(Rotated(bits), x)
    assert decoded[0, 0, 0].isfinite().all()
    assert not decoded[0, 0, 1].isfinite().any()
    assert torch.equal(decoded[0, 0, 2], torch.zeros(128))
