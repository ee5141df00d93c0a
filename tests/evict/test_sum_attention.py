"""Accumulated attention: torch references against a dense softmax, and kernels against the references."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qkvcache.evict.observe import observe_on_codes, observe_pages, observes_slots, sum_attention
from qkvcache.evict.prefill import prefill_with_lse
from qkvcache.evict.sum_attention import attend_observed
from qkvcache.kernels import attend, give_handle
from qkvcache.kernels.host.handles import ORDER
from qkvcache.storage import Storage
from tests.matrix import FORMATS, slowly
from tests.softmax import attention_weights
from tests.tolerance import rounding

from ..kernels.attention_inputs import assert_fake, assert_near, build
from ..kernels.test_pages import build as pages_of

in_torch = importlib.import_module("qkvcache.evict.sum_attention")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def data(*shape: int, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def dense_mass(query, key, observed, mask=None, *, power=1, **options) -> tuple[Tensor, Tensor]:
    """By definition, in float64: mass, and the log of normalisers."""
    weights, lse = attention_weights(query, key, mask, **options)
    shares = (weights * observed.double()[:, None, :, None]).unflatten(1, (key.shape[1], -1))
    return (shares**power).sum((2, 3)).float(), lse.float()


@pytest.fixture
def triton():
    triton = pytest.importorskip("triton")
    if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
        pytest.skip("needs a GPU, or Triton's interpreter")
    return triton


# Of attention on codes


def make(format: str, heads=2, group=2, queries=3, tokens=135, dim=64, dtype=torch.float32, first=3, recent=20, cuts=(60,)):
    key, value = (data(2, heads, tokens, dim, dtype=dtype) for _ in range(2))
    attention_inputs = build(FORMATS[format], key, value, first, recent, cuts)
    return data(2, heads * group, queries, dim, dtype=dtype), attention_inputs, torch.rand(2, queries, device=DEVICE)


OPTIONS = {
    "causal": {"causal": True},
    "softcap": {"softcap": 2.0, "causal": True},
    "sinks": {"sinks": torch.tensor([9.0, -50.0, 0.0, 2.0])},
    "mask": {"mask": (2, 1, 3, 135)},
    "mask of each head": {"mask": (1, 4, 3, 135), "causal": True},
    "mask of numbers": {"mask": (2, 1, 3, 135), "numbers": True, "scaling": 0.3},
}


def options_of(case: str) -> dict:
    options = dict(OPTIONS[case])
    if "mask" in options:
        visible = torch.rand(options["mask"], device=DEVICE) < 0.6
        visible[..., 0] = True
        options["mask"] = data(*visible.shape).masked_fill(~visible, -torch.inf) if options.pop("numbers", False) else visible
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(DEVICE)
    return options


@pytest.mark.parametrize("format", ["identity", "turboquant_3bit_nc"])
@pytest.mark.parametrize("case", OPTIONS)
def test_the_reference(case, format):
    query, attention_inputs, observed = make(format)
    options = options_of(case)
    out, attention_sums = attend_observed(query, attention_inputs, observed=observed, **options)
    assert torch.equal(out, attend(query, attention_inputs, **options))
    expected, _ = dense_mass(query, attention_inputs.key.dense(), observed, **options)
    torch.testing.assert_close(attention_sums, expected, rtol=rounding(64, 135), atol=rounding(64, 135) * 1e-2)


def test_hidden_tokens_have_no_mass():
    """Nor do padding queries give any, which may hold nan."""
    query, attention_inputs, observed = make("int8")
    mask = torch.ones(2, 1, 3, 135, dtype=torch.bool, device=DEVICE)
    mask[0, :, :, 5:20] = False
    mask[0, :, 1] = False
    query[1, :, 2] = torch.nan
    observed[1, 2] = 0
    out, attention_sums = attend_observed(query, attention_inputs, mask, observed=observed)
    assert not attention_sums[0, :, 5:20].any() and out[0].isfinite().all()
    torch.testing.assert_close(attention_sums.sum(-1), (2 * torch.stack([observed[0, ::2].sum(), observed[1].sum()]))[:, None].expand(2, 2))


def fused(query, inputs, observed, mask=None, **options) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the log of the normaliser and the sums, by kernels."""
    from qkvcache.evict.triton_sum_keys import sum_keys
    from qkvcache.kernels.attend.plan import plan_pages

    plan = plan_pages(query, inputs, mask, **options)
    out, lse, arguments = plan.run(query, inputs, options.get("sinks"))
    return out, lse, sum_keys(plan, lse, arguments, observed)


