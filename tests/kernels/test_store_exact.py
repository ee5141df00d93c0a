"""The kernel that stores a step of several tokens in sinks and residual."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkvcache.kernels import pages as reference

triton = pytest.importorskip("triton")
if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

from qkvcache.kernels import triton_store_exact  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, DIMS, SINKS, RING = 3, (64, 80), 4, 9


def zones(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`count` slots for keys and for values, of which every element is a sentinel."""
    key, value = (torch.full((2, HEADS, count, dim), -7, device=DEVICE, dtype=dtype) for dim in DIMS)
    return key, value


def tokens(count: int, dtype: torch.dtype, contiguous: bool) -> tuple[Tensor, Tensor]:
    """Heads within tokens, as a projection leaves them, unless `contiguous`."""
    sides = [torch.randn(2, count, HEADS, dim, device=DEVICE).to(dtype).transpose(1, 2) for dim in DIMS]
    key, value = (x.contiguous() if contiguous else x for x in sides)
    return key, value


CASES = {  # tokens; of them sinks: the first and the one after the last; the first token for the ring, and its slot
    "sinks and one": (5, (0, 4), 4, 0),
    "sinks alone": (4, (1, 3), 4, 3),
    "no sinks": (3, (0, 0), 0, 3),
    "the last of many": (30, (0, 0), 21, 0),
    "sinks, and the last of many": (30, (2, 4), 22, 4),
    "all of the ring": (9, (0, 0), 0, 0),
    "wrapped": (9, (0, 0), 0, 5),
    "sinks, and wrapped": (6, (0, 2), 2, 7),
    "the last slot": (1, (0, 0), 0, 8),
    "no tokens": (0, (0, 0), 0, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_kernel(case, dtype):
    count, opening, begin, slot = CASES[case]
    x = tokens(count, dtype, contiguous=count == 5)
    stored = []
    for store in (triton_store_exact.store_exact, reference.store_exact):
        ring, sinks = zones(RING, dtype), zones(SINKS, dtype)
        rows = torch.arange(16, dtype=torch.int32, device=DEVICE).view(2, 8)
        store(x, ring, sinks, rows, opening, begin, slot, (4, 5, 6, 7, 22))
        stored.append((*ring, *sinks, rows))
    assert all(map(torch.equal, *stored))
    assert stored[0][-1].tolist() == [[0, 1, 2, 4, 5, 6, 7, 22], [8, 9, 10, 4, 5, 6, 7, 22]]
