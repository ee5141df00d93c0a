"""What comes into a layer that forgets tokens, and what goes: the kernels against torch operations, everything else bit-identical."""

from __future__ import annotations

import pytest
import torch
from matrix import slowly
from torch import Tensor

from qkvcache.formats import REGISTRY
from qkvcache.kernels import dispatch, number
from qkvcache.kernels import retire as retire_by_dispatch
from qkvcache.kernels.retire import arrive, retire

triton = pytest.importorskip("triton")
if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

from qkvcache.kernels import triton_retire as kernels  # noqa: E402

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


class Layer:
    """Every byte that a step may write is the sentinel, but for what counts, and for the ring."""

    def __init__(self, format: str, rows=1, heads=2, dims=(64, 80), dtype=torch.float16, exact=0, width=3, others=1):
        self.codecs = REGISTRY[format].codecs()
        self.dims, self.shape, self.dtype, self.exact, self.width = dims, (rows, heads), dtype, exact, width
        self.ring = tuple(torch.randn(rows, heads, width, dim, device=DEVICE).to(dtype) for dim in dims)
        self.first = tuple(poisoned(rows, heads, exact, dim, dtype=dtype) for dim in dims)
        self.planes = []
        for codec, x in zip(self.codecs, self.ring, strict=True):
            each, _ = codec.allocate(x, SLOTS, per_head=True, make=lambda shape, **options: poisoned(*shape, dtype=options["dtype"]))
            self.planes.append(each | codec.fit(x))
        self.records = [torch.randint(-1, 50, (rows, 1, SLOTS + width), device=DEVICE).int().expand(-1, heads, -1).contiguous()]
        self.records += [torch.randn(rows, heads, SLOTS + width, device=DEVICE) for _ in range(others)]
        self.shown = torch.rand(rows, exact + SLOTS + width, device=DEVICE) < 0.5
        self.seen = torch.randint(0, 40, (rows,), device=DEVICE)
        self.columns = torch.full((1,), 41, device=DEVICE)

    def tensors(self) -> list[Tensor]:
        planes = [plane for side in self.planes for plane in side.values()]
        return [*self.ring, *self.first, *self.records, self.shown, self.seen, self.columns, *planes]

    def copy(self) -> Layer:
        twin = object.__new__(Layer)
        twin.__dict__.update(self.__dict__)
        for name in ("ring", "first", "records"):
            setattr(twin, name, tuple(x.clone() for x in getattr(self, name)))
        for name in ("shown", "seen", "columns"):
            setattr(twin, name, getattr(self, name).clone())
        twin.planes = [{name: x.clone() for name, x in side.items()} for side in self.planes]
        return twin

    def token(self) -> tuple[Tensor, Tensor]:
        """As a projection leaves it: channels within a longer row, heads beside them."""
        rows, heads = self.shape
        return tuple(torch.randn(rows, 1, heads, dim + 8, device=DEVICE).to(self.dtype)[..., 4:-4].transpose(1, 2) for dim in self.dims)

    def arrive(self, how, x, new, real) -> None:
        how(self.ring, self.records, self.shown, self.seen, self.columns, x, new, real)

    def retire(self, how, order) -> Tensor:
        return how(self.codecs, self.planes, self.first, self.records, self.shown, self.ring, self.seen, order)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same(ours: Layer, theirs: Layer, share: float = 0.0) -> None:
    """The same bits, but for a `share` of the codes that were written; their scales up to rounding then."""
    for got, wanted in zip(ours.tensors(), theirs.tensors(), strict=True):
        if got.shape[2:3] == (SLOTS,) and share:
            written = (bits(wanted) != SENTINEL).any(-1)
            assert bool((bits(got)[~written] == SENTINEL).all())
            got, wanted = got[written], wanted[written]
            if got.is_floating_point():
                torch.testing.assert_close(got, wanted, rtol=2e-3, atol=1e-6)
            else:
                assert not got.numel() or (bits(got) != bits(wanted)).float().mean() <= share
        else:
            assert torch.equal(bits(got), bits(wanted))


@pytest.mark.parametrize("real", [None, "some"])
@pytest.mark.parametrize(("rows", "heads", "dims"), [(1, 1, (64, 64)), (3, 3, (80, 64)), (3, 8, (64, 80))])
def test_arrivals(rows, heads, dims, real):
    """Every kind of record, given or zero or not there; a ring of one column; counts that wrap."""
    for others, width in ((0, 1), (1, 3), (3, 4)):
        layer = Layer("identity", rows, heads, dims, width=width, others=others, exact=others)
        twin = layer.copy()
        for step in range(2):
            x = layer.token()
            new = [None if i == step else torch.randn(rows, heads, 1, device=DEVICE) for i in range(others)]
            who = torch.tensor([True, False, True], device=DEVICE)[:rows] ^ bool(step) if real else None
            layer.arrive(kernels.arrive, x, new, who)
            twin.arrive(arrive, x, new, who)
            same(layer, twin)
        assert int(layer.columns) == 43


def test_many_heads_in_rows_that_lie_apart():
    """More heads than a tile has; whether a token is real, and its records, as views."""
    layer = Layer("identity", 2, 70, (80, 64), dtype=torch.bfloat16, others=1)
    twin, x = layer.copy(), layer.token()
    new = torch.randn(70, 2, 3, device=DEVICE)[..., 1:2].transpose(0, 1)
    real = torch.tensor([[True, False], [False, True]], device=DEVICE)[:, 1]
    layer.arrive(kernels.arrive, x, [new], real)
    twin.arrive(arrive, x, [new], real)
    same(layer, twin)


