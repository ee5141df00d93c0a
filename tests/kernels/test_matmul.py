"""Products in fp32, against fp64."""

import importlib

import pytest
import torch

from qkvcache.kernels import matmul_fp32, quadratic_form
from tests.tolerance import rounding

matmul = importlib.import_module("qkvcache.kernels.matmul")
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


@pytest.mark.parametrize("by_bytes", [True, False])
def test_products_with_int8(by_bytes, monkeypatch):
    """By bytes where the CPU has the instructions; few rows, of several scales, beside one that is not finite and one of zeros."""
    if by_bytes and not matmul._multiplies_bytes():
        pytest.skip("needs a CPU that multiplies bytes")
    multiplied, int_mm = [], torch._int_mm
    monkeypatch.setattr(matmul, "_multiplies_bytes", lambda: by_bytes)
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: multiplied.append(a) or int_mm(a, b))
    levels = torch.randint(-128, 128, (2, 77, 3, 256), dtype=torch.int8)[..., ::2].transpose(1, 2)
    for rows, transposed in ((1, True), (8, False), (8, True), (9, False)):
        a = data(2, 3, rows, 128 if transposed else 77).cpu() * 10.0 ** torch.arange(-20, rows - 20)[:, None]
        expected = a.double() @ (levels.mT if transposed else levels).double()
        error = (matmul.matmul_levels(a, levels, transposed) - expected).abs() / a.abs().amax(-1, keepdim=True)
        assert error.max() <= 128 * a.shape[3] * 2**-22
        a[0, 0, 0, 0], a[1, 1, -1] = torch.inf, 0
        found = matmul.matmul_levels(a, levels, transposed)
        assert found.is_contiguous() and not found[0, 0, 0].isfinite().any() and not found[1, 1, -1].any() and found[0, 1:].isfinite().all()
    assert len(multiplied) == by_bytes * 2 * 3 * 6
    a = torch.randn(2, 3, 1, 77, requires_grad=True)
    matmul.matmul_levels(a, levels).sum().backward()
    assert torch.equal(a.grad, levels.sum(-1, dtype=torch.float32)[:, :, None])


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


SHAPES = [(1, 2, 70, 64, 3), (2, 1, 1, 80, 1), (2, 3, 65, 16, 2)]  # rows, heads, tokens, channels, query heads of a head


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quadratic_forms_by_kernel(dtype, shape, monkeypatch):
    """The matrices are rounded to 16 bits, and nothing else. Buffers hold nan at first."""
    triton = pytest.importorskip("triton")
    if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
        pytest.skip("needs a GPU, or Triton's interpreter")
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("the interpreter has no products of bfloat16")
    from qkvcache.kernels import triton_quadratic_form

    poisoned = lambda *shape, **options: torch.full(shape, torch.nan, **options)  # noqa: E731
    monkeypatch.setattr(triton_quadratic_form.torch, "empty", poisoned)
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    run, launches = triton_quadratic_form.quadratic_form, []
    monkeypatch.setattr(triton_quadratic_form, "quadratic_form", lambda *args: launches.append(args) or run(*args))
    batch, heads, tokens, dim, groups = shape
    x = data(batch, heads, tokens, dim, dtype=dtype)
    for rows in {1, batch}:
        matrices = torch.randn(rows, heads * groups, dim, dim, device=DEVICE)
        found, expected = quadratic_form(x, matrices), quadratic_forms(x, matrices.to(dtype))
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= rounding(dim, dim) * expected.abs().max()
        assert torch.equal(quadratic_form(x.mT.contiguous().mT, matrices), found)
    assert len(launches) == 2 * len({1, batch})
