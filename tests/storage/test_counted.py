"""Storage that counts on the device: ways to add tokens agree, full storage takes none, and each token is found at its column."""

import pytest
import torch
from torch import Tensor

from qkvcache.kernels.paged_inputs import DROPPED, LENGTH, TOKENS
from qkvcache.kernels.store import reference
from qkvcache.storage import Storage
from tests.codes import codes_of
from tests.matrix import FORMATS, covering

ROWS, HEADS, DIM, VALUE_DIM = 3, 2, 64, 32
Pair = tuple[Tensor, Tensor]


def new(tokens: int) -> Pair:
    return tuple(torch.randn(ROWS, HEADS, tokens, dim) for dim in (DIM, VALUE_DIM))


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def made(format: str = "turboquant_4bit_nc", first: int = 3, ring: int = 5, limit: int = 70) -> Storage:
    return Storage((FORMATS[format].key, FORMATS[format].value), new(0), first, ring - 1, limit)


def append(held: Storage, x: Pair) -> None:
    held.reserve(x[0].shape[2])
    held.append(x)


def step_one_by_one(held: Storage, x: Pair) -> None:
    for part in zip(*(side.split(1, 2) for side in x), strict=True):
        reference.step(held.inputs, part)


def step_by_the_ring(held: Storage, x: Pair) -> None:
    for part in zip(*(side.split(held.slots, 2) for side in x), strict=True):
        reference.step(held.inputs, part)


def content(held: Storage) -> list[Tensor]:
    held.tokens.length = int(held.rows[0, LENGTH])
    return [held.rows, held.control, *held.sinks, *held.residual, *codes_of(held.tokens)]


ZONES = [(3, 5), (0, 5), (3, 1), (0, 1), (7, 3)]
SIZES = [(1, 1, 1, 1, 1, 1, 1), (2, 3, 4), (8, 1, 5), (5, 5, 5, 5), (40, 3, 1, 26)]


@pytest.mark.parametrize(
    ("format", "zones", "sizes"), covering(["identity", "int8_asymmetric", "fp8_token", "turboquant_4bit_nc"], ZONES, SIZES), ids=str
)
def test_ways_to_take_tokens_agree(format, zones, sizes):
    first, ring = zones
    stores = [made(format, first, ring) for _ in range(3)]
    ways = (append, step_one_by_one, step_by_the_ring)
    x = new(20)
    for store in stores:
        store.tokens.calibrate(x)
    for size in sizes:
        x = new(size)
        for store, take in zip(stores, ways, strict=True):
            take(store, x)
        assert same(content(stores[0]), content(stores[1]))
        assert same(content(stores[0]), content(stores[2]))


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_full_store_takes_nothing_but_counts(tokens):
    store = made(limit=20)
    append(store, new(20 - tokens + 1))
    before = [x.clone() for x in content(store)[2:]]
    for times in (1, 2):
        reference.step(store.inputs, new(tokens))
        assert (store.rows[:, [TOKENS, LENGTH]] == torch.tensor([20 - tokens + 1, 12 - tokens + 1])).all()
        assert store.control[DROPPED] == tokens * times and same(content(store)[2:], before)
    if tokens > 1:
        reference.step(store.inputs, new(tokens - 1))  # for which there is room
        assert (store.rows[:, TOKENS] == 20).all()


@pytest.mark.parametrize(("first", "ring"), [(3, 5), (0, 5), (3, 1), (0, 1)])
def test_columns_and_unfold(first, ring):
    store = made("identity", first, ring)
    whole = new(70)
    for seen in range(71):
        if seen:
            reference.step(store.inputs, tuple(side[:, :, seen - 1 : seen] for side in whole))
        slots = store.tokens.capacity
        expected = [-1] * (first + slots + ring)
        region = max(seen - first - ring, 0)
        for token in range(seen):
            left = token - first
            slot = token if left < 0 else first + left if left < region else first + slots + left % ring
            expected[slot] = token
        assert store.inputs.columns(store.inputs.pages.read(0, store.inputs.max_length)[1])[:, 0].tolist() == [expected] * ROWS
        if seen % 7 and seen < 60:
            continue
        for coming in (0, 1, 6):
            x = new(coming)
            got = reference.unfold(store.inputs, 70, x)
            for side, known, fresh in zip(got, whole, x, strict=True):
                wanted = torch.zeros(ROWS, HEADS, 80, known.shape[3])
                wanted[:, :, :seen] = known[:, :, :seen]
                wanted[:, :, seen : seen + coming] = fresh
                assert torch.equal(side, wanted[:, :, :70])
