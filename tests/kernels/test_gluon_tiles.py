"""The kernel for many rows on Hopper, in Gluon, which no interpreter runs."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

from qkvcache.kernels import attend, attends_in_tiles
from qkvcache.kernels.attend.launches import GLUON_TILES, architecture
from qkvcache.select import select_blocks as selecting
from qkvcache.select.budget import Budget
from tests.matrix import FORMATS

from .attention_inputs import assert_near, build
from .test_attend_tiles import QUANTIZED, compare
from .test_fused_attend import DEVICE, KINDS, data, fused, guarded, make, plan, tolerance
from .test_pages import TWICE
from .test_pages import compare as compare_pages
from .test_step import holding

HOPPER = pytest.mark.skipif(architecture(DEVICE)[0] // 10 != 9, reason="needs a Hopper GPU")
GPU = [pytest.mark.gpu, HOPPER]


def three_bits(format: str) -> bool:
    """Whether a plane of high bits has half of the words."""
    return any(codec.packed_layout.high == 1 for codec in FORMATS[format].codecs())


@pytest.fixture
def gluon(monkeypatch):
    """The launches that are chosen."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    chosen, in_tiles = [], fused.in_tiles

    def watched(*args):
        chosen.append(in_tiles(*args))
        return chosen[-1]

    monkeypatch.setattr(fused, "in_tiles", watched)
    yield
    assert chosen and all(launch in GLUON_TILES for launch in chosen)


def a_release(name, monkeypatch):
    """Triton has the version `name`."""
    monkeypatch.setattr("triton.__version__", name)
    monkeypatch.setattr(fused, "knows_gluon", functools.cache(fused.knows_gluon.__wrapped__))


def gpu(test):
    for mark in GPU:
        test = mark(test)
    return pytest.mark.usefixtures("gluon")(test)


@gpu
@pytest.mark.parametrize(("queries", "splits"), [(35, 1), (35, 100), (14, 1)])
@pytest.mark.parametrize("format", QUANTIZED)
def test_every_format(format, queries, splits, monkeypatch):
    """Two slabs, one split of several tiles or several splits, odd tails, two groups of warps or one, a block of rows that is not full."""
    monkeypatch.setattr(fused, "MOST_SPLITS", splits)
    heads = 2 if "tok" in format or "tensor" in format else 1  # a scale that heads share
    query, attention_inputs = make(format, heads=heads, group=4, queries=queries, recent=41, tokens=900, dims=(128, 128), cuts=(260,))
    compare(monkeypatch, format, query, attention_inputs)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("tokens", [97, 128, 129, 255, 256, 257, 385, 512, 1400])
@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
def test_tails(format, tokens, dtype, monkeypatch):
    """One split of one to eleven tiles: fewer than are copied ahead, whole ones, and one of a token."""
    monkeypatch.setattr(fused, "MOST_SPLITS", 1)
    query, attention_inputs = make(
        format, heads=2, group=4, queries=40, first=3, recent=41, tokens=tokens + 44, dims=(128, 128), cuts=(), dtype=dtype
    )
    compare(monkeypatch, format, query, attention_inputs)


@gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (64, 128)], ids=str)
@pytest.mark.parametrize("format", [name for name in sorted(KINDS.keys() - {"identity"}) if not three_bits(name)])
def test_widths(format, dims, monkeypatch):
    query, attention_inputs = make(format, heads=1, group=8, queries=17, recent=23, tokens=420, dims=dims, cuts=())
    compare(monkeypatch, format, query, attention_inputs)


@gpu
@pytest.mark.parametrize("format", sorted(KINDS.keys() - {"identity"}))
def test_everything_together(format, monkeypatch):
    """Padding, softcap, attention sinks."""
    query, attention_inputs = make(format, batch=2, heads=1, group=3, queries=32, recent=38, tokens=450, dims=(128, 128), cuts=())
    mask = torch.rand(2, 1, 1, 450, device=DEVICE) < 0.7
    mask[..., -32:] = True
    sinks = torch.tensor([-1.0, 0.5, 3.0], device=DEVICE)
    compare(monkeypatch, format, query, attention_inputs, mask, softcap=3.0, sinks=sinks, scaling=0.2)


@gpu
@pytest.mark.parametrize("format", sorted(KINDS.keys() - {"identity"}))
def test_magnitudes(format, monkeypatch):
    """Vectors of zeros, tokens and queries of very different lengths, chunks apart: fp16 holds no such scales."""
    high = 1e4 if format in ("int8", "fp8_token", "int4_vllm") else 1e3
    lengths = torch.tensor([0.0, 1e-4, 1.0, 1e2, high], device=DEVICE)[torch.arange(400, device=DEVICE) % 5]
    lengths[:170] *= 1e-4
    query, _ = make(format, heads=1, group=4, queries=33, recent=39, tokens=400, dims=(128, 128), cuts=(60,))
    orders = torch.arange(400), torch.randperm(400)
    key, value = (data(1, 1, 400, 128, dtype=torch.float32) * lengths[order.to(DEVICE), None] for order in orders)
    attention_inputs = build(FORMATS[format], key.half(), value.half(), 0, 40, (60,))
    compare(monkeypatch, format, query * 1e-3, attention_inputs, limit=tolerance(format, torch.bfloat16) * 2)


