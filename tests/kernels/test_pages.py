"""Attention over pages, in torch and in the fused kernel, against one row and head after another; and quantizing into pages and back."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qkvcache.formats import Codes
from qkvcache.kernels import PagedInputs, Splits, attend_pages, give_handle, work
from qkvcache.kernels.attend.reference import attend_pages as attend_in_torch
from qkvcache.kernels.host.handles import ORDER
from qkvcache.kernels.paged_inputs import BEGIN, SINKS
from qkvcache.kernels.store import reference
from tests.matrix import FORMATS, slowly
from tests.softmax import attention_weights

from .attention_inputs import assert_fake, assert_near
from .paged_inputs import build, divided, inputs_of, pages_of, pool, row
from .test_fused_attend import KINDS, guarded, tolerance

QUICK = ("identity", "int8_token", "nvfp4", "turboquant_3bit_nc", "fp8_tensor")


def by_row(query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, *, sinks: Tensor | None = None, **options):
    """`attend_pages` by its definition, for one row and KV head after another."""
    (batch, query_heads, queries, _), heads = query.shape, inputs.ring[0].shape[1]
    out, lse = query.new_zeros(batch, query_heads, queries, inputs.ring[1].shape[3]), query.new_zeros(batch, query_heads, queries)
    for b, h in itertools.product(range(batch), range(heads)):
        group = slice(h * query_heads // heads, (h + 1) * query_heads // heads)
        key, value = (row(inputs, b, h, side)[None, None] for side in (0, 1))
        shown = None if mask is None else mask.expand(batch, query_heads, queries, -1)[b : b + 1, group]
        given = options | {"sinks": None if sinks is None else sinks[group]}
        weights, lse[b, group] = attention_weights(query[b : b + 1, group], key, shown, **given)
        out[b, group] = (weights @ value.double())[0].float()
    return out, lse


@pytest.mark.parametrize("format", slowly(FORMATS, QUICK))
@pytest.mark.parametrize("per_head", [False, True], ids=["rows", "heads"])
def test_the_reference(format, per_head):
    lengths = [[70, 0], [5, 130]] if per_head else [70, 0, 130]
    batch = len(lengths)
    inputs = build(FORMATS[format], lengths, begin=2, sinks=2, ring=5, ring_tokens=[4, 0, 5][:batch], shared=0 if per_head else 1)
    query = torch.randn(batch, 4, 1, 64)
    out, lse = attend_in_torch(query, inputs)
    wanted, wanted_lse = by_row(query, inputs)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)


def test_everything_that_attention_has():
    inputs = build(FORMATS["int8"], [70, 3, 130], begin=1, ring=9, ring_tokens=[9, 6, 7])
    query = torch.randn(3, 4, 4, 64)
    options = {"softcap": 5.0, "sinks": torch.randn(4), "causal": True, "scaling": 0.3}
    for mask in (None, torch.rand(3, 1, 4, 150) < 0.7, torch.randn(1, 4, 1, 150)):
        if mask is not None and mask.dtype == torch.bool:
            mask = mask | (torch.rand(3, 1, 1, 150) < 0.5)
        out, lse = attend_in_torch(query, inputs, mask, **options)
        wanted, wanted_lse = by_row(query, inputs, mask, **options)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)


def assert_stored(planes: Codes, codes: Codes, slots: Tensor, per_head: bool) -> None:
    """Planes whose bits were all set have the codes of two heads in the slots of their tokens, and nothing else was written."""
    for name, plane in planes.items():
        expected, given = torch.full_like(plane.view(torch.uint8), 0xFF).view(plane.dtype), codes[name]
        for b, h, t in itertools.product(range(slots.shape[0]), range(2), range(slots.shape[2])):
            if (slot := int(slots[b, h % slots.shape[1], t])) >= 0:
                expected[slot // 64, 0 if per_head else h % plane.shape[1], slot % 64] = given[b, h % given.shape[1], t]
        assert torch.equal(plane.view(torch.uint8), expected.view(torch.uint8)), name


@pytest.mark.parametrize("format", slowly(FORMATS, QUICK))
@pytest.mark.parametrize("per_head", [False, True], ids=["rows", "heads"])
def test_quantizing_and_back(format, per_head):
    """Codes are those of the codec, tokens without a slot leave none, and nothing else is written."""
    chosen, x = FORMATS[format], (torch.randn(1, 2, 5, 64), torch.randn(1, 2, 5, 64))
    planes, statistics = pool(chosen, x, 4, 64, per_head)
    slots = torch.tensor([[[70, -1, 3, 255, 128], [1, 2, -1, 0, 65]][: 1 + per_head]])
    reference.quantize_into(pages_of(chosen.codecs(), planes, 64, statistics), x, slots)
    for codec, side, pooled, constant in zip(chosen.codecs(), x, planes, statistics, strict=True):
        assert_stored(pooled, codec.quantize(side, constant), slots, per_head)


@pytest.mark.parametrize("format", slowly(FORMATS, QUICK))
def test_dequantizing(format):
    inputs = build(FORMATS[format], [70, 0, 130], sinks=0, ring=0, dims=(64, 96))
    pages = inputs.pages
    out = tuple(torch.full((3, 2, 90, dim), torch.nan) for dim in (64, inputs.ring[1].shape[3]))
    reference.dequantize_pages(pages, out, begin=50)
    for side, x in enumerate(out):
        for b, length in enumerate(pages.lengths.tolist()):
            count = min(max(length - 50, 0), 90)
            for h in range(2):
                wanted = pages.codecs[side].rotate(row(inputs, b, h, side)[None, None, 50 : 50 + count])[0, 0]
                torch.testing.assert_close(x[b, h, :count], wanted, rtol=1e-5, atol=1e-5)
            assert (x[b, :, count:] == 0).all()


triton = pytest.importorskip("triton")
KERNELS = pytest.mark.skipif(
    not (torch.cuda.is_available() or triton.knobs.runtime.interpret), reason="needs a GPU, or Triton's interpreter"
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


TWICE = 1e-3
"""More tolerance where the kernel for many rows dequantizes values, which are rounded to 11 bits, in the interpreter twice."""


def compare(
    monkeypatch, format: str, query: Tensor, inputs: PagedInputs, mask=None, given: PagedInputs | None = None, more: float = 0, **options
) -> None:
    """`given`: the inputs of the kernel, where they are not those of the reference; `more`: added to the tolerance."""
    from qkvcache.kernels.attend import plan

    with guarded(monkeypatch):
        out, lse = plan.attend_pages(query, given or inputs, mask, **options)
    assert out.dtype == query.dtype
    wanted, wanted_lse = attend_in_torch(query.float(), inputs, mask, **options)
    assert_near(out, wanted, tolerance(format, query.dtype) + more, lse, wanted_lse)


@KERNELS
@pytest.mark.parametrize("format", slowly(FORMATS, KINDS))
def test_the_kernel(format, monkeypatch):
    dim = KINDS.get(format, 64)
    inputs = build(FORMATS[format], [70, 0, 130], begin=3, ring=5, ring_tokens=[4, 0, 5], dims=(dim, dim), shared=1, device=DEVICE)
    query = torch.randn(3, 4, 1, dim, device=DEVICE).half()
    compare(monkeypatch, format, query, divided(inputs, splits=split(inputs.pages.lengths)))
    if format in slowly(FORMATS, QUICK):
        compare(monkeypatch, format, query, inputs)  # the same split of every row


def split(lengths: Tensor, least: int = 64, programs: int = 2, shares: Tensor | None = None) -> Splits:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "LEAST_SPLIT", least)
        return Splits.of(lengths, int(lengths.max()), programs, shares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("programs", [1, 7, 198])
def test_splits_share_the_tokens_of_all_rows(programs, dtype):
    """Each token is in one item of its row, items are of one length but for the last of a row, and none is longer than its share;
    whatever torch's default dtype is."""
    for lengths in ([0], [1], [0, 0], [5, 40_000, 0, 64], [130_000, 1], torch.randint(9000, (40,)).tolist()):
        torch.set_default_dtype(dtype)
        try:
            splits = Splits.of(torch.tensor(lengths, dtype=torch.int32), max(lengths), programs)
        finally:
            torch.set_default_dtype(torch.float32)
        items, firsts = splits.items.tolist(), splits.firsts.tolist()
        assert len(firsts) == len(lengths) + 1 and firsts[0] == 0 and all(first >= end for _, first, end in items[firsts[-1] :])
        most = max((end - first for _, first, end in items if first >= 0), default=0)
        for number, length in enumerate(lengths):
            exact, *others = items[firsts[number] : firsts[number + 1]]
            assert all(item[0] == number for item in (exact, *others)) and exact[1] < 0
            begins = [first for _, first, _ in others]
            assert [*begins, length] == [0, *(end for _, _, end in others)] or (not others and not length)
            assert all(begin % 64 == 0 for begin in begins) and len(others) <= work.MOST_SPLITS
            assert all(end - first == most for _, first, end in others[:-1])
        assert most <= max(sum(lengths) / programs / work.WAVES, work.BALANCED_SPLIT, max(lengths) / work.MOST_SPLITS) + 64


