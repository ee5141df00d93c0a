"""The sums of attention of many queries over chunks of a quantized past are those over all of it."""

import pytest
import torch

from qkvcache.evict.observe import observe_chunks
from qkvcache.evict.sum_attention import sum_attention
from qkvcache.kernels import AttentionInputs, attend
from qkvcache.kernels.attend import chunked
from qkvcache.kernels.attend.chunked import attend_chunked
from tests import matrix
from tests.kernels.paged_inputs import of_heads
from tests.kernels.test_attend_chunked import DEVICE, DTYPE, FORMATS, LIMIT, REGISTRY, attention_inputs, close, poisoned  # noqa: F401
from tests.matrix import slowly
from tests.tolerance import rounding

pytestmark = pytest.mark.usefixtures("poisoned")


def check_sums(query, held, hidden, observed, *, scaling=None, softcap=None, sinks=None, **options):
    """Against the reference over dense keys, with the normaliser that it computes itself."""
    options |= {"scaling": scaling, "softcap": softcap, "sinks": sinks}
    out, sums = observe_chunks(query, held, hidden, observed=observed, **options)
    torch.testing.assert_close(out, attend_chunked(query, held, hidden, **options)[0], rtol=0, atol=0)
    visible = None if hidden is None else ~hidden
    keys, last = held.key.dense(), query[:, :, query.shape[2] - observed.shape[1] :]
    given = {"scaling": query.shape[3] ** -0.5 if scaling is None else scaling, "softcap": softcap, "sinks": sinks}
    wanted = sum_attention(last, keys, observed, visible, **given)
    assert sums.dtype == torch.float32 and sums.shape == wanted.shape
    limit = LIMIT if torch.bfloat16 == DTYPE else rounding(query.shape[3], query.shape[3], keys.shape[2])
    assert ((sums - wanted).abs().max() / wanted.abs().max()).item() < limit
    if hidden is not None:
        assert not sums.masked_select(hidden if hidden.dim() == 3 else hidden[:, None]).any()


@pytest.mark.parametrize("format", slowly(matrix.FORMATS, FORMATS))
@pytest.mark.parametrize("triton", [False, True], ids=["torch", "pages"])
@pytest.mark.parametrize("queries", [1, 19])
def test_sums_of_chunks_of_any_size(format, triton, queries):
    """With slots as layers that evict have them: each head has its own scales."""
    held = attention_inputs(format, 300, queries, per_head=True)
    held = held if triton else AttentionInputs(held.key, held.value)
    query = torch.randn(2, 6, queries, 64, device=DEVICE, dtype=DTYPE)
    check_sums(query, held, None, torch.rand(2, queries, device=DEVICE), chunk_tokens=64 if queries == 1 else 192)


@pytest.mark.parametrize("window", [1, 4, 9])
@pytest.mark.parametrize("first", [0, 4])
def test_sums_of_the_last_queries_with_padding_and_options(window, first):
    held = attention_inputs("turboquant_4bit_nc", 300, 9, first=first, per_head=True)
    query = torch.randn(2, 4, 9, 64, device=DEVICE, dtype=DTYPE)
    hidden = torch.zeros(2, 309, dtype=torch.bool, device=DEVICE)
    hidden[0, 300:304] = hidden[1, :150] = True
    observed = torch.rand(2, window, device=DEVICE).masked_fill(hidden[:, 309 - window :], 0)
    for options in ({}, {"scaling": 0.3, "sinks": torch.randn(4, device=DEVICE)}, {"softcap": 2.0}):
        check_sums(query, held, hidden, observed, chunk_tokens=64, **options)


@pytest.mark.parametrize(
    ("format", "triton"),
    [
        *((format, False) for format in ("identity", "int8", "turboquant_3bit_nc", "fp8_token")),
        *((format, True) for format in slowly(["identity", "int8", "turboquant_3bit_nc", "fp8_token"], ["fp8_token"])),
    ],
)
def test_pages_of_heads_of_different_lengths(monkeypatch, format, triton):
    """Of one head nothing is quantized, of another whole chunks are missing; a row has padding among its exact tokens."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton" if triton else "torch")
    queries = 9
    held, hidden = of_heads(REGISTRY[format], queries, dtype=DTYPE, device=DEVICE)
    query = torch.randn(2, 6, queries, 64, device=DEVICE, dtype=DTYPE)
    options = {"scaling": 0.3, "sinks": torch.randn(6, device=DEVICE)}
    shown = ~hidden.repeat_interleave(3, dim=1)[:, :, None]
    close(attend_chunked(query, held, hidden, chunk_tokens=64, **options)[0], attend(query, held, shown, causal=True, **options))
    for window in (1, queries):
        check_sums(query, held, hidden, torch.rand(2, window, device=DEVICE), chunk_tokens=64, **options)


@pytest.mark.parametrize(("heads", "dim"), [(2, 80), (16, 128)])
def test_sums_of_groups_and_channels(heads, dim):
    held = attention_inputs("int8", 200, 7, dim)
    query = torch.randn(2, heads, 7, dim, device=DEVICE, dtype=DTYPE)
    check_sums(query, held, None, torch.ones(2, 5, device=DEVICE), chunk_tokens=64)


def test_sums_without_quantized_tokens():
    held = attention_inputs("int8", 30, 6, recent=26, first=4)
    check_sums(torch.randn(2, 4, 6, 64, device=DEVICE, dtype=DTYPE), held, None, torch.ones(2, 6, device=DEVICE))


def test_chunks_are_dequantized_twice_and_the_last_one_once(monkeypatch):
    filled = []
    stock = chunked._pieces_of_pages

    def counted(*args):
        for i, (count, codecs, fill) in enumerate(stock(*args)):
            yield count, codecs, lambda out, i=i, fill=fill: filled.append(i) or fill(out)

    monkeypatch.setattr(chunked, "_pieces_of_pages", counted)
    held = attention_inputs("int8", 300, 5)
    query = torch.randn(2, 4, 5, 64, device=DEVICE, dtype=DTYPE)
    observe_chunks(query, held, None, observed=torch.ones(2, 5, device=DEVICE), chunk_tokens=128)
    assert filled == [0, 1, 2, 1, 0]
