"""The tokens that new ones replace: the torch reference against sorting in Python, and the kernel against the reference."""

import pytest
import torch

from qkvcache.evict import replace as reference
from tests.seeds import SEED

ROWS, HEADS = 3, 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def made(stored: int, count: int, others: int, padding: bool):
    """Priorities with ties, nan, inf and both zeros; distinct positions in any order, and slots and new tokens that are empty."""
    torch.manual_seed(SEED)
    columns = stored + count
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 2.0])
    priority = odd[torch.randint(len(odd), (ROWS, HEADS, columns))]
    priority = torch.where(torch.rand(priority.shape) < 0.5, priority, torch.rand(priority.shape))
    positions = torch.stack([torch.randperm(2 * columns)[:columns] for _ in range(ROWS * HEADS)]).view(ROWS, HEADS, columns).int()
    if padding:
        positions = positions.masked_fill(torch.rand(ROWS, 1, columns) < 0.4, -1)
    union = {"positions": positions} | {str(i): torch.randn(priority.shape) for i in range(others)}
    union = {name: x.to(DEVICE) for name, x in union.items()}
    return priority.to(DEVICE), union, {name: x[..., :stored].clone() for name, x in union.items()}


SIZES = [(6, 1, 0), (13, 4, 1), (40, 7, 3), (5, 9, 2), (0, 3, 1)]
"""Slots, new tokens, and fields beside the positions."""
RECENT = [20, torch.tensor([4, 15, 30], device=DEVICE)[:, None, None]]


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(("stored", "count", "others"), SIZES)
def test_the_lowest_are_replaced(stored, count, others, padding):
    priority, union, region = made(stored, count, others, padding)
    into = reference.replace_lowest(priority, union, region, 2, 20).tolist()
    low = torch.finfo(torch.float32).min
    for row in range(ROWS):
        for head in range(HEADS):
            positions = union["positions"][row, head].tolist()
            ranks = [low if x != x else min(max(x, low), -low) for x in priority[row, head].tolist()]
            ranks = [torch.inf if p < 2 or p >= 20 else x for x, p in zip(ranks, positions, strict=True)]
            order = sorted(range(stored + count), key=lambda i: (positions[i] >= 0, ranks[i] if positions[i] >= 0 else -i, positions[i]))
            lowest = order[:count]
            freed, new = sorted(i for i in lowest if i < stored), [i for i in range(stored, stored + count) if i not in lowest]
            assert into[row][head] == [freed[new.index(i)] if i in new else -1 for i in range(stored, stored + count)]
            held = list(range(stored))
            for slot, i in zip(freed, new, strict=True):
                held[slot] = i
            for name, x in region.items():
                assert torch.equal(x[row, head], union[name][row, head, held])


def kernel():
    triton = pytest.importorskip("triton")
    if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
        pytest.skip("needs a GPU, or Triton's interpreter")
    from qkvcache.evict import triton_replace

    return triton_replace


@pytest.mark.parametrize("by", [lambda: reference, kernel], ids=["reference", "kernel"])
def test_both_zeros_are_equal(by):
    """Among tokens of equal priority the earliest go first."""
    priority = torch.tensor([0.0, 0.0, 0.0, -0.0, -0.0, -0.0, 1.0, 1.0], device=DEVICE)[None, None]
    union = {"positions": torch.arange(2, 10, dtype=torch.int32, device=DEVICE)[None, None]}
    region = {"positions": union["positions"][..., :6].clone()}
    assert by().replace_lowest(priority, union, region, 2, 20).tolist() == [[[0, 1]]]
    assert region["positions"].tolist() == [[[8, 9, 4, 5, 6, 7]]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("first_recent", RECENT, ids=["even", "rows"])
@pytest.mark.parametrize("padding", [False, True])
def test_the_kernel_replaces_the_same(monkeypatch, padding, first_recent):
    triton_replace = kernel()
    monkeypatch.setattr(triton_replace, "LARGEST", 16)  # so that a program looks at several blocks
    triton_replace._launcher.cache_clear()
    for stored, count, others in SIZES:
        priority, union, region = made(stored, count, others, padding)
        strided = {name: x.mT.contiguous().mT for name, x in region.items()}  # as views of larger tensors are
        wanted = reference.replace_lowest(priority, union, region, 2, first_recent)
        found = triton_replace.replace_lowest(priority, union, strided, 2, first_recent)
        assert torch.equal(found, wanted)
        assert all(torch.equal(strided[name].view(torch.int32), x.view(torch.int32)) for name, x in region.items())
    triton_replace._launcher.cache_clear()
