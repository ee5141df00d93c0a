"""The kernel of the rotary embedding, against a rotation in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkvcache.evict.dispatch import rotate
from qkvcache.evict.rope import Rope
from tests.evict.test_rope import exactly

triton = pytest.importorskip("triton")
if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

from qkvcache.evict import triton_rotate  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def launches(monkeypatch) -> list[torch.dtype]:
    """Dispatch chooses the kernel, whose output holds nan at first. Returns the dtypes of what it rotates."""
    kernel, found = triton_rotate.rotate, []

    def noted(x: Tensor, *args: object) -> Tensor:
        found.append(x.dtype)
        return kernel(x, *args)

    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    monkeypatch.setattr(triton_rotate, "rotate", noted)
    monkeypatch.setattr(triton_rotate.torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    return found


def data(batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Heads within tokens, as a projection leaves them."""
    return torch.randn(batch, tokens, heads, dim, device=DEVICE).to(dtype).transpose(1, 2)


def frequencies(channels: int) -> Tensor:
    return (1e4 ** -(torch.arange(0, channels, 2, device=DEVICE).double() / channels)).contiguous()


SHAPES = {  # batch, heads, tokens, channels, those with RoPE
    "llama": (1, 9, 70, 128, 128),
    "one token": (3, 2, 1, 64, 64),
    "few channels with RoPE": (2, 3, 33, 80, 32),
    "channels that are no power of two": (1, 2, 5, 96, 96),
    "two channels": (2, 1, 32, 6, 2),
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape, interleaved, launches):
    *sizes, channels = SHAPES[shape]
    x, inv_freq = data(*sizes), frequencies(channels)
    batch, _, tokens, _ = x.shape
    for by in (
        torch.randint(-100_000, 10_000_000, (batch, tokens), device=DEVICE),
        torch.randint(100_000, (batch, 1), dtype=torch.int32, device=DEVICE),
        torch.full((1, 1), -77, device=DEVICE),
    ):
        found = rotate(x, by, inv_freq, interleaved)
        torch.testing.assert_close(found.double(), exactly(x, by, inv_freq, interleaved), rtol=0, atol=2e-6)
        assert torch.equal(found[..., channels:], x[..., channels:])
    assert len(launches) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_vectors_are_rounded_once(dtype, launches):
    x, inv_freq = data(2, 3, 40, 32, dtype), frequencies(32)
    by = torch.arange(40, device=DEVICE)[None] + 30_000
    found, expected = rotate(x, -by, inv_freq, False), exactly(x, -by, inv_freq, False)
    assert found.dtype == dtype
    rounded = torch.finfo(dtype).eps / 2 * (1 if DEVICE.type == "cuda" or dtype != torch.bfloat16 else 2)  # the interpreter cuts bf16
    assert ((found.double() - expected).abs() <= expected.abs() * rounded + 2e-6).all()
    assert torch.equal(rotate(x, by * 0, inv_freq, False), x)
    assert launches == [dtype] * 2


def test_views(launches):
    """Parts of tensors, and channels that are not contiguous."""
    x, inv_freq, by = data(2, 4, 50, 32), frequencies(32), torch.arange(50, device=DEVICE).expand(2, -1)
    whole = rotate(x, by, inv_freq, False)
    part = slice(7, 43)
    assert torch.equal(rotate(x[:, 1:3, part], by[:, part], inv_freq, False), whole[:, 1:3, part])
    assert torch.equal(rotate(x.mT.contiguous().mT, by, inv_freq, False), whole)
    assert torch.equal(rotate(x[:1].expand(3, -1, -1, -1), by[:1], inv_freq, False), whole[:1].expand(3, -1, -1, -1))
    assert rotate(x[:, :, :0], by[:, :0], inv_freq, False).shape == (2, 4, 0, 32)


def test_what_the_reference_serves(launches):
    """fp64 and gradients."""
    rope = Rope(frequencies(32).cpu(), False)
    x = data(1, 2, 3, 32)
    torch.testing.assert_close(rope.rotate(x.double(), 5).float(), rope.rotate(x, 5), rtol=0, atol=2e-6)
    x.requires_grad_()
    rope.rotate(x, 5).square().sum().backward()  # a rotation keeps the norm
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=0, atol=1e-5)
    assert launches == [torch.float32]