@gpu
@pytest.mark.parametrize(("format", "masked"), [("int8", False), ("turboquant_4bit_nc", False), ("nvfp4", False), ("int8", True)])
def test_chosen_blocks(format, masked, monkeypatch):
    """The blocks of each head, of which a tile has several."""
    batch = 2 if masked else 1
    query, attention_inputs = make(format, batch=batch, heads=2, group=4, queries=36, recent=42, tokens=700, dims=(128, 128), cuts=(60,))
    mask = None
    if masked:
        mask = torch.rand(2, 1, 1, 700, device=DEVICE) < 0.7
        mask[..., -36:] = True
    inputs = attention_inputs.paged
    read = selecting.over_blocks(inputs, selecting.select_blocks(query.float(), inputs, Budget(350), mask))
    assert fused.tiled(query, read, mask, {"causal": True})
    compare_pages(monkeypatch, format, query, read, mask, more=TWICE, causal=True)


@gpu
@pytest.mark.parametrize("seen", [170, 300, 430])
def test_tokens_counted_on_the_device(seen, monkeypatch):
    """The ring began anew, and what is free would show."""
    store = holding("int8", seen, ring=50, limit=430)
    query, inputs = data(2, 4, 40, 64), store.compiled_inputs(store.residual)
    mask = torch.ones(2, 1, 1, 430, dtype=torch.bool, device=DEVICE)
    mask[1, ..., :40] = False
    assert attends_in_tiles(query, inputs, mask)
    with guarded(monkeypatch):
        out = plan.attend_pages(query, inputs.paged, mask, causal=True)[0]
    assert_near(out, attend(query.float(), store.attention_inputs(), mask[..., :seen], causal=True), 4e-3)


@pytest.mark.parametrize(
    ("arch", "rows", "layout", "dim", "gluon"),
    [
        (90, 65, "int8", 128, True), (90, 64, "int8", 128, True), (100, 128, "int8", 128, False), (80, 128, "int8", 128, False),
        (90, 128, "turboquant_3bit_nc", 128, True), (90, 128, "turboquant_3bit_nc", 64, False), (90, 128, "nvfp4", 64, True),
    ],
)  # fmt: skip
def test_where_it_is_launched(arch, rows, layout, dim, gluon, monkeypatch):
    a_release("3.6.0", monkeypatch)
    sides = [(codec.packed_layout, dim) for codec in FORMATS[layout].codecs()]
    launch = fused.launched_in_tiles(arch, rows, sides)
    assert (launch in GLUON_TILES, launch.rows) == (gluon, 64 if rows <= 64 else 128)


@pytest.mark.parametrize(
    ("release", "known"), [("3.5.1", False), ("3.6.0", True), ("3.7.1+git1", True), ("3.8.0", True), ("3.9.0", False), ("3.10.0", False)]
)
def test_another_triton_takes_the_other_kernel(release, known, monkeypatch):
    a_release(release, monkeypatch)
    sides = [(codec.packed_layout, 128) for codec in FORMATS["int8"].codecs()]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [fused.launched_in_tiles(90, 128, sides) in GLUON_TILES for _ in range(2)] == [known, known]
    assert len(told) == (not known)


@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
@pytest.mark.parametrize("masked", [False, True])
def test_its_launch_has_all_arguments(format, masked, monkeypatch):
    """On Hopper, without one."""
    launched = []

    def call(self, grid, *tensors, held=()):
        launched.append((self.kernel, {*self.kernel.arg_names} - self._named(tensors, held).keys() - self.fixed.keys()))

    a_release("3.6.0", monkeypatch)
    for module in (fused, plan):
        monkeypatch.setattr(module, "architecture", lambda device: (90, 132))
    monkeypatch.setattr("qkvcache.kernels.host.launch._callable", lambda kernel: False)
    monkeypatch.setattr(plan.Launcher, "__call__", call)
    plan._kind.cache_clear()
    query, attention_inputs = make(format, heads=2, group=4, queries=40, recent=46, tokens=240, dims=(128, 128), cuts=())
    mask = torch.ones(1, 1, 1, 240, dtype=torch.bool, device=DEVICE) if masked else None
    plan.attend_pages(query, attention_inputs.paged, mask, causal=True)
    plan._kind.cache_clear()
    assert [kernel is plan.gluon_kernel() for kernel, _ in launched] == [True, False]
    assert not any(missing for _, missing in launched)
