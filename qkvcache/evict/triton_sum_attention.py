# mypy: ignore-errors
"""Accumulated attention of many queries (`sum_attention.py`) on tensor cores: one kernel for normalisers, if they are not known, and one
for columns.

The kernel for columns needs one number for each query, its level: the weight of key k is 2^(score - level), in base 2. It is the log of the
normaliser, less the logarithm of how often the query counts, so that padding has a level of infinity and adds nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.attend.launches import architecture
from ..kernels.attend.triton_attend import LOG2E, capped
from ..kernels.device.math import MASKED_BELOW, MASKED_SCORE, exp2


@triton.jit
def _rows(x, stride, start, count, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WHOLE: tl.constexpr):
    """Vectors `start` to `start + N` of `x`, which are `stride` elements apart, as [N, DP]: 0 beyond the `count` that there are, and beyond
    channel D. WHOLE: all N exist."""
    n = tl.arange(0, N)[:, None]
    d = tl.arange(0, DP)[None, :]
    at = x + tl.cast(start, tl.int64) * stride + n * stride + d
    if WHOLE and D == DP:
        return tl.load(at)
    elif WHOLE:
        return tl.load(at, mask=d < D, other=0.0)
    else:
        return tl.load(at, mask=(start + n < count) & (d < D), other=0.0)


@triton.jit
def _joined(
    m, l, q, keys, stride, start, tokens, newest, visible, scale,
    D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr, SOFTCAP: tl.constexpr, VISIBLE: tl.constexpr, DIAGONAL: tl.constexpr,
    ARCH: tl.constexpr,
):  # fmt: skip
    """Maxima `m` and normalisers `l`, fp32 [BQ], updated with a tile of BT keys from `start` on. `q`: [BQ, DP]; `keys`: [tokens, D],
    `stride` apart; `newest`: int [BQ], the last key that a query sees, read with DIAGONAL; `visible`: uint8 [tokens], read with VISIBLE."""
    s = tl.dot(q, tl.trans(_rows(keys, stride, start, tokens, BT, D, DP, not DIAGONAL)))
    if SOFTCAP is not None:
        s = capped(s * scale, SOFTCAP, ARCH)
        scale = 1.0
    t = start + tl.arange(0, BT)
    if DIAGONAL:
        s = tl.where(t[None, :] <= newest[:, None], s, float("-inf"))
    if VISIBLE:
        shown = tl.load(visible + t, mask=t < tokens, other=0)
        s = tl.where((shown != 0)[None, :], s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1) * scale)
    l = l * exp2(m - top, ARCH) + tl.sum(exp2(s * scale - top[:, None], ARCH), 1)
    return top, l


@triton.jit(do_not_specialize=["visible_stride", "scale", "heads", "queries", "tokens", "before"])
def lse_kernel(
    query, key, visible, sinks, lse, q_stride_b, q_stride_h, q_stride_q, k_stride_b, k_stride_h, k_stride_t, visible_stride,
    scale, heads, queries, tokens, before,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr, SOFTCAP: tl.constexpr,
    VISIBLE: tl.constexpr, SINKS: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Log-sum-exps of queries. Grid (blocks of BQ queries, B * H * G). Strides are in elements.

    query     [B, H * G, queries, D] fp16 or bf16, channels contiguous, the last `queries` tokens: q_stride_b, q_stride_h, q_stride_q
    key       [B, H, tokens, D] likewise: k_stride_b, k_stride_h, k_stride_t
    visible   uint8 [B, tokens], tokens contiguous: visible_stride; 0: padding; read with VISIBLE
    sinks     [H * G]: a logit for each query head; read with SINKS
    lse       fp32 [B, H * G, queries], contiguous: output
    scale     factor of scores, times log2(e) unless SOFTCAP           SOFTCAP   cap of scores; None: none
    heads     H                 BT   keys of a tile                    DP        `D`, padded to a power of two of at least 16
    before    tokens that the first query sees before its own
    ARCH      compute capability, 0 without NVIDIA assembly
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BQ  # those with most to do come first
    b = tl.program_id(1) // (heads * G)
    head = tl.program_id(1) % (heads * G)
    row = first + tl.arange(0, BQ)
    newest = tl.minimum(before + row, tokens - 1)
    q = _rows(query + b.to(tl.int64) * q_stride_b + head * q_stride_h, q_stride_q, first, queries, BQ, D, DP, False)
    keys = key + b.to(tl.int64) * k_stride_b + head // G * k_stride_h
    visible += b.to(tl.int64) * visible_stride
    m = tl.full([BQ], MASKED_SCORE, tl.float32)
    l = tl.zeros([BQ], tl.float32)
    whole = tl.minimum(before + first + 1, tokens) // BT * BT  # tokens before it are seen by all
    for start in range(0, whole, BT):
        m, l = _joined(m, l, q, keys, k_stride_t, start, tokens, newest, visible, scale, D, DP, BT, SOFTCAP, VISIBLE, False, ARCH)
    for start in tl.range(whole, tl.minimum(before + first + BQ, tokens), BT, num_stages=1):
        m, l = _joined(m, l, q, keys, k_stride_t, start, tokens, newest, visible, scale, D, DP, BT, SOFTCAP, VISIBLE, True, ARCH)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        l = l * tl.exp2(m - top) + tl.exp2(sink - top)
        m = top
    tl.store(lse + tl.program_id(1).to(tl.int64) * queries + row, (m + tl.log2(l)) / LOG2E, mask=row < queries)


@triton.jit
def _added(
    total, k, rows, stride, lse, counts, start, queries, before, t, scale,
    D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, SOFTCAP: tl.constexpr, POWER: tl.constexpr, DIAGONAL: tl.constexpr,
    ARCH: tl.constexpr,
):  # fmt: skip
    """`total`, fp32 [BQ, BT], with the weights that BQ queries from `start` on give to a tile of keys `k` [BT, DP] at columns `t` [BT]:
    the sum of their powers.
    `rows`: queries [queries, D], `stride` apart; `lse`, `counts`: fp32 [queries]; `before`: tokens before the first query; DIAGONAL:
    some of the queries come before some of the keys."""
    row = start + tl.arange(0, BQ)
    q = _rows(rows, stride, start, queries, BQ, D, DP, False)
    count = tl.load(counts + row, mask=row < queries, other=0.0)
    level = tl.load(lse + row, mask=row < queries, other=float("-inf"))
    level = tl.where(level > MASKED_BELOW, level * LOG2E - count, float("inf"))
    s = capped(tl.dot(q, tl.trans(k)) * scale, SOFTCAP, ARCH) - level[:, None]
    if DIAGONAL:
        s = tl.where((before + row)[:, None] >= t[None, :], s, float("-inf"))
    return total + exp2(s * POWER if POWER > 1 else s, ARCH)


@triton.jit(do_not_specialize=["visible_stride", "scale", "heads", "queries", "tokens", "before"])
def column_kernel(
    query, key, visible, counts, lse, attention_sums, q_stride_b, q_stride_h, q_stride_q, k_stride_b, k_stride_h, k_stride_t,
    visible_stride, scale, heads, queries, tokens, before,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr, SOFTCAP: tl.constexpr,
    VISIBLE: tl.constexpr, POWER: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Accumulated attention of the first `tokens` keys. Grid (blocks of BT keys, B * H): the keys stay in registers, while the queries of
    the group pass.

    attention_sums  fp32 [B, H, tokens], contiguous: output
    counts          fp32 [B, queries], contiguous: how often each query counts, in base 2
    lse             fp32 [B, H * G, queries], contiguous, sinks included
    BQ              queries of a tile                   POWER      of weights that are added
    query, key, visible, scale, heads, before, D, DP, ARCH with q_stride_b, q_stride_h, q_stride_q, k_stride_b, k_stride_h,
    k_stride_t, visible_stride, SOFTCAP and VISIBLE: as in `lse_kernel`

    Sums are kept for each place in a tile of queries, and added up at the end: a weight costs a product, an exponential and an addition."""
    first = tl.program_id(0) * BT
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    t = first + tl.arange(0, BT)
    k = _rows(key + b.to(tl.int64) * k_stride_b + h * k_stride_h, k_stride_t, first, tokens, BT, D, DP, False)
    begin = tl.maximum(first - before, 0) // BQ * BQ
    whole = tl.minimum(tl.cdiv(tl.maximum(first + BT - 1 - before, 0), BQ) * BQ, queries)  # queries from it on see all
    total = tl.zeros([BQ, BT], tl.float32)
    counts += b.to(tl.int64) * queries
    for g in range(G):
        rows = query + b.to(tl.int64) * q_stride_b + (h * G + g) * q_stride_h
        levels = lse + (tl.program_id(1) * G + g).to(tl.int64) * queries
        for start in tl.range(begin, whole, BQ, num_stages=1):
            total = _added(
                total, k, rows, q_stride_q, levels, counts, start, queries, before, t, scale, D, DP, BQ, SOFTCAP, POWER, True,
                ARCH,
            )  # fmt: skip
        for start in range(whole, queries, BQ):
            total = _added(
                total, k, rows, q_stride_q, levels, counts, start, queries, before, t, scale, D, DP, BQ, SOFTCAP, POWER, False,
                ARCH,
            )  # fmt: skip
    sums = tl.sum(total, 0)
    if VISIBLE:
        shown = tl.load(visible + b.to(tl.int64) * visible_stride + t, mask=t < tokens, other=0)
        sums = tl.where(shown != 0, sums, 0.0)
    tl.store(attention_sums + tl.program_id(1).to(tl.int64) * tokens + t, sums, mask=t < tokens)


