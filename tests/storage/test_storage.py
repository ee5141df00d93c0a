"""Which tokens are exact, and that a token is quantized once."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from qkvcache import CompressedCache
from qkvcache.kernels.paged_inputs import LENGTH, TOKENS
from qkvcache.kernels.segments import block_of
from qkvcache.storage import PAGE, Storage, storage
from tests.matrix import FORMATS
from tests.plain_cache import PlainLayer
from tests.seeds import SEED

CODEC = FORMATS["int8"].value
DIM = 8

zones_of_any_size = st.tuples(st.integers(0, 6), st.integers(0, 80))
updates = st.lists(st.integers(1, 120), min_size=1, max_size=12)


def make(first: int, recent: int) -> Storage:
    like = torch.empty(1, 2, 0, DIM)
    return Storage((CODEC, CODEC), (like, like), first, recent)


def keys(held: Storage) -> Tensor:
    """Values are their negatives."""
    key, value = held.dense()
    assert torch.equal(value, -key)
    return key


def step(held: Storage, new: Tensor) -> Tensor:
    """What attention sees of one update."""
    return held.add((new, -new)).key.dense()


def encoded(x: Tensor) -> Tensor:
    return CODEC.dequantize(CODEC.quantize(x, {}), DIM)


def codes(held: Storage) -> Tensor:
    packed = [packed.codes["codes"] for packed in held.tokens.packed(0, 1000)]
    return torch.cat(packed or [torch.empty(1, 2, 0, DIM, dtype=torch.int8)], dim=2)


operations = st.lists(st.tuples(st.booleans(), st.integers(1, 120)), min_size=1, max_size=12)


@given(zones_of_any_size, operations)
def test_first_and_recent_are_exact_and_the_rest_is_quantized(sizes, operations):
    """As in `PlainLayer`, after crops too; and once: codes that stay are bit for bit what they were."""
    torch.manual_seed(SEED)
    held, plain = make(*sizes), PlainLayer(SimpleNamespace(codecs=lambda: (CODEC, CODEC)), *sizes)
    for crop, n in operations:
        before = codes(held)
        if crop:
            held.truncate(max(held.seq_length - n, 0))
            plain.crop(n)
        else:
            new = torch.randn(1, 2, n, DIM)
            assert torch.equal(step(held, new), plain.update((new, -new))[0])
        assert held.seq_length == plain.seen
        assert held.tokens.length == plain.quantized and held.rows[:, [TOKENS, LENGTH]].tolist() == [[plain.seen, plain.quantized]]
        if plain.seen:
            assert torch.equal(keys(held), plain.dense()[0])
        kept = min(before.shape[2], plain.quantized)
        assert torch.equal(before[:, :, :kept], codes(held)[:, :, :kept])


@pytest.mark.parametrize("recent", [0, 64])
def test_a_prompt_of_several_blocks(recent):
    held = make(4, recent)
    block = block_of(held.residual[0])
    parts = [torch.randn(1, 2, n, DIM) for n in (3, 2 * block + 500, block, 1)]
    for part in parts:
        assert torch.equal(step(held, part)[:, :, -part.shape[2] :], part)
    x, now = torch.cat(parts, dim=2), keys(held)
    middle = slice(4, x.shape[2] - recent - 1)
    assert torch.equal(now[:, :, middle], encoded(x)[:, :, middle])


@given(zones_of_any_size, updates)
def test_nothing_of_the_callers_is_kept_alive_or_read_later(sizes, updates):
    """New tokens come as views of the fused projection's output, which the caller may overwrite."""
    held = make(*sizes)
    for n in updates:
        projected = torch.randn(1, n, 2, 3 * DIM).transpose(1, 2)
        step(held, projected[..., DIM : 2 * DIM])
        now = keys(held)
        projected.zero_()
        assert torch.equal(keys(held), now)
        for _, tensor in held.tensors():
            assert tensor.untyped_storage().nbytes() <= max(tensor.nbytes, sum(slab.data.nbytes for slab in held.tokens.pool.slabs))


def test_tokens_are_quantized_in_groups_ahead_of_their_step():
    held, calls = make(4, 64), []
    step(held, torch.randn(1, 2, 100, DIM))
    write = held.tokens.write
    held.tokens.write = lambda x: (calls.append(x[0].shape[2]), write(x))
    for _ in range(40):
        step(held, torch.randn(1, 2, 1, DIM))
    assert calls == [16, 16, 1, 16]  # a group ends with the pages that there are


def test_what_is_idle_is_few_pages_or_an_eighth():
    held = make(4, 64)
    step(held, torch.randn(1, 2, 3000, DIM))
    addresses = [x.data_ptr() for x in (*held.sinks, *held.residual, held.rows, held.control, held.tokens.table)]
    for _ in range(1000):
        step(held, torch.randn(1, 2, 1, DIM))
        assert held.tokens.capacity - held.tokens.length <= max(PAGE, held.tokens.length // 8)
    assert addresses == [x.data_ptr() for x in (*held.sinks, *held.residual, held.rows, held.control, held.tokens.table)]


@pytest.mark.parametrize("zones", [{"residual_length": 10**9}, {"num_sink_tokens": 10**9}, {}])
def test_zones_grow_with_the_tokens(zones):
    """To the same contents as zones of full size, from little more memory than dense tokens take."""
    cache, reference = CompressedCache(format="int8", **zones), DynamicCache()
    for tokens in (1, 19, *[1] * 50, 7, 100):
        x = torch.randn(2, 2, tokens, 32)
        for each in (cache, reference):
            each.update(x, -x, 0)
        dense = reference.layers[0].keys
        token, pages = 2 * dense.nbytes // dense.shape[2], cache.layers[0].storage.tokens.capacity // PAGE
        assert cache.nbytes <= 1.125 * 2 * dense.nbytes + (7 + pages * PAGE // 3) * token + 1024  # two zones of four tokens or more
    exact = cache.layers[0].dense()[0]
    if zones:
        assert torch.equal(exact, dense)
    torch.testing.assert_close(exact, dense, atol=0.05, rtol=0)
    assert torch.equal(exact[:, :, -64:], dense[:, :, -64:])


def test_a_ring_that_grows_holds_what_a_whole_one_holds(monkeypatch):
    """With crops, rows that move, and tokens that leave."""
    whole, grown = (CompressedCache(format="turboquant_4bit_nc", num_sink_tokens=3, residual_length=30) for _ in range(2))
    torch.manual_seed(SEED)
    for tokens in (2, 1, 20, 1, 9, 1, 1, 30, 1, 1):
        x = torch.randn(2, 2, tokens, 32)
        with monkeypatch.context() as patch:
            patch.setattr(storage, "zone_room", lambda tokens, most: most)
            whole.update(x, -x, 0)
        grown.update(x, -x, 0)
        for cache in (whole, grown):
            cache.crop(-1)
            cache.reorder_cache(torch.tensor([1, 0]))
    assert all(map(torch.equal, whole.layers[0].dense(), grown.layers[0].dense()))
