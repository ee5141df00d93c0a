"""Attention of many queries over chunks of a quantized past is the attention over all of it."""

from dataclasses import replace

import pytest
import torch

from qkvcache.formats import REGISTRY
from qkvcache.kernels import AttentionInputs, attend, triton_dequantize_region, triton_merge
from qkvcache.kernels.attend_chunked import _blocks, _cut, attend_chunked, chunks, dequantize_blocks, merge, supports
from tests import matrix
from tests.kernels.attention_inputs import build
from tests.matrix import slowly

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
LIMIT = 1e-2 if torch.cuda.is_available() else 1e-5
FORMATS = ("identity", "int8", "fp8", "int4_vllm", "nvfp4", "turboquant_3bit_nc", "hadaquant_k4v4")


def attention_inputs(
    format: str, tokens: int, queries: int, dim: int = 64, first: int = 4, recent: int = 33, batch: int = 2
) -> AttentionInputs:
    key, value = (torch.randn(batch, 2, tokens + queries, dim, device=DEVICE, dtype=DTYPE) for _ in range(2))
    cuts = (70, 130) if tokens > 200 else ()
    return build(REGISTRY[format], key, value, first, recent + queries, cuts)


def close(out: torch.Tensor, wanted: torch.Tensor) -> None:
    assert out.shape == wanted.shape and out.dtype == DTYPE
    assert ((out.float() - wanted.float()).norm() / wanted.float().norm()).item() < LIMIT


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("queries", [1, 5, 19])
@pytest.mark.parametrize("triton", [False, True], ids=["torch", "chunks"])
def test_chunks_of_any_size(format, queries, triton):
    """They end within chunks of storage, at their ends, and hold several; without `exact` the torch reference reads them."""
    held = attention_inputs(format, 300, queries)
    held = held if triton else AttentionInputs(held.key, held.value)
    query = torch.randn(2, 8, queries, 64, device=DEVICE, dtype=DTYPE)
    wanted = attend(query, held, causal=True)
    for size in (64, 192, 4096):
        close(attend_chunked(query, held, chunk_tokens=size)[0], wanted)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (16, 2)])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_groups_and_channels(heads, dim):
    held = attention_inputs("int8", 200, 7, dim)
    query = torch.randn(2, heads[0], 7, dim, device=DEVICE, dtype=DTYPE)
    close(attend_chunked(query, held, chunk_tokens=64)[0], attend(query, held, causal=True))


@pytest.mark.parametrize("first", [0, 4])
def test_padding_sinks_and_scaling(first):
    held = attention_inputs("turboquant_4bit_nc", 300, 9, first=first)
    query = torch.randn(2, 8, 9, 64, device=DEVICE, dtype=DTYPE)
    hidden = torch.zeros(2, 309, dtype=torch.bool, device=DEVICE)
    hidden[1, :150] = True  # two whole chunks
    options = {"scaling": 0.3, "sinks": torch.randn(8, device=DEVICE)}
    wanted = attend(query, held, ~hidden[:, None, None], causal=True, **options)
    close(attend_chunked(query, held, hidden, chunk_tokens=64, **options)[0], wanted)
    close(attend_chunked(query, held, hidden[1:], chunk_tokens=64)[0], attend(query, held, ~hidden[1:, None, None], causal=True))


def test_a_past_without_quantized_tokens():
    held = attention_inputs("int8", 30, 6, recent=26, first=4)
    assert held.region is None
    query = torch.randn(2, 4, 6, 64, device=DEVICE, dtype=DTYPE)
    close(attend_chunked(query, held)[0], attend(query, held, causal=True))


def test_scratch_that_was_written_before_does_not_show(monkeypatch):
    """The last chunk is shorter than the scratch, whose rest holds the tokens of the chunk before, or anything."""
    empty = torch.Tensor.new_empty
    held = attention_inputs("int8", 333, 11)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape, **options: empty(x, *shape, **options).fill_(torch.nan))
    query = torch.randn(2, 8, 11, 64, device=DEVICE, dtype=DTYPE)
    out, _ = attend_chunked(query, held, chunk_tokens=128)
    monkeypatch.undo()
    close(out, attend(query, held, causal=True))


def test_chunks_hold_every_token_once():
    held = attention_inputs("int8", 700, 3)
    sizes = [count for count, _, _ in chunks(held, [], 192)]
    assert sum(sizes) == held.region.tokens and set(sizes[:-1]) == {192} and 0 < sizes[-1] <= 192


@pytest.mark.parametrize("format", slowly(matrix.FORMATS, FORMATS))
@pytest.mark.parametrize("dim", slowly([64, 80], [64]))
def test_dequantize_kernel(format, dim):
    """Any piece of storage in chunks, which holds anything in slots without tokens; nothing beyond the piece is written."""
    if REGISTRY[format].refuses(dim):
        pytest.skip("the format does not hold these channels")
    region = attention_inputs(format, 300, 3, dim).region
    if not triton_dequantize_region.supports(region, (dim, dim)):
        pytest.skip("torch reads it")
    for begin, count in ((0, 70), (64, 192), (192, region.tokens - 192)):
        out = torch.full((2, 2, 2, count + 5, dim), torch.nan, device=DEVICE, dtype=DTYPE)
        triton_dequantize_region.dequantize_region(region, begin, out[0, :, :, :count], out[1, :, :, :count])
        wanted = out.new_empty(2, 2, 2, begin + count, dim)
        dequantize_blocks(next(_cut(_blocks(replace(region, tokens=begin + count), (dim, dim)), begin + count)), *wanted)
        torch.testing.assert_close(out[..., :count, :], wanted[..., begin:, :], rtol=LIMIT, atol=1e-6)
        assert out[..., count:, :].isnan().all()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(3, 4, 80), (2, 1, 64)])
def test_merge_kernel(heads, groups, dim, sinks):
    """Parts folded and not, of any layout in memory, one of them with next to no weight."""
    batch, queries = 2, 5
    all_heads = heads * groups
    parts = [
        (torch.randn(batch, heads, 32, dim, device=DEVICE), torch.randn(batch, heads, 32, device=DEVICE)),
        (torch.randn(batch, all_heads, queries, dim, device=DEVICE), torch.randn(batch, all_heads, queries, device=DEVICE)),
        (torch.randn(batch, queries, all_heads, dim, device=DEVICE).transpose(1, 2), torch.full((batch, all_heads, queries), -1e30)),
    ]
    parts[2] = parts[2][0], parts[2][1].to(DEVICE)
    logits = torch.randn(all_heads, device=DEVICE) if sinks else None
    wanted = merge(parts, all_heads, queries, heads, logits)
    wanted, level = wanted
    out, total = triton_merge.merge(parts, all_heads, queries, heads, logits)
    torch.testing.assert_close(total, level, rtol=1e-5, atol=1e-5)
    assert out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_what_torch_has_no_attention_for():
    held, query = attention_inputs("int8", 90, 5), torch.randn(2, 4, 5, 64, device=DEVICE, dtype=DTYPE)
    assert supports(query, held)
    assert not supports(query.double(), held)
    assert not supports(query.half() if torch.float32 == DTYPE else query.float(), held)
