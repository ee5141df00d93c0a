"""Pages that rows of a batch share are read once: which rows are read together, and that answers are as without."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest
import torch

from qkvcache import continuous_batching
from qkvcache.batching import layout, shares, step
from qkvcache.formats import Int8
from qkvcache.kernels.attend import plan
from tests.matrix import model
from tests.seeds import SEED

from .requests import answers, assert_same, prompts, serving, single

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PAGES = layout.BlockLayout(Int8(), 2, 64, 64, 2, torch.float32)


def shared(lists: list[list[int]], lengths: list[int]) -> list[list[int]]:
    blocks = numpy.zeros((len(lists), max(map(len, lists))), numpy.int32)
    for row, found in enumerate(lists):
        blocks[row, : len(found)] = found
    found = shares.shares_of(blocks, numpy.array(lengths) // PAGES.page_size, PAGES)
    return [] if found is None else [[pages // 64, *rows] for pages, *rows in found.tolist()]


def test_rows_are_grouped_where_they_share_most(monkeypatch):
    monkeypatch.setattr(shares, "LEAST_SPARED", 1)
    alone = [0] * 5
    # The last page of a row is not complete, or its tokens are in the ring.
    lists = [[1, 2, 9], [5, 6], [1, 2, 9], [1, 2, 9]]
    assert shared(lists, [200, 90, 130, 200]) == [[2, 0, 2, 3, 0], alone, [2, 0, 2, 3, 0], [2, 0, 2, 3, 0]]
    # Two rows spare nothing.
    assert shared(lists[:3], [200] * 3) == []
    # All share the first page; three of them share more than all of them spare.
    lists = [[1, 2, 3, 4, 5, 6], [1, 7], [1, 2, 3, 4, 5, 8], [1, 2, 3, 4, 5, 9]]
    assert shared(lists, [380, 100, 380, 380]) == [[5, 0, 2, 3, 0], alone, [5, 0, 2, 3, 0], [5, 0, 2, 3, 0]]
    # More rows than are read together, as many in each part.
    found = shared([[3, 4, 10 + n] for n in range(7)], [150] * 7)
    assert found == [[2, 0, 1, 2, 3]] * 4 + [[2, 4, 5, 6, 4]] * 3
    # Padding is no page.
    assert shared([[1], [1], [1], [2, 0], [3, 0], [4, 0]], [60, 40, 60, 100, 64, 64]) == []
    monkeypatch.setattr(shares, "LEAST_SPARED", 2 * 64 + 1)
    assert shared([[1, 2], [1, 3], [1, 4]], [100] * 3) == []


def test_shares_are_found_anew_only_where_they_change(monkeypatch):
    """While requests of two prompts come, grow by pages of their own, exchange pages for equal ones, and leave."""
    monkeypatch.setattr(shares, "LEAST_SPARED", 1)
    searches, groups = [], shares._groups
    monkeypatch.setattr(shares, "_groups", lambda *args: (searches.append(args[3]), groups(*args))[1])
    tables, draw, page = step.BlockTables(12), random.Random(SEED), itertools.count(100)
    lists = [[1 + i % 2, 3 + i % 2] for i in range(12)]
    ends = [draw.randint(1, 128) for _ in lists]
    batch, steps = list(range(8)), 600
    for turn in range(steps):
        if turn % 100 == 50:
            batch = sorted(draw.sample(range(12), 8))
            lists[batch[0]] = list(lists[batch[1]][:2])
            ends[batch[0]] = 128
            tables.forget(1 + batch[0])
        if turn % 100 == 80:
            lists[batch[0]][0] = 3 - lists[batch[0]][0]
            tables.forget(1 + batch[0])
        for i in batch:
            ends[i] += 1
            while len(lists[i]) * PAGES.page_size < ends[i]:
                lists[i].append(next(page))
        rows = numpy.array(batch) + 1
        blocks, lengths = tables.read(rows, [lists[i] for i in batch]), numpy.array([ends[i] for i in batch])
        searches.clear()
        got = tables.shares(rows, blocks, lengths, PAGES)
        steps -= not searches
        assert numpy.array_equal(got, shares.shares_of(blocks, lengths // PAGES.page_size, PAGES))
    assert 5 < steps < 50


def test_answers_of_prompts_that_begin_alike(monkeypatch):
    """In steps of decoding alone and beside prompts, with the answers that prompts have alone; kernels in the interpreter."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    monkeypatch.setattr(shares, "LEAST_SPARED", 1)
    network, (begin,), calls = model("llama", layers=2), prompts(130), []
    ids = [*(begin + more for more in prompts(20, 9, 40, seed=1)), *prompts(90, seed=2)]
    real = plan.Plan.__init__

    def watched(self, query, inputs, *args, **options):
        real(self, query, inputs, *args, **options)
        if self.items is not None and self.items.shape[1] > 3:
            calls.append((len(query), inputs.work.splits.shares[:, 1].amax().item()))

    monkeypatch.setattr(plan.Plan, "__init__", watched)
    zones = {"num_sink_tokens": 2, "residual_length": 4}
    with continuous_batching(network, Int8(center=False), **zones), serving(network, new=4, max_batch_tokens=200) as running:
        got = answers(running, ids)
    assert {rows for rows, _ in calls} >= {3, 4} and all(pieces > 0 for _, pieces in calls)
    monkeypatch.setenv("QKVCACHE_KERNELS", "torch")
    for tokens, prompt in zip(got, ids, strict=True):
        assert_same(tokens, single(network, prompt, Int8(center=False), new=4))
