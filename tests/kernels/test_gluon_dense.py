"""Attention to dense keys and values on Hopper, in Gluon, which no interpreter runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkvcache.attention.route import path_of
from qkvcache.kernels.attend import chunked
from qkvcache.kernels.attend.launches import architecture

from .test_fused_attend import DEVICE, make

GPU = [pytest.mark.gpu, pytest.mark.skipif(architecture(DEVICE)[0] // 10 != 9, reason="needs a Hopper GPU")]
pytestmark = GPU


def data(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def among_nans(x: Tensor) -> Tensor:
    """A view of `x` `[B, H, T, D]` in a longer tensor, whose other numbers are NaN."""
    wide = x.new_full((*x.shape[:2], x.shape[2] + 9, x.shape[3]), float("nan"))
    wide[:, :, : x.shape[2]] = x
    return wide[:, :, : x.shape[2]]


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    lse = torch.stack([lse for _, lse in parts])
    total = lse.logsumexp(0)
    return sum(out.float() * (one - total).exp()[..., None] for (out, _), one in zip(parts, lse, strict=True)), total  # type: ignore[return-value]


def assert_is_attention(parts: list[tuple[Tensor, Tensor]], query: Tensor, key: Tensor, value: Tensor, shown: Tensor | None = None) -> None:
    scores = query.float() @ key.float().mT * 0.11
    if shown is not None:
        scores = scores.where(shown, float("-inf"))
    out, lse = joined(parts)
    expected = scores.softmax(-1) @ value.float()
    limit = 2.0**-7 if query.dtype == torch.bfloat16 else 2.0**-10
    assert (out - expected).abs().max() <= limit * value.float().abs().max()
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("size", [(128, 128), (200, 77), (1, 1), (1000, 1000), (130, 4097), (3072, 5000), (129, 385)], ids=str)
def test_all_tokens(size, dim, dtype):
    """Blocks of rows that are not full, fewer tokens than a tile, one split and eight."""
    rows, tokens = size
    query, key, value = (data(2, 3, n, dim, dtype=dtype) for n in (rows, tokens, tokens))
    parts = chunked.gluon_attend(query, among_nans(key), among_nans(value), 0.11)
    assert len(parts) <= 8
    assert_is_attention(parts, query, key, value)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("size", [(1, 128, 128), (4, 128, 300), (3, 100, 100), (4, 500, 700), (2, 31, 32), (1, 1000, 1129)], ids=str)
def test_causal(size, dim):
    """Blocks of rows with the queries of one head, of several heads, and of the end of one and the begin of the next."""
    group, queries, tokens = size
    query, key, value = (data(2, 3, n, dim, dtype=torch.bfloat16) for n in (group * queries, tokens, tokens))
    number = torch.arange(group * queries, device=DEVICE) % queries
    shown = torch.arange(tokens, device=DEVICE) <= (tokens - queries + number)[:, None]
    parts = chunked.gluon_attend(query, among_nans(key), among_nans(value), 0.11, queries)
    assert_is_attention(parts, query, key, value, shown)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("chunk", [None, 448])
@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc", "nvfp4", "identity"])
def test_in_chunks(format, chunk, hidden, monkeypatch):
    """A past in one chunk or in several, with and without hidden columns, as torch's flash attention has it."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    query, inputs = make(format, batch=2, heads=2, group=4, queries=270, recent=320, tokens=1500, dims=(128, 128), cuts=())
    columns = torch.rand(2, 1500, device=DEVICE) < 0.3 if hidden else None
    if columns is not None:
        columns[:, 700:] = False
    options = {"hidden": columns, "shown_from": 700, "chunk_tokens": chunk} if hidden else {"chunk_tokens": chunk}
    served, attend = [], chunked.gluon_attend
    monkeypatch.setattr(chunked, "gluon_attend", lambda *args: served.append(args) or attend(*args))
    out, lse = chunked.attend_chunked(query, inputs, **options)
    assert served
    monkeypatch.setattr(chunked, "serves_dense", lambda *_: False)
    expected, expected_lse = chunked.attend_chunked(query, inputs, **options)
    torch.testing.assert_close(out, expected, atol=1e-2 * expected.abs().max().item(), rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-4)


def test_where_it_outruns_tiles(monkeypatch):
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    query, inputs = make("int8", batch=1, heads=2, group=4, queries=300, recent=320, tokens=1500, dims=(128, 128), cuts=())
    assert path_of("sdpa", query, inputs) == "tiles"
    assert chunked.outruns_tiles(query, 2) and not chunked.outruns_tiles(query[:, :, :256], 2)
