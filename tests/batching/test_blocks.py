"""Blocks that requests share, fork, lose to others and get back; what requests leave behind."""

from __future__ import annotations

import random
import time

import numpy
import pytest
import torch
from transformers import GenerationConfig

from qkvcache import continuous_batching
from qkvcache.formats import Int8
from qkvcache.storage.ring import in_order
from tests.seeds import SEED

from .requests import ZONES, answers, assert_same, collect, llama, pool, prompts, serving, single, tiniest, waiting, watch_offloading

FORMAT = "turboquant_4bit_nc"


def allocator(manager):
    return manager.cache.allocators[0]


def free_pages(manager) -> int:
    """Pages that a request could have: those that nobody has, and those that are kept in case a prompt begins with them."""
    held = allocator(manager)
    return held.pool.num_free_sectors * held.blocks_per_sector + held.pool.count_free_blocks(0) + len(held.ledger.cached_blocks)


def assert_nothing_is_left(manager) -> None:
    held = allocator(manager)
    assert free_pages(manager) == held.num_blocks and not held.block_table
    rings = manager.cache.store.rings
    assert not rings.by_request and sorted(rings.free) == list(range(1, rings.count + 1))


def test_a_prompt_in_chunks_equals_a_cache():
    """Its chunks are smaller and larger than the exact tokens, and end within pages."""
    network, ids = llama(), prompts(100)
    for chunk in (3, 30):
        with continuous_batching(network, Int8(center=False), **ZONES), serving(network, max_batch_tokens=chunk) as manager:
            (got,) = answers(manager, ids)
        assert assert_same(got, single(network, ids[0], Int8(center=False), chunk=chunk))


@pytest.mark.contract
def test_prompts_that_begin_alike_share_their_blocks(monkeypatch):
    """The codes of shared blocks are read, not written again; answers are those of a prompt in two chunks."""
    network = llama()
    (begin,) = prompts(128)
    first, second = begin + prompts(20, seed=1)[0], begin + prompts(30, seed=2)[0]
    with continuous_batching(network, Int8(center=False), **ZONES | {"residual_length": 0}) as batching, serving(network) as manager:
        answers(manager, [first])
        cached = dict(allocator(manager).ledger.hash_to_block)
        assert batching.metrics().pages_cached == len(cached) == 2
        before = manager.cache.cache_tensor.view(-1, allocator(manager).bytes_per_block)[list(cached.values())].clone()
        (got,) = answers(manager, [second])
        assert cached.items() <= allocator(manager).ledger.hash_to_block.items()
        after = manager.cache.cache_tensor.view(-1, allocator(manager).bytes_per_block)[list(cached.values())]
        assert torch.equal(before, after)
        assert_nothing_is_left(manager)
    # The first chunk of a cache with a residual of one token; the last of the 128 is exact there, and a code here.
    assert assert_same(got[:2], tuple(x[:2] for x in single(network, second, Int8(center=False), chunk=128, residual_length=0)))


def test_the_last_tokens_of_a_prompt_are_read_again():
    """Pages have their codes; the ring has them exact, as many as of a prompt without pages."""
    network, (ids,) = tiniest(), prompts(131)
    with continuous_batching(network, FORMAT, **ZONES) as batching, serving(network, new=2) as manager:
        answers(manager, [ids])
        for length, reused in ((131, 64), (133, 128)):
            before = batching.metrics().cached_tokens
            answers(manager, [(ids + [5, 6])[:length]])
            assert batching.metrics().cached_tokens == before + reused


def test_there_are_no_more_rings_than_blocks():
    network = tiniest()
    with continuous_batching(network, FORMAT, **ZONES) as batching:
        for options in ({}, {"max_requests_per_batch": 9}):
            with serving(network, blocks=3, **options) as manager:
                assert batching.metrics().rings == 3 == manager.continuous_batching_config.max_requests_per_batch
                assert len(answers(manager, prompts(20, 30, 40, 50))) == 4


