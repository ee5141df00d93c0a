"""The kernel that gathers the tokens of requests, against its torch reference."""

import pytest
import torch

from qkvcache.kernels.store import reference
from tests.kernels.test_fused_attend import KINDS
from tests.kernels.test_pages import DEVICE, FORMATS, KERNELS, QUICK, gathered
from tests.matrix import slowly


@KERNELS
@pytest.mark.parametrize("format", slowly(FORMATS, QUICK))
def test_the_kernel_that_gathers(format):
    from qkvcache.batching import triton_gather

    inputs, new, starts, tiles, (out, wanted) = gathered(format, KINDS.get(format, 64), DEVICE)
    triton_gather.gather_rows(inputs, new, starts, tiles, out)
    reference.gather_rows(inputs, new, starts, tiles, wanted)
    for x, y in zip(out, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3, equal_nan=True)