def supports(query: Tensor, key: Tensor) -> bool:
    """Whether the kernels can read these queries and keys."""
    return query.dtype == key.dtype and query.dtype in (torch.float16, torch.bfloat16) and key.shape[3] % 16 == 0 and key.shape[3] <= 256


def tiles(head_dim: int, arch: int) -> tuple[dict[str, int], dict[str, int]]:
    """Launch options of `lse_kernel`, and of `column_kernel`: queries and keys of a tile, warps, tiles in flight."""
    if head_dim > 128 or arch < 90:  # where what stays must fit in registers, or shared memory is small
        return ({"BQ": 64, "BT": 64, "num_warps": 4, "num_stages": 2},) * 2
    warps = 4 if arch == 90 else 8  # two programs, of which one multiplies while the other takes exponentials
    return {"BQ": 128, "BT": 128, "num_warps": 8, "num_stages": 2}, {"BQ": 64, "BT": 128, "num_warps": warps, "num_stages": 2}


def sum_attention(
    query: Tensor,
    key: Tensor,
    observed: Tensor,
    visible: Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    causal: bool = True,
    power: int = 1,
    columns: int | None = None,
) -> Tensor:
    """Run `sum_attention.sum_attention` in two launches; `observed` is not negative."""
    batch, query_heads, queries, dim = query.shape
    heads, tokens = key.shape[1:3]
    columns = tokens if columns is None else columns
    arch = architecture(query.device)[0]
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    counts = observed.float().log2().contiguous()
    shown, shown_stride, before = counts, 0, tokens - queries if causal else tokens
    if visible is not None:
        shown = visible.contiguous().view(torch.uint8)
        shown_stride = shown.stride(0)
    shape = {"D": dim, "DP": max(triton.next_power_of_2(dim), 16), "G": query_heads // heads}
    options = {"SOFTCAP": softcap, "VISIBLE": visible is not None, "ARCH": arch}
    strides = (*query.stride()[:3], *key.stride()[:3], shown_stride)
    numbers = scaling * (1.0 if softcap is not None else LOG2E.value), heads, queries
    for_lse, for_columns = tiles(dim, arch)
    attention_sums = torch.empty(batch, heads, columns, dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):
        if lse is None:
            lse = torch.empty(batch, query_heads, queries, dtype=torch.float32, device=query.device)
            lse_kernel[(triton.cdiv(queries, for_lse["BQ"]), batch * query_heads)](
                query, key, shown, counts if sinks is None else sinks, lse, *strides, *numbers, tokens, before,
                **shape, **options, SINKS=sinks is not None, **for_lse,
            )  # fmt: skip
        column_kernel[(triton.cdiv(columns, for_columns["BT"]), batch * heads)](
            query, key, shown, counts, lse.contiguous(), attention_sums, *strides, *numbers, columns, before, **shape, **options,
            POWER=power, **for_columns,
        )  # fmt: skip
    return attention_sums