@pytest.mark.contract
def test_forks_equal_the_request_that_they_come_from():
    network, (ids,) = llama(), prompts(100)
    options = {"max_new_tokens": 10, "do_sample": True, "top_k": 1, "eos_token_id": -1}
    with continuous_batching(network, FORMAT, **ZONES):
        several = network.generate_batch(
            [ids], generation_config=GenerationConfig(**options, num_return_sequences=3), continuous_batching_config=pool()
        )
    tokens = [output.generated_tokens for output in several.values()]
    assert len(tokens) == 3 and tokens[0] == tokens[1] == tokens[2] and len(tokens[0]) == 10


@pytest.mark.contract
@pytest.mark.parametrize("space", [0, 0.01], ids=["reset", "offload"])
def test_a_request_that_loses_its_blocks_gets_them_back(space, monkeypatch):
    """From the host bit by bit, or read again; all requests end, and nothing is left."""
    network, ids = llama(), prompts(60, 55, 50, 58)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: real(*a, **k))  # a CPU pins nothing
    with continuous_batching(network, Int8(center=False), **ZONES) as batching:
        with serving(network, new=80, blocks=7, cpu_offload_space=space, safety_margin=0.0, allow_block_sharing=False) as manager:
            moved = watch_offloading(manager)
            with waiting(network):
                names = manager.add_requests(ids)
            found = collect(manager, names)
            assert_nothing_is_left(manager)
        assert batching.metrics().preemptions > 0 and (not space or moved)
    assert [len(found[name].generated_tokens) for name in names] == [80] * 4


def test_a_ring_that_another_request_takes():
    """A request whose ring is given away reads codes, and goes on with a ring of later tokens."""
    from qkvcache.batching.rings import Rings

    rings = Rings(1, 2, 1, 4, 8, torch.float32, torch.device("cpu"))

    def extend(past: int, end: int, *requests: str) -> tuple[list[int], list[int], list[int]]:
        """Rows, and how many tokens are read from them before and after the new ones."""
        before, after = (numpy.full(len(requests), count) for count in (past, end))
        rows, since = rings.extend(requests, before, after)
        return rows.tolist(), *(rings.tokens(since, count, 2).tolist() for count in (before, after))

    a, _, kept = extend(0, 10, "a")
    b, *_ = extend(0, 3, "b")
    assert kept == [4] and extend(3, 4, "b") == (b, [1], [2])
    assert extend(0, 5, "c") == (a, [0], [3])
    assert extend(10, 11, "a") == (b, [0], [1]) and "b" not in rings.by_request
    assert extend(11, 12, "a", "c") == ([*b, *a], [1, 0], [2, 1])  # the ring of the second ends at 5
    assert extend(12, 13, "d", "a") == ([*a, *b], [0, 2], [1, 3])  # a request of the same step keeps its ring
    rings.release("a")
    rings.fork("d", "e")
    assert rings.copies == [(*a, *b)] and extend(13, 14, "d", "e") == ([*a, *b], [1, 1], [2, 2])
    ring = torch.arange(2 * 4.0).view(2, 1, 4, 1)
    assert in_order(ring[1:2], 2, 3).flatten().tolist() == [6, 7, 4]


@pytest.mark.contract
def test_a_request_that_does_not_fit_fails_alone():
    """At the call, if its length is known, or beside the others of a batch; else once it has all pages. The others go on."""
    network = tiniest()
    with continuous_batching(network, FORMAT, **ZONES) as batching, serving(network, new=5, blocks=2) as manager:
        with pytest.raises(MemoryError, match="129 tokens .* pool of 128"):
            manager.add_request(prompts(125)[0], max_new_tokens=5)
        assert not batching.metrics().waiting
        names = manager.add_requests(prompts(125, 40), max_new_tokens=5)
        found = collect(manager, names)
        assert "pool of 128" in found[names[0]].error and len(found[names[1]].generated_tokens) == 5
        manager.generation_config.max_new_tokens = None
        endless = manager.add_request(prompts(100)[0])
        found = collect(manager, [endless])
        assert "pool of 128" in found[endless].error and len(found[endless].generated_tokens) == 29
        manager.generation_config.max_new_tokens = 5
        assert len(answers(manager, prompts(40, 30))) == 2
        assert_nothing_is_left(manager)


