"""Which tokens are exact, and that a token is encoded once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeds import SEED
from torch import Tensor

from qkvcache.formats import REGISTRY
from qkvcache.layers.zones import GROUP, Zones

CODEC = REGISTRY["int8"].value
DIM = 8

zones_of_any_size = st.tuples(st.integers(0, 6), st.integers(0, 80))
updates = st.lists(st.integers(1, 120), min_size=1, max_size=12)


def step(zones: Zones, new: Tensor) -> Tensor:
    """What attention sees of one update."""
    zones.extend(new)
    seen = zones.side().dense()
    leaving = zones.leave()
    if leaving is not None:
        zones.body.append(leaving)
    zones.keep()
    return seen


def encoded(x: Tensor) -> Tensor:
    return CODEC.decode(CODEC.encode(x, {}), DIM)


def codes(zones: Zones) -> Tensor:
    return torch.cat(
        [codes["codes"] for codes, _ in zones.body.blocks(zones.block)] or [torch.empty(1, 2, 0, DIM, dtype=torch.int8)], dim=2
    )


@given(zones_of_any_size, updates)
def test_first_and_recent_are_exact_and_the_rest_is_encoded(sizes, updates):
    torch.manual_seed(SEED)
    first, recent = sizes
    all_tokens = torch.randn(1, 2, sum(updates), DIM)
    zones = Zones(CODEC, all_tokens, first, recent)
    length = 0
    for new in all_tokens.split(updates, dim=2):
        before = zones.side().dense() if length else new[:, :, :0]
        seen = step(zones, new)
        assert torch.equal(seen, torch.cat([before, new], dim=2))  # the step sees itself exactly, and the past as it was
        length += new.shape[2]
        x, held = all_tokens[:, :, :length], zones.side().dense()
        assert zones.length == length and held.shape == x.shape
        exact = (held == x).all(-1).all(1)[0]
        assert exact[:first].all() and exact[max(length - recent, 0) :].all()
        assert torch.equal(held, torch.where(exact[:, None], x, encoded(x)))
        inside = exact[first : max(length - recent, 0)]
        assert inside.sum() <= min(GROUP, recent)  # no more wait for company than that,
        assert not (inside[:-1] & ~inside[1:]).any()  # and those are the newest


@given(zones_of_any_size, st.lists(st.tuples(st.booleans(), st.integers(1, 120)), min_size=1, max_size=12))
def test_a_token_is_encoded_once(sizes, operations):
    """Crops included: what stays is bit for bit what it was, except that recent tokens may be encoded later."""
    torch.manual_seed(SEED)
    zones = Zones(CODEC, torch.empty(1, 2, 1, DIM), *sizes)
    x = torch.empty(1, 2, 0, DIM)
    for crop, n in operations:
        before, held = codes(zones), zones.side().dense() if zones.length else x
        if crop:
            zones.truncate(zones.length - n)
            x = x[:, :, : max(x.shape[2] - n, 0)]
            assert zones.length == x.shape[2]
            if zones.length:
                assert torch.equal(zones.side().dense(), held[:, :, : zones.length])
        else:
            new = torch.randn(1, 2, n, DIM)
            x = torch.cat([x, new], dim=2)
            step(zones, new)
            held = torch.cat([held, new], dim=2)
            now = zones.side().dense()
            same = (now == held).all(-1).all(1)[0]
            assert torch.equal(now, torch.where(same[:, None], held, encoded(x)))
        after = codes(zones)
        kept = min(before.shape[2], after.shape[2])
        assert torch.equal(before[:, :, :kept], after[:, :, :kept])
        assert zones.first.shape[2] == min(sizes[0], zones.length)


@pytest.mark.parametrize("recent", [0, 64])
def test_a_chunk_of_several_blocks(recent):
    zones = Zones(CODEC, torch.empty(1, 2, 1, DIM), 4, recent)
    chunks = [torch.randn(1, 2, n, DIM) for n in (3, 2 * zones.block + 500, zones.block, 1)]
    for chunk in chunks:
        assert torch.equal(step(zones, chunk)[:, :, -chunk.shape[2] :], chunk)
    x, held = torch.cat(chunks, dim=2), zones.side().dense()
    middle = slice(4, x.shape[2] - recent - min(GROUP, recent))
    assert torch.equal(held[:, :, middle], encoded(x)[:, :, middle])


def test_blocks_bound_the_temporaries():
    zones = Zones(CODEC, torch.empty(1, 2, 1, DIM), 4, 64)
    step(zones, torch.randn(1, 2, 3 * zones.block, DIM))
    assert max(segment.tokens for segment in zones.side().segments) <= zones.block


@given(zones_of_any_size, updates)
def test_nothing_larger_is_kept_alive(sizes, updates):
    """New tokens come as views of the fused projection's output."""
    zones = Zones(CODEC, torch.empty(1, 2, 1, DIM), *sizes)
    for n in updates:
        projected = torch.zeros(1, n, 2, 3 * DIM).transpose(1, 2)
        step(zones, projected[..., DIM : 2 * DIM])
        for _, tensor in zones.tensors():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("sizes", [(0, 0), (0, 8), (2, 8)])
def test_the_caller_may_overwrite_what_it_gave(sizes):
    zones = Zones(CODEC, torch.empty(1, 2, 1, DIM), *sizes)
    for n in (3, 1, 60, 2):
        new = torch.randn(1, 2, n, DIM)
        step(zones, new)
        held = zones.side().dense()
        new.zero_()
        assert torch.equal(zones.side().dense(), held)
