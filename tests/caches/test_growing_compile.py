"""A cache that grows, in compiled code."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qkvcache import CompressedCache
from tests.matrix import FORMATS, slowly


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


def test_tokens_may_leave_the_recent_zone():
    """And what was made in compiled code may be written outside of it."""
    plain, other = (CompressedCache(format="int8", num_sink_tokens=2, residual_length=6) for _ in range(2))
    compiled = torch.compile(update, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
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


class Attention(torch.nn.Module):
    """As models have it, of 4 query heads over 2."""

    num_key_value_groups = 2
    is_causal = True

    def forward(self, query, key, value, cache):
        key, value = cache.update(key, value, 0)
        return ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)(self, query, key, value, None, scaling=0.2)[0]


@torch.no_grad()
def check_compiled_attention(backend: str, format: str) -> None:
    module = Attention()
    compiled = torch.compile(module.forward, dynamic=True, backend=backend)
    caches = [CompressedCache(format=FORMATS[format], num_sink_tokens=2, residual_length=4) for _ in range(2)]
    for tokens in (30, 1, 3, 1):
        x = [torch.randn(1, heads, tokens, 32) for heads in (4, 2, 2)]
        assert torch.equal(compiled(*x, caches[0]), module(*x, caches[1]))


@pytest.mark.parametrize("format", slowly(FORMATS, ["turboquant_3bit_nc"]))
def test_compiled_attention_is_that_of_eager_code(format):
    """On codes, of which no graph is made: whatever the format."""
    check_compiled_attention("aot_eager", format)


@pytest.mark.slow
@pytest.mark.parametrize("format", slowly(FORMATS, ["turboquant_4bit_nc"]))
def test_inductor_compiles_attention(format):
    check_compiled_attention("inductor", format)