def check_fused(monkeypatch, query, attention_inputs, observed, mask=None, **options):
    from ..kernels.test_fused_attend import expect, guarded, tolerance

    with guarded(monkeypatch):
        out, lse, attention_sums = fused(query, attention_inputs.paged, observed, mask, **options)
    format = next(name for name, format in FORMATS.items() if format.codecs() == attention_inputs.paged.pages.codecs)
    expect(format, query, attention_inputs, mask, out, lse, 3 * tolerance(format, query.dtype), **options)
    _, expected = attend_observed(query.float(), attention_inputs, mask, observed=observed, **options)
    assert attention_sums.dtype == torch.float32
    # Weights in bf16 have 8 bits, to which the interpreter does not round: it cuts.
    limit = tolerance(format, query.dtype) + (0 if query.dtype == torch.float32 else 2**-7 if DEVICE.type == "cpu" else 2**-8)
    assert_near(attention_sums, expected, limit)
    assert not attention_sums[expected == 0].any()
    return attention_sums


QUICK = ("int8", "turboquant_4bit_nc")
every_format = pytest.mark.parametrize("format", slowly(FORMATS, QUICK))


@every_format
def test_fused(format, monkeypatch, triton):
    query, attention_inputs, observed = make(format, heads=2 if "tok" in format or "tensor" in format else 1, queries=1)
    attention_sums = check_fused(monkeypatch, query, attention_inputs, observed)
    torch.testing.assert_close(attention_sums.sum(-1), 2 * observed.expand(-1, attention_sums.shape[1]), rtol=1e-3, atol=0)


def test_a_query_counts_or_not(monkeypatch, triton):
    query, attention_inputs, _ = make("int8", heads=1, queries=1)
    observed = torch.arange(query.shape[0], device=DEVICE)[:, None] == 1
    attention_sums = check_fused(monkeypatch, query, attention_inputs, observed)
    assert not attention_sums[0].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_format
def test_fused_in_half(format, dtype, monkeypatch, triton):
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("the interpreter has no products of bfloat16")
    check_fused(monkeypatch, *make(format, dtype=dtype), causal=True)


@pytest.mark.parametrize("case", [case if "each head" in case else pytest.param(case, marks=pytest.mark.slow) for case in OPTIONS])
def test_fused_options(case, monkeypatch, triton):
    options = options_of(case)
    check_fused(monkeypatch, *make("int8_asymmetric"), options.pop("mask", None), **options)


FUSED = {
    "fp16": {"tokens": 70, "queries": 3, "dtype": torch.float16},
    "several blocks of rows, the last not full": {"group": 3, "queries": 7, "tokens": 80},
    "a block of rows": {"group": 4, "queries": 1, "tokens": 80},
    "fewer rows": {"group": 3, "queries": 1, "tokens": 80},
    "one row of each head": {"heads": 4, "group": 1, "queries": 1, "tokens": 80},
    "a full block": {"group": 8, "queries": 1, "tokens": 80},
    "full blocks": {"group": 2, "queries": 16, "tokens": 80},
    "queries of two heads": {"heads": 2, "group": 1, "queries": 2, "tokens": 80},
    "several slabs": {"tokens": 300, "cuts": (1, 65, 70, 200)},
    "no exact tokens": {"first": 0, "recent": 0},
    "none recent": {"recent": 0, "first": 17},
    "nothing packed": {"first": 5, "recent": 55},
    "one packed": {"first": 30, "recent": 29},
    "exact tokens of many tiles": {"tokens": 150, "first": 33, "recent": 50},
}
QUICK_SHAPES = "fp16", "several blocks of rows, the last not full", "several slabs"


@pytest.mark.parametrize("shape", [x if x in QUICK_SHAPES else pytest.param(x, marks=pytest.mark.slow) for x in FUSED])
@pytest.mark.parametrize("format", ["int8", pytest.param("turboquant_4bit_nc", marks=pytest.mark.slow)])
def test_fused_shapes(format, shape, monkeypatch, triton):
    given = {"heads": 1, "queries": 1, "tokens": 60, "cuts": ()} | FUSED[shape]
    check_fused(monkeypatch, *make(format, **given), causal=given["queries"] > 1)


