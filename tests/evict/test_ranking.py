"""Selecting tokens, against sorting them in Python."""

import pytest
import torch

from qkvcache.evict.policies import ranking
from qkvcache.evict.policies.ranking import ascending, first_of, highest
from qkvcache.evict.replace import total_order
from tests.seeds import SEED


def test_an_order_is_by_rank_and_then_by_position():
    rank = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, 1.0, 1e-40])
    positions = torch.tensor([3, 2, 1, 0, 5, 4, 7, 6], dtype=torch.int32)
    found = total_order(rank[None, None], positions[None, None])[0, 0].argsort().tolist()
    assert found == sorted(range(8), key=lambda i: (rank[i].item() + 0.0, positions[i].item()))


@pytest.mark.parametrize("count", [-1, 0, 1, 4, 9, 12, torch.tensor([[[0], [3]], [[9], [20]]]), torch.tensor([[[-2]], [[5]]])], ids=str)
def test_the_highest(count):
    torch.manual_seed(SEED)
    order = torch.stack([torch.randperm(9) for _ in range(4)]).view(2, 2, 9) - 4
    found = highest(order, count)
    for row in range(2):
        for head in range(2):
            many = count if isinstance(count, int) else int(count.expand(2, 2, 1)[row, head])
            best = sorted(range(9), key=lambda i: -order[row, head, i])[: max(many, 0)]
            assert found[row, head].nonzero().flatten().tolist() == sorted(best)


@pytest.mark.parametrize("block", [4096, 8], ids=["short", "long"])
def test_rows_are_sorted_each_by_itself(block, monkeypatch):
    monkeypatch.setattr(ranking, "SORTED_IN_A_BLOCK", block)
    torch.manual_seed(SEED)
    positions = torch.randint(-1, 6, (2, 3, 20), dtype=torch.int32)
    positions[0, 1, 4] = 2**31 - 1
    assert torch.equal(ascending(positions), positions.argsort(dim=-1, stable=True))


@pytest.mark.parametrize("count", [0, 1, 5, 11])
def test_the_first_of_several_masks(count):
    torch.manual_seed(SEED)
    kind = torch.randint(3, (2, 3, 11))
    found = first_of([kind == i for i in range(3)], count)
    expected = [[sorted(range(11), key=lambda i: (int(kind[row, head, i]), i))[:count] for head in range(3)] for row in range(2)]
    assert found.tolist() == expected