@pytest.mark.parametrize("programs", [1, 7, 198])
def test_splits_of_shared_tokens(programs):
    """Each token is in one item of its row, and items of the tokens that rows share are the same for these rows."""
    for batch, most in ((2, 600), (40, 9000), (5, 300_000)):
        shared, shares = 64 * torch.randint(1, most // 64, (batch // 2,)), torch.zeros(batch, 5, dtype=torch.int32)
        for first, tokens in enumerate(shared.tolist()):
            shares[[first, batch - 1 - first]] = torch.tensor(
                [tokens, batch - 1 - first, first, batch - 1 - first, batch - 1 - first]
            ).int()
        lengths = (shares[:, 0] + torch.randint(200, (batch,))).int()
        splits = Splits.of(lengths, int(lengths.max()), programs, shares)
        read, firsts = splits.shared.tolist(), splits.firsts.tolist()
        for b, length in enumerate(lengths.tolist()):
            own = [item[1:] for item in splits.items.tolist() if item[0] == b and (item[1] < 0 or item[1] < item[2])]
            pieces = [piece for piece in read if b in piece[3:] and piece[1] < piece[2]]
            assert all(piece[0] == piece[3] and piece[3:] == shares[b, 1:].tolist() for piece in pieces) and own[0][0] < 0
            spans = sorted([*(item[:2] for item in own[1:]), *(piece[1:3] for piece in pieces)])
            assert [0, *(end for _, end in spans)] == [*(begin for begin, _ in spans), length]
            first, count, place = splits.shares[b].tolist()
            assert read[first : first + count] == pieces and len(pieces) <= work.MOST_SPLITS
            assert all(piece[3 + place] == b for piece in pieces)
            assert splits.items[firsts[b] : firsts[b + 1], 0].tolist() == [b] * len(own)
        assert firsts[-1] <= len(splits.items)


@KERNELS
@pytest.mark.parametrize("format", slowly(FORMATS, ("turboquant_4bit_nc", "int8")))
def test_tokens_that_rows_share_are_read_once(format, monkeypatch):
    """Rows anywhere in the batch share a page or three, and some share none. Only the first of those that share has the entries."""
    lengths = [300, 70, 200, 130, 0, 290]
    inputs = build(FORMATS[format], lengths, begin=2, ring=5, ring_tokens=[4, 0, 5, 1, 2, 5], shared=3, device=DEVICE)
    shares = torch.tensor([[192, 2, 0, 5, 2], [64, 3, 1, 3, 3], [192, 2, 0, 5, 2], [64, 3, 1, 3, 3], [0] * 5, [192, 2, 0, 5, 2]])
    splits, table = split(inputs.pages.lengths, shares=shares.int().to(DEVICE)), inputs.pages.table.clone()
    for follower, count in ((0, 3), (5, 3), (1, 1)):
        table[follower, :count] = 2**30
    given = divided(inputs.anew(pages=replace(inputs.pages, table=table)), splits=splits)
    query, sinks = torch.randn(6, 6, 1, 64, device=DEVICE).half(), torch.randn(6, device=DEVICE)
    compare(monkeypatch, format, query, inputs, given=given, sinks=sinks, softcap=5.0)


@KERNELS
def test_splits_of_many_rows(monkeypatch):
    """Rows of many splits and of none, and rows that are no request, as batches have them."""
    inputs = build(FORMATS["turboquant_4bit_nc"], [300, 0, 64, 1, 129], ring=7, ring_tokens=[7, 0, 3, 1, 6], device=DEVICE)
    inputs.rows[1, SINKS] = 0
    query, sinks = torch.randn(5, 4, 1, 64, device=DEVICE).half(), torch.randn(4, device=DEVICE)
    whole = divided(inputs, splits=split(inputs.pages.lengths, programs=1))
    assert len({tuple(item[:2]) for item in whole.work.splits.items.tolist()}) > 10
    compare(monkeypatch, "turboquant_4bit_nc", query, whole, sinks=sinks, softcap=5.0, scaling=0.3)
    without = build(FORMATS["turboquant_4bit_nc"], [300, 70], sinks=0, ring=0, device=DEVICE)
    compare(monkeypatch, "turboquant_4bit_nc", query[:2], divided(without, splits=split(without.pages.lengths)))


@KERNELS
def test_a_window_begins_anywhere_in_a_page(monkeypatch):
    """Whole splits before it have no token, and neither may a row whose window is in its ring."""
    inputs = build(FORMATS["int8"], [150, 151, 270], heads=1, begin=150, sinks=0, ring=5, page=256, device=DEVICE)
    query, sinks = torch.randn(3, 2, 1, 64, device=DEVICE).half(), torch.randn(2, device=DEVICE)
    compare(monkeypatch, "int8", query, divided(inputs, splits=split(inputs.pages.lengths)), sinks=sinks, softcap=5.0)


@KERNELS
@pytest.mark.parametrize("format", slowly(FORMATS, KINDS))
@pytest.mark.parametrize("per_head", [False, True], ids=["rows", "heads"])
def test_the_kernel_that_quantizes(format, per_head):
    """Codes of the same tokens stored by kernels that are tested against the codec; nothing else is written."""
    from qkvcache.kernels.store import triton_store

    chosen, dim = FORMATS[format], KINDS.get(format, 64)
    x = tuple(torch.randn(2, 2, 5, dim, device=DEVICE).half() for _ in range(2))
    like = tuple(side[:1] for side in x)
    planes, statistics = pool(chosen, like, 4, 64, per_head)
    slots = torch.tensor([[70, -1, 3, 255, 128], [1, 2, -1, 0, 65]], device=DEVICE)
    if per_head:
        slots = torch.stack([slots, torch.where(slots >= 0, slots ^ 4, -1)], 1)
        slots[:, 1, 2] = -1  # a token that one head stores; the other still has its part in what they share
    else:
        slots = slots[:, None]
    # The block holds the same tokens without gaps; the codes must agree, since each vector is quantized on its own.
    block, block_statistics = pool(chosen, like, 2, 64)
    triton_store.quantize_into(pages_of(chosen.codecs(), planes, 64, statistics), x, slots)
    triton_store.quantize_into(
        pages_of(chosen.codecs(), block, 64, block_statistics),
        x,
        torch.arange(5, device=DEVICE) + torch.tensor([[[0]], [[64]]], device=DEVICE),
    )
    for codes, pooled in zip(block, planes, strict=True):
        assert_stored(pooled, codes, slots, per_head)


@KERNELS
@pytest.mark.parametrize("format", slowly(FORMATS, KINDS))
@pytest.mark.parametrize("per_head", [False, True], ids=["rows", "heads"])
def test_the_kernel_that_dequantizes(format, per_head):
    from qkvcache.kernels.store import triton_dequantize

    dim = KINDS.get(format, 64)
    lengths = [[70, 0], [5, 100]] if per_head else [70, 100]
    pages = build(FORMATS[format], lengths, sinks=0, ring=0, dims=(dim, dim), device=DEVICE).pages
    out, wanted = (tuple(torch.full((2, 2, 50, dim), torch.nan, device=DEVICE) for _ in range(2)) for _ in range(2))
    triton_dequantize.dequantize_pages(pages, out, 40)
    reference.dequantize_pages(pages, wanted, 40)
    for x, y in zip(out, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@KERNELS
@pytest.mark.parametrize("format", slowly(["int8", "turboquant_3bit_nc"], ["int8"]))
def test_the_kernel_with_everything_that_attention_has(format, monkeypatch):
    inputs = build(FORMATS[format], [150, 3, 40], begin=1, ring=19, ring_tokens=[19, 16, 17], device=DEVICE)
    options = {"softcap": 5.0, "sinks": torch.randn(4, device=DEVICE), "scaling": 0.3}
    for queries, mask in (
        (5, None),
        (3, torch.rand(3, 1, 3, 200) < 0.7),
        (1, torch.rand(3, 1, 1, 200) < 0.7),
        (2, torch.randn(1, 4, 1, 200)),
    ):
        if mask is not None:
            mask = mask.to(DEVICE)
            mask[..., :25] = mask[..., :25] if mask.dtype == torch.float32 else True
        query = torch.randn(3, 4, queries, 64, device=DEVICE).half()
        compare(monkeypatch, format, query, inputs, mask, causal=queries > 1, **options)


@KERNELS
@pytest.mark.slow
def test_rows_of_very_different_lengths(monkeypatch):
    """Splits of the long row are chosen for the tokens of all."""
    inputs = build(FORMATS["int8"], [500, 0, 20, 64], ring=5, ring_tokens=[5, 0, 1, 2], device=DEVICE)
    inputs = divided(inputs, tokens=600)
    compare(monkeypatch, "int8", torch.randn(4, 4, 1, 64, device=DEVICE).half(), inputs)
    inputs.rows[:, BEGIN] = 70
    compare(monkeypatch, "int8", torch.randn(4, 4, 1, 64, device=DEVICE).half(), inputs)


@KERNELS
def test_heads_with_pages_of_their_own(monkeypatch):
    inputs = build(FORMATS["int8_token"], [[70, 0], [5, 130]], begin=2, sinks=2, ring=5, device=DEVICE)
    compare(monkeypatch, "int8_token", torch.randn(2, 4, 1, 64, device=DEVICE).half(), inputs)


def test_operators():
    """What a compiled graph calls does what the functions do."""
    inputs = build(FORMATS["turboquant_3bit_nc"], [36, 20], sinks=2, ring=4, device=DEVICE)
    options = torch.tensor([1.0, -1.0, 0.0, 2.0]), 0.2, 10.0, False
    inputs = divided(inputs, splits=split(inputs.pages.lengths))
    query = torch.randn(2, 4, 1, 64, device=DEVICE).half()
    sinks, scaling, softcap, causal = (x.to(DEVICE) if isinstance(x, Tensor) else x for x in options)
    give_handle(inputs)
    shape = [inputs.ring[1].shape[1], sum(inputs.slots), inputs.ring[1].shape[3]]
    arguments = query, inputs.handle, ORDER[query.device], shape, None, sinks, scaling, softcap, causal
    outs = torch.ops.qkvcache.attend(*arguments)
    wanted = attend_pages(query, inputs, sinks=sinks, scaling=scaling, softcap=softcap, causal=causal)
    for x, y in zip(outs, wanted, strict=True):
        assert torch.equal(x, y)
    assert_fake(torch.ops.qkvcache.attend, arguments)


def far_apart(inputs: PagedInputs) -> PagedInputs:
    """The two pages of the only row as pages 1 and 2 of a pool with more than 2^31 bytes from one page to the next, which the system
    allocates when they are written."""
    used = inputs.pages.table[0, :2].long()
    planes: list[Codes] = []
    for codes in inputs.pages.planes:
        planes.append({})
        for name, plane in codes.items():
            stride, shape = (2**31 + 128) // plane.itemsize, (3, *plane.shape[1:])
            buffer = torch.empty(2 * stride + plane[0].numel(), dtype=plane.dtype)
            planes[-1][name] = buffer.as_strided(shape, (stride, *plane.stride()[1:]))
            planes[-1][name][1:] = plane[used]
    table = inputs.pages.table.clone()
    table[0, :2] = torch.tensor([1, 2])
    pages = replace(inputs.pages, slabs=[tuple(planes)], table=table, lengths=inputs.pages.lengths.clone())
    return inputs_of(pages, inputs.sinks, tuple(x.clone() for x in inputs.ring), inputs.rows.clone(), inputs.max_length)


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory of a GPU is allocated whether it is written or not")
@pytest.mark.parametrize("format", ["int8_token", "turboquant_3bit_nc"])
def test_pages_of_a_pool_beyond_32_bits(format):
    from qkvcache.kernels.attend import plan
    from qkvcache.kernels.store import triton_dequantize, triton_store

    near = build(FORMATS[format], [70], heads=1, sinks=0, ring=4)
    far = far_apart(near)
    query = torch.randn(1, 2, 1, 64, dtype=torch.float16)
    assert torch.equal(plan.attend_pages(query, far)[0], plan.attend_pages(query, near)[0])
    outs = []
    for inputs in (near, far):
        outs.append(tuple(torch.empty(1, 1, 75, 64, dtype=torch.float16) for _ in range(2)))
        triton_dequantize.dequantize_pages(inputs.pages, outs[-1])
    assert all(map(torch.equal, *outs))
    new = tuple(torch.randn(1, 1, 1, 64, dtype=torch.float16) for _ in range(2))
    for inputs in (near, far):
        page = int(inputs.pages.table[0, 1])
        triton_store.quantize_into(inputs.pages, new, torch.tensor([[[page * 64 + 20]]]))  # the token of another row, say
    used = near.pages.table[0, :2].long()
    for codes, others in zip(near.pages.planes, far.pages.planes, strict=True):
        for name, plane in codes.items():
            assert torch.equal(plane[used].view(torch.uint8), others[name][1:].contiguous().view(torch.uint8))


def gathered(format: str, dim: int, device: torch.device):
    """Rows with and without tokens in sinks, pages and ring, new tokens, the starts of both, and outputs full of NaN."""
    lengths, news = [70, 2, 130, 3], [5, 70, 1, 9]
    options = {"begin": 2, "sinks": 3, "ring": 6, "ring_tokens": [4, 0, 6, 1], "dims": (dim, dim), "device": device}
    inputs = build(FORMATS[format], lengths, **options)
    new = tuple(torch.randn(1, 9, sum(news), 2 * dim, device=device).half()[:, :2, :, :dim] for _ in range(2))
    totals = [int(inputs.rows[b, SINKS]) + lengths[b] - 2 + options["ring_tokens"][b] + news[b] for b in range(4)]
    starts = tuple(torch.tensor([0, *counts], device=device).cumsum(0).int() for counts in (news, totals))
    tiles = torch.tensor(reference.gather_tiles(totals), dtype=torch.int32, device=device).view(-1, 2)
    outs = [tuple(torch.full((1, 2, sum(totals) + 1, dim), torch.nan, device=device).half() for _ in range(2)) for _ in range(2)]
    return inputs, new, starts, tiles, outs


@pytest.mark.parametrize("format", slowly(FORMATS, QUICK))
def test_gathering(format):
    inputs, new, starts, tiles, (out, _) = gathered(format, 64, torch.device("cpu"))
    reference.gather_rows(inputs, new, starts, tiles, out)
    for side in range(2):
        for h in range(2):
            rows = [torch.cat([row(inputs, b, h, side), new[side][0, h, starts[0][b] : starts[0][b + 1]].float()]) for b in range(4)]
            torch.testing.assert_close(out[side][0, h, :-1].float(), torch.cat(rows), rtol=1e-3, atol=1e-3)
        assert out[side][0, :, -1].isnan().all()


@pytest.mark.parametrize("sinks", [3, 0])
def test_storing_in_rings_and_sinks(sinks):
    """Tokens without a slot leave nothing; and nothing else is written."""
    x = tuple(torch.randn(1, 40, 2, dim, device=DEVICE).half().transpose(1, 2) for dim in (64, 80))
    like = [(side.new_full((5, 2, n, side.shape[3]), torch.nan)) for n in (7, sinks) for side in x]
    ring_slots = torch.randperm(35, device=DEVICE)[:20].repeat_interleave(2)
    ring_slots[1::2] = -1
    sink_slots = torch.full((40,), -1, device=DEVICE)
    if sinks:
        sink_slots[[1, 20, 39]] = torch.tensor([4, 14, 0], device=DEVICE)
    wanted = [place.clone() for place in like]
    for place, side, slots in zip(wanted, (*x, *x), (ring_slots, ring_slots, sink_slots, sink_slots), strict=True):
        for t, slot in enumerate(slots.tolist()):
            if slot >= 0:
                place[slot // place.shape[2], :, slot % place.shape[2]] = side[0, :, t]
    stores = [reference.quantize_into]
    if DEVICE.type == "cuda" or triton.knobs.runtime.interpret:
        from qkvcache.kernels.store import triton_store

        stores.append(triton_store.quantize_into)
    slots = torch.stack([ring_slots, sink_slots], 1)[None]  # columns of a table, as in steps that are replayed
    chosen = FORMATS["int8"]
    planes, statistics = pool(chosen, x, 4, 64)
    pages = pages_of(chosen.codecs(), planes, 64, statistics)
    for store in stores:
        got = [place.clone() for place in like]
        zones = [((got[0], got[1]), slots[..., 0]), ((got[2], got[3]), slots[..., 1])]
        store(pages, x, ring_slots.flip(0)[None, None], zones if sinks else zones[:1])
        for place, expected in zip(got, wanted, strict=True):
            torch.testing.assert_close(place, expected, rtol=0, atol=0, equal_nan=True)
