"""Outputs of attention on parts of the tokens, merged by their log-sum-exps in one launch: what `chunked.merge` computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Query rows of a program."""


def merge(
    parts: Sequence[tuple[Tensor, Tensor]], query_heads: int, queries: int, heads: int, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run `chunked.merge` in one launch; the output is a view of contiguous `[B, Q, Hq, Dv]`, which is what
    transformers asks for.

    The kernel is compiled for powers of two of parts, not anew whenever a past grows by a chunk."""
    first, count = parts[0][0], len(parts)
    parts = [*parts, *parts[:1] * (triton.next_power_of_2(count) - count)]  # nobody reads the last ones
    batch, value_dim, groups = first.shape[0], first.shape[3], query_heads // heads
    out = torch.empty(batch, queries, query_heads, value_dim, dtype=first.dtype, device=first.device).transpose(1, 2)
    total = torch.empty(batch, query_heads, queries, dtype=torch.float32, device=first.device)
    strides = tuple((*x.stride()[:3], *lse.stride()) for x, lse in parts)
    folded = tuple(int(x.shape[1] != query_heads or groups == 1) for x, _ in parts)
    outs, lses = tuple(x for x, _ in parts), tuple(lse for _, lse in parts)
    grid = (-(-groups * queries // ROWS), batch * heads)
    with torch.cuda.device_of(first):
        _merge_kernel[grid](
            outs, lses, strides, first if sinks is None else sinks, out, *out.stride()[:3], total, groups * queries, queries, heads, count,
            G=groups, D=value_dim, P=triton.next_power_of_2(value_dim), R=ROWS, FOLDED=folded, SINKS=sinks is not None,
        )  # fmt: skip
    return out, total


@triton.jit(do_not_specialize=["rows", "queries", "heads", "count"])
def _merge_kernel(
    outs, lses, strides, sinks, out, ob, oh, oq, totals, rows, queries, heads, count,
    G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, FOLDED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merges attention over parts of the tokens, and the sinks, by their log-sum-exps. Grid (blocks of R query rows, B * H).

    Strides are in elements; channels are contiguous. Query row `r` of a KV head is query `r % queries` of
    query head `h * G + r // queries`.

    outs     for each part, in the model's dtype: [B, H, >= rows, D] where FOLDED, else [B, H * G, queries, D]
    lses     for each part, fp32: [B, H, >= rows] where FOLDED, else [B, H * G, queries]
    strides  for each part, six: over batch, heads and rows (queries, unless FOLDED) of `outs`, then of `lses`
    sinks    [H * G], read if SINKS
    out      [B, H * G, queries, D] in the model's dtype: ob, oh, oq over its first three dimensions
    totals   fp32 [B, H * G, queries], contiguous: the log-sum-exp of all parts and the sink
    rows     `G * queries`                P   `D`, padded to a power of two
    count    parts that are read
    """
    r = tl.program_id(0) * R + tl.arange(0, R)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    live = r < rows
    c = tl.arange(0, P)
    inside = live[:, None] & (c < D)[None, :]
    head = h * G + r // queries
    query = r % queries
    top = tl.full([R], -float("inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, P], tl.float32)
    for i in tl.static_range(len(outs)):
        if i < count:
            sb, sh, sr, lb, lh, lr = strides[i]
            if FOLDED[i]:
                at = b * sb + h * sh + r.to(tl.int64) * sr
                at_lse = b * lb + h * lh + r.to(tl.int64) * lr
            else:
                at = b * sb + head.to(tl.int64) * sh + query.to(tl.int64) * sr
                at_lse = b * lb + head.to(tl.int64) * lh + query.to(tl.int64) * lr
            lse = tl.load(lses[i] + at_lse, mask=live, other=0.0)
            x = tl.load(outs[i] + at[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
            higher = tl.maximum(top, lse)
            shrink = tl.exp(top - higher)
            weight = tl.exp(lse - higher)
            acc = acc * shrink[:, None] + x * weight[:, None]
            total = total * shrink + weight
            top = higher
    if SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)
        higher = tl.maximum(top, sink)
        acc = acc * tl.exp(top - higher)[:, None]
        total = total * tl.exp(top - higher) + tl.exp(sink - higher)
        top = higher
    at = b * ob + head.to(tl.int64) * oh + query.to(tl.int64) * oq
    tl.store(out + at[:, None] + c[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(totals + (b * heads * G + head) * queries + query, top + tl.log(total), mask=live)
