"""The fused kernel against the torch reference on the same attention_inputs: outputs, normalisers, and that nothing else is read or
written."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from qkvcache.formats import Codec, Format
from qkvcache.formats.centered import Centered
from qkvcache.kernels import AttentionInputs, attend
from tests.matrix import FORMATS, slowly
from tests.softmax import attention_weights

from .attention_inputs import assert_near, build, exactly

triton = pytest.importorskip("triton")
if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

from qkvcache.kernels.attend import launches as fused  # noqa: E402
from qkvcache.kernels.attend import plan, triton_join  # noqa: E402
from qkvcache.kernels.device.unpack import offset_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about nan and infinity, in the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 4096
BFLOAT16 = pytest.param(
    torch.bfloat16, marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no products of bfloat16")
)
WIDE_RANGE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16

KINDS = {  # formats that take each path of the kernel once at least, and a head_dim: every width once at least
    "identity": 96,
    "int8": 112,
    "int8_halves": 80,
    "int8_asymmetric": 80,
    "fp8_token": 64,
    "fp8_e5m2_tensor": 256,
    "int4": 96,
    "int4_vllm": 80,
    "nvfp4_mse": 112,
    "turboquant_4bit_nc": 128,
    "turboquant_3bit_nc": 112,
    "turboquant_3bit_nc_uncentered": 96,
    "hadaquant_k3v2": 80,
}
QUICK = ("int8", "int4_vllm", "turboquant_3bit_nc")


HEAD_DIMS = (32, 64, 80, 96, 112, 128, 256)


def tolerance(format: str, dtype: torch.dtype) -> float:
    """Of the output, RMS over RMS.

    fp16: queries and weights are rounded to 11 bits, and so is the output; bf16 rounds the weights of exact tokens and the output to 8.
    fp32 has the roundings of fp16 but the last one, unless nothing is packed. Where numbers carry an offset (16 to 31 for four bits), a
    rounded weight counts as many times more as they exceed their spread. The interpreter rounds scaled int4 twice.
    """
    key, value = (codec.packed_layout for codec in FORMATS[format].codecs())
    if dtype == torch.float32 and key.kind == "half":
        return 2e-5
    error = {torch.float16: 1e-3, torch.bfloat16: 5e-3, torch.float32: 1e-3}[dtype]
    if value.group and offset_of(value):
        return error + (6e-3 if DEVICE.type == "cpu" else 3e-3)
    return error + (3e-3 if offset_of(value) else 0)


def data(*shape: int, dtype=torch.float16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def make(format: str, batch=1, heads=2, group=2, queries=1, tokens=135, dims=64, dtype=torch.float16, first=3, recent=20, cuts=(60,)):
    """A query and the attention inputs: by default two slabs, two splits, odd tails."""
    dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    key, value = data(batch, heads, tokens, dim, dtype=dtype), data(batch, heads, tokens, value_dim, dtype=dtype)
    query = data(batch, heads * group, queries, dim, dtype=dtype)
    return query, build(FORMATS[format], key, value, first, recent, cuts)


@contextmanager
def guarded(monkeypatch):
    """What is allocated meanwhile holds nan, between guards of nan that nobody may write to."""
    empty, held = torch.empty, []

    def guarded_empty(*shape, dtype=None, device=None):
        size = torch.Size(shape[0] if isinstance(shape[0], (tuple, torch.Size)) else shape)
        whole = empty(2 * GUARD + size.numel(), dtype=dtype, device=device).fill_(float("nan"))
        held.append(whole)
        return whole[GUARD : GUARD + size.numel()].view(size)

    with monkeypatch.context() as patch:
        patch.setattr(plan.torch, "empty", guarded_empty)
        patch.setattr(plan.torch, "empty_like", lambda x, dtype=None: guarded_empty(x.shape, dtype=dtype or x.dtype, device=x.device))
        patch.setattr(fused, "LEAST_SPLIT", 64)  # several splits, where few tokens would make one
        yield
    for whole in held:
        assert whole[:GUARD].isnan().all() and whole[-GUARD:].isnan().all(), "written beyond a buffer"


def run(monkeypatch, query: Tensor, attention_inputs: AttentionInputs, *args, **kwargs) -> tuple[Tensor, Tensor]:
    assert fused.supports(attention_inputs.paged, query)
    with guarded(monkeypatch):
        return plan.attend_pages(query, attention_inputs.paged, *args, **kwargs)[:2]


def compare(monkeypatch, format, query, attention_inputs, mask=None, *, limit=None, **kwargs) -> None:
    out, lse = run(monkeypatch, query, attention_inputs, mask, **kwargs)
    expect(format, query, attention_inputs, mask, out, lse, limit, **kwargs)


def expect(format, query, attention_inputs, mask, out, lse, limit=None, **kwargs) -> None:
    assert out.dtype == query.dtype
    _, expected = attention_weights(query, exactly(attention_inputs.key), mask, **kwargs)
    wanted = attend(query.float(), attention_inputs, mask, **kwargs)
    assert_near(out, wanted, limit or tolerance(format, query.dtype), lse, expected.float())


@pytest.mark.parametrize("format", slowly(FORMATS, KINDS))
def test_every_format(format, monkeypatch):
    query, attention_inputs = make(format, heads=2 if "tok" in format or "tensor" in format else 1)  # a scale that heads share
    compare(monkeypatch, format, query, attention_inputs)


@pytest.mark.parametrize("at_once", [4, 32, 128])
@pytest.mark.parametrize("format", ["int8", "hadaquant_k2v2"])
def test_many_splits(format, at_once, monkeypatch):
    """The join reads several splits at once, over and over, or all of them."""
    query, attention_inputs = make(format, heads=1, tokens=700)
    joining = triton_join.joining
    monkeypatch.setattr(triton_join, "joining", lambda *sizes: joining(*sizes) | {"S": at_once})
    compare(monkeypatch, format, query, attention_inputs)


@dataclass(frozen=True)
class Means(Format):
    """Keys and values that lie around a mean."""

    of: str

    @property
    def name(self) -> str:
        return f"means of {self.of}"

    def codecs(self) -> tuple[Codec, Codec]:
        return Centered.of(FORMATS[self.of].key), Centered.of(FORMATS[self.of].value)


MEANS = {"int4_vllm": 80, "turboquant_3bit_nc": 64, "nvfp4": 112, "int4": 96}


@pytest.mark.parametrize("format", slowly(MEANS, ["int4_vllm"]))
def test_means(format, monkeypatch):
    """Far from zero, rows and heads apart; under softcap and attention sinks, exact tokens on both sides."""
    dim = MEANS[format]
    key, value = (data(2, 2, 90, dim) + 3 * data(2, 2, 1, dim) for _ in range(2))
    attention_inputs = build(Means(format), key, value, 3, 20, (40,))
    query = data(2, 4, 1, dim)
    mask = torch.rand(2, 1, 1, 90, device=DEVICE) < 0.8
    mask[..., -1] = True
    compare(
        monkeypatch,
        format,
        query,
        attention_inputs,
        mask,
        softcap=20.0,
        sinks=torch.tensor([-1.0, 0.5, 3.0, 0.0], device=DEVICE),
    )


@pytest.mark.parametrize("format", slowly(KINDS, QUICK))
def test_everything_together(format, monkeypatch):
    """Widths that differ, more rows than a block of eight, queries among themselves, every option."""
    dims = (KINDS[format], 64 if KINDS[format] != 64 else 128)
    query, attention_inputs = make(
        format, heads=1, group=3, queries=3, tokens=101, dims=dims, dtype=torch.float16 if DEVICE.type == "cpu" else torch.bfloat16, cuts=()
    )
    mask = torch.rand(1, 1, 3, 101, device=DEVICE) < 0.7
    mask[..., -4:] = True
    sinks = torch.tensor([-1.0, 0.5, 3.0], device=DEVICE)
    compare(monkeypatch, format, query, attention_inputs, mask, causal=True, softcap=3.0, sinks=sinks, scaling=0.2)


@pytest.mark.parametrize("format", slowly(KINDS, ["int4_vllm"]))
def test_values_of_other_widths(format, monkeypatch):
    """Of the widths that are no power of two, those of `KINDS`, for values this time."""
    if KINDS[format] in (64, 128):
        pytest.skip("covered by others")
    compare(monkeypatch, format, *make(format, heads=1, tokens=60, dims=(64, KINDS[format]), cuts=()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16, torch.float32])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("format", KINDS)
def test_head_dims(format, head_dim, dtype, monkeypatch):
    if FORMATS[format].refuses(head_dim):
        pytest.skip("refused")
    compare(monkeypatch, format, *make(format, tokens=90, dims=head_dim, dtype=dtype, cuts=()))


@pytest.mark.parametrize("format", slowly(["int4", "int4_vllm", "nvfp4", "turboquant_3bit_nc"], ["int4"]))
def test_narrow(format, monkeypatch):
    """Fewer words than a tile has."""
    compare(monkeypatch, format, *make(format, heads=1, tokens=60, dims=32, cuts=()))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("format", slowly([x for x in KINDS if x not in ("int4", "nvfp4_mse")], ["identity", "turboquant_4bit_nc"]))
def test_heads_of_512(format, queries, monkeypatch):
    compare(monkeypatch, format, *make(format, heads=1, queries=queries, tokens=60, dims=512, cuts=()), causal=True)


@pytest.mark.parametrize(
    ("format", "dim", "dtype"), [("int4", 512, torch.float16), ("int8", 512, torch.float32), ("int8", 320, torch.float16)]
)
def test_wide_heads_are_left_to_torch(format, dim, dtype):
    query, attention_inputs = make(format, heads=1, group=1, tokens=44, dims=dim, dtype=dtype, first=0, recent=5, cuts=())
    assert not fused.supports(attention_inputs.paged, query)


MASKS = {
    "keys": (2, 1, 1, 90),
    "rows": (2, 1, 3, 90),
    "one for all": (1, 1, 3, 90),
    "each head": (2, 4, 3, 90),
    "one row, each head": (1, 4, 3, 90),
    "longer": (2, 1, 3, 99),
}


@pytest.mark.parametrize("kind", slowly(["bool", "float", "half"], ["bool"]))
@pytest.mark.parametrize("name", slowly(MASKS, ["rows", "longer"]))
def test_masks(name, kind, monkeypatch):
    shape = MASKS[name]
    query, attention_inputs = make("int8", batch=2, queries=3, tokens=90, cuts=())
    mask = torch.rand(shape, device=DEVICE) < 0.6
    mask[..., 0] = True
    if kind != "bool":
        dtype = torch.float32 if kind == "float" else query.dtype
        mask = torch.randn(shape, device=DEVICE).to(dtype).masked_fill(~mask, -torch.inf if kind == "float" else torch.finfo(dtype).min)
    compare(monkeypatch, "int8", query, attention_inputs, mask, causal=kind != "half")


def test_masks_of_fewer_dimensions(monkeypatch):
    """Whatever broadcasts."""
    query, attention_inputs = make("int8", heads=1, queries=3, tokens=40, cuts=())
    compare(monkeypatch, "int8", query, attention_inputs, torch.randn(3, 40, device=DEVICE))


def test_a_mask_that_is_no_copy(monkeypatch):
    """Columns far apart, and a slice of something longer."""
    query, attention_inputs = make("int8", heads=1, queries=3, tokens=90, cuts=())
    compare(monkeypatch, "int8", query, attention_inputs, (torch.randn(1, 1, 99, 5, device=DEVICE).mT[:, :, 1:4, 4:94]))


@pytest.mark.parametrize("low", slowly([False, -torch.inf, torch.finfo(torch.float32).min], [-torch.inf]))
@pytest.mark.parametrize("format", slowly(["int8", "nvfp4"], ["int8"]))
def test_a_row_that_sees_nothing_is_finite_and_spoils_no_other(format, low, monkeypatch):
    query, attention_inputs = make(format, heads=1, queries=3, tokens=60, cuts=())
    mask = torch.full((1, 1, 3, 60), 0.0 if low else True, device=DEVICE)
    mask[0, :, 1] = low
    out, _ = run(monkeypatch, query, attention_inputs, mask)
    assert out.isfinite().all()
    free, _ = run(monkeypatch, query, attention_inputs)
    assert torch.equal(out[:, :, [0, 2]], free[:, :, [0, 2]])
    out, _ = run(monkeypatch, query, attention_inputs, mask, sinks=torch.zeros(2, device=DEVICE))
    assert not out[:, :, 1].any()  # all of it went to the sink


OPTIONS = {
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": torch.tensor([9.0, -50.0, 0.0, 2.0])},
    "scaling": {"scaling": 1.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, monkeypatch):
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    query, attention_inputs = make("int8", queries=2)
    compare(monkeypatch, "int8", query, attention_inputs, causal=True, **options, limit=2e-3)


@pytest.mark.parametrize("shape", slowly([(1, 4, 1), (4, 1, 1), (1, 8, 1), (1, 2, 16), (1, 3, 7), (2, 1, 2)], [(1, 3, 7)]))
def test_grouped_queries(shape, monkeypatch):
    """One block of rows, a full one, several of which the last is not full."""
    heads, group, queries = shape
    query, attention_inputs = make("int8", heads=heads, group=group, queries=queries, tokens=80, cuts=())
    compare(monkeypatch, "int8", query, attention_inputs, causal=True)


ZONES = {
    "no exact tokens": {"first": 0, "recent": 0},
    "none recent": {"recent": 0},
    "none first": {"first": 0},
    "nothing packed": {"first": 5, "recent": 55},
    "only first": {"first": 60, "recent": 0},
    "one packed": {"first": 30, "recent": 29},
    "whole tiles": {"first": 0, "recent": 0, "tokens": 128, "cuts": (64,)},
    "several slabs": {"tokens": 300, "cuts": (1, 65, 70, 200)},
}


@pytest.mark.parametrize("zones", ZONES.values(), ids=ZONES)
def test_zones(zones, monkeypatch):
    query, attention_inputs = make("int8_asymmetric", **{"heads": 1, "tokens": 60, "cuts": ()} | zones)
    compare(monkeypatch, "int8_asymmetric", query, attention_inputs, softcap=4.0)


@pytest.mark.parametrize("recent", slowly([0, 1, 3], [1]))
def test_causal_within_the_body(recent, monkeypatch):
    """Queries see each other through the exact recent tokens, and the body is not masked for them."""
    query, attention_inputs = make("int8", heads=1, queries=4, tokens=50, recent=recent, cuts=())
    with pytest.raises(ValueError, match="causal with 4 queries: their own tokens must be among the exact recent ones"):
        plan.attend_pages(query, attention_inputs.paged, causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16, torch.float32])
@pytest.mark.parametrize("format", slowly(["identity", "int8", "int4", "turboquant_4bit_nc"], ["identity"]))
def test_dtypes(format, dtype, monkeypatch):
    compare(monkeypatch, format, *make(format, heads=1, tokens=90, dtype=dtype, dims=96 if format == "int4" else 64, cuts=()))


def apart(attention_inputs: AttentionInputs) -> None:
    """Heads of exact tokens are next to each other."""
    paged = attention_inputs.paged
    paged.sinks, paged.ring = (tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in zone) for zone in (paged.sinks, paged.ring))


def test_strides(monkeypatch):
    """Queries and exact tokens as a projection leaves them."""
    query, attention_inputs = make("int8", queries=2, tokens=60, cuts=())
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    apart(attention_inputs)
    compare(monkeypatch, "int8", query, attention_inputs, causal=True)


@pytest.mark.parametrize("format", slowly(KINDS, QUICK))
def test_magnitudes(format, monkeypatch):
    """Vectors of zeros, and tokens and queries of very different lengths, as far as the codec itself holds them."""
    high = 1e6 if format in ("identity", "int8", "fp8_token", "int4_vllm") else 1e3  # scales of the others have 16 or 8 bits
    lengths = torch.tensor([0.0, 1e-6, 1.0, 1e2, high], device=DEVICE)[torch.arange(60, device=DEVICE) % 5]
    key, value = (data(1, 1, 60, 64, dtype=torch.float32) * lengths[order, None] for order in (torch.arange(60), torch.randperm(60)))
    query = data(1, 3, 1, 64, dtype=WIDE_RANGE) * torch.tensor([1e-8, 1e-3, 0.0], device=DEVICE, dtype=WIDE_RANGE)[:, None, None]
    attention_inputs = build(FORMATS[format], key.to(WIDE_RANGE), value.to(WIDE_RANGE), 0, 0)
    compare(monkeypatch, format, query, attention_inputs, limit=tolerance(format, torch.bfloat16) * 2)


def test_tiny_queries(monkeypatch):
    """Whose inverse overflows."""
    query, attention_inputs = make("int8", heads=1, tokens=40, dtype=torch.float32, cuts=())
    compare(monkeypatch, "int8", query * 1e-39, attention_inputs)


@pytest.mark.parametrize("format", slowly(["int8", "int4_vllm"], ["int8"]))
@pytest.mark.parametrize("queries", [2, 9], ids=["few rows", "many rows"])
def test_nan_stays_in_its_row(format, queries, monkeypatch):
    """Of the batch, of a head, of a query; of both kernels."""
    query, attention_inputs = make(format, batch=2, group=4, queries=queries, tokens=70, cuts=())
    assert (fused.tiled(query, attention_inputs.paged, None, {"causal": True}) is None) == (queries == 2)
    clean, clean_lse = run(monkeypatch, query, attention_inputs, causal=True)
    query = query.clone()
    query[0, 1, 1, 5] = float("nan")
    attention_inputs.paged.ring[0][1, 1, 3, 7] = float("nan")
    pages = attention_inputs.paged.pages
    for codes in pages.planes:
        codes["scale"][int(pages.table[0, 0]) - pages.firsts[0], 1, 4] = float("nan")
    out, lse = run(monkeypatch, query, attention_inputs, causal=True)
    spoilt = torch.zeros(2, 8, queries, dtype=torch.bool, device=DEVICE)
    spoilt[0, 1, 1] = spoilt[1, 4:] = spoilt[0, 4:] = True
    assert out[spoilt].isnan().all()
    assert torch.equal(out[~spoilt], clean[~spoilt]) and torch.equal(lse[~spoilt], clean_lse[~spoilt])


def test_inputs_are_left_alone(monkeypatch):
    query, attention_inputs = make("int4", queries=2, tokens=60, dims=96, cuts=())
    mask = torch.randn(1, 1, 2, 60, device=DEVICE)
    held = [
        query,
        mask,
        *attention_inputs.paged.sinks,
        *attention_inputs.paged.ring,
        attention_inputs.paged.pages.table,
        *(x for side in attention_inputs.paged.pages.planes for x in side.values()),
    ]
    before = [x.clone() for x in held]
    run(monkeypatch, query, attention_inputs, mask, causal=True)
    assert all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in zip(before, held, strict=True))
