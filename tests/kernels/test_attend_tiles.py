"""The kernel for many query rows against the torch reference, and which inputs it is left."""

from __future__ import annotations

import pytest
import torch

from qkvcache.attention import route
from qkvcache.formats.int4 import Int4
from qkvcache.kernels import attend, attends_in_tiles
from qkvcache.select import select_blocks as selecting
from qkvcache.select.budget import Budget
from tests.matrix import FORMATS, slowly

from .attention_inputs import assert_near, build
from .test_fused_attend import DEVICE, KINDS, apart, data, expect, fused, guarded, make, plan, run, tolerance
from .test_pages import TWICE
from .test_pages import compare as compare_pages
from .test_step import holding

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about nan and infinity, in the interpreter
QUICK = ("int8", "int8_asymmetric", "int4", "nvfp4", "turboquant_3bit_nc", "hadaquant_k4v4")
QUANTIZED = [format for format in FORMATS if format != "identity"]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")


def compare(monkeypatch, format, query, attention_inputs, mask=None, limit=None, **options) -> None:
    assert attends_in_tiles(query, attention_inputs, mask)
    out, lse = run(monkeypatch, query, attention_inputs, mask, causal=True, **options)
    limit = limit or tolerance(format, query.dtype) + TWICE
    expect(format, query, attention_inputs, mask, out, lse, limit, causal=True, **options)


@pytest.mark.parametrize("format", slowly(QUANTIZED, QUICK))
def test_every_format(format, monkeypatch):
    """Two slabs, several splits, odd tails, a block of rows that is not full."""
    heads = 2 if "tok" in format or "tensor" in format else 1  # a scale that heads share
    query, attention_inputs = make(format, heads=heads, group=4, queries=9, tokens=240, cuts=(60,))
    compare(monkeypatch, format, query, attention_inputs)


@pytest.mark.parametrize("format", slowly(sorted(KINDS.keys() - {"identity"}), ["turboquant_4bit_nc"]))
def test_wide_blocks(format, monkeypatch):
    """More rows than two blocks have, widths that differ."""
    query, attention_inputs = make(format, heads=1, group=8, queries=17, tokens=120, dims=(128, 64), cuts=())
    compare(monkeypatch, format, query, attention_inputs)


@pytest.mark.parametrize("format", slowly(sorted(KINDS.keys() - {"identity"}), ["int8"]))
def test_everything_together(format, monkeypatch):
    """Padding, softcap, attention sinks."""
    query, attention_inputs = make(format, batch=2, heads=1, group=3, queries=12, tokens=150, dims=(64, 128), cuts=())
    mask = torch.rand(2, 1, 1, 150, device=DEVICE) < 0.7
    mask[..., -12:] = True
    sinks = torch.tensor([-1.0, 0.5, 3.0], device=DEVICE)
    compare(monkeypatch, format, query, attention_inputs, mask, softcap=3.0, sinks=sinks, scaling=0.2)


@pytest.mark.parametrize(("format", "masked"), [*((format, False) for format in slowly(QUANTIZED, QUICK)), ("int8", True)])
def test_chosen_blocks(format, masked, monkeypatch):
    """The blocks of each head, of which a tile has several."""
    batch = 2 if masked else 1
    query, attention_inputs = make(format, batch=batch, heads=2, group=4, queries=9, tokens=250, cuts=(60,))
    mask = None
    if masked:
        mask = torch.rand(2, 1, 1, 250, device=DEVICE) < 0.7
        mask[..., -9:] = True
    inputs = attention_inputs.paged
    read = selecting.over_blocks(inputs, selecting.select_blocks(query.float(), inputs, Budget(100), mask))
    assert fused.tiled(query, read, mask, {"causal": True})
    compare_pages(monkeypatch, format, query, read, mask, more=TWICE, causal=True)


@pytest.mark.parametrize("columns", [slice(0, 20), slice(100, 101), slice(0, 128)], ids=["first", "one", "a split"])
def test_padding(columns, monkeypatch):
    query, attention_inputs = make("int8", batch=2, heads=1, group=4, queries=9, tokens=180, cuts=())
    mask = torch.ones(2, 1, 1, 180, dtype=torch.bool, device=DEVICE)
    mask[1, ..., columns] = False
    compare(monkeypatch, "int8", query, attention_inputs, mask)


ZONES = {
    "none first": {"first": 0},
    "one packed": {"first": 30, "recent": 29},
    "whole tiles": {"first": 0, "recent": 9, "tokens": 137, "cuts": (64,)},
    "several slabs": {"tokens": 300, "cuts": (1, 65, 70, 200)},
}


@pytest.mark.parametrize("zones", ZONES.values(), ids=ZONES)
def test_zones(zones, monkeypatch):
    query, attention_inputs = make("int4_vllm", **{"heads": 1, "group": 4, "queries": 9, "tokens": 60, "cuts": ()} | zones)
    compare(monkeypatch, "int4_vllm", query, attention_inputs)