def test_fused_hides(monkeypatch, triton):
    """What a mask hides has no mass, not even from a row that sees nothing; a padding query that holds nan gives none."""
    from ..kernels.test_fused_attend import guarded

    query, attention_inputs, observed = make("int8", heads=1, tokens=90, cuts=())
    mask = torch.ones(2, 1, 3, 90, dtype=torch.bool, device=DEVICE)
    mask[0, :, :, 4:30] = False
    mask[0, :, 1] = False
    query[1, :, 2], observed[1, 2] = torch.nan, 0
    expected = attend_observed(query, attention_inputs, mask, observed=observed)[1]
    with guarded(monkeypatch):
        attention_sums = fused(query, attention_inputs.paged, observed, mask)[2]
    torch.testing.assert_close(attention_sums, expected, rtol=5e-3, atol=1e-5)
    assert not attention_sums[0, :, 4:30].any()


def test_magnitudes(monkeypatch, triton):
    """Values of very different lengths: their scales are part of what weights are relative to."""
    lengths = torch.tensor([0.0, 1e-6, 1.0, 1e2, 1e6], device=DEVICE)[torch.arange(60, device=DEVICE) % 5]
    query, attention_inputs = data(1, 2, 1, 64), build(FORMATS["int8"], data(1, 1, 60, 64), data(1, 1, 60, 64) * lengths[:, None], 0, 0)
    observed = torch.ones(1, 1, device=DEVICE)
    expected = attend_observed(query, attention_inputs, observed=observed)[1]
    torch.testing.assert_close(fused(query, attention_inputs.paged, observed)[2], expected, rtol=5e-3, atol=1e-6)


def test_sums_are_by_slot_where_the_device_counts(monkeypatch, triton):
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    x, query, observed = (data(2, 2, 11, 64), data(2, 2, 11, 64)), data(2, 4, 1, 64), torch.ones(2, 1, device=DEVICE)
    held = Storage(FORMATS["int8"].codecs(), x, 0, 4, 60)
    held.append(x)
    inputs = held.attention_inputs()
    assert observes_slots(query, inputs)
    sums = observe_on_codes(query, inputs, observed=observed)[1]
    torch.testing.assert_close(sums, in_torch.observe_pages(query, inputs.paged, observed=observed)[1], rtol=5e-3, atol=1e-5)


def test_sums_are_the_numbers_of_queries():
    """Of each slot, and 0 where there is no token."""
    inputs = pages_of(FORMATS["int8"], [70, 0], ring=6, ring_tokens=[6, 3])
    query, observed = torch.randn(2, 4, 3, 64), torch.tensor([[1.0, 0, 2], [0, 1, 1]])
    sums = in_torch.observe_pages(query, inputs, causal=True, observed=observed)[1]
    torch.testing.assert_close(sums.sum(-1), (2 * observed.sum(1))[:, None].expand(2, 2))
    assert (sums[inputs.columns(inputs.pages.read(0, inputs.max_length)[1]).expand_as(sums) < 0] == 0).all()


@pytest.mark.parametrize("case", ["rows", "heads", "longest"])
def test_sums_of_pages(case, monkeypatch, triton):
    """Where the longest row has fewer tokens than its last tile, the end of the tile is not where the ring's weights lie."""
    from ..kernels.test_fused_attend import guarded, tolerance

    if case == "longest":
        inputs = pages_of(FORMATS["int8"], [[70, 74], [66, 3]], ring=6, device=DEVICE)
        inputs = replace(inputs, max_length=74)
    else:
        lengths = [[150, 40], [3, 70]] if case == "heads" else [150, 3]
        inputs = pages_of(FORMATS["int8"], lengths, begin=1, ring=19, ring_tokens=[19, 17], device=DEVICE)
    for queries in (1, 5) if case != "longest" else (1,):
        observed, query = torch.rand(2, queries, device=DEVICE), torch.randn(2, 4, queries, 64, device=DEVICE).half()
        with guarded(monkeypatch):
            sums = fused(query, inputs, observed, causal=queries > 1)[2]
        limit, wanted = (
            tolerance("int8", query.dtype),
            in_torch.observe_pages(query.float(), inputs, causal=queries > 1, observed=observed)[1],
        )
        torch.testing.assert_close(sums, wanted, rtol=limit, atol=10 * limit)


