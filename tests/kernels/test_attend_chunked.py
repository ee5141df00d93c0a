"""Attention of many queries over chunks of a quantized past is the attention over all of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qkvcache.kernels import AttentionInputs, attend, pages, triton_dequantize, triton_merge
from qkvcache.kernels import attend_chunked as attend_chunked_module
from qkvcache.kernels.attend_chunked import (
    ChunkedKV,
    attend_chunked,
    cut,
    merge,
    supports,
)
from qkvcache.kernels.sum_attention import sum_attention
from tests import matrix
from tests.kernels.attention_inputs import build
from tests.kernels.paged_inputs import of_heads
from tests.matrix import FORMATS as REGISTRY
from tests.matrix import covering, slowly
from tests.tolerance import rounding

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
LIMIT = 1e-2 if torch.cuda.is_available() else 1e-5
FORMATS = ("identity", "int8", "int8_token", "fp8", "int4_vllm", "nvfp4", "turboquant_3bit_nc", "hadaquant_k4v4")


def attention_inputs(
    format: str, tokens: int, queries: int, dim: int = 64, first: int = 4, recent: int = 33, batch: int = 2, per_head: bool = False
) -> AttentionInputs:
    key, value = (torch.randn(batch, 2, tokens + queries, dim, device=DEVICE, dtype=DTYPE) for _ in range(2))
    cuts = (70, 130) if tokens > 200 else ()
    return build(REGISTRY[format], key, value, first, recent + queries, cuts, per_head)


@pytest.fixture
def poisoned(monkeypatch):
    """Scratch that holds nan at first."""
    empty = torch.Tensor.new_empty

    def new_empty(x: torch.Tensor, *shape, **options) -> torch.Tensor:
        out = empty(x, *shape, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def close(out: torch.Tensor, wanted: torch.Tensor) -> None:
    assert out.shape == wanted.shape and out.dtype == DTYPE
    assert ((out.float() - wanted.float()).norm() / wanted.float().norm()).item() < LIMIT


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("queries", [1, 5, 19])
@pytest.mark.parametrize("triton", [False, True], ids=["torch", "pages"])
def test_chunks_of_any_size(format, queries, triton):
    """They end within pages and slabs, at their ends, and hold several; without `paged`, blocks are dequantized one after another."""
    held = attention_inputs(format, 300, queries)
    held = held if triton else AttentionInputs(held.key, held.value)
    query = torch.randn(2, 8, queries, 64, device=DEVICE, dtype=DTYPE)
    wanted = attend(query, held, causal=True)
    for size in (64, 192, 4096):
        close(attend_chunked(query, held, chunk_tokens=size)[0], wanted)


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_are_merged_before_all_are_there(monkeypatch, parts):
    monkeypatch.setattr(attend_chunked_module, "MERGED_PARTS", parts)
    held, query = attention_inputs("int8", 500, 5), torch.randn(2, 8, 5, 64, device=DEVICE, dtype=DTYPE)
    (out, lse), (wanted, wanted_lse) = (attend_chunked(query, held, chunk_tokens=size)[:2] for size in (64, 4096))
    close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse, rtol=LIMIT, atol=LIMIT)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [300, 1030])
@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
def test_cudnn(monkeypatch, format, queries):
    """Chunks of cuDNN's sizes, and its causal attention."""
    monkeypatch.setattr(attend_chunked_module, "PLAN_FLOPS", 0)
    held, query = attention_inputs(format, 6200, queries, 128, batch=4), torch.randn(4, 8, queries, 128, device=DEVICE, dtype=DTYPE)
    close(attend_chunked(query, held)[0], attend(query, held, causal=True))


@pytest.fixture
def cudnn(monkeypatch):
    """Keys' numbers and strides, and causality, of what torch's attention on the CPU attends to for cuDNN, in parts of 64 and 32 tokens of
    chunks of 128."""
    calls = []

    def attention(query, key, value, scaling, causal):
        calls.append((key.shape[2], key.stride(), causal))
        if causal:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scaling)

    monkeypatch.setattr(attend_chunked_module, "_cudnn_is_faster", lambda folded, device: True)
    monkeypatch.setattr(attend_chunked_module, "_cudnn_attention", attention)
    attend_chunked_module._done_by.cache_clear()
    for name, value in {"CUDNN_TOKENS": (64, 32), "CHUNK_TOKENS": 160}.items():
        monkeypatch.setattr(attend_chunked_module, name, value)
    return calls


@pytest.mark.skipif(DEVICE.type == "cuda", reason="torch's attention on the CPU stands in for cuDNN")
@pytest.mark.parametrize("format", ["int8", "hadaquant_k4v4"])
@pytest.mark.parametrize("tokens", [23, 60, 200, 437])
def test_cudnn_gets_few_shapes_and_strides(monkeypatch, cudnn, format, tokens):
    """Of a past of any length. What is left goes to flash attention."""
    monkeypatch.setattr(attend_chunked_module, "PLAN_FLOPS", 0)
    held = attention_inputs(format, tokens + 4 + 33, 9)
    query = torch.randn(2, 8, 9, 64, device=DEVICE, dtype=DTYPE)
    close(attend_chunked(query, held)[0], attend(query, held, causal=True))
    seen = {call[:2] for call in cudnn if not call[2]}
    assert seen <= {(count, (2 * 64, 64, 2 * 2 * 64, 1)) for count in (32, 64)} and bool(seen) == (tokens >= 32)
    assert sum(call[2] for call in cudnn) == 1


