"""A cache that grows, in compiled code."""

import pytest
import torch

from qkvcache import CompressedCache


@pytest.fixture(autouse=True)
def _compiling(monkeypatch):
    monkeypatch.setenv("QKVCACHE_KERNELS", "torch")
    torch.compiler.reset()
    with torch.compiler.set_stance("default"):
        yield
    torch.compiler.reset()


def update(x, cache):
    cache.update(x, -x, 0)
    return x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tokens_may_leave_the_recent_zone(mode):
    """And what was made in compiled code may be written outside of it."""
    plain, other = (CompressedCache(format="int8", num_sink_tokens=2, residual_length=6) for _ in range(2))
    compiled = torch.compile(update, dynamic=True, backend="aot_eager")
    with mode():
        for tokens in (9, 5, 70):
            x = torch.randn(1, 2, tokens, 32)
            update(x, plain)
            compiled(x, other)
    with torch.no_grad():
        x = torch.randn(1, 2, 20, 32)
        update(x, plain)
        update(x, other)
    assert plain.get_seq_length() == other.get_seq_length() == 104
    for got, expected in zip(other.layers[0].dense(), plain.layers[0].dense(), strict=True):
        assert torch.equal(got, expected)


@torch.no_grad()
def test_many_tokens_over_a_compressed_past():
    """Which the layer is decoded for."""
    cache, x = CompressedCache(format="int8", num_sink_tokens=2, residual_length=6), torch.randn(1, 2, 20, 32)
    cache.update(x, -x, 0)
    got = torch.compile(lambda x: cache.update(x, -x, 0)[1].dense(), backend="aot_eager")(x)
    assert torch.equal(got[:, :, 20:], -x)
    torch.testing.assert_close(got[:, :, :20], -x, atol=0.03, rtol=0)
