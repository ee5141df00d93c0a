"""Pages: appending, truncating, selecting and forking rows give what plain tensors would, without copies that nobody needs."""

from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkvcache.storage import MAX_GROWTH, PAGE, RowPages, paged
from tests.matrix import FORMATS
from tests.plain_cache import PlainLayer
from tests.seeds import SEED
from tests.tolerance import same_decoded

DIM = 16
HEADS = 2
CODECS = {name: FORMATS[name].key for name in ("identity", "turboquant_3bit_nc", "fp8")}

every_codec = pytest.mark.parametrize("name", CODECS)


@pytest.fixture(params=["views", "addresses"])
def layout(request, monkeypatch):
    """Pages as torch reads them, and as kernels find them."""
    monkeypatch.setattr(paged, "on_triton", lambda device: request.param == "addresses")
    return request.param


def empty(name: str, rows: int = 2, **options) -> RowPages:
    """For keys, and for values that are their negatives."""
    return RowPages((CODECS[name], CODECS[name]), both(torch.empty(rows, HEADS, 0, DIM)), **options)


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, -x


def stored(tokens: RowPages, side: int = 0, limit: int = 50) -> dict[str, torch.Tensor]:
    """The codes of all tokens, joined."""
    packed = list(tokens.packed(side, limit))
    assert all(0 < part.tokens <= limit for part in packed)
    assert sum(part.tokens for part in packed) == tokens.length
    names = [b.name for b in tokens.codecs[side].buffers(DIM) if b.tokens == "each"]
    return {name: torch.cat([part.codes[name] for part in packed], dim=2) for name in names} if packed else {}


def filled(name: str, *sizes: int, rows: int = 2) -> RowPages:
    tokens = empty(name, rows)
    for size in sizes:
        x = both(torch.randn(rows, HEADS, size, DIM))
        tokens.calibrate(x), tokens.append(x)
    return tokens


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 150)),
        st.tuples(st.just("truncate"), st.integers(0, 300)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
        st.tuples(st.just("fork"), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 9)),
    ),
    max_size=14,
)


@every_codec
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_forks_equal_plain_tensors(name, layout, data):
    """Each operation is of one of the forks; none changes the others."""
    torch.manual_seed(SEED)
    codec = CODECS[name]
    forks = [(empty(name), PlainLayer(SimpleNamespace(codecs=lambda: (codec, codec)), 0, -1))]  # of which every token is in codes
    for what, n in data.draw(operations):
        tokens, plain = forks[data.draw(st.integers(0, len(forks) - 1))]
        rows = len(tokens.numbers)
        if what == "append":
            x = both(torch.randn(rows, HEADS, n, DIM))
            tokens.calibrate(x), tokens.append(x), plain.update(x)
        elif what == "truncate":
            n = min(max(n, 1), tokens.length)
            plain.crop(tokens.length - n), tokens.truncate(n)
        elif what == "select":
            index = [i % rows for i in n]
            tokens.select(index)
            if plain.seen:
                plain.select(index)
        elif what == "fork":
            forks.append((tokens.fork(), plain.fork()))
        elif len(forks) > 1:
            gone, _ = forks.pop(n % len(forks))
            gone.pool.release(gone.numbers)
        for tokens, plain in forks:
            assert tokens.length == plain.seen
            for side in (0, 1) if plain.seen else ():
                held = stored(tokens, side) | dict(tokens.statistics[side])
                assert same_decoded(codec.dequantize(held, DIM), plain.dense()[side], codec)
                assert all(torch.equal(tokens.statistics[side][key], x) for key, x in plain.statistics[side].items())
    for pool in {tokens.pool for tokens, _ in forks}:
        owners = numpy.zeros_like(pool.owners)
        for tokens, _ in forks:
            if tokens.pool is pool:
                numpy.add.at(owners, tokens.numbers.ravel(), 1)
        assert (owners == pool.owners).all()  # nobody owns a page that no table has