@pytest.mark.skipif(DEVICE.type == "cuda", reason="torch's attention on the CPU stands in for cuDNN")
def test_plans_of_cudnn_are_for_shapes_that_come_again(monkeypatch, cudnn):
    """A chat that grows, whose turns are all of different lengths, has no plan. Turns over pasts of 64 tokens have one when flash attention
    has cost as much; it serves the parts of longer pasts, too, and what they leave is counted for the smaller size."""
    monkeypatch.setattr(attend_chunked_module, "PLAN_FLOPS", 4 * 2 * 8 * 9 * 64 * 64 * 3)  # three layers' attention of 9 new tokens to 64

    def turn(past: int, queries: int = 9) -> list[int]:
        """The parts that cuDNN attends to."""
        cudnn.clear()
        held, query = attention_inputs("int8", past + 4 + 33, queries), torch.randn(2, 8, queries, 64)
        close(attend_chunked(query, held)[0], attend(query, held, causal=True))
        return [call[0] for call in cudnn]

    assert not any(turn(64 * n, 10 + n) for n in range(1, 5))
    assert [turn(64) for _ in range(4)] == [[], [], [], [64]]
    assert [turn(100) for _ in range(7)] == [[64]] * 6 + [[64, 32]]
    assert turn(64 + 32 + 128) == [64, 64, 64, 32]
    assert turn(64, 11) == []


@pytest.mark.skipif(DEVICE.type == "cuda", reason="torch's attention on the CPU stands in for cuDNN")
def test_plans_of_cudnn_for_the_new_tokens(monkeypatch, cudnn):
    monkeypatch.setattr(attend_chunked_module, "PLAN_FLOPS", 2 * 2 * 8 * 40 * 40 * 64 * 2)  # two layers' 40 new tokens
    seen = []
    for recent in (33, 33, 34, 33):  # another number of exact tokens has other strides
        cudnn.clear()
        held, query = attention_inputs("int8", 4 + recent, 40, recent=recent), torch.randn(2, 8, 40, 64)
        close(attend_chunked(query, held)[0], attend(query, held, causal=True))
        seen.append([call[0] for call in cudnn])
    assert seen == [[], [], [], [40]]


def test_a_shape_pays_when_other_kernels_have_cost_as_much(monkeypatch):
    """In each thread for itself. Of 32 layers over 16,384 tokens, 8 x 512 new ones pay in eight turns, 1 x 1,024 not in ten."""
    attend_chunked_module._done_by.cache_clear()
    monkeypatch.setattr(attend_chunked_module, "CUDNN_TOKENS", (16384,))
    turns = {(8, 512): 0, (1, 1024): 0}
    for rows, new in turns:
        query = torch.empty(rows, 32, new, 128, device="meta")
        plan = attend_chunked_module._plan(query, (rows, 8, 4 * new, 128), 16384)
        while not attend_chunked_module.plan_pays(plan) and turns[rows, new] < 10:
            turns[rows, new] += 1
            for _ in range(32):
                attend_chunked_module._count(query, (rows, 8, 4 * new, 128), 16384, [16384])
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(attend_chunked_module.plan_pays, plan).result()
    assert turns == {(8, 512): 8, (1, 1024): 10}


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


PADDINGS = {
    "in a chunk": (0, 40),
    "among the sinks": (2, 3),
    "of chunks": (150, 64),
    "of all chunks": (0, 272),
    "of the residual": (290, 7),
    "also of new tokens": (5, 303),
    "of all that a row has": (303, 7),
}


