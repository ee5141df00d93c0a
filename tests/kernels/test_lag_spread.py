"""Spread within the range of later tokens: torch against the definition in fp64, and the kernel against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkvcache.kernels import lag_spread

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = {  # batch, heads, tokens with a spread, lag, tokens after the last window, channels
    "one block": (1, 2, 4, 4, 0, 16),
    "blocks, the last of which is not full": (2, 1, 11, 4, 0, 48),
    "a lag that is no power of two": (1, 2, 8, 3, 2, 40),
    "a token of a step": (2, 1, 1, 5, 0, 16),
    "fewer tokens than the lag": (1, 1, 3, 8, 1, 6),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def data(shape: str, dtype: torch.dtype) -> Tensor:
    """Heads within tokens, as a projection leaves them."""
    batch, heads, count, lag, more, dim = SHAPES[shape]
    return torch.randn(batch, count + lag + more, heads, dim, device=DEVICE).to(dtype).transpose(1, 2)


def spread(x: Tensor, count: int, lag: int) -> Tensor:
    """By definition."""
    found = []
    for t in range(count):
        after = x.double()[:, :, t + 1 : t + 1 + lag]
        low, high = after.amin(2), after.amax(2)
        found.append(((x[:, :, t].double() - low) / (high - low).clamp_min(1e-6)).std(-1))
    return torch.stack(found, dim=-1).float()


@every_shape
def test_reference(shape, monkeypatch):
    monkeypatch.setenv("QKVCACHE_KERNELS", "torch")
    _, _, count, lag, *_ = SHAPES[shape]
    x = data(shape, torch.float32)
    torch.testing.assert_close(lag_spread(x, count, lag), spread(x, count, lag), rtol=1e-4, atol=0)


@pytest.fixture
def kernel(monkeypatch) -> list[int]:
    """Dispatch chooses the kernel, whose output holds nan at first. Returns the lags of its launches."""
    triton = pytest.importorskip("triton")
    if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
        pytest.skip("needs a GPU, or Triton's interpreter")
    from qkvcache.kernels import triton_lag_spread

    run, launches = triton_lag_spread.lag_spread, []

    def noted(x: Tensor, count: int, lag: int) -> Tensor:
        launches.append(lag)
        return run(x, count, lag)

    monkeypatch.setattr(triton_lag_spread, "lag_spread", noted)
    monkeypatch.setattr(triton_lag_spread.torch, "empty", lambda *shape, **options: torch.full(shape, torch.nan, **options))
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    return launches


@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernel(shape, dtype, kernel):
    """In fp32, whatever the dtype of the keys."""
    _, _, count, lag, *_ = SHAPES[shape]
    x = data(shape, dtype)
    x[:, :, :, 3] = 2.0  # a channel without a range
    torch.testing.assert_close(lag_spread(x, count, lag), spread(x, count, lag), rtol=1e-4, atol=0)
    torch.testing.assert_close(lag_spread(x.mT.contiguous().mT, count, lag), spread(x, count, lag), rtol=1e-4, atol=0)
    assert kernel == [lag] * 2


def test_what_is_beyond_the_windows_is_not_read(kernel):
    x = data("blocks, the last of which is not full", torch.float32)
    longer = torch.cat([x, torch.full_like(x, torch.nan)], dim=2)
    assert torch.equal(lag_spread(longer, 11, 4), lag_spread(x, 11, 4))
