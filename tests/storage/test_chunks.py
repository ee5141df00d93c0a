"""Chunks: append, truncate and move rows as a plain tensor would, in place and without waste."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkvcache.kernels import chunk_table
from qkvcache.storage import MAX_GROWTH, PAGE, Chunks
from tests.matrix import FORMATS as REGISTRY
from tests.seeds import SEED

DIM = 16
HEADS = 2
CODECS = {name: REGISTRY[name].key for name in ("identity", "turboquant_3bit_nc", "fp8_tensor_frozen")}

every_codec = pytest.mark.parametrize("name", CODECS)


def empty(name: str) -> Chunks:
    """Of keys, and of values that are their negatives."""
    return Chunks((CODECS[name], CODECS[name]), (DIM, DIM))


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, -x


def stored(chunks: Chunks, side: int = 0, limit: int = 50) -> dict[str, torch.Tensor]:
    """What is kept for each token, joined."""
    packed = list(chunks.packed(side, limit))
    assert all(0 < part.tokens <= limit for part in packed)
    assert sum(part.tokens for part in packed) == chunks.length
    names = [b.name for b in chunks.codecs[side].buffers(DIM) if b.tokens == "each"]
    return {name: torch.cat([part.codes[name] for part in packed], dim=2) for name in names} if packed else {}


def filled(name: str, *sizes: int, rows: int = 2) -> Chunks:
    chunks = empty(name)
    for size in sizes:
        chunks.append(both(torch.randn(rows, HEADS, size, DIM)))
    return chunks


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 150)),
        st.tuples(st.just("truncate"), st.integers(0, 300)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
    ),
    max_size=12,
)


@every_codec
@given(operations)
def test_equals_a_plain_tensor(name, operations):
    torch.manual_seed(SEED)
    codec = CODECS[name]
    chunks, rows, plain, statistics = empty(name), 2, ({}, {}), ({}, {})
    for what, n in operations:
        if what == "append":
            x = both(torch.randn(rows, HEADS, n, DIM))
            if not chunks.calibrated:
                statistics = tuple(codec.calibrate(side) for side in x)
            codes = [codec.quantize(side, kept) for side, kept in zip(x, statistics, strict=True)]
            plain = tuple(
                {key: torch.cat([held[key], t], dim=2) if held else t for key, t in new.items() if key not in statistics[0]}
                for held, new in zip(plain, codes, strict=True)
            )
            chunks.append(x)
        elif what == "truncate":
            plain = tuple({key: t[:, :, :n] for key, t in held.items()} if n else {} for held in plain)
            chunks.truncate(n)
        else:
            index = torch.tensor([i % rows for i in n]) if what == "select" else torch.arange(rows).repeat_interleave(n)
            index = index[:4]
            plain, statistics = (tuple({key: t[index] for key, t in side.items()} for side in group) for group in (plain, statistics))
            chunks.map(lambda t, index=index: t.index_select(0, index))
            rows = len(index)
        for side in (0, 1):
            held = stored(chunks, side)
            assert held.keys() == plain[side].keys() and all(torch.equal(held[key], plain[side][key]) for key in held)
            if held:
                assert all(torch.equal(chunks.statistics[side][key], statistics[side][key]) for key in statistics[side])
        assert chunks.length == (next(iter(plain[0].values())).shape[2] if plain[0] else 0) <= chunks.capacity


@given(st.lists(st.integers(1, 1500), min_size=1, max_size=30))
def test_what_is_idle_is_a_page_or_an_eighth(sizes):
    chunks = Chunks((REGISTRY["identity"].key,) * 2, (1, 1))
    for size in sizes:
        chunks.append(both(torch.zeros(1, 1, size, 1)))
        assert chunks.capacity % PAGE == 0
        assert 0 <= chunks.capacity - chunks.length <= max(PAGE, min(chunks.length // 8, MAX_GROWTH))


def test_chunks_stay_few_and_the_table_says_where_they_are():
    chunks = Chunks((REGISTRY["identity"].key,) * 2, (1, 1))
    tables = set()
    for _ in range(5000):
        chunks.append(both(torch.zeros(1, 1, 1, 1)))
        tables.add(chunks.table.data_ptr())
    count = len(chunks.chunks)
    assert 16 < count <= 32  # of 79 pages
    assert chunks.table.shape == (32, 8) and torch.equal(chunks.table[:count], chunk_table(chunks.region.chunks, chunks.codecs))
    assert len(tables) <= 3  # which moves at powers of two alone


def test_reserve_makes_one_chunk():
    chunks, x = filled("identity"), torch.randn(2, HEADS, 1000, DIM)
    chunks.reserve(1, both(x))
    assert chunks.capacity == PAGE
    chunks.reserve(1000, both(x))  # in place of the empty one
    for block in x.split(300, dim=2):
        chunks.append(both(block))
    assert len(chunks.chunks) == 1 and chunks.capacity == 1024
    assert torch.equal(stored(chunks)["codes"], x) and torch.equal(stored(chunks, 1)["codes"], -x)


@every_codec
def test_views_handed_out_stay_as_they_were(name):
    chunks = filled(name, 100, 3)
    views = [packed.codes for packed in chunks.packed(0, 40)]
    copies = [{key: t.clone() for key, t in codes.items()} for codes in views]
    for size in (1, 200):
        chunks.append(both(torch.randn(2, HEADS, size, DIM)))
    chunks.map(lambda t: t.flip(0))
    chunks.truncate(0)
    for view, copied in zip(views, copies, strict=True):
        assert view.keys() == copied.keys() and all(torch.equal(view[key], copied[key]) for key in view)


def test_blocks_are_views():
    chunks = filled("identity", 100)
    for packed in chunks.packed(0, 40):
        assert packed.codes["codes"].untyped_storage().data_ptr() == chunks.chunks[0][0]["codes"].untyped_storage().data_ptr()


def test_truncate_gives_chunks_back_but_the_first():
    chunks = filled("identity", 64, 64, 64)
    for length, count in ((200, 3), (129, 3), (128, 2), (65, 2), (64, 1), (0, 1)):
        chunks.truncate(length)
        assert (chunks.length, len(chunks.chunks), len(chunks.region.chunks)) == (min(length, 192), count, count)
    assert chunks.capacity == 64 and list(chunks.packed(0, 10)) == []


def test_what_is_kept_once_stays_until_it_is_fitted_again():
    chunks = filled("fp8_tensor_frozen", 10)
    before = chunks.statistics[0]["scale"].clone()
    chunks.append(both(100 * torch.randn(2, HEADS, 10, DIM)))
    assert torch.equal(chunks.statistics[0]["scale"], before)
    chunks.truncate(0)
    chunks.calibrated = False
    chunks.append(both(100 * torch.randn(2, HEADS, 10, DIM)))
    assert (chunks.statistics[0]["scale"] > 10 * before).all()


@every_codec
def test_tensors_lists_each_once_with_its_role(name):
    chunks = filled(name, 100, 100)
    roles = {b.name: b.role for b in CODECS[name].buffers(DIM)}
    live = {id(t): roles[key] for pair in (*chunks.chunks, chunks.statistics) for group in pair for key, t in group.items()}
    live[id(chunks.table)] = "bookkeeping"
    listed = [(id(t), role) for role, t in chunks.tensors()]
    assert len(listed) == len(live) and dict(listed) == live


def test_a_copy_says_where_its_own_chunks_are():
    chunks = filled("turboquant_3bit_nc", 100, 100)
    twin = copy.deepcopy(chunks)
    assert torch.equal(twin.table[:2], chunk_table(twin.region.chunks, twin.codecs)) and twin.region.table is twin.table
    assert twin.region.chunks[1][0]["low"] is twin.chunks[1][0]["low"]


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_inference_mode_may_come_and_go(modes):
    chunks, x = empty("identity"), torch.randn(2, HEADS, 30, DIM)
    for part, mode in zip(x.split(10, dim=2), (*modes, modes[0]), strict=True):
        with mode():
            chunks.append(both(part))
    assert torch.equal(stored(chunks)["codes"], x)
