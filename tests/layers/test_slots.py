"""Slots: append, truncate and move rows as a plain tensor would, in place and without waste."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeds import SEED

from qkvcache.formats import REGISTRY
from qkvcache.layers.slots import MAX_GROWTH, PAGE, Slots

DIM = 16
HEADS = 2
CODECS = {name: REGISTRY[name].key for name in ("identity", "turboquant_3bit_nc", "fp8_tensor_frozen")}

every_codec = pytest.mark.parametrize("name", CODECS)


def stored(slots: Slots, limit: int = 50) -> dict[str, torch.Tensor]:
    """What is kept for each token, joined."""
    blocks = list(slots.blocks(limit))
    assert all(0 < count <= limit for _, count in blocks)
    assert sum(count for _, count in blocks) == slots.length
    names = [b.name for b in slots.codec.buffers(DIM) if b.tokens == "each"]
    return {name: torch.cat([codes[name] for codes, _ in blocks], dim=2) for name in names} if blocks else {}


def filled(name: str, *sizes: int, rows: int = 2) -> Slots:
    slots = Slots(CODECS[name], DIM)
    for size in sizes:
        slots.append(torch.randn(rows, HEADS, size, DIM))
    return slots


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
    slots, rows, plain, once = Slots(codec, DIM), 2, {}, {}
    for what, n in operations:
        if what == "append":
            x = torch.randn(rows, HEADS, n, DIM)
            once = once if plain else codec.fit(x)
            codes = codec.encode(x, once)
            plain = {key: torch.cat([plain[key], t], dim=2) if plain else t for key, t in codes.items() if key not in once}
            slots.append(x)
        elif what == "truncate":
            plain = {key: t[:, :, :n] for key, t in plain.items()} if n else {}
            slots.truncate(n)
        else:
            index = torch.tensor([i % rows for i in n]) if what == "select" else torch.arange(rows).repeat_interleave(n)
            index = index[:4]
            plain, once = ({key: t[index] for key, t in group.items()} for group in (plain, once))
            slots.map(lambda t, index=index: t.index_select(0, index))
            rows = len(index)
        held = stored(slots)
        assert held.keys() == plain.keys() and all(torch.equal(held[key], plain[key]) for key in held)
        if held:
            assert all(torch.equal(slots.once[key], once[key]) for key in once)
        assert slots.length == (next(iter(plain.values())).shape[2] if plain else 0) <= slots.capacity


@given(st.lists(st.integers(1, 1500), min_size=1, max_size=30))
def test_what_is_idle_is_a_page_or_an_eighth(sizes):
    slots = Slots(REGISTRY["identity"].key, 1)
    for size in sizes:
        slots.append(torch.zeros(1, 1, size, 1))
        assert slots.capacity % PAGE == 0
        assert 0 <= slots.capacity - slots.length <= max(PAGE, min(slots.length // 8, MAX_GROWTH))


def test_slabs_stay_few():
    slots = Slots(REGISTRY["identity"].key, 1)
    for _ in range(5000):
        slots.append(torch.zeros(1, 1, 1, 1))
    assert len(slots.slabs) <= 40  # of 79 pages


def test_reserve_makes_one_slab():
    slots, x = filled("identity"), torch.randn(2, HEADS, 1000, DIM)
    slots.reserve(1000, x)
    for block in x.split(300, dim=2):
        slots.append(block)
    assert len(slots.slabs) == 1 and slots.capacity == 1024
    assert torch.equal(stored(slots)["codes"], x)


@every_codec
def test_views_handed_out_stay_as_they_were(name):
    slots = filled(name, 100, 3)
    views = [codes for codes, _ in slots.blocks(40)]
    copies = [{key: t.clone() for key, t in codes.items()} for codes in views]
    for size in (1, 200):
        slots.append(torch.randn(2, HEADS, size, DIM))
    slots.map(lambda t: t.flip(0))
    slots.truncate(0)
    for view, copy in zip(views, copies, strict=True):
        assert view.keys() == copy.keys() and all(torch.equal(view[key], copy[key]) for key in view)


def test_blocks_are_views():
    slots = filled("identity", 100)
    for codes, _ in slots.blocks(40):
        assert codes["codes"].untyped_storage().data_ptr() == slots.slabs[0]["codes"].untyped_storage().data_ptr()


def test_truncate_gives_slabs_back():
    slots = filled("identity", 64, 64, 64)
    for length, slabs in ((200, 3), (129, 3), (128, 2), (65, 2), (64, 1), (0, 0)):
        slots.truncate(length)
        assert (slots.length, len(slots.slabs)) == (min(length, 192), slabs)
    assert slots.capacity == 0 and list(slots.blocks(10)) == []


def test_what_is_kept_once_is_fitted_again_when_empty():
    slots = filled("fp8_tensor_frozen", 10)
    before = slots.once["scale"].clone()
    slots.append(100 * torch.randn(2, HEADS, 10, DIM))
    assert torch.equal(slots.once["scale"], before)
    slots.truncate(0)
    slots.append(100 * torch.randn(2, HEADS, 10, DIM))
    assert (slots.once["scale"] > 10 * before).all()


@every_codec
def test_tensors_lists_each_once_with_its_role(name):
    slots = filled(name, 100, 100)
    roles = {b.name: b.role for b in slots.codec.buffers(DIM)}
    live = {id(t): roles[key] for group in (*slots.slabs, slots.once) for key, t in group.items()}
    listed = [(id(t), role) for role, t in slots.tensors()]
    assert len(listed) == len(live) and dict(listed) == live


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_inference_mode_may_come_and_go(modes):
    slots, x = Slots(CODECS["identity"], DIM), torch.randn(2, HEADS, 30, DIM)
    for part, mode in zip(x.split(10, dim=2), (*modes, modes[0]), strict=True):
        with mode():
            slots.append(part)
    assert torch.equal(stored(slots)["codes"], x)
