"""What comes into a layer that forgets tokens, and what goes: the kernels against torch operations, everything else bit-identical."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from qkvcache.evict import dispatch as evict_dispatch
from qkvcache.evict.slot_pages import SlotPages
from qkvcache.evict.static import StaticTensors, append_token, evict_token
from qkvcache.kernels import give_handle
from qkvcache.kernels.host import dispatch
from qkvcache.kernels.host.handles import ORDER
from tests.kernels.attention_inputs import assert_fake, by_address
from tests.kernels.paged_inputs import inputs_of
from tests.matrix import FORMATS, slowly

triton = pytest.importorskip("triton")
if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

from qkvcache.evict import triton_static as kernels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, SENTINEL = 6, 0xA5
SHARED = "int8_token"
EXACT = ("identity", SHARED)
ROUNDED = {"int8": 0.0 if DEVICE.type == "cpu" else 0.01}
"""Share of codes that may differ: a GPU divides otherwise in kernels than in torch."""
QUICK = (*EXACT, "turboquant_4bit_nc", "hadaquant_k4v4")


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    x = torch.empty(shape, dtype=dtype, device=DEVICE)
    x.view(torch.uint8).fill_(SENTINEL)
    return x


@dataclass(eq=False)
class Layer(StaticTensors):
    """Every byte that a step may write is the sentinel, but for what counts, and for the ring."""

    tokens: SlotPages

    def copy(self) -> Layer:
        """The same tensors elsewhere, in pages of their own."""
        tokens, (sinks, ring) = copy.deepcopy(self.tokens), copy.deepcopy((self.inputs.sinks, self.inputs.ring))
        others = copy.deepcopy((self.records, self.column_mask, self.row_lengths, self.columns))
        return Layer(inputs_of(tokens.pages, sinks, ring), *others, tokens)

    def tensors(self) -> list[Tensor]:
        """All that a step may write."""
        return [*(slab.data for slab in self.tokens.pool.slabs), *super().tensors()]

    def token(self) -> tuple[Tensor, Tensor]:
        """As a projection leaves it: channels within a longer row, heads beside them."""
        rows, heads = self.ring[0].shape[:2]
        wide = (torch.randn(rows, 1, heads, x.shape[3] + 8, device=DEVICE).to(x.dtype) for x in self.ring)
        return tuple(x[..., 4:-4].transpose(1, 2) for x in wide)


def made(format: str, rows=1, heads=2, dims=(64, 80), dtype=torch.float16, exact=0, width=3, others=1, slots: int = SLOTS) -> Layer:
    codecs = FORMATS[format].codecs()
    ring = tuple(torch.randn(rows, heads, width, dim, device=DEVICE).to(dtype) for dim in dims)
    tokens = by_address(SlotPages(codecs, ring))
    if slots:
        tokens.reserve(slots)
    for slab in tokens.pool.slabs:
        slab.data.fill_(SENTINEL)
    tokens.calibrate(ring)
    positions = torch.randint(-1, 50, (rows, 1, slots + width), device=DEVICE).int().expand(-1, heads, -1).contiguous()
    records = {str(i): torch.randn(rows, heads, slots + width, device=DEVICE) for i in range(others)}
    return Layer(
        inputs_of(tokens.pages, tuple(poisoned(rows, heads, exact, dim, dtype=dtype) for dim in dims), ring),
        records={"positions": positions} | records,
        column_mask=torch.rand(rows, exact + slots + width, device=DEVICE) < 0.5,
        row_lengths=torch.randint(0, 40, (rows,), device=DEVICE),
        columns=torch.full((1,), 41, device=DEVICE),
        tokens=tokens,
    )


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same(ours: Layer, theirs: Layer, share: float = 0.0) -> None:
    """The same bits, but for a `share` of the codes that were written; their scales up to rounding then."""
    for got, wanted in zip(StaticTensors.tensors(ours), StaticTensors.tensors(theirs), strict=True):
        assert torch.equal(bits(got), bits(wanted))
    if not share:
        assert all(map(torch.equal, ours.tensors(), theirs.tensors()))
        return
    for side in (0, 1):
        taken = [layer.tokens.pages.take(side, layer.tokens.pages.slots(torch.arange(SLOTS, device=DEVICE))) for layer in (ours, theirs)]
        for got, wanted in zip(*(codes.values() for codes in taken), strict=True):
            written = (bits(wanted) != SENTINEL).any(-1)
            assert bool((bits(got)[~written] == SENTINEL).all())
            got, wanted = got[written], wanted[written]
            if got.is_floating_point():
                torch.testing.assert_close(got, wanted, rtol=2e-3, atol=1e-6)
            else:
                assert not got.numel() or (bits(got) != bits(wanted)).float().mean() <= share


@pytest.mark.parametrize("is_valid", [None, "some"])
@pytest.mark.parametrize(("rows", "heads", "dims"), [(1, 1, (64, 64)), (3, 3, (80, 64)), (3, 8, (64, 80))])
def test_arrivals(rows, heads, dims, is_valid):
    """Every kind of record, given or zero or not there; a ring of one column; counts that wrap."""
    for others, width in ((0, 1), (1, 3), (3, 4)):
        layer = made("identity", rows, heads, dims, width=width, others=others, exact=others)
        twin = layer.copy()
        for step in range(2):
            x = layer.token()
            new = [None if i == step else torch.randn(rows, heads, 1, device=DEVICE) for i in range(others)]
            who = torch.tensor([True, False, True], device=DEVICE)[:rows] ^ bool(step) if is_valid else None
            kernels.append_token(layer, x, new, who)
            append_token(twin, x, new, who)
            same(layer, twin)
        assert int(layer.columns) == 43


def test_many_heads_in_rows_that_lie_apart():
    """More heads than a tile has; whether a token is real, and its records, as views."""
    layer = made("identity", 2, 70, (80, 64), dtype=torch.bfloat16, others=1)
    twin, x = layer.copy(), layer.token()
    new = torch.randn(70, 2, 3, device=DEVICE)[..., 1:2].transpose(0, 1)
    is_valid = torch.tensor([[True, False], [False, True]], device=DEVICE)[:, 1]
    kernels.append_token(layer, x, [new], is_valid)
    append_token(twin, x, [new], is_valid)
    same(layer, twin)


def orders(layer: Layer) -> list[Tensor]:
    """In which heads differ, and some forget the token; in which slots are alike, of which the first goes; in which all forget it."""
    shape = *layer.ring[0].shape[:2], layer.slots + 1
    mixed = torch.randint(-(2**62), 2**62, shape, device=DEVICE)
    mixed[0, 0, -1] = mixed.min() - 1
    alike = torch.randint(0, 9, shape, device=DEVICE)
    alike[..., 1::2] = -(2**40)
    none = alike.clone()
    none[..., -1] = -(2**63) + 1
    return [mixed, alike, none]


def compare(layer: Layer, twin: Layer, order: Tensor, share: float = 0.0, how=kernels.evict_token) -> Tensor:
    where = how(layer, order)
    assert torch.equal(where, evict_token(twin, order))
    same(layer, twin, share)
    return where


@pytest.mark.parametrize("shape", slowly([(1, 1, (64, 64)), (2, 3, (80, 64)), (1, 8, (64, 80))], [(2, 3, (80, 64))]))
@pytest.mark.parametrize("format", slowly(["identity", "int8"], ["int8"]))
def test_retirements(format, shape):
    rows, heads, dims = shape
    seen = set()
    for exact, others, width in ((0, 1, 1), (2, 3, 4), (3, 0, 2)):
        layer = made(format, rows, heads, dims, exact=exact, width=width, others=others)
        twin = layer.copy()
        for order in (*orders(layer), *orders(layer)):
            where = compare(layer, twin, order, ROUNDED.get(format, 0.0))
            seen |= set(where.flatten().tolist())
            for x in (layer.row_lengths, twin.row_lengths):
                x.add_(1)
            for x in (layer.records["positions"], twin.records["positions"]):  # what leaves next is one of the first tokens, or empty
                at = layer.row_lengths % width
                x.scatter_(2, (SLOTS + at)[:, None, None].expand(-1, heads, 1), int(at[0]) - 1)
    assert {-1, 0, 1, -2} <= seen or rows * heads == 1


def test_the_least_of_many():
    """More columns than are compared at once; the least in the first of them, the last, and between, twice."""
    layer = made("identity", 1, 4, slots=2500)
    layer.records["positions"].fill_(7)
    order = torch.randint(0, 2**62, (1, 4, 2501), device=DEVICE)
    for head, columns in enumerate(((0,), (2500,), (1030, 2100), (1023, 1024))):
        order[0, head, list(columns)] = -5
    assert compare(layer, layer.copy(), order).tolist() == [[0, -1, 1030, 1023]]


@pytest.mark.parametrize("format", slowly(QUICK, QUICK))
def test_formats(format, monkeypatch):
    """By dispatch: formats that share a scale among heads run as torch operations."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    layer = made(format, 1, 3, (64, 64), exact=1, dtype=torch.float32)
    dispatch.prepare(layer.inputs.pages.codecs, (64, 64), torch.float32, DEVICE)
    share = 0.0 if format in EXACT else ROUNDED.get(format, 0.01)
    for order in orders(layer):
        compare(layer, layer.copy(), order, share, evict_dispatch.evict_token)


def test_no_slots():
    """A budget that is all recent tokens: what leaves the ring goes to the first zone, or is forgotten."""
    layer = made("int8", 2, 2, exact=2, slots=0)
    for positions in ([5, 1], [0, -1]):
        layer.records["positions"].copy_(torch.tensor(positions, device=DEVICE)[:, None, None])
        where = compare(layer, layer.copy(), torch.zeros(2, 2, 1, dtype=torch.int64, device=DEVICE))
        assert where[:, 0].tolist() == [-2 - n if 0 <= n < 2 else -1 for n in positions]


@pytest.mark.parametrize("by", ["torch", "triton"])
def test_what_the_compiler_is_told(by, monkeypatch):
    """Which tensors operators return."""
    monkeypatch.setenv("QKVCACHE_KERNELS", by)
    layer = made("int8", 1, 2, exact=1)
    x, new = layer.token(), [torch.randn(1, 2, 1, device=DEVICE)]
    give_handle(layer.inputs)
    static = layer.inputs.handle, ORDER[x[0].device], *layer.arguments
    torch.ops.qkvcache.append_token(*static, *x, new, None)
    assert_fake(torch.ops.qkvcache.evict_token, (*static, orders(layer)[0]))
