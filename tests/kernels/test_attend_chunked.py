"""Attention of many queries over chunks of a quantized past is the attention over all of it."""

import pytest
import torch

from qkvcache.kernels import AttentionInputs, attend
from qkvcache.kernels.attend import chunked as attend_chunked_module
from qkvcache.kernels.attend import triton_merge
from qkvcache.kernels.attend.chunked import ChunkedKV, attend_chunked, merge, supports
from qkvcache.kernels.store import reference, triton_dequantize
from tests import matrix
from tests.kernels.attention_inputs import assert_near, build
from tests.matrix import FORMATS as REGISTRY
from tests.matrix import covering, slowly

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
    assert out.dtype == DTYPE
    assert_near(out, wanted, LIMIT)


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


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (16, 2)])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_groups_and_channels(heads, dim):
    held = attention_inputs("int8", 200, 7, dim)
    query = torch.randn(2, heads[0], 7, dim, device=DEVICE, dtype=DTYPE)
    close(attend_chunked(query, held, chunk_tokens=64)[0], attend(query, held, causal=True))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("first", [0, 4])
def test_padding_and_options(first, softcap):
    held = attention_inputs("turboquant_4bit_nc", 300, 9, first=first)
    query = torch.randn(2, 8, 9, 64, device=DEVICE, dtype=DTYPE)
    hidden = torch.zeros(2, 309, dtype=torch.bool, device=DEVICE)
    hidden[1, :150] = True  # two whole chunks
    given = {"softcap": softcap, "scaling": 0.3, "sinks": torch.randn(8, device=DEVICE)}
    for columns, options in ((hidden, given), (hidden[1:], {"softcap": softcap}), (None, {"softcap": softcap})):
        shown = None if columns is None else ~columns[:, None, None]
        wanted = attend(query, held, shown, causal=True, **options)
        close(attend_chunked(query, held, columns, chunk_tokens=64, **options)[0], wanted)


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
    held, query = attention_inputs("int8", 333, 11), torch.randn(2, 8, 11, 64, device=DEVICE, dtype=DTYPE)
    close(attend_chunked(query, held, chunk_tokens=128)[0], attend(query, held, causal=True))


def test_chunks_hold_every_token_once():
    held = attention_inputs("int8", 700, 3)
    sizes = [count for count, _, _ in ChunkedKV.of(held).pieces(192)]
    assert sum(sizes) == held.paged.max_length and set(sizes[:-1]) == {192} and 0 < sizes[-1] <= 192


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
        for dequantize, x in ((triton_dequantize.dequantize_pages, out), (reference.dequantize_pages, wanted)):
            dequantize(inputs.pages, (x[0, :, :, :count], x[1, :, :, :count]), begin)
        torch.testing.assert_close(out, wanted, rtol=LIMIT, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(3, 4, 80), (2, 1, 64)])
def test_merge_kernel(heads, groups, dim, sinks):
    """Parts folded and not, of any layout in memory, one of them with next to no weight."""
    batch, queries = 2, 5
    all_heads = heads * groups
    parts = [
        (torch.randn(batch, heads, groups * queries, dim, device=DEVICE), torch.randn(batch, heads, groups * queries, device=DEVICE)),
        (torch.randn(batch, all_heads, queries, dim, device=DEVICE), torch.randn(batch, all_heads, queries, device=DEVICE)),
        (torch.randn(batch, queries, all_heads, dim, device=DEVICE).transpose(1, 2), torch.full((batch, all_heads, queries), -1e30)),
    ]
    parts[2] = parts[2][0], parts[2][1].to(DEVICE)
    logits = torch.randn(all_heads, device=DEVICE) if sinks else None
    wanted, level = merge(parts, all_heads, queries, heads, logits)
    out, total = triton_merge.merge(parts, all_heads, queries, heads, logits)
    torch.testing.assert_close(total, level, rtol=1e-5, atol=1e-5)
    assert out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_what_torch_has_no_attention_for():
    held, query = attention_inputs("int8", 90, 5), torch.randn(2, 4, 5, 64, device=DEVICE, dtype=DTYPE)
    assert supports(query, held)
    assert not supports(query.double(), held)
    assert not supports(query.half() if torch.float32 == DTYPE else query.float(), held)


