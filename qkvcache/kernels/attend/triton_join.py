"""Kernels before and after the attention kernel: one rotates queries, one joins the partial outputs of splits by their maxima."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..device.math import MASKED_SCORE
from ..host.launch import Launcher
from .triton_attend import LOG2E


def join(device: torch.device, rows: int, groups: int, held: Sequence[str], fixed: dict[str, Any]) -> Callable[..., None]:
    """The launch of `reduce_kernel` for `rows` query rows of each of `groups` KV heads of rows; other arguments as in `Launcher`."""
    how = joining(rows * groups, triton.next_power_of_2(fixed["DV"]), fixed["V"].rotated)
    launch = Launcher(reduce_kernel, device, ("part", "tops", "sinks", "out", "lse"), held, **fixed | how)
    return functools.partial(launch, (rows, groups, -(-fixed["DV"] // how["C"])))


def joining(rows: int, channels: int, rotated: bool) -> dict[str, int]:
    """How so many query rows are joined, as measured on an H200: S splits and C channels at once.

    Many rows fill the GPU if a program reads few splits at once; of few rows, all splits should be on their way at once."""
    if rows >= 1024:
        splits, columns, warps = 4, channels, channels // 256
    elif channels > 256:
        splits, columns, warps = (32, channels, 4) if rotated else (8, 128, 1)
    elif rows > 128:
        splits, columns, warps = 32, channels, channels // 128
    else:
        splits, columns, warps = (128, channels, channels // 32) if rotated else (128, 32, 1)
    return {"S": splits, "C": columns, "num_warps": max(warps, 1)}


@triton.jit
def _hadamard_stage(x, N: tl.constexpr, WIDTH: tl.constexpr):
    """One stage of the Hadamard transform of `x`, fp32 [N]: sums and differences of channels that are WIDTH apart."""
    low, high = tl.split(tl.permute(tl.reshape(x, [N // (2 * WIDTH), 2, WIDTH]), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), [N])


@triton.jit(
    do_not_specialize=[
        "splits", "blocks", "heads", "queries", "before", "branches", "shared_splits", "shared_blocks", "center_b", "center_h",
    ]
)  # fmt: skip
def reduce_kernel(
    part, tops, firsts, shares, sinks, signs, center, out, lse, out_strides, splits, blocks, heads, queries, before, branches,
    shared_splits, shared_blocks, center_b, center_h,
    V: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, SINKS: tl.constexpr,
    EXACT: tl.constexpr, TURN: tl.constexpr, STAGES: tl.constexpr, ITEMS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Joins splits, adds the mean of values, rotates back what was stored rotated, and divides by the
    normaliser. Grid (G * queries, B * H, blocks of C channels): one query row each.

    part       fp32 [B * H, blocks, splits, R, DV], contiguous: outputs. With EXACT, split 0 has the exact tokens, its channels in order;
               the others have channels plane after plane (`unpack`), rotated if V.rotated
    tops       fp32 [B * H, blocks, splits, R, 2], contiguous: the maximum of the scores, to base 2, and the normaliser, relative to it
    firsts     int32 [B + 1], `work.Splits.firsts`; read if ITEMS: `splits` then counts the splits of all rows, and the first dimension
               of `part` and `tops` is H
    SHARED     query rows in a block of a second launch, over tokens that `branches` rows of the batch share; 0: there is none. Its outputs
               are behind the `before` query rows of the first: [B / branches * H, shared_blocks,
               shared_splits, SHARED], or with ITEMS [H, ..]. Query `q` of head `g` of the group and of the
               row at place `p` is query row `(g * branches + p) * queries + q`
    shares     int32 [B, 3], `work.Splits.shares`; read if SHARED and ITEMS
    sinks      [H * G]: a logit for each query head; read if SINKS
    signs      fp32 [DV], read if V.rotated
    center     fp32 [B, H, DV], read if V.centered: center_b, center_h
    out        [B, H * G, queries, DV] in the model's dtype: out_strides over rows, heads and queries
    lse        fp32 [B, H * G, queries], contiguous: log of the normaliser, to base e
    blocks     blocks of R query rows                    S       splits that are read at once
    TURN       factor of the inverse rotation; STAGES: the logarithm of its block, to base 2; with V.rotated, C covers all channels
    """
    row = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // heads
    head = (bh % heads) * G + row // queries
    base = (bh * blocks + row // R).to(tl.int64) * splits
    count = splits
    if ITEMS:
        first = tl.load(firsts + b)
        base = (bh % heads * blocks + row // R).to(tl.int64) * splits + first
        count = tl.load(firsts + b + 1) - first
    base = base * R + row % R
    every = count
    beyond = base
    if SHARED:
        group, first, others, place = b // branches * heads + bh % heads, 0, shared_splits, b % branches
        if ITEMS:
            group, first, others, place = bh % heads, tl.load(shares + b * 3), tl.load(shares + b * 3 + 1), tl.load(shares + b * 3 + 2)
        other = (row // queries * branches + place) * queries + row % queries
        panel = (group * shared_blocks + other // SHARED).to(tl.int64)
        beyond = before + (panel * shared_splits + first) * SHARED + other % SHARED
        every += others
    at = tl.arange(0, S)
    place_of_channel = tl.program_id(2) * C + tl.arange(0, C)  # in the order of partial sums: plane after plane
    inside = place_of_channel < DV
    VW: tl.constexpr = DV // V.per
    if V.group > 0:
        channel = place_of_channel
    elif V.rotated and DV != 1 << STAGES:
        channel = place_of_channel
        place_of_channel = channel % V.per * VW + channel // V.per
    else:  # a Hadamard transform of all channels may have them in this order: it turns each bit of their numbers alike
        channel = place_of_channel % VW * V.per + place_of_channel // VW
    top = tl.load(tops + base * 2)
    total = tl.zeros([], tl.float32)
    attention_sums = tl.zeros([], tl.float32)  # of packed tokens
    region = tl.zeros([C], tl.float32)
    for begin in range(0, every, S):
        split = begin + at
        live = split < every
        entry = base + split.to(tl.int64) * R
        if SHARED:
            entry = tl.where(split < count, entry, beyond + (split - count).to(tl.int64) * SHARED)
        m = tl.load(tops + entry * 2, mask=live, other=MASKED_SCORE)
        l = tl.load(tops + entry * 2 + 1, mask=live, other=0.0)
        if EXACT:
            packed = live & (split > 0)
        else:
            packed = live
        x = tl.load(part + entry[:, None] * DV + place_of_channel[None, :], mask=packed[:, None] & inside[None, :], other=0.0)
        x = tl.where((l != 0)[:, None], x, 0.0)  # splits without tokens wrote no output
        higher = tl.maximum(top, tl.max(m, 0))
        shrink = tl.exp2(top - higher)
        weight = tl.where(live, tl.exp2(m - higher), 0.0)
        total = total * shrink + tl.sum(weight * l, 0)
        attention_sums = attention_sums * shrink + tl.sum(tl.where(packed, weight * l, 0.0), 0)
        region = region * shrink + tl.sum(x * weight[:, None], 0)
        top = higher
    if V.centered:
        region += attention_sums * tl.load(center + b * center_b + bh % heads * center_h + channel, mask=inside, other=0.0)
    if V.rotated:
        for stage in tl.static_range(STAGES):  # the Hadamard transform, which undoes itself
            region = _hadamard_stage(region, C, 1 << stage)
        region *= tl.load(signs + channel, mask=inside, other=0.0) * TURN
    if EXACT:
        weight = tl.exp2(tl.load(tops + base * 2) - top)
        region += weight * tl.load(part + base * DV + channel, mask=inside, other=0.0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        region *= tl.exp2(top - higher)
        total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
        top = higher
    query = row % queries
    region /= tl.where(total == 0, 1.0, total)  # a row may have no tokens
    tl.store(out + b.to(tl.int64) * out_strides[0] + head * out_strides[1] + query * out_strides[2] + channel, region, mask=inside)
    if tl.program_id(2) == 0:
        tl.store(lse + (bh * G * queries) + row, (top + tl.log2(total)) / LOG2E)


@triton.jit(do_not_specialize=["rows"])
def rotate_kernel(x, matrix, out, rows, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, TURN: tl.constexpr):
    """Rotates queries where the attention kernel cannot. Grid (tiles of R rows).

    x        [rows, D], contiguous                 matrix   fp16 [D, D], entries 1, -1 and 0
    out      fp32 [rows, D], contiguous: `x @ matrix * TURN`
    DP       `D`, padded to a power of two
    """
    r = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.arange(0, DP)
    inside = (r < rows)[:, None] & (d < D)[None, :]
    tile = tl.load(x + r.to(tl.int64)[:, None] * D + d[None, :], mask=inside, other=0.0)
    turn = tl.load(matrix + d[:, None] * D + d[None, :], mask=(d < D)[:, None] & (d < D)[None, :], other=0.0).to(tile.dtype)
    tl.store(out + r.to(tl.int64)[:, None] * D + d[None, :], tl.dot(tile, turn, input_precision="ieee") * TURN, mask=inside)
