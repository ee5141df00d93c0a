"""The fused kernel where rows share their first pages, which it reads once for all of them, against the torch reference."""

from __future__ import annotations

import functools

import pytest
import torch

from qkvcache.kernels import PagedInputs
from tests.matrix import FORMATS, slowly

from .paged_inputs import build, divided
from .test_fused_attend import BFLOAT16, DEVICE, data, fused, plan
from .test_pages import TWICE, compare

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about nan and infinity, in the interpreter
QUICK = ("identity", "int8_token", "nvfp4", "turboquant_4bit_nc", "hadaquant_k3v2")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(fused, "LEAST_SPARED", 1)


def sharing(format: str, lengths: list[int], pages: int, branches: int = 0, **options) -> PagedInputs:
    """Rows of `lengths` tokens; each `branches` of them, or all, share as many pages."""
    inputs = build(FORMATS[format], lengths, shared=pages, device=DEVICE, **options)
    return divided(inputs, branches=branches or len(lengths), shared=64 * pages)


compare = functools.partial(compare, more=TWICE)


@pytest.fixture
def shared_launches(monkeypatch) -> list[int]:
    """Query rows of the launches over shared tokens."""
    seen, call = [], plan._shared

    def spied(*args):
        shared = call(*args)
        seen.append(shared.launches.groups * shared.launches.queries)
        return shared

    monkeypatch.setattr(plan, "_shared", spied)
    return seen


@pytest.mark.parametrize("format", slowly(FORMATS, QUICK))
def test_every_format(format, monkeypatch, shared_launches):
    """Rows that have no other tokens in pages, some, and many; rings that are not full."""
    inputs = sharing(format, [128, 130, 250], 2, ring_tokens=[5, 0, 8])
    compare(monkeypatch, format, data(3, 4, 1, 64), inputs)
    assert shared_launches == [6]


SHAPES = {
    "pairs": {"lengths": [70, 90, 64, 100], "branches": 2, "format": "turboquant_3bit_nc"},
    "as many rows as tiles have": {"lengths": [64] * 9, "group": 4, "format": "turboquant_4bit_nc"},
    "more rows than a block of tiles": {"lengths": [66] * 17, "group": 4},
    "queries of a draft": {"lengths": [70, 90, 80], "queries": 3},
    "queries in two blocks": {"lengths": [70, 90], "queries": 5, "group": 4},
    "no exact tokens": {"lengths": [70, 90], "sinks": 0, "ring": 0, "heads": 2},
    "widths that differ": {"lengths": [70, 90], "dims": (128, 64), "format": "turboquant_3bit_nc"},
    "a width of no power of two": {"lengths": [70, 90], "dims": (80, 80), "heads": 2},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape, monkeypatch, shared_launches):
    given = {"heads": 1, "dims": (64, 64), "group": 2, "queries": 1, "branches": 0, "format": "int8"} | shape
    group, queries, lengths, branches, format = (given.pop(name) for name in ("group", "queries", "lengths", "branches", "format"))
    inputs = sharing(format, lengths, 1, branches, **given)
    query = data(len(lengths), queries, group * given["heads"], given["dims"][0]).transpose(1, 2)
    compare(monkeypatch, format, query, inputs, causal=queries > 1)
    assert shared_launches == [(branches or len(lengths)) * queries * group]


MASKS = {
    "columns of each row": lambda: torch.rand(4, 1, 1, 140, device=DEVICE) < 0.7,
    "columns of all rows": lambda: torch.rand(1, 1, 1, 140, device=DEVICE) < 0.7,
    "of each head and query": lambda: torch.rand(4, 4, 2, 140, device=DEVICE) < 0.7,
    "additive": lambda: torch.randn(1, 1, 2, 140, device=DEVICE),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_and_options(mask, monkeypatch, shared_launches):
    inputs = sharing("int8", [70, 90, 64, 100], 1, 2, heads=1, sinks=0)
    sinks = torch.tensor([-1.0, 0.5, 3.0, 0.0], device=DEVICE)
    compare(monkeypatch, "int8", data(4, 4, 2, 64), inputs, mask(), softcap=3.0, sinks=sinks, scaling=0.2)
    assert shared_launches == [16]


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_dtypes(dtype, monkeypatch, shared_launches):
    inputs = sharing("int8", [70, 90], 1, dtype=dtype)
    compare(monkeypatch, "int8", data(2, 4, 1, 64, dtype=dtype), inputs)
    assert shared_launches


OTHERS = {
    "no tokens": {"shared": 0},
    "rows of their own": {"branches": 1},
    "a launch of its own": {"queries": 9},
}


@pytest.mark.parametrize("given", OTHERS.values(), ids=OTHERS)
def test_what_is_read_for_each_row(given, shared_launches):
    given = {"queries": 1} | given
    queries, changes = given.pop("queries"), {name: given.pop(name) for name in ("shared", "branches") if name in given}
    inputs = divided(sharing("int8", [70, 90], 1, ring=12, sinks=0), **changes)
    plan.attend_pages(data(2, 8, queries, 64), inputs, causal=queries > 1, **given)
    assert not shared_launches