def test_a_fork_costs_its_table_until_it_writes(layout):
    tokens = filled("identity", 1000)
    before = sum(slab.data.nbytes for slab in tokens.pool.slabs)
    twins = [tokens.fork() for _ in range(8)]
    assert sum(slab.data.nbytes for slab in tokens.pool.slabs) == before
    for twin in twins:
        twin.append(both(torch.randn(2, HEADS, 1, DIM)))
    added = sum(slab.data.nbytes for slab in tokens.pool.slabs) - before
    assert 0 < added <= 2 * 8 * 3 * tokens.pool.layout.nbytes  # in each row the page that is not full, and those behind it


@given(st.lists(st.integers(1, 1500), min_size=1, max_size=30))
def test_what_is_idle_is_a_page_or_an_eighth(sizes):
    tokens = RowPages((FORMATS["identity"].key,) * 2, both(torch.empty(1, 1, 0, 1)))
    for size in sizes:
        tokens.append(both(torch.zeros(1, 1, size, 1)))
        assert tokens.capacity % PAGE == 0
        assert 0 <= tokens.capacity - tokens.length <= max(PAGE, min(tokens.length // 8, MAX_GROWTH))


def test_growth_copies_nothing_and_the_table_seldom_moves(layout):
    tokens = RowPages((FORMATS["identity"].key,) * 2, both(torch.empty(1, 1, 0, 1)))
    tables, addresses = set(), {}
    for _ in range(316):
        tokens.append(both(torch.zeros(1, 1, 16, 1)))
        tables.add(tokens.table.data_ptr())
        for slab in tokens.pool.slabs:
            assert addresses.setdefault(slab.first, slab.data.data_ptr()) == slab.data.data_ptr()
    assert 16 < len(tokens.pool.slabs) <= 32  # of 79 pages
    assert len(tables) <= 5  # which moves at powers of two alone


@every_codec
def test_blocks_that_were_handed_out_stay_as_they_were(name, layout):
    tokens = filled(name, 100, 3)
    blocks = [packed.codes for packed in tokens.packed(0, 40)]
    copies = [{key: t.clone() for key, t in codes.items()} for codes in blocks]
    for size in (1, 200):
        tokens.append(both(torch.randn(2, HEADS, size, DIM)))
    tokens.select([1, 0])
    tokens.truncate(0)
    for block, copied in zip(blocks, copies, strict=True):
        assert block.keys() == copied.keys() and all(torch.equal(block[key], copied[key]) for key in block)


def test_blocks_are_views_where_rows_were_not_exchanged():
    tokens = filled("identity", 100, 50, 200)
    memory = {slab.data.untyped_storage().data_ptr() for slab in tokens.pool.slabs}
    assert all(packed.codes["codes"].untyped_storage().data_ptr() in memory for packed in tokens.packed(0, 40))
    tokens.select([0, 0])
    memory = {slab.data.untyped_storage().data_ptr() for slab in tokens.pool.slabs}
    assert all(packed.codes["codes"].untyped_storage().data_ptr() not in memory for packed in tokens.packed(0, 40))


def test_truncate_gives_slabs_back_but_the_first():
    tokens = filled("identity", 64, 64, 64)
    for length, count in ((200, 3), (129, 3), (128, 2), (65, 2), (64, 1), (0, 1)):
        tokens.truncate(length)
        assert (tokens.length, len(tokens.pool.slabs), tokens.capacity) == (min(length, 192), count, 64 * count)
    assert list(tokens.packed(0, 10)) == []


def test_selected_rows_are_shared_until_they_are_written():
    tokens = filled("int8" if "int8" in CODECS else "fp8", 200)
    size = sum(slab.data.nbytes for slab in tokens.pool.slabs)
    tokens.select([0, 0, 1, 1, 1])
    assert sum(slab.data.nbytes for slab in tokens.pool.slabs) == size
    assert (tokens.pool.owners[:4] == 2).all()
    tokens.append(both(torch.randn(5, HEADS, 1, DIM)))
    assert [len(set(column)) for column in tokens.numbers.T.tolist()] == [2, 2, 2, 5]


def test_one_side_may_have_no_channels():
    """Latents without rotated keys have such a side."""
    codec = CODECS["identity"]
    x = torch.randn(2, 1, 200, DIM), torch.empty(2, 1, 200, 0)
    tokens = RowPages((codec, codec), (x[0][:, :, :0], x[1][:, :, :0]))
    tokens.append(x)
    tokens.select([0])
    tokens.select([0, 0, 0])
    tokens.append(tuple(side[:1, :, :1].expand(3, -1, -1, -1) for side in x))
    assert torch.equal(stored(tokens)["codes"][2, :, :200], x[0][0])


def test_rows_know_what_they_share():
    tokens = filled("fp8", 200, rows=1)
    assert tokens.branches() == (1, 0)
    tokens.select([0] * 4)
    assert tokens.branches() == (4, 192)  # in full pages
    tokens.append(both(torch.randn(4, HEADS, 300, DIM)))
    assert tokens.branches() == (4, 192)
    tokens.select([0, 0, 2, 2])  # pairs share more
    assert tokens.branches() == (2, 448)
    tokens.select([0, 0, 2, 2, 3])  # which are no groups of one size
    assert tokens.branches() == (5, 192)
    tokens.truncate(100)
    assert tokens.branches() == (5, 64)
    tokens.append(both(torch.randn(5, HEADS, 100, DIM)))
    assert tokens.branches() == (5, 64)
    two = filled("fp8", 200)
    two.select([0, 0, 1, 1])
    assert two.branches() == (2, 192)
    two.select([0, 2, 1, 3])  # which are not next to each other
    assert two.branches()[1] == 0


def test_tensors_have_the_bytes_of_all_slabs(layout):
    for name in CODECS:
        tokens = filled(name, 100, 100)
        sizes = {"codes": 0, "scales": 0, "bookkeeping": 0}
        for role, x in tokens.tensors():
            sizes[role] += x.nbytes
        statistics = sum(x.nbytes for side in tokens.statistics for x in side.values())
        assert sizes["codes"] + sizes["scales"] == sum(slab.data.nbytes for slab in tokens.pool.slabs) + statistics
        assert sizes["bookkeeping"] == tokens.table.nbytes + tokens.begun.nbytes


def test_kernels_see_the_same_strides_before_there_are_pages(monkeypatch):
    monkeypatch.setattr(paged, "on_triton", lambda device: True)
    tokens = empty("turboquant_3bit_nc")
    strides = [{name: x.stride() for name, x in side.items()} for side in tokens.pages.planes]
    tokens.append(both(torch.randn(2, HEADS, 70, DIM)))
    assert strides == [{name: x.stride() for name, x in side.items()} for side in tokens.pages.planes]


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("name", ["bind", "_copy"])
def test_an_interrupted_change_of_pages_leaves_old_or_new(name, where, monkeypatch):
    """Ctrl-C `before` or `after` the pages are bound, or copied to pages of a row's own."""
    tokens, twin = filled("turboquant_3bit_nc", 100), None
    if name == "_copy":
        twin = tokens.fork()
    before, change = stored(tokens, 0), getattr(RowPages, name)

    def interrupted(*args):
        if where == "after":
            change(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RowPages, name, interrupted)
        tokens.reserve(500)
    x = both(torch.randn(2, HEADS, 300, DIM))
    tokens.append(x)
    plain = filled("turboquant_3bit_nc")
    plain.statistics, plain.calibrated = tokens.statistics, True
    plain.bind()
    plain.append(x)
    for key, found in stored(tokens, 0).items():
        assert torch.equal(found[:, :, :100], before[key]) and torch.equal(found[:, :, 100:], stored(plain, 0)[key])
    assert twin is None or all(torch.equal(x, before[key]) for key, x in stored(twin, 0).items())