def orders(layer: Layer) -> list[Tensor]:
    """In which heads differ, and some forget the token; in which slots are alike, of which the first goes; in which all forget it."""
    shape = *layer.shape, layer.records[0].shape[2] - layer.width + 1
    mixed = torch.randint(-(2**62), 2**62, shape, device=DEVICE)
    mixed[0, 0, -1] = mixed.min() - 1
    alike = torch.randint(0, 9, shape, device=DEVICE)
    alike[..., 1::2] = -(2**40)
    none = alike.clone()
    none[..., -1] = -(2**63) + 1
    return [mixed, alike, none]


def compare(layer: Layer, twin: Layer, order: Tensor, share: float = 0.0, how=kernels.retire) -> Tensor:
    where = layer.retire(how, order)
    assert torch.equal(where, twin.retire(retire, order))
    same(layer, twin, share)
    return where


@pytest.mark.parametrize(("rows", "heads", "dims"), [(1, 1, (64, 64)), (3, 3, (80, 64)), (1, 8, (64, 80))])
@pytest.mark.parametrize("format", slowly(["identity", "int8"], ["int8"]))
def test_retirements(format, rows, heads, dims):
    seen = set()
    for exact, others, width in ((0, 1, 1), (2, 3, 4), (3, 0, 2)):
        layer = Layer(format, rows, heads, dims, exact=exact, width=width, others=others)
        twin = layer.copy()
        for order in (*orders(layer), *orders(layer)):
            where = compare(layer, twin, order, ROUNDED.get(format, 0.0))
            seen |= set(where.flatten().tolist())
            for x in (layer.seen, twin.seen):
                x.add_(1)
            for x in (layer.records[0], twin.records[0]):  # what leaves next is one of the first tokens, or empty
                at = layer.seen % width
                x.scatter_(2, (SLOTS + at)[:, None, None].expand(-1, heads, 1), int(at[0]) - 1)
    assert {-1, 0, 1, -2} <= seen or rows * heads == 1


def test_the_least_of_many():
    """More columns than are compared at once; the least in the first of them, the last, and between, twice."""
    layer = Layer("identity", 1, 4)
    layer.records = [torch.full((1, 4, 2500 + layer.width), 7, dtype=torch.int32, device=DEVICE), *layer.records[1:]]
    layer.records[1:] = [torch.randn(1, 4, 2500 + layer.width, device=DEVICE)]
    layer.shown = torch.ones(1, 2500 + layer.width, dtype=torch.bool, device=DEVICE)
    layer.planes = [{name: x.repeat(1, 1, 500, 1)[:, :, :2500].contiguous() for name, x in side.items()} for side in layer.planes]
    order = torch.randint(0, 2**62, (1, 4, 2501), device=DEVICE)
    for head, columns in enumerate(((0,), (2500,), (1030, 2100), (1023, 1024))):
        order[0, head, list(columns)] = -5
    assert compare(layer, layer.copy(), order).tolist() == [[0, -1, 1030, 1023]]


@pytest.mark.parametrize("format", slowly(QUICK, QUICK))
def test_formats(format, monkeypatch):
    """By dispatch: formats that share a scale among heads run as torch operations."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    layer = Layer(format, 1, 3, (64, 64), exact=1, dtype=torch.float32)
    dispatch.prepare(tuple(layer.codecs), layer.dims, layer.dtype, DEVICE)
    numbers = tuple(number(codec) for codec in layer.codecs)
    share = 0.0 if format in EXACT else ROUNDED.get(format, 0.01)
    for order in orders(layer):
        compare(layer, layer.copy(), order, share, lambda codecs, *args: retire_by_dispatch(numbers, *args))


def test_trellis():
    layer = Layer("hadaquant_k3v2_trellis", 1, 1, (64, 64), dtype=torch.float32)
    compare(layer, layer.copy(), orders(layer)[1], 0.01)


def test_no_slots():
    """A budget that is all recent tokens: what leaves the ring goes to the first zone, or is forgotten."""
    layer = Layer("int8", 2, 2, exact=2)
    layer.records = [x[..., SLOTS:].contiguous() for x in layer.records]
    layer.planes = [{name: x[:, :, :0] for name, x in side.items()} for side in layer.planes]
    layer.shown = layer.shown[:, SLOTS:].contiguous()
    for positions in ([5, 1], [0, -1]):
        layer.records[0].copy_(torch.tensor(positions, device=DEVICE)[:, None, None].expand_as(layer.records[0]))
        where = compare(layer, layer.copy(), torch.zeros(2, 2, 1, dtype=torch.int64, device=DEVICE))
        assert where[:, 0].tolist() == [-2 - n if 0 <= n < 2 else -1 for n in positions]


@pytest.mark.parametrize("by", ["torch", "triton"])
def test_what_the_compiler_is_told(by, monkeypatch):
    """Which tensors the operators write, and what they return."""
    monkeypatch.setenv("QKVCACHE_KERNELS", by)
    layer = Layer("int8", 1, 2, exact=1)
    x, new = layer.token(), [torch.randn(1, 2, 1, device=DEVICE)]
    counts = layer.shown, layer.seen, layer.columns
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.qkvcache.arrive, (list(layer.ring), list(layer.records), *counts, *x, new, None), test_utils=tests)
    planes, numbers = [plane for side in layer.planes for plane in side.values()], [number(codec) for codec in layer.codecs]
    arguments = (planes, numbers, list(layer.first), list(layer.records), layer.shown, list(layer.ring), layer.seen, orders(layer)[0])
    torch.library.opcheck(torch.ops.qkvcache.retire, arguments, test_utils=tests)
