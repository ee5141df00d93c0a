"""A storage of one chunk by itself: ways to take tokens agree, a full one takes none, and each token is found at its column."""

import pytest
import torch
from torch import Tensor

from qkvcache.kernels import counted
from qkvcache.kernels.segments import CONTROL, DROPPED
from qkvcache.storage import Storage
from tests.matrix import FORMATS as REGISTRY

ROWS, HEADS, DIM, VALUE_DIM = 3, 2, 64, 32
Pair = tuple[Tensor, Tensor]


def new(tokens: int) -> Pair:
    return tuple(torch.randn(ROWS, HEADS, tokens, dim) for dim in (DIM, VALUE_DIM))


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def made(format: str = "turboquant_4bit_nc", first: int = 3, ring: int = 5, limit: int = 70) -> Storage:
    return Storage((REGISTRY[format].key, REGISTRY[format].value), new(0), first, ring - 1, limit)


def take_by_append(held: Storage, x: Pair) -> None:
    held.append(x)


def take_one_by_one(held: Storage, x: Pair) -> None:
    for part in zip(*(side.split(1, 2) for side in x), strict=True):
        counted.step(held.buffers, part)


def take_by_the_ring(held: Storage, x: Pair) -> None:
    for part in zip(*(side.split(held.slots, 2) for side in x), strict=True):
        counted.step(held.buffers, part)


def content(held: Storage) -> list[Tensor]:
    region = int(held.state[CONTROL + 1])
    codes = [plane[:, :, :region].contiguous() for side in held.chunks.chunks[0] for plane in side.values()]
    return [held.state, *held.sinks, *held.residual, *codes]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1, 1), (2, 3, 4), (8, 1, 5), (5, 5, 5, 5), (40, 3, 1, 26)], ids=str)
@pytest.mark.parametrize(("first", "ring"), [(3, 5), (0, 5), (3, 1), (0, 1), (7, 3)])
@pytest.mark.parametrize("format", ["identity", "int8_asymmetric", "fp8_token", "turboquant_4bit_nc"])
def test_ways_to_take_tokens_agree(format, first, ring, sizes):
    stores = [made(format, first, ring) for _ in range(3)]
    ways = (take_by_append, take_one_by_one, take_by_the_ring)
    x = new(20)
    for store in stores:
        store.chunks.calibrate(x)
    for size in sizes:
        x = new(size)
        for store, take in zip(stores, ways, strict=True):
            take(store, x)
        assert same(content(stores[0]), content(stores[1]))
        assert same(content(stores[0]), content(stores[2]))


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_full_store_takes_nothing_but_counts(tokens):
    store = made(limit=20)
    take_by_append(store, new(20 - tokens + 1))
    before = [x.clone() for x in content(store)[1:]]
    for times in (1, 2):
        counted.step(store.buffers, new(tokens))
        assert (store.buffers.lengths == torch.tensor([20 - tokens + 1, 12 - tokens + 1])).all() and store.state[DROPPED] == tokens * times
        assert same(content(store)[1:], before)
    if tokens > 1:
        counted.step(store.buffers, new(tokens - 1))  # for which there is room
        assert (store.buffers.lengths[:, 0] == 20).all()


@pytest.mark.parametrize(("first", "ring"), [(3, 5), (0, 5), (3, 1), (0, 1)])
def test_columns_and_unfold(first, ring):
    store = made("identity", first, ring)
    whole = new(70)
    for seen in range(71):
        if seen:
            counted.step(store.buffers, tuple(side[:, :, seen - 1 : seen] for side in whole))
        slots = store.chunks.capacity
        expected = [-1] * (first + slots + ring)
        region = max(seen - first - ring, 0)
        for token in range(seen):
            left = token - first
            slot = token if left < 0 else first + left if left < region else first + slots + left % ring
            expected[slot] = token
        assert counted.columns(store.buffers).tolist() == expected
        if seen % 7 and seen < 60:
            continue
        for coming in (0, 1, 6):
            x = new(coming)
            got = counted.unfold(store.buffers, x if coming else None)
            for side, known, fresh in zip(got, whole, x, strict=True):
                wanted = torch.zeros(ROWS, HEADS, 80, known.shape[3])
                wanted[:, :, :seen] = known[:, :, :seen]
                wanted[:, :, seen : seen + coming] = fresh
                assert torch.equal(side, wanted[:, :, :70])
