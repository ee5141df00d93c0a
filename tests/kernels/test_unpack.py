"""`unpack` against what the codecs say codes stand for: every word, or every combination of bits that one channel can see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkvcache.formats.base import PackedLayout
from qkvcache.formats.codebooks import GRID, grid_levels
from qkvcache.formats.fp8 import VALUES
from qkvcache.formats.int4 import GroupInt4, HiddenZeroInt4
from qkvcache.formats.nvfp4 import BlockFP4
from qkvcache.formats.packing import pack3
from qkvcache.formats.rotated import Rotated
from tests.kernels.ptx import run

triton = pytest.importorskip("triton")
if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

import triton.language as tl  # noqa: E402

from qkvcache.formats.fp8 import ScaledFloat8  # noqa: E402
from qkvcache.formats.int8 import SymmetricInt8  # noqa: E402
from qkvcache.formats.uniform import Uniform  # noqa: E402
from qkvcache.kernels.device.unpack import _ASSEMBLY, offset_of, plane_offset, unit_of, unpack  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ARCHITECTURES = [0]
if torch.cuda.is_available() and not torch.version.hip:
    major, minor = torch.cuda.get_device_capability()
    ARCHITECTURES += sorted({10 * major + minor, 80})  # what is assembled for Ampere runs on whatever came after
ALL_WORDS = torch.arange(2**16, device=DEVICE)
TILE = 1024 if DEVICE.type == "cuda" else 2**16  # the interpreter takes the same time for any


@triton.jit
def _unpack_kernel(words, high, shifts, out, total, KIND: tl.constexpr, PER: tl.constexpr, SIZE: tl.constexpr, ARCH: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    planes = unpack(KIND, tl.load(words + at), tl.load(high + at), tl.load(shifts + at), ARCH)
    for i in tl.static_range(PER):
        tl.store(out + i * total + at, planes[i])


def planes(kind: str, per: int, low: Tensor, arch: int, high: Tensor | None = None, shifts: Tensor | None = None) -> Tensor:
    """`[channels of a word, words]` in fp32, from words as int32."""
    low, high, shifts = (low.to(torch.int16) if x is None else x.to(torch.int16) for x in (low, high, shifts))
    size = min(TILE, low.numel())
    out = torch.full((per, low.numel()), float("nan"), dtype=torch.float16, device=DEVICE)
    _unpack_kernel[(low.numel() // size,)](low, high, shifts, out, low.numel(), KIND=kind, PER=per, SIZE=size, ARCH=arch)
    return out.float()


def levels(how: PackedLayout, numbers: Tensor) -> Tensor:
    """What `unpack` gave, as the layout says to read it."""
    zeros = torch.tensor([plane_offset(how, i) * offset_of(how) for i in range(len(numbers))], device=numbers.device)
    return (numbers - zeros[:, None]) * unit_of(how)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("codec", "table"),
    [
        (SymmetricInt8(), [n - 256 * (n > 127) for n in range(256)]),
        (Uniform(8), range(256)),
        (ScaledFloat8("e4m3"), VALUES["e4m3"]),
        (ScaledFloat8("e5m2"), VALUES["e5m2"]),
    ],
    ids=["int8", "uint8", "e4m3", "e5m2"],
)
def test_bytes(codec, table, arch):
    """Both of a word, each among all others."""
    numbers = levels(codec.packed_layout, planes(codec.packed_layout.kind, 2, ALL_WORDS, arch))
    table = torch.tensor([float(x) for x in table], device=DEVICE)
    if 0 < arch < 89 and codec.packed_layout.kind == "e4m3":  # has no conversion, and no nan
        table[127], table[255] = 480, -480
    wanted = torch.stack([table[ALL_WORDS & 255], table[ALL_WORDS >> 8]])
    torch.testing.assert_close(numbers, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("layout", "table"),
    [
        (Uniform(4).packed_layout, range(16)),
        (HiddenZeroInt4().packed_layout, range(16)),
        (GroupInt4().packed_layout, range(-8, 8)),
        (SymmetricInt8(halves=True).packed_layout.upper, [16 * n - 120.5 for n in range(16)]),
    ],
    ids=["uniform", "hidden", "group", "upper"],
)
def test_nibbles(layout, table, arch):
    numbers = levels(layout, planes(layout.kind, 4, ALL_WORDS, arch))
    table = torch.tensor([float(x) for x in table], device=DEVICE)
    wanted = torch.stack([table[ALL_WORDS >> 4 * i & 15] for i in range(4)])
    assert torch.equal(numbers, wanted)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_four_bits_in_halves(arch):
    """Every word of either plane, beside random ones of the other."""
    layout, table = Rotated(4).packed_layout, torch.tensor(grid_levels(4), device=DEVICE)
    other = torch.randint(2**16, ALL_WORDS.shape, device=DEVICE)
    for low, high in ((ALL_WORDS, other), (other, ALL_WORDS)):
        wanted = torch.stack([table[low >> 2 * (i ^ 1) & 3 | (high >> 2 * i & 3) << 2] for i in range(8)])
        # Levels are products of a step and a count, rounded here and there.
        torch.testing.assert_close(levels(layout, planes(layout.kind, 8, low, arch, high)), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bytes_in_halves(arch):
    """Every word of either plane, beside random ones of the other."""
    other = torch.randint(2**16, ALL_WORDS.shape, device=DEVICE)
    for low, high in ((ALL_WORDS, other), (other, ALL_WORDS)):
        wanted = torch.stack([(low >> 4 * i & 15 | (high >> 4 * i & 15) << 4) - 128 for i in range(4)])
        assert torch.equal(planes("int8_halves", 4, low, arch, high), wanted.float())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_e2m1(arch):
    """Through the codec itself, whose channels lie in the order of planes."""
    codec = BlockFP4()
    packed = ALL_WORDS.to(torch.int16).view(torch.uint8).view(1, 1, -1, 32)  # 16 words, 64 channels
    one = torch.full((*packed.shape[:3], 4), 7 << 3, dtype=torch.uint8, device=DEVICE)  # 1 in E4M3
    wanted = codec.dequantize({"codes": packed, "scale": one}, 64)[0, 0]
    numbers = planes("e2m1", 4, ALL_WORDS, arch).view(4, -1, 16).transpose(0, 1).flatten(1) * 2.0**14
    assert torch.equal(numbers, wanted)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("codec", [Uniform(3), Rotated(3)], ids=["uniform", "lloyd"])
def test_three_bits(codec, arch):
    """As they are packed: two words of low bits share one of high bits. `test_all_bits_of_three_bit_words` has every word."""
    codes = torch.randint(8, (2048, 16), device=DEVICE, dtype=torch.uint8)
    low, high = (x.contiguous().view(torch.int16) for x in pack3(codes))
    shifts = torch.tensor([0, -1], device=DEVICE).expand(low.shape)
    kind = codec.packed_layout.kind
    numbers = levels(codec.packed_layout, planes(kind, 8, low.flatten(), arch, high.expand(low.shape).flatten(), shifts.flatten()))
    table = torch.tensor([float(x) for x in (range(8) if kind == "int3" else grid_levels(3))], device=DEVICE)
    torch.testing.assert_close(numbers, table[codes.view(-1, 8).long()].mT, rtol=1e-6, atol=0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("layout", [Rotated(2).packed_layout, Rotated(4).packed_layout.upper], ids=["two", "upper"])
def test_two_bits(layout, arch):
    numbers = levels(layout, planes(layout.kind, 8, ALL_WORDS, arch))
    table = torch.tensor(grid_levels(2), device=DEVICE)
    wanted = torch.stack([table[ALL_WORDS >> 2 * i & 3] for i in range(8)])
    torch.testing.assert_close(numbers, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["int3", "lut3"])
@pytest.mark.parametrize("shift", [0, 2])
def test_all_bits_of_three_bit_words(kind, shift, arch):
    """Every word of low bits under random high bits, and the other way round: what does not belong to a channel does not reach it."""
    other = torch.randint(2**16, ALL_WORDS.shape, device=DEVICE)
    for low, high in ((ALL_WORDS, other), (other, ALL_WORDS)):
        numbers = planes(kind, 8, low, arch, high, torch.full_like(low, -shift // 2))
        for i in range(8):
            bit = 4 * (i // 2) + i % 2 + 2 - shift
            code = low >> 2 * i & 3 | (high >> bit & 1) << 2
            if kind == "int3":
                wanted = 8.0 + code
            else:
                step, tiny, half = GRID[3][0], 2.0**-24, 2**7
                wanted = torch.tensor([(half + round(x / step - 0.5)) * tiny for x in grid_levels(3)], device=DEVICE)[code]
            assert torch.equal(numbers[i], wanted.float())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_halves(arch):
    low = torch.randn(TILE, device=DEVICE).half()
    out = torch.empty(1, TILE, dtype=torch.float16, device=DEVICE)
    _unpack_kernel[(1,)](low, low, low, out, TILE, KIND="half", PER=1, SIZE=TILE, ARCH=arch)
    assert torch.equal(out[0], low)


@pytest.mark.parametrize(("kind", "count"), [("int8_halves", 4), ("lut4", 8), ("int2", 8), ("lut3", 8), ("int3", 8)])
def test_assembly(kind, count):
    """What is assembled for NVIDIA gives, run on numbers, what plain Triton does; two words in a register, of either half."""
    pairs = torch.randint(2**16, (3, 2, 2**16))
    pairs[2] = torch.randint(2, (2, 1)) * 0xFFFF
    inputs = [x[0] | x[1] << 16 for x in pairs]
    got = torch.stack(run(_ASSEMBLY.value[kind], count, inputs))
    for word, numbers in enumerate((got & 0xFFFF, got >> 16)):
        low, high, shifts = pairs[:, word].to(DEVICE)
        plain = planes(kind, count, low, 0, high, shifts)
        assert torch.equal(numbers.to(torch.int32).to(torch.uint16).view(torch.float16).float(), plain.cpu())