def dense(query, key, value, scaling, queries=None):
    """Computes what `gluon_dense.attend` returns, in torch."""
    scores = query.float() @ key.float().mT * scaling
    rows, tokens = scores.shape[2:]
    if queries is not None:
        newest = tokens - queries + torch.arange(rows, device=DEVICE) % queries
        scores = scores.masked_fill(torch.arange(tokens, device=DEVICE) > newest[:, None], float("-inf"))
    size = tokens if queries is not None else -(-tokens // 2)
    parts = zip(scores.split(size, dim=3), value.split(size, dim=2), strict=True)
    return [((s.softmax(-1) @ v.float()).to(query.dtype), s.logsumexp(-1)) for s, v in parts]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
def test_chunks_on_hopper(format, hidden, monkeypatch):
    """Each part of the tokens without hidden columns goes to the kernel for Hopper, which returns several outputs; others do not."""
    served = []
    monkeypatch.setattr(attend_chunked_module, "serves_dense", lambda *_: True)
    monkeypatch.setattr(attend_chunked_module, "gluon_attend", lambda *args: served.append(args[1].shape[2]) or dense(*args))
    held, query = attention_inputs(format, 300, 9), torch.randn(2, 8, 9, 64, device=DEVICE, dtype=DTYPE)
    columns = torch.arange(309, device=DEVICE).expand(2, -1) < 100 if hidden else None  # all 4 sinks, and 96 tokens
    shown = None if columns is None else ~columns[:, None, None]
    options = {"scaling": 0.3, "sinks": torch.randn(8, device=DEVICE)}
    out = attend_chunked(query, held, columns, shown_from=100 if hidden else None, chunk_tokens=192, **options)[0]
    close(out, attend(query, held, shown, causal=True, **options))
    assert served == ([96, 71, 42] if hidden else [192, 71, 46])
    served.clear()
    close(attend_chunked(query, held, softcap=2.0)[0], attend(query, held, causal=True, softcap=2.0))
    assert not served


def test_what_the_kernel_for_hopper_serves(monkeypatch):
    """Vectors of 64 or 128 contiguous channels of 16 bits at addresses that 16 divides, from so many rows of a KV head on."""
    launches = attend_chunked_module.module("attend.launches")
    monkeypatch.setattr(attend_chunked_module, "on_triton", lambda device: True)
    monkeypatch.setattr(launches, "knows_gluon", lambda *_: True)
    monkeypatch.setattr(launches, "architecture", lambda device: (90, 132))

    def served(x: torch.Tensor, query: torch.Tensor | None = None) -> bool:
        return attend_chunked_module.serves_dense(x if query is None else query, x, x)

    x = torch.zeros(2, 2, 9, 128, dtype=torch.bfloat16)
    assert served(x) and served(x.half()) and served(x[..., :64]) and served(x.transpose(1, 2))
    assert not attend_chunked_module.serves_dense(x, x.float(), x) and not attend_chunked_module.serves_dense(x, x, x[..., :64])
    assert not served(x.float()) and not served(x[..., :96]) and not served(x[..., ::2])
    assert not served(x[..., 4:68]) and served(x[..., 8:72]) and not served(x.new_zeros(2, 2, 9, 132)[..., :128])
    assert served(x, x.new_zeros(2, 2, 9, 132)[..., :128])  # queries may be anywhere
    query = torch.zeros(1, 8, 257, 64, dtype=torch.bfloat16)
    assert attend_chunked_module.outruns_tiles(query, 2) and not attend_chunked_module.outruns_tiles(query[:, :, :256], 2)
    monkeypatch.setattr(launches, "architecture", lambda device: (100, 132))
    assert not served(x)