@pytest.mark.contract
def test_a_thousand_requests_with_cancels_and_preemptions():
    """Every request that is not cancelled ends with all its tokens; no page and no ring is left; the thread lives.

    The first requests take all pages and need as many again: some of them lose theirs, whatever is scheduled when."""
    network, draw, blocks = tiniest(), random.Random(SEED), 20
    with continuous_batching(network, FORMAT, **ZONES) as batching:
        with serving(network, blocks=blocks, max_requests_per_batch=32, safety_margin=0.0) as manager:
            with waiting(network):
                first = manager.add_requests(prompts(*[63] * blocks), max_new_tokens=5)
            wanted = dict.fromkeys(first, 5)
            cancelled: set[str] = set()
            for i, ids in enumerate(prompts(*(draw.choice((1, 9, 61, 63)) for _ in range(1000)))):
                wanted[str(i)] = draw.randint(1, 5)
                manager.add_request(ids, request_id=str(i), max_new_tokens=wanted[str(i)])
                if draw.random() < 0.2:
                    cancelled.add(str(draw.randint(0, i)))
            for name in cancelled:
                manager.cancel_request(name)
            found = collect(manager, [name for name in wanted if name not in cancelled])
            while manager.batch_processor.has_pending_requests():
                time.sleep(0.01)
            assert_nothing_is_left(manager)
            assert len(answers(manager, prompts(20))) == 1
        assert {name: len(found[name].generated_tokens) for name in found} == {name: wanted[name] for name in found}
        metrics = batching.metrics()
        assert metrics.preemptions and metrics.tokens_generated >= sum(wanted[name] for name in found)


def test_blocks_kept_between_steps_are_those_of_the_requests():
    """While requests come and go, fork, exchange blocks for others with the same tokens, and take the rings of others."""
    from transformers.generation.continuous_batching import RequestState

    network, draw, states, begins = tiniest(), random.Random(SEED), dict[str, RequestState](), prompts(128, 128)
    with continuous_batching(network, FORMAT, **ZONES):
        manager = network.init_continuous_batching(continuous_batching_config=pool(200, max_requests_per_batch=6))
        cache = manager._create_batch_processor().cache
        (held,) = cache.allocators
        for i in range(300):
            states[str(i)] = RequestState(str(i), draw.choice(begins) + prompts(90, seed=i)[0])
            if draw.random() < 0.3:
                source = states[draw.choice(list(states))]
                if source.position_offset and cache.prepare_fork_request(source, [f"{i}f"], {"full_attention": ([], [])}):
                    states[f"{i}f"] = source.fork(f"{i}f")
            batch = draw.sample(list(states.values()), min(len(states), 6))
            batch = [state for state in batch if cache.can_store_request_tokens(state, draw.choice((1, 1, 70)))]
            tables = [held.block_table[state.request_id] for state in batch]
            past = [state.position_offset for state in batch]
            count = [min(len(blocks) * held.tokens_per_page - begin, 70) for blocks, begin in zip(tables, past, strict=True)]
            if not batch:
                continue
            cache.store.prepare([state.request_id for state in batch], [tables], past, count)
            for row, blocks, state, new in zip(cache.store.groups[0].batch.blocks.tolist(), tables, batch, count, strict=True):
                assert row[: len(blocks)] == blocks
                state.position_offset += new
                if draw.random() < 0.3:
                    state.initial_tokens = state.initial_tokens[: state.position_offset]
                    cache.mark_complete_blocks(state, {"full_attention": 2})
            for name in [name for name in states if draw.random() < 0.15]:
                cache.free_blocks(name)
                del states[name]
        assert held.ledger.block_to_hash