@pytest.mark.parametrize("first", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("before", [0, 4])
def test_padding_up_to_a_known_column(first, before):
    """Attention to the tokens after the padding takes no mask."""
    held = attention_inputs("hadaquant_k4v4", 300, 9, first=before)
    query = torch.randn(2, 8, 9, 64, device=DEVICE, dtype=DTYPE)
    hidden = torch.arange(309, device=DEVICE) < torch.tensor(first, device=DEVICE)[:, None]
    options = {"scaling": 0.3, "sinks": torch.randn(8, device=DEVICE)}
    wanted = attend(query, held, ~hidden[:, None, None], causal=True, **options)
    counted = ~hidden[:, -9:]  # of padding the output is any number
    for chunk in (64, 512):
        out = attend_chunked(query, held, hidden, shown_from=max(first), chunk_tokens=chunk, **options)[0].transpose(1, 2)
        close(out[counted], wanted.transpose(1, 2)[counted])
        assert out.isfinite().all()


def test_a_past_without_quantized_tokens():
    held = attention_inputs("int8", 30, 6, recent=26, first=4)
    assert not held.paged.max_length
    query = torch.randn(2, 4, 6, 64, device=DEVICE, dtype=DTYPE)
    close(attend_chunked(query, held)[0], attend(query, held, causal=True))


def test_scratch_that_was_written_before_does_not_show(poisoned):
    """The last chunk is shorter than the scratch, whose rest holds the tokens of the chunk before, or anything."""
    held = attention_inputs("int8", 333, 11)
    query = torch.randn(2, 8, 11, 64, device=DEVICE, dtype=DTYPE)
    out = attend_chunked(query, held, chunk_tokens=128)[0]
    close(out, attend(query, held, causal=True))


@pytest.mark.parametrize("first", [0, 4])
def test_softcap(first):
    held = attention_inputs("turboquant_4bit_nc", 300, 9, first=first)
    query = torch.randn(2, 8, 9, 64, device=DEVICE, dtype=DTYPE)
    hidden = torch.zeros(2, 309, dtype=torch.bool, device=DEVICE)
    hidden[1, :150] = True
    options = {"softcap": 2.0, "scaling": 0.3, "sinks": torch.randn(8, device=DEVICE)}
    close(
        attend_chunked(query, held, hidden, chunk_tokens=64, **options)[0],
        attend(query, held, ~hidden[:, None, None], causal=True, **options),
    )
    close(attend_chunked(query, held, softcap=2.0)[0], attend(query, held, causal=True, softcap=2.0))


# Accumulated attention


def check_sums(query, held, hidden, observed, *, scaling=None, softcap=None, sinks=None, **options):
    """Against the reference over dense keys, with the normaliser that it computes itself."""
    options |= {"scaling": scaling, "softcap": softcap, "sinks": sinks}
    out, _, sums = attend_chunked(query, held, hidden, observed=observed, **options)
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
def test_sums_of_chunks_of_any_size(format, triton, queries, poisoned):
    """With slots as layers that evict have them: each head has its own scales."""
    held = attention_inputs(format, 300, queries, per_head=True)
    held = held if triton else AttentionInputs(held.key, held.value)
    query = torch.randn(2, 6, queries, 64, device=DEVICE, dtype=DTYPE)
    check_sums(query, held, None, torch.rand(2, queries, device=DEVICE), chunk_tokens=64 if queries == 1 else 192)


@pytest.mark.parametrize("window", [1, 4, 9])
@pytest.mark.parametrize("first", [0, 4])
def test_sums_of_the_last_queries_with_padding_and_options(window, first, poisoned):
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
def test_pages_of_heads_of_different_lengths(monkeypatch, format, triton, poisoned):
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
    stock = attend_chunked_module._pieces_of_pages

    def counted(*args):
        for i, (count, codecs, fill) in enumerate(stock(*args)):
            yield count, codecs, lambda out, i=i, fill=fill: filled.append(i) or fill(out)

    monkeypatch.setattr(attend_chunked_module, "_pieces_of_pages", counted)
    held = attention_inputs("int8", 300, 5)
    query = torch.randn(2, 4, 5, 64, device=DEVICE, dtype=DTYPE)
    attend_chunked(query, held, observed=torch.ones(2, 5, device=DEVICE), chunk_tokens=128)
    assert filled == [0, 1, 2, 1, 0]


def test_chunks_hold_every_token_once():
    held = attention_inputs("int8", 700, 3)
    sizes = [count for count, _, _ in ChunkedKV.of(held).pieces(192)]
    assert sum(sizes) == held.paged.max_length and set(sizes[:-1]) == {192} and 0 < sizes[-1] <= 192


def test_cuts_are_of_few_sizes():
    sizes = list(cut(700, (192, 64)))
    assert sum(sizes) == 700 and sizes == [192, 192, 192, 64, 60]
    assert list(cut(64, (192, 64))) == [64] and not list(cut(0, (192, 64)))


@pytest.mark.parametrize(
    ("format", "dim", "per_head"), covering(slowly(matrix.FORMATS, FORMATS), slowly([64, 80], [64]), [False, True], strength=1)
)
def test_dequantize_kernel(format, dim, per_head):
    """Any piece of the tokens, whose pages hold anything in slots without tokens; nothing beyond the piece is written."""
    if REGISTRY[format].refuses(dim):
        pytest.skip("the format does not hold these channels")
    inputs = attention_inputs(format, 300, 3, dim, per_head=per_head).paged
    if not all(triton_dequantize.supports(codec, dim) for codec in inputs.pages.codecs):
        pytest.skip("torch reads it")
    for begin, count in ((0, 70), (64, 192), (192, inputs.max_length - 192)):
        out, wanted = (torch.full((2, 2, 2, count + 5, dim), torch.nan, device=DEVICE, dtype=DTYPE) for _ in range(2))
        for dequantize, x in ((triton_dequantize.dequantize_pages, out), (pages.dequantize_pages, wanted)):
            dequantize(inputs.pages, (x[0, :, :, :count], x[1, :, :, :count]), begin)
        torch.testing.assert_close(out, wanted, rtol=LIMIT, atol=1e-6, equal_nan=True)


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
