"""Triton's `quantize_into` and `decode` against the codecs: codes, what they stand for, and what stays untouched."""

import pytest
import torch
from torch import Tensor

from qkvcache.formats import Codec, Codes, Int4
from tests.codes import planes_of
from tests.kernels.paged_inputs import pages_of
from tests.matrix import COVER, FORMATS, covering, slowly

triton = pytest.importorskip("triton")
if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

from qkvcache.kernels.store.triton_dequantize import decode  # noqa: E402
from qkvcache.kernels.store.triton_quantize import supports  # noqa: E402
from qkvcache.kernels.store.triton_store import quantize_into  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about nan, in the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SENTINEL = 0xA5
CAPACITY = 64
SUPPORTED = [name for name in FORMATS if all(supports(codec, 128) for codec in FORMATS[name].codecs())]
QUICK = [name for name in SUPPORTED if DEVICE.type == "cuda" or name in COVER]


def poisoned(codec: Codec, x: Tensor) -> Codes:
    """Planes of `CAPACITY` slots, every byte of them the sentinel."""
    batch, heads = x.shape[:2]
    planes = {}
    for buffer in codec.buffers(x.shape[3]):
        if buffer.tokens == "each":
            shape = (batch, heads if buffer.heads == "each" else 1, CAPACITY, buffer.width)
            plane = torch.empty(shape, dtype=buffer.dtype or x.dtype, device=x.device)
            plane.view(torch.uint8).fill_(SENTINEL)
            planes[buffer.name] = plane
    return planes


def write(codecs, x, planes, statistics, start: int) -> None:
    """Quantizes into slots from `start` on of the pages `planes`, of which each row has one."""
    pages = pages_of(codecs, tuple(planes), CAPACITY, tuple(statistics))
    rows, tokens = x[0].shape[0], x[0].shape[2]
    slots = CAPACITY * torch.arange(rows, device=DEVICE)[:, None, None] + start + torch.arange(tokens, device=DEVICE)
    quantize_into(pages, tuple(x), slots)


def store(format, key: Tensor, value: Tensor, start: int = 0) -> list[tuple[Codec, Tensor, Codes, Codes]]:
    """Both sides, after `quantize_into`: planes whose slots hold the codes, and buffers kept once."""
    sides = [(codec, x, poisoned(codec, x), codec.calibrate(x)) for codec, x in zip(FORMATS[format].codecs(), (key, value), strict=True)]
    write(*zip(*sides, strict=True), start)
    return sides


def view(planes: Codes, start: int, tokens: int) -> Codes:
    return {name: plane[:, :, start : start + tokens] for name, plane in planes.items()}


