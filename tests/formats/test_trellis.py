import pytest
import torch
from formats.roundtrip import error
from seeds import SEED

from qkvcache.formats import HadaQuant
from qkvcache.formats.codebooks import TRELLIS, trellis_levels
from qkvcache.formats.rotated import LloydMax, Rotated
from qkvcache.formats.trellis import DROPPED, FINE, LIMIT, MOST, Trellis, search

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)


def parts(bits: int) -> tuple[float, tuple[int, ...]]:
    step, counts = TRELLIS[bits]
    return step / FINE, tuple(FINE * n + FINE // 2 for n in counts)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_search_finds_the_best_of_all_paths(bits):
    """Against all 2^16, in the integers that the search sees, ties included; far tails among the channels."""
    part, positive = parts(bits)
    torch.manual_seed(SEED + bits)
    x = torch.cat([torch.randn(6, 16), torch.randn(2, 16) * 4, torch.zeros(1, 16), torch.full((1, 16), 0.7)])
    paths = torch.arange(2**16)[:, None] >> torch.arange(16) & 1
    subsets = 2 * (paths ^ paths.roll(-2, 1)) + paths.roll(-1, 1)
    levels = torch.tensor([-n for n in reversed(positive)] + list(positive)).view(-1, 4)
    found, indices = search(x, part, positive, DROPPED[bits])
    for row, path, index in zip((x / part).floor().clamp(-LIMIT, LIMIT).long(), found, indices, strict=True):
        distance = (row[:, None, None] - levels).abs()  # [16, indices, 4]
        errors = distance.amin(1) ** 2
        errors = (errors - errors.amin(1, keepdim=True) >> DROPPED[bits]).clamp_max(MOST)
        totals = sum(errors[t][subsets[:, t]] for t in range(16))
        assert totals[(path << torch.arange(16)).sum()] == totals.min()
        subset = 2 * (path ^ path.roll(-2)) + path.roll(-1)
        chosen = distance[torch.arange(16), index.long(), subset.long()]
        assert torch.equal(chosen, distance.amin(1)[torch.arange(16), subset.long()])


@pytest.mark.parametrize(("bits", "most"), [(2, 0.0897), (3, 0.0247), (4, 0.0066)])
def test_distortion(bits, most):
    """A quarter less than Lloyd-Max at 2 bits, three tenths at 3 and 4."""
    torch.manual_seed(SEED)
    x = torch.randn(3000, 128)

    def distortion(quantizer):
        return (quantizer.levels(quantizer.encode(x)) - x).square().mean().item()

    assert distortion(Trellis(bits)) < most < {2: 0.77, 3: 0.72, 4: 0.7}[bits] * distortion(LloydMax(bits))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_planes_say_what_the_rule_says(bits, head_dim):
    """Random planes, channel by channel, as the table in the module has them."""
    quantizer, half = Trellis(bits), head_dim // 16
    codes = {b.name: torch.randint(256, (2, b.width), dtype=torch.uint8) for b in quantizer.buffers(head_dim)}
    values = quantizer.levels(codes)
    assert values.shape == (2, head_dim)
    for row in range(2):
        words = {name: plane[row].view(torch.uint16).tolist() for name, plane in codes.items()}
        for channel in range(head_dim):
            word, i = divmod(channel, 8)
            h, block, t = word // half, word % half, 4 * (i // 2) + 2 * (word // half) + i % 2
            path = words["high"][block]
            p = [path >> (t + n) % 16 & 1 for n in range(3)]
            index = words["codes"][block] >> 4 * (i // 2) + 2 * (1 - h) + i % 2 & 1 if bits == 2 else words["low"][word] >> 2 * i & 3
            if bits == 4:
                index = 3 - index if words["high"][half + block] >> t & 1 else 4 + index
            assert values[row, channel].item() == pytest.approx(trellis_levels(bits)[4 * index + 2 * (p[0] ^ p[2]) + p[1]])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_vector_is_encoded_from_itself(bits):
    codec, x = Rotated(Trellis(bits)), torch.randn(2, 3, 5, 80)
    whole, alone = codec.encode(x, {}), codec.encode(x[1:, 2:, 3:4], {})
    assert all(torch.equal(whole[name][1:, 2:, 3:4], plane) for name, plane in alone.items())


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_errs_less_than_lloyd_max_at_the_same_bytes(bits, head_dim):
    x = torch.randn(1, 2, 200, head_dim)
    trellis, lloyd = Rotated(Trellis(bits)), Rotated(LloydMax(bits))
    assert (
        sum(b.nbytes() for b in trellis.buffers(head_dim)) == sum(b.nbytes() for b in lloyd.buffers(head_dim)) == bits * head_dim // 8 + 2
    )
    assert error(trellis, x) < 0.9 * error(lloyd, x)


def test_refuses():
    assert "16 channels" in (Trellis(2).refuses(72) or "") and Trellis(3).refuses(80) is None
    with pytest.raises(ValueError, match="bits=5"):
        Trellis(5)


@pytest.mark.parametrize(("format", "size"), [((4, 4), 132), ((4, 3), 116), ((3, 3), 100), ((3, 2), 84), ((2, 2), 68)])
def test_bytes(format, size):
    assert HadaQuant(*format, "trellis").bytes_per_token(128) == size