def test_strides(monkeypatch):
    """Queries and exact tokens as a projection leaves them."""
    query, attention_inputs = make("int8", group=4, queries=9, tokens=90, cuts=())
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    apart(attention_inputs)
    compare(monkeypatch, "int8", query, attention_inputs)


@pytest.mark.parametrize("format", slowly(sorted(KINDS.keys() - {"identity"}), ["int8", "turboquant_4bit_nc"]))
def test_magnitudes(format, monkeypatch):
    """Vectors of zeros, tokens and queries of very different lengths, chunks apart: fp16 holds no such scales."""
    high = 1e4 if format in ("int8", "fp8_token", "int4_vllm") else 1e3
    lengths = torch.tensor([0.0, 1e-4, 1.0, 1e2, high], device=DEVICE)[torch.arange(150, device=DEVICE) % 5]
    lengths[:70] *= 1e-4
    query, attention_inputs = make(format, heads=1, group=4, queries=9, tokens=150, cuts=(60,))
    key, value = (data(1, 1, 150, 64, dtype=torch.float32) * lengths[order, None] for order in (torch.arange(150), torch.randperm(150)))
    attention_inputs = build(FORMATS[format], key.half(), value.half(), 0, 20, (60,))
    compare(monkeypatch, format, query * 1e-3, attention_inputs, limit=tolerance(format, torch.bfloat16) * 2)


@pytest.mark.parametrize("seen", [70, 100, 130])
def test_tokens_counted_on_the_device(seen, monkeypatch):
    """The ring began anew, and what is free would show."""
    store = holding("int8", seen, ring=20)
    query, inputs = data(2, 4, 9, 64), store.compiled_inputs(store.residual)
    mask = torch.ones(2, 1, 1, 130, dtype=torch.bool, device=DEVICE)
    mask[1, ..., :40] = False
    assert attends_in_tiles(query, inputs, mask)
    with guarded(monkeypatch):
        out = plan.attend_pages(query, inputs.paged, mask, causal=True)[0]
    assert_near(out, attend(query.float(), store.attention_inputs(), mask[..., :seen], causal=True), 4e-3)


OTHERS = {
    "not quantized": ({"format": "identity"}, {}),
    "few rows": ({"queries": 8}, {}),
    "fp32": ({"dtype": torch.float32}, {}),
    "another width": ({"dims": 96}, {}),
    "nothing packed": ({"first": 60, "recent": 30, "tokens": 90, "cuts": ()}, {}),
    "a mask of each query": ({}, {"mask": torch.ones(1, 1, 9, 135, dtype=torch.bool)}),
    "an additive mask": ({}, {"mask": torch.zeros(1, 1, 1, 135)}),
    "not causal": ({}, {"causal": False}),
}


@pytest.mark.parametrize(("shape", "given"), OTHERS.values(), ids=OTHERS)
def test_what_other_kernels_serve(shape, given):
    query, attention_inputs = make(**{"format": "int8", "group": 4, "queries": 9} | shape)
    options = {"causal": True} | given
    mask = options.pop("mask", None)
    assert fused.tiled(query, attention_inputs.paged, mask, options) is None
    assert attends_in_tiles(query, attention_inputs, mask) == (not shape and mask is None)


@pytest.mark.parametrize(("group_size", "served"), [(64, True), (16, True), (8, False)])
def test_groups(group_size, served, monkeypatch):
    """A plane of 32 words lies in one group or in two."""
    key, value = data(1, 1, 60, 128), data(1, 1, 60, 128)
    attention_inputs = build(Int4("group", group_size), key, value, 0, 20)
    query = data(1, 4, 9, 128)
    assert attends_in_tiles(query, attention_inputs, None) == served
    if served:
        compare(monkeypatch, "int4", query, attention_inputs)


def test_the_path_depends_on_shapes_and_options_alone(monkeypatch):
    monkeypatch.setattr(route, "MAX_FUSED_ROWS", 32)
    query, attention_inputs = make("int8", heads=2, group=4, queries=9, tokens=130)

    def path(query=query, implementation="sdpa", **options):
        return route.path_of(implementation, query, attention_inputs, **options)

    assert path(query[:, :, :8]) == "codes" and {path() for _ in range(9)} == {"tiles"}
    assert path(query.float()) == "dense"
    assert path(softcap=5.0) == "tiles" and path(softcap=5.0, implementation="flash_attention_2") == "dense"
    monkeypatch.setattr(route, "CHUNK_BYTES", 8 * query.numel() - 1)
    assert path() == "chunks"
    monkeypatch.setenv("QKVCACHE_KERNELS", "torch")
    assert path() == "codes" and path(query.expand(-1, -1, 9, -1).repeat(1, 1, 2, 1)) == "chunks"
