import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkvcache.formats import packing
from qkvcache.formats.fp8 import ScaledFloat8
from qkvcache.formats.int4 import HiddenZeroInt4
from qkvcache.formats.rotated import Rotated
from qkvcache.formats.uniform import Uniform

LEVELS = {bits: tuple(0.5 * code - 3 for code in range(2**bits)) for bits in (2, 3, 4, 8)}


def codes(bits: int, groups: int):
    return st.lists(st.integers(0, 2**bits - 1), min_size=16 * groups, max_size=16 * groups)


def as_bytes(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_nibbles_by_hand():
    assert packing.pack4(as_bytes([1, 2, 15, 0])).tolist() == [0x21, 0x0F]


def test_planes_by_hand():
    first, second = [0b001, 0b110, 0b011, 0b100, 0b111, 0, 0, 0b101], [0b100, 0, 0, 0, 0, 0b100, 0b100, 0]
    low, high = packing.pack3(as_bytes(first + second))
    assert low.tolist() == [0b00_11_10_01, 0b01_00_00_11, 0, 0]
    # Nibbles of high bits, lowest first: channels 0 and 1, 2 and 3, 4 and 5, 6 and 7; `first` at bits 2 and 3, `second` at 0 and 1.
    assert high.view(torch.uint16).tolist() == [0b1001_0110_1000_1001]


def test_halves_by_hand():
    packed = packing.pack(as_bytes([0b0110, 0b1101, 0b0011, 0b1000]), 4, halves=True)
    assert packed["high"].tolist() == [0b10_00_11_01]
    assert packed["low"].tolist() == [0b11_00_10_01]  # the channels of each nibble swapped


@given(st.integers(1, 6).flatmap(lambda groups: codes(4, groups)))
def test_halves_come_back(values):
    packed = packing.pack(as_bytes(values), 4, halves=True)
    assert packing.lookup(packed, 4, tuple(range(16)), halves=True).tolist() == values
    assert packing.lookup({"codes": packed["high"]}, 2, tuple(range(4))).tolist() == [value >> 2 for value in values]
    e = torch.arange(2)
    high, low = ((byte.int()[:, None] >> 4 * e & 15).flatten() for byte in (packed["high"], packed["low"]))
    # Kernels select these bits from nibbles of both planes.
    assert (high & 12 | low & 3).tolist() == values[1::2]
    assert (high & 3 | low & 12).tolist() == [(value & 3) << 2 | value >> 2 for value in values[0::2]]


@pytest.mark.parametrize(("bits", "halves"), [(2, False), (3, False), (4, False), (4, True), (8, False)])
@pytest.mark.parametrize("width", [16, 48, 80, 128])
def test_shapes_and_declared_buffers(bits, halves, width):
    x = torch.randint(0, 2**bits, (2, 3, 5, width), dtype=torch.uint8)
    packed = packing.pack(x, bits, halves)
    buffers = packing.code_buffers(bits, width, halves)
    assert {name: tuple(plane.shape) for name, plane in packed.items()} == {b.name: (2, 3, 5, b.width) for b in buffers}
    assert sum(b.nbytes() for b in buffers) * 8 == bits * width
    assert torch.equal(packing.lookup(packed, bits, LEVELS[bits], halves), torch.tensor(LEVELS[bits])[x.long()])
    steps = tuple(range(-(2 ** (bits - 1)), 2 ** (bits - 1)))
    assert torch.equal(packing.lookup(packed, bits, steps, halves), torch.tensor(steps, dtype=torch.int8)[x.long()])


@pytest.mark.parametrize(("bits", "halves"), [(2, False), (3, False), (4, False), (4, True), (8, False)])
def test_lookup_reads_slices(bits, halves):
    x = torch.randint(0, 2**bits, (2, 3, 9, 48), dtype=torch.uint8)
    packed = {name: plane[:, 1:, 3:8] for name, plane in packing.pack(x, bits, halves).items()}
    assert torch.equal(packing.lookup(packed, bits, LEVELS[bits], halves), torch.tensor(LEVELS[bits])[x[:, 1:, 3:8].long()])


@pytest.mark.parametrize(
    ("codec", "multiple"),
    [
        *((Rotated(2), 8), (Rotated(3), 16), (Uniform(3), 16), (Rotated(4), 4)),
        *((HiddenZeroInt4(), 4), (ScaledFloat8(), 2), (Uniform(8), 1)),
    ],
)
def test_refuses_what_lookup_cannot_read(codec, multiple):
    for head_dim in range(1, 4 * multiple + 1):
        reason = codec.refuses(head_dim)
        assert (reason is None) == (head_dim % multiple == 0)
        assert reason is None or str(multiple) in reason and "use" in reason


def test_rank_counts_thresholds_reached():
    thresholds = (-1.5, 0.0, 0.1, 2.0)
    x = torch.cat([torch.randn(1000) * 2, torch.tensor(thresholds)])
    expected = torch.bucketize(x, torch.tensor(thresholds), right=True)
    assert torch.equal(packing.rank(x, thresholds).long(), expected)
    assert packing.rank(torch.tensor([torch.nan, torch.inf, -torch.inf]), thresholds).tolist() == [0, 4, 0]