def data(*shape: int, dtype=torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def check(
    codec: Codec, x: Tensor, planes: Codes, statistics: Codes, start: int, share: float = 1e-3 if DEVICE.type == "cpu" else 5e-3
) -> None:
    """Codes as the codec has them, up to a step for a `share` of them; slots outside untouched."""
    tokens, head_dim = x.shape[2:]
    expected = codec.quantize(x, statistics)
    for name, plane in planes.items():
        outside = torch.cat([plane[:, :, :start], plane[:, :, start + tokens :]], 2).contiguous()
        assert bool((outside.view(torch.uint8) == SENTINEL).all()), f"{name}: a slot outside was written"
        got = plane[:, :, start : start + tokens]
        want = expected[name].expand_as(got)
        if not want.dtype.is_floating_point:
            differing = (got != want).float().mean().item()
            assert differing <= share, f"{name}: {differing:.2g} of the codes differ"
        else:
            torch.testing.assert_close(got, want, rtol=2e-3 if got.dtype == torch.float16 else 2e-6, atol=1e-6, equal_nan=True)
    decoded, wanted = (codec.dequantize(c | statistics, head_dim) for c in (view(planes, start, tokens), expected))
    step = (wanted.amax(-1, keepdim=True) - wanted.amin(-1, keepdim=True)).abs() / 3
    assert bool(((decoded - wanted).abs() <= step + 1e-6).all())


@pytest.mark.parametrize(
    ("format", "head_dim"), covering(slowly(SUPPORTED, QUICK), slowly([64, 80, 96, 112, 128, 256, 512], [64, 80, 128, 512]), strength=1)
)
def test_codes(format, head_dim):
    """Blocks and single tokens, in every dtype, anywhere in the planes."""
    if FORMATS[format].refuses(head_dim):
        pytest.skip("refused")
    dtype = (torch.bfloat16, torch.float16, torch.float32)[head_dim // 16 % 3]
    for batch, heads, tokens, start in ((1, 3, 17, 5), (2, 3, 1, 23)):
        key, value = (data(batch, heads, tokens, head_dim, dtype=dtype, scale=2.0) for _ in range(2))
        for codec, x, planes, statistics in store(format, key, value, start):
            check(codec, x, planes, statistics, start)


@pytest.mark.parametrize(
    "format", [name for name in SUPPORTED if name.endswith("_token") and FORMATS[name].key.buffers(64)[1].heads == "shared"]
)
def test_what_heads_share_may_be_held_by_each(format):
    """As where tokens are evicted: every head has a copy of the scale."""
    for heads, tokens in ((3, 5), (4, 1)):
        x = data(2, heads, tokens, 64)
        codec = FORMATS[format].key
        each = planes_of(codec, x, CAPACITY, per_head=True)
        planes = {name: plane.contiguous() for name, plane in each.items()}
        for plane in planes.values():
            plane.view(torch.uint8).fill_(SENTINEL)
        assert {plane.shape[1] for plane in planes.values()} == {heads}
        statistics = codec.calibrate(x)
        other = {name: plane.clone() for name, plane in planes.items()}
        write((codec, codec), (x, x), (planes, other), (statistics, statistics), 7)
        check(codec, x, planes, statistics, 7)
        # After evictions a slot has another token, and another scale, in each head.
        planes[codec.buffers(64)[1].name][:, :, 7 : 7 + tokens] *= 1 + torch.arange(heads, device=DEVICE)[:, None, None]
        out, codes = torch.empty_like(x), view(planes, 7, tokens) | statistics
        decode(codec, codes, out)
        torch.testing.assert_close(out, codec.dequantize(codes, 64, x.dtype), rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("format", "head_dim"), covering(slowly(SUPPORTED, QUICK), slowly([64, 96, 128, 256, 512], [96, 256, 512]), strength=1)
)
def test_decode(format, head_dim):
    """What the codec decodes, up to the rounding of the last step, from views into planes to a view of the output."""
    if FORMATS[format].refuses(head_dim):
        pytest.skip("refused")
    dtype = (torch.float32, torch.bfloat16, torch.float16)[head_dim // 32 % 3]
    x = data(2, 3, 5, head_dim, dtype=dtype)
    for codec in dict.fromkeys(FORMATS[format].codecs()):
        statistics = codec.calibrate(x)
        planes = poisoned(codec, x)
        for name, codes in codec.quantize(x, statistics).items():
            planes[name][:, :, 3:8] = codes
        out = torch.full((2, 7, 3, head_dim), 7.0, dtype=dtype, device=DEVICE).transpose(1, 2)
        codes = view(planes, 3, 5) | statistics
        decode(codec, codes, out[:, :, 1:6])
        assert bool((out[:, :, [0, 6]] == 7).all())
        rtol = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(out[:, :, 1:6], codec.dequantize(codes, head_dim, dtype), rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("format", slowly(SUPPORTED, ["int8", "fp8_token", "int4", "turboquant_3bit_nc"]))
def test_strides(format):
    """Vectors as a projection leaves them, heads within tokens, and rows cut out of something longer."""
    key, value = (data(2, 6, 3, 72, scale=3.0)[:, 1:, :, 8:].transpose(1, 2) for _ in range(2))
    if not FORMATS[format].refuses(64):
        for codec, x, planes, statistics in store(format, key, value, 2):
            check(codec, x, planes, statistics, 2)


@pytest.mark.parametrize("format", slowly(SUPPORTED, QUICK))
def test_magnitudes(format):
    """Codes are those of the codec wherever its scales hold; beyond, what comes back is as finite as there."""
    scales = (0.0, 1e-30, 1e-6, 1e4, 1e18)
    key, value = (data(1, 2, 5, 64, dtype=torch.float32) * torch.tensor(scales, device=DEVICE)[:, None] for _ in range(2))
    for codec, x, planes, statistics in store(format, key.bfloat16(), value.bfloat16()):
        decoded, wanted = (codec.dequantize(c | statistics, 64) for c in (view(planes, 0, 5), codec.quantize(x, statistics)))
        finite = wanted.isfinite()
        assert torch.equal(decoded.isfinite(), finite)
        mean = max((float(kept.abs().max()) for kept in statistics.values()), default=0.0)  # that of all tokens, the largest too
        for t, scale in enumerate(scales):
            near = finite[:, :, t]
            torch.testing.assert_close(decoded[:, :, t][near], wanted[:, :, t][near], rtol=1e-2, atol=scale / 50 + mean * 1e-7)


@pytest.mark.parametrize("format", slowly(SUPPORTED, QUICK))
def test_not_finite(format):
    """What the codec decodes to something not finite does so here, and nothing else."""
    key, value = (data(1, 2, 5, 64, dtype=torch.float32) for _ in range(2))
    sides = []
    for codec, x in zip(FORMATS[format].codecs(), (key, value), strict=True):
        statistics = codec.calibrate(x)
        x[0, 1, :4, 37] = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf")], device=DEVICE)
        sides.append((codec, x, poisoned(codec, x), statistics))
    write(*zip(*sides, strict=True), 0)
    for codec, x, planes, statistics in sides:
        decoded, wanted = (codec.dequantize(c | statistics, 64) for c in (view(planes, 0, 5), codec.quantize(x, statistics)))
        assert torch.equal(decoded.isfinite(), wanted.isfinite())


def test_alone_as_in_a_block():
    """A token gets the same codes alone as among others."""
    for format in QUICK:
        key, value = (data(1, 2, 9, 64) for _ in range(2))
        block = store(format, key, value)
        for codec, x, planes, statistics in block:
            alone = poisoned(codec, x)
            write(*([each] * 2 for each in (codec, x[:, :, 4:5], alone, statistics)), 4)
            for name, plane in planes.items():
                assert torch.equal(alone[name][:, :, 4].view(torch.uint8), plane[:, :, 4].view(torch.uint8)), (format, name)


def test_channels_apart():
    """Vectors of any strides are stored."""
    x = data(1, 1, 2, 64)
    codec = FORMATS["int8_uncentered"].key
    planes, wanted = poisoned(codec, x), codec.quantize(x, {})
    write(*([each] * 2 for each in (codec, x.mT.contiguous().mT, planes, {})), 0)
    assert all(torch.equal(planes[name][:, :, :2], codes) for name, codes in wanted.items())


def test_errors():
    x = data(1, 1, 2, 64)
    codec = FORMATS["int8"].key
    with pytest.raises(ValueError, match="contiguous"):
        decode(codec, codec.quantize(x, codec.calibrate(x)), x.mT.contiguous().mT)
    block = Int4(group_size=24).value
    assert not supports(block, 96) and not supports(codec, 1024) and not supports(FORMATS["int4"].key, 80)
    with pytest.raises(ValueError, match="ask `supports`"):
        write(*([each] * 2 for each in (block, data(1, 1, 2, 96), {}, {})), 0)
    with pytest.raises(ValueError, match="ask `supports`"):
        decode(FORMATS["int4"].key, {}, data(1, 1, 2, 80))
