"""The step kernel against `reference.step`, and the attention kernel on a storage whose counts only the device knows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkvcache.kernels import PagedInputs, attend
from qkvcache.kernels.paged_inputs import DROPPED, LENGTH, ROOM, SINKS, TOKENS
from qkvcache.kernels.store import reference
from qkvcache.storage import Storage
from tests.matrix import FORMATS, slowly

from .attention_inputs import assert_near

triton = pytest.importorskip("triton")
if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

from qkvcache.kernels.attend import launches as fused  # noqa: E402
from qkvcache.kernels.attend import plan  # noqa: E402
from qkvcache.kernels.store.triton_quantize import supports  # noqa: E402
from qkvcache.kernels.store.triton_store import launch_of_step  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDED = 0.0 if DEVICE.type == "cpu" else 0.01
"""Share of codes that may differ: a GPU divides otherwise in kernels than in torch."""
SUPPORTED = [name for name in FORMATS if all(supports(codec, 128) for codec in FORMATS[name].codecs())]
QUICK = ("identity", "int8", "fp8_token", "int4", "nvfp4", "turboquant_4bit_nc", "turboquant_3bit_nc")
SENTINEL = 0xA5
Pair = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    monkeypatch.setattr(fused, "LEAST_SPLIT", 32)  # several splits, where few tokens would make one


def step_kv(inputs: PagedInputs, x: Pair) -> None:
    launch_of_step(inputs, x)(x)


def data(*shape: int, dtype=torch.float16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def pair(rows: int, heads: int, tokens: int, dims=(64, 96), dtype=torch.float16) -> Pair:
    return tuple(data(rows, heads, tokens, dim, dtype=dtype) for dim in dims)


def make(format: str, x: Pair, first: int, ring: int, limit: int | None) -> Storage:
    """An empty storage, every byte of its pages the sentinel."""
    codecs = FORMATS[format].key, FORMATS[format].value
    held = Storage(codecs, tuple(side[:, :, :0] for side in x), first, ring - 1, limit, static=True)
    poison(held, SENTINEL)
    held.tokens.calibrate(x)
    return held


def poison(held: Storage, byte: int) -> None:
    for slab in held.tokens.pool.slabs:
        slab.data.fill_(byte)


def planes(held: Storage, region: int) -> list[tuple[str, Tensor, Tensor]]:
    """Of the planes of keys and values, what is used and what is not."""
    found, pages = [], held.tokens.pages
    for side in (0, 1):
        for name, codes in pages.take(side, pages.slots(torch.arange(held.tokens.capacity, device=DEVICE))).items():
            found.append((name, codes[:, :, :region], codes[:, :, region:]))
    return found


def check(store: Storage, expected: Storage, share: float = 0.0) -> None:
    """The same counts, zones and codes, these but for a `share`; and nothing written beyond what is used."""
    assert store.rows.tolist() == expected.rows.tolist() and store.control[:ROOM].tolist() == expected.control[:ROOM].tolist()
    exact = ((*held.sinks, *held.residual) for held in (store, expected))
    assert all(torch.equal(a, b) for a, b in zip(*exact, strict=True))
    region = int(store.rows[0, LENGTH])
    for (name, got, free), (_, wanted, _) in zip(planes(store, region), planes(expected, region), strict=True):
        assert bool((free.contiguous().view(torch.uint8) == SENTINEL).all()), f"{name}: written beyond the body"
        if share and got.is_floating_point():
            torch.testing.assert_close(got, wanted, rtol=2e-3 if got.dtype == torch.float16 else 2e-6, atol=1e-6)
        elif region:
            got, wanted = got.contiguous(), wanted.contiguous()
            assert (got.view(torch.uint8) != wanted.view(torch.uint8)).float().mean() <= share, name


def run(
    format: str, first: int, ring: int, limit: int, sizes, rows=1, heads=2, dims=(64, 96), dtype=torch.float16, share=ROUNDED
) -> Storage:
    x = pair(rows, heads, 5, dims, dtype)
    store, expected = make(format, x, first, ring, limit), make(format, x, first, ring, limit)
    for size in sizes:
        x = pair(rows, heads, size, dims, dtype)
        step_kv(store.inputs, x)
        reference.step(expected.inputs, x)
        check(store, expected, share)
    return store


GEOMETRY = {  # first zone, ring, limit, sizes of the steps
    "one by one": (3, 4, 60, (1,) * 12),
    "the first zone partly filled": (7, 5, 60, (2, 1, 5, 5, 5, 1)),
    "the ring full and wrapping": (1, 5, 60, (5, 5, 1, 5, 3)),
    "no first zone": (0, 5, 60, (5, 1, 5)),
    "more than the ring holds": (3, 4, 60, (12, 1, 9, 5)),
    "many times what the ring holds": (2, 3, 90, (40, 2, 31)),
    "bare": (0, 1, 60, (1, 1, 1)),
    "no ring but one": (2, 1, 60, (1,) * 5),
    "over the limit": (2, 5, 9, (5, 3, 5, 1, 1)),
    "over the limit, none in the body": (2, 8, 9, (8, 2, 1, 1)),
}


@pytest.mark.parametrize("geometry", GEOMETRY)
@pytest.mark.parametrize("format", slowly(["identity", "int8"], ["int8"]))
def test_geometry(format, geometry):
    store = run(format, *GEOMETRY[geometry], heads=1)
    if "limit" in geometry:
        assert store.rows[0, TOKENS] == 9 and store.control[DROPPED] > 0


@pytest.mark.parametrize("heads", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("format", slowly(SUPPORTED, QUICK))
def test_formats(format, heads):
    """Single tokens and five at once, from and to everywhere; widths that differ, heads that fill no tile."""
    share = 0.01 if format.startswith(("turboquant", "int4")) else ROUNDED  # what is summed is rounded in another order
    dims = (96, 64) if heads == 3 else (64, 64)
    run(format, 1, 5, 40, (5, 5, 1), heads=heads, dims=dims, dtype=torch.float32, share=share)


@pytest.mark.parametrize("dtype", slowly([torch.float16, torch.bfloat16, torch.float32], [torch.bfloat16]), ids=str)
def test_strides_and_dtypes(dtype):
    """Vectors as a projection leaves them: heads within tokens."""
    sides = [data(2, 5, 3, 80, dtype=dtype)[..., 8:72].transpose(1, 2) for _ in range(2)]
    stores = [make("int8_asymmetric", tuple(sides), 1, 5, 40) for _ in range(2)]
    for part in (slice(0, 5), slice(1, 2), slice(0, 4)):
        x = tuple(side[:, :, part] for side in sides)
        step_kv(stores[0].inputs, x)
        reference.step(stores[1].inputs, x)
        check(*stores)


@pytest.mark.parametrize("format", slowly(SUPPORTED, ["turboquant_3bit_nc", "fp8_token"]))
def test_pages_are_found_by_the_table(format):
    """One by one over the ends of slabs, as into the one slab of a storage that does not grow."""
    x = pair(2, 2, 1, dtype=torch.float32)
    grows, one = make(format, x, 1, 3, None), make(format, x, 1, 3, 200)
    start = pair(2, 2, 62, dtype=torch.float32)
    for held in (grows, one):
        held.reserve(62)
        poison(held, SENTINEL)
        held.append(start)
    share, slabs = 0.01 if format.startswith("turboquant") else ROUNDED, len(grows.tokens.pool.slabs)
    for _ in range(62, 72):
        x = pair(2, 2, 1, dtype=torch.float32)
        grows.reserve(1)
        if len(grows.tokens.pool.slabs) > slabs:
            grows.tokens.pool.slabs[-1].data.fill_(SENTINEL)
        slabs = len(grows.tokens.pool.slabs)
        step_kv(grows.inputs, x)
        step_kv(one.inputs, x)
        grows.advance(1), one.advance(1)
        check(grows, one, share)
    assert slabs == 2 and grows.rows[0, LENGTH] == 68


def test_channels_that_are_not_contiguous():
    x = pair(1, 2, 1)
    one, other = (make("int8", x, 1, 3, 60) for _ in range(2))
    for _ in range(5):
        x = pair(1, 2, 1, dims=(128, 192))
        for held, sides in ((one, tuple(side[..., ::2] for side in x)), (other, tuple(side[..., ::2].contiguous() for side in x))):
            held.reserve(1)
            step_kv(held.inputs, sides)
            held.advance(1)
        check(one, other)


def test_rows_of_different_lengths():
    """Each goes on as if it were alone."""
    x = pair(2, 1, 50)
    together = make("int8", x, 2, 5, 60)
    alone = [make("int8", tuple(side[row : row + 1] for side in x), 2, 5, 60) for row in range(2)]
    for row, (held, count) in enumerate(zip(alone, (50, 20), strict=True)):
        held.append(tuple(side[row : row + 1, :, :count] for side in x))
        for mine, theirs in zip((*together.sinks, *together.residual), (*held.sinks, *held.residual), strict=True):
            mine[row : row + 1] = theirs
        mine, theirs = (x.tokens.pages for x in (together, held))
        place = torch.arange(held.tokens.length, device=DEVICE)
        slots = torch.full((2, 1, len(place)), -1, device=DEVICE)
        slots[row] = mine.slots(place)[row]
        for side in (0, 1):
            codes = theirs.take(side, theirs.slots(place))
            mine.put(side, slots, {name: x.expand(2, -1, -1, -1) for name, x in codes.items()})
        together.rows[row, SINKS:] = held.rows[0, SINKS:]
    query = data(2, 2, 1, 64)
    for _ in range(7):
        x = pair(2, 1, 1)
        step_kv(together.inputs, x)
        for row, held in enumerate(alone):
            step_kv(held.inputs, tuple(side[row : row + 1] for side in x))
            held.advance(1)
            assert together.rows[row, SINKS:].tolist() == held.rows[0, SINKS:].tolist()
        out = plan.attend_pages(query, together.inputs)[0]
        for row, held in enumerate(alone):
            torch.testing.assert_close(out[row : row + 1], attend(query[row : row + 1], held.attention_inputs()), rtol=0, atol=4e-3)


# Attention


def holding(format: str, seen: int, first=3, ring=10, limit=130, rows=2, heads=1, dims=(64, 64), dtype=torch.float16) -> Storage:
    """A storage of `seen` tokens; what is free is nan in the chunks, and shows in the zones."""
    x = pair(rows, heads, seen, dims, dtype)
    held = make(format, x, first, ring, limit)
    for zone in (*held.sinks, *held.residual):
        zone.fill_(100.0)
    poison(held, 0xFF)
    held.reserve(seen)
    held.append(x)
    return held


def compare(store: Storage, limit: float = 4e-3) -> None:
    rows, heads, _, dim = store.residual[0].shape
    query = data(rows, heads * 2, 1, dim, dtype=store.residual[0].dtype)
    assert fused.supports(store.inputs, query)
    assert_near(plan.attend_pages(query, store.inputs)[0], attend(query.float(), store.attention_inputs()), limit)


@pytest.mark.parametrize("seen", [1, 3, 8, 13, 14, 60, 130])
def test_attention_counts_on_the_device(seen):
    """The first zone not full, the ring not full, no body, a body of one, of several splits, all full."""
    compare(holding("int8", seen))


@pytest.mark.parametrize("format", slowly(SUPPORTED, ["identity", "fp8_token", "turboquant_3bit_nc"]))
def test_attention_of_formats(format):
    shared = "_t" in format  # by heads
    compare(holding(format, 70, rows=1, heads=2 if shared else 1), limit=9e-3 if format.startswith("int4") else 4e-3)


@pytest.mark.parametrize(("first", "ring"), [(0, 10), (3, 1), (0, 1)])
def test_attention_without_zones(first, ring):
    compare(holding("int8", 50, first, ring))


def test_attention_after_a_crop():
    """The ring begins anywhere, and what was cropped lies behind."""
    store = holding("int8", 90, rows=1)
    for seen, region in ((85, 77), (40, 37)):
        store.truncate(seen)
        assert store.tokens.length == region
        compare(store)


def test_what_the_kernels_took_is_read_by_the_kernels():
    store = run("turboquant_4bit_nc", 2, 5, 60, (5, 5, 5, 1, 5), heads=1, dims=(64, 64), share=0.01)
    store.counts_stale = True
    store.sync_counts()
    compare(store)
