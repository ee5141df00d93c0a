"""The kernel that stores a step of several tokens in sinks and residual."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkvcache.kernels.counted import store_exact
from qkvcache.storage import Storage

triton = pytest.importorskip("triton")
if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

from qkvcache.kernels import triton_store_exact  # noqa: E402
from tests.matrix import FORMATS as REGISTRY  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, DIMS, SINKS, RING = 3, (64, 80), 4, 9


def storage(dtype: torch.dtype) -> Storage:
    """Every element of sinks and residual is a sentinel."""
    like = tuple(torch.empty(2, HEADS, 0, dim, device=DEVICE, dtype=dtype) for dim in DIMS)
    held = Storage(REGISTRY["identity"].codecs(), like, SINKS, RING - 1, max_length=60)
    for x in (*held.sinks, *held.residual):
        x.fill_(-7)
    return held


def tokens(count: int, dtype: torch.dtype, contiguous: bool) -> tuple[Tensor, Tensor]:
    """Heads within tokens, as a projection leaves them, unless `contiguous`."""
    sides = [torch.randn(2, count, HEADS, dim, device=DEVICE).to(dtype).transpose(1, 2) for dim in DIMS]
    key, value = (x.contiguous() if contiguous else x for x in sides)
    return key, value


CASES = {  # tokens, new sinks, first token for the ring, its slot
    "sinks and one": (5, (0, 4), 4, 0),
    "sinks alone": (3, (1, 3), 3, 0),
    "nothing new": (30, (0, 0), 30, 3),
    "all of the ring": (30, (4, 4), 21, 0),
    "wrapped": (30, (4, 4), 21, 5),
    "the last slot": (40, (2, 4), 39, 8),
    "no tokens": (0, (0, 0), 0, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_kernel(case, dtype):
    count, sinks, begin, slot = CASES[case]
    x = tokens(count, dtype, contiguous=count == 5)
    mine, wanted = storage(dtype), storage(dtype)
    triton_store_exact.store_exact(mine.buffers, x, sinks, begin, slot, (count + 2, 7))
    store_exact(wanted.buffers, x, sinks, begin, slot, (count + 2, 7))
    assert all(map(torch.equal, (*mine.sinks, *mine.residual, mine.state), (*wanted.sinks, *wanted.residual, wanted.state)))
    assert mine.buffers.lengths.tolist() == [[count + 2, 7]] * 2