def test_the_operator(triton, monkeypatch):
    """What a compiled graph calls does what the functions do."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    inputs = pages_of(FORMATS["turboquant_3bit_nc"], [36, 20], sinks=2, ring=4, device=DEVICE)
    query, observed, sinks = torch.randn(2, 4, 1, 64, device=DEVICE).half(), torch.ones(2, 1, device=DEVICE), data(4)
    give_handle(inputs)
    shape = [inputs.ring[1].shape[1], sum(inputs.slots), inputs.ring[1].shape[3]]
    arguments = query, inputs.handle, ORDER[query.device], shape, None, observed, sinks, 0.2, 10.0, False
    wanted = observe_pages(query, inputs, observed=observed, sinks=sinks, scaling=0.2, softcap=10.0, causal=False)
    for x, y in zip(torch.ops.qkvcache.observe(*arguments), wanted, strict=True):
        assert torch.equal(x, y)
    assert_fake(torch.ops.qkvcache.observe, arguments)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_dispatch(kernels, monkeypatch, request):
    if kernels == "triton":
        request.getfixturevalue("triton")
    monkeypatch.setenv("QKVCACHE_KERNELS", kernels)
    query, attention_inputs, observed = make("int8", heads=1, queries=1, tokens=50, cuts=())
    out, attention_sums = observe_on_codes(query, attention_inputs, observed=observed)
    expected_out, expected = attend_observed(query, attention_inputs, observed=observed)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=3e-3)
    torch.testing.assert_close(attention_sums, expected, rtol=3e-3, atol=1e-6)


# Of a prefill

PREFILLS = [  # heads, group, queries, tokens
    (1, 1, 1, 1),
    (2, 2, 7, 7),
    (1, 3, 130, 130),
    (2, 1, 5, 130),
    (1, 2, 1, 200),
    (1, 2, 97, 140),
]


def prefill(heads, group, queries, tokens, dim=64, dtype=torch.float16):
    """Rows are padded on the left, the second by a quarter."""
    query, key = data(2, heads * group, queries, dim, dtype=dtype), data(2, heads, tokens, dim, dtype=dtype)
    visible = torch.ones(2, tokens, dtype=torch.bool, device=DEVICE)
    visible[1, : tokens // 4] = False
    observed = torch.rand(2, queries, device=DEVICE) * visible[:, tokens - queries :]
    return query, key, observed, visible


def check_prefill(function, limit, query, key, observed, visible, later=False, columns=None, **options):
    """`later`: queries see all tokens, those after their own too."""
    options.setdefault("scaling", 64**-0.5)
    expected, lse = dense_mass(query, key, observed, None if visible is None else visible[:, None, None], causal=not later, **options)
    expected = expected[..., :columns]
    for known in (None, lse):
        attention_sums = function(query, key, observed, visible, lse=known, causal=not later, columns=columns, **options)
        assert attention_sums.dtype == torch.float32 and attention_sums.shape == expected.shape
        torch.testing.assert_close(attention_sums, expected, rtol=limit * options.get("power", 1), atol=limit * 1e-2)
        if columns is None and not {"sinks", "power"} & options.keys():
            counted = observed.sum(-1, keepdim=True) * (query.shape[1] // key.shape[1])
            torch.testing.assert_close(attention_sums.sum(-1), counted.expand(-1, key.shape[1]), rtol=limit, atol=limit)
        if visible is not None:
            assert not attention_sums.masked_select(~visible[:, None, :columns]).any()


PREFILL_OPTIONS = [
    {},
    {"later": True},
    {"power": 3},
    {"columns": 43},
    {"softcap": 1.5},
    {"sinks": torch.tensor([9.0, -20.0, 0.5])},
    {"scaling": 0.4},
]


@pytest.mark.parametrize("shape", PREFILLS)
@pytest.mark.parametrize("block", [2**24, 300])
def test_column_mass_in_torch(shape, block, monkeypatch):
    monkeypatch.setattr(in_torch, "BLOCK", block)
    query, key, observed, visible = prefill(*shape, dtype=torch.float32)
    check_prefill(in_torch.sum_attention, rounding(64, 200), query, key, observed, visible)
    check_prefill(in_torch.sum_attention, rounding(64, 200), query, key, torch.ones_like(observed), None)


@pytest.mark.parametrize("options", PREFILL_OPTIONS, ids=str)
def test_column_mass_in_torch_with_options(options):
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    check_prefill(in_torch.sum_attention, rounding(64, 200), *prefill(1, 3, 30, 50, dtype=torch.float32), **options)


@pytest.fixture
def columns(triton, monkeypatch):
    """The kernels, whose buffers hold nan at first."""
    from qkvcache.evict import triton_sum_attention

    def poisoned(*shape, dtype, device):
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(triton_sum_attention.torch, "empty", poisoned)
    return triton_sum_attention


@pytest.mark.parametrize("shape", [x if x[3] < 8 or x[2] == 97 else pytest.param(x, marks=pytest.mark.slow) for x in PREFILLS])
def test_column_mass(shape, columns):
    query, key, observed, visible = prefill(*shape)
    check_prefill(columns.sum_attention, 2e-3, query, key, observed, visible)
    check_prefill(columns.sum_attention, 2e-3, query, key, torch.ones_like(observed), None)


@pytest.mark.parametrize("options", PREFILL_OPTIONS, ids=str)
def test_column_mass_with_options(options, columns):
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    check_prefill(columns.sum_attention, 2e-3, *prefill(1, 3, 30, 70), **options)


def test_tokens_that_only_some_heads_have(triton):
    """With known normalisers the kernels leave these out too; keys that are not there hold anything."""
    query, key, observed, _ = prefill(2, 3, 9, 70)
    visible = torch.rand(2, 2, 70, device=DEVICE) < 0.6
    visible[..., 61:] = True
    expected, lse = dense_mass(query, key, observed, visible.repeat_interleave(3, dim=1)[:, :, None], causal=True, scaling=0.2)
    key = key.masked_fill(~visible[..., None], 100.0)
    for known in (None, lse):
        sums = sum_attention(query, key, observed, visible, scaling=0.2, lse=known)
        torch.testing.assert_close(sums, expected, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("dim", [96, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (80, 128, 256))])
def test_column_mass_of_other_widths(dim, columns):
    check_prefill(columns.sum_attention, 2e-3, *prefill(1, 2, 30, 70, dim=dim), scaling=0.1)


def test_column_mass_of_slices(columns):
    """Queries as a projection leaves them, of which the last are taken; a normaliser of infinity and nan where padding is."""
    query, key, observed, visible = prefill(1, 2, 90, 90)
    query, key = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    check_prefill(columns.sum_attention, 2e-3, query[:, :, -7:], key, observed[:, -7:], visible)
    expected, lse = dense_mass(query, key, observed, visible[:, None, None], causal=True, scaling=0.1)
    lse[1, :, :5], lse[1, :, 5:9] = torch.nan, -torch.inf
    for function in (columns.sum_attention, in_torch.sum_attention):
        attention_sums = function(query, key, observed, visible, scaling=0.1, lse=lse)
        torch.testing.assert_close(attention_sums, expected, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_column_mass_dispatch(dtype, monkeypatch, triton):
    """fp32 is left to torch."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    check_prefill(sum_attention, 2e-3, *prefill(1, 2, 20, 30, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4, 300), (4, 1, 64), (1, 8, 1000)])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_prefill_with_lse(backend, shape, dtype):
    heads, group, tokens = shape
    query, key, _, _ = prefill(heads, group, tokens, tokens, dim=128, dtype=dtype)
    value = data(2, heads, tokens, 128, dtype=dtype)
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, scale=0.1, enable_gqa=True)
    with sdpa_kernel(backend):
        out, lse = prefill_with_lse(query, key, value, 0.1)
        # cuDNN may take another program where the normaliser is asked for.
        limit = 0 if backend == SDPBackend.FLASH_ATTENTION else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, sdpa(query, key, value), rtol=limit, atol=limit)
    ones = torch.ones(2, tokens, device=DEVICE)
    _, expected = dense_mass(query, key, ones, causal=True, scaling=0.1)
    torch.testing.assert_close(lse, expected, rtol=1e-3, atol=1e-3)


def test_prefill_with_lse_is_for_gpus():
    x = torch.randn(1, 2, 5, 64)
    assert prefill_with_lse(x, x, x, 0.1) is None
