"""Products in fp32, against fp64."""

import importlib

import pytest
import torch

from qkvcache.kernels import matmul_fp32, quadratic_form
from tests.tolerance import rounding

matmul = importlib.import_module("qkvcache.kernels.attend.matmul")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def data(*shape, dtype=torch.float32):
    """As attention has it: heads after tokens in memory."""
    batch, heads, tokens, dim = shape
    return torch.randn(batch, tokens, heads, dim, device=DEVICE).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_summed_in_fp32(dtype):
    x, y = data(2, 3, 300, 24, dtype=dtype), data(2, 3, 300, 40, dtype=dtype)
    for a, b in ((x.mT, y), (x, y[..., :24].mT), (x, y[..., :24, :].float()[..., :24, :16])):
        found, expected = matmul_fp32(a, b), a.double() @ b.double()
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() <= rounding(300) * expected.abs().max()


def quadratic_forms(x, matrices):
    """By definition, in fp64."""
    matrices = matrices.double().unflatten(1, (x.shape[1], -1)).expand(len(x), -1, -1, -1, -1)
    return torch.einsum("bhti,bhgij,bhtj->bhgt", x.double(), matrices, x.double())


@pytest.mark.parametrize("block", [2**25, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quadratic_forms(dtype, block, monkeypatch):
    monkeypatch.setattr(matmul, "BLOCK", block)
    for batch in (1, 2):
        x, matrices = data(2, 3, 7, 16, dtype=dtype), torch.randn(batch, 6, 16, 16, device=DEVICE)
        found, expected = quadratic_form(x, matrices), quadratic_forms(x, matrices)
        assert found.dtype == torch.float32 and found.shape == (2, 3, 2, 7)
        assert (found - expected).abs().max() <= rounding(16, 16, dtype=dtype) * expected.abs().max()
