# mypy: ignore-errors
"""Accumulated attention of a few queries: the softmax weights of each token, summed over query rows, once the normalisers are known.

It reads the keys alone, a second time: so that the attention kernel need not keep weights, which few callers want. The weight of a token is
2^(score - level), where the level of a query row is the log of its normaliser less the log of how often it counts, to base 2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.attend.launches import Launch, architecture
from ..kernels.attend.plan import OF_CALL, OF_INPUTS, OF_LAYER, Arguments, Plan
from ..kernels.attend.triton_attend import (
    BEGIN,
    LOG2E,
    RING_ROW,
    RING_START,
    RING_TOKENS,
    SINK_ROW,
    SINKS,
    capped,
    entry_of,
    exact_columns,
    head_of,
    key_scores,
    masked,
    page_of,
    query_planes,
    words_of_tile,
)
from ..kernels.device.math import MASKED_BELOW, MASKED_SCORE, exp2
from ..kernels.host.launch import Launcher

LAUNCH = Launch(64, 2, None, 12, rows=64)
"""With the most query rows of a tile: more are added up in turn."""
MOST_SPAN = 512
"""The most tokens of a program."""


@triton.jit
def _exact_scores(
    D: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, RING: tl.constexpr, ARCH: tl.constexpr,
    q, scale, keys, key_stride, at, tokens, start, oldest_slot, count, visible,
):  # fmt: skip
    """The scores, fp32 [T, R] to base 2, of the exact tokens in slots `at`, int [T]; arguments as in `triton_attend.exact_tiles`."""
    mask, mask_rows, mask_stride, newest = visible
    DP: tl.constexpr = max(triton.next_power_of_2(D), 16)
    d = tl.arange(0, DP)
    valid, column = exact_columns(at, tokens, start, oldest_slot, count, RING)
    k = tl.load(keys + at[:, None] * key_stride + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    s = capped(tl.dot(k, q, input_precision="ieee") * scale, SOFTCAP, ARCH)
    s = masked(s, mask, mask_rows, mask_stride, tl.where(valid, column, start), True, MASK)
    if CAUSAL:
        s = tl.where(column[:, None] <= newest[None, :], s, MASKED_SCORE)
    return tl.where(valid[:, None], s, MASKED_SCORE)


# What changes from step to step, or call to call, must not compile the kernel anew.
@triton.jit(
    do_not_specialize=[
        "scaling", "n_sinks", "n_quantized", "n_residual", "heads", "queries", "table_b", "table_h", "rows_b", "lengths_b", "lengths_h",
        "span", "mask_b", "mask_h", "mask_q", "mask_t",
    ]
)  # fmt: skip
def sum_keys_kernel(
    query, region_query, rotation, table, rows, lengths, k_planes, exact, mask, lse, observed, sums,
    query_strides, table_b, table_h, rows_b, lengths_b, lengths_h, mean_strides, mask_b, mask_h, mask_q, mask_t,
    scaling, n_sinks, n_quantized, n_residual, span, heads, queries,
    KEYS: tl.constexpr, PAGES: tl.constexpr, G: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Sums softmax weights over the query heads of a group, and over queries. Grid (spans of slots: of the quantized tokens, then
    of the sinks, then of the residual; B * H).

    span      slots of a program, a multiple of T
    lse       fp32 [B, H * G, queries], contiguous: logs of the normalisers, to base e
    observed  fp32 or bool [B, queries], contiguous: how often each query counts
    sums      fp32 [B, H, n_sinks + n_quantized + n_residual], contiguous: sinks, quantized tokens, residual; 0 for a slot without a token
    other arguments   as in `triton_attend.attend_kernel`, of keys
    """
    COUNTED: tl.constexpr = rows is not None
    K: tl.constexpr = KEYS.layout
    D: tl.constexpr = KEYS.dim
    K_ONCE: tl.constexpr = KEYS.once
    K_STRIDES: tl.constexpr = KEYS.strides
    TURN: tl.constexpr = KEYS.turn
    PAGE: tl.constexpr = PAGES[0]
    BASE: tl.constexpr = PAGES[1]
    part = tl.program_id(0)
    bh = tl.program_id(1)
    b = (bh // heads).to(tl.int64)
    h = bh % heads
    first_token, row_sinks, in_ring, length = 0, n_sinks, n_residual, n_quantized
    sink_row, ring_row, oldest_slot = b, b, 0
    if COUNTED:
        rows += b * rows_b
        first_token = tl.load(rows + BEGIN)
        row_sinks = tl.load(rows + SINKS)
        in_ring = tl.load(rows + RING_TOKENS)
        length = tl.load(lengths + b * lengths_b + h * lengths_h)
        sink_row = tl.load(rows + SINK_ROW).to(tl.int64)
        ring_row = tl.load(rows + RING_ROW).to(tl.int64)
        oldest_slot = tl.load(rows + RING_START)
    shift = row_sinks - first_token  # from places among the quantized tokens to columns
    total = tl.maximum(length, first_token) + shift + in_ring
    of_region = tl.cdiv(n_quantized, span)
    of_sinks = tl.cdiv(n_sinks, span)
    t = tl.arange(0, T)
    if MASK == "row":
        mask += b * mask_b
    sums += bh.to(tl.int64) * (n_sinks + n_quantized + n_residual)
    for begin in range(0, G * queries, R):
        r = begin + tl.arange(0, R)
        live = r < G * queries
        row = tl.minimum(r, G * queries - 1)
        head = h * G + row // queries
        number = row % queries
        count = tl.load(observed + b * queries + number, mask=live, other=0).to(tl.float32)
        level = tl.load(lse + (b * heads * G + head) * queries + number) * LOG2E
        live = live & (count != 0.0) & (level > MASKED_BELOW)  # of others, which may hold nan, all weights are 0
        level = tl.where(live, level - tl.log2(count), 0.0)
        q_rows = b * query_strides[0] + head * query_strides[1] + number * query_strides[2]
        visible = mask, b * mask_b + head * mask_h + number * mask_q, mask_t, total - queries + number
        if part < of_region:
            KW: tl.constexpr = D // K.per
            KT: tl.constexpr = words_of_tile(K, D)
            mean, shifts = k_planes[3], k_planes[4]
            if K.centered:
                mean += b * mean_strides[0] + h * mean_strides[1]
            q = query_planes(K, KW, KT, D, TURN, ARCH, SOFTCAP, region_query, q_rows, live, rotation, mean, scaling)
            planes = head_of(K, K_ONCE, (k_planes[0], k_planes[1], k_planes[2]), K_STRIDES, b, h)
            low = tl.multiple_of(part * span, T)
            pages = table + (b * table_b + h * table_h)
            high = tl.minimum(low + span, n_quantized)
            stored = tl.minimum(tl.maximum(tl.cdiv(length, T) * T, low), high)
            page = entry_of(pages, low, low < length, PAGE, BASE)
            for token in range(low, stored, T):
                codes, bits, scales = page_of(K, D, K_ONCE, planes, K_STRIDES, page, token % PAGE)
                page = entry_of(pages, token + T, token + T < stored, PAGE, BASE)
                same = tl.multiple_of(token % 32, 32)  # as in `attend_kernel`
                place = token + t
                valid = (place >= first_token) & (place < length)
                column = shift + tl.minimum(tl.maximum(place, first_token), length - 1)
                s = key_scores(
                    K, D, K_ONCE, SOFTCAP, MASK, ARCH, q, (codes, bits, shifts + same), scales, valid, visible, True, column
                )  # fmt: skip
                w = tl.sum(tl.where(valid[:, None] & live[None, :], exp2(s - level[None, :], ARCH), 0.0), 1)
                at = sums + n_sinks + place
                if begin > 0:
                    tl.debug_barrier()
                    w += tl.load(at, mask=place < n_quantized, other=0.0)
                tl.store(at, w, mask=place < n_quantized)
            for token in range(stored, high, T):
                tl.store(sums + n_sinks + token + t, tl.zeros([T], tl.float32), mask=token + t < n_quantized)
        else:
            DP: tl.constexpr = max(triton.next_power_of_2(D), 16)
            d = tl.arange(0, DP)
            x_query = tl.load(query + q_rows[None, :] + d[:, None], mask=(d < D)[:, None] & live[None, :], other=0.0)
            scale = scaling * (LOG2E if SOFTCAP is None else 1.0)
            is_sink = part < of_region + of_sinks
            low = (part - of_region - tl.where(is_sink, 0, of_sinks)) * span
            zone = tl.where(is_sink, n_sinks, n_residual)
            for slot in tl.range(low, tl.minimum(low + span, zone), T, num_stages=1):
                place = slot + t
                if is_sink:
                    keys = exact[0] + sink_row * exact[4] + h * exact[5]
                    s = _exact_scores(
                        D, SOFTCAP, MASK, CAUSAL, False, ARCH, x_query, scale, keys, exact[6], place, row_sinks, 0, 0, 0, visible
                    )  # fmt: skip
                else:
                    keys = exact[2] + ring_row * exact[10] + h * exact[11]
                    s = _exact_scores(
                        D, SOFTCAP, MASK, CAUSAL, COUNTED, ARCH, x_query, scale, keys, exact[12], place, n_residual, total - in_ring,
                        oldest_slot, in_ring, visible,
                    )  # fmt: skip
                w = tl.where(live[None, :] & (s > MASKED_BELOW), exp2(s - level[None, :], ARCH), 0.0)
                at = sums + tl.where(is_sink, 0, n_sinks + n_quantized) + place
                w = tl.sum(w, 1)
                if begin > 0:
                    tl.debug_barrier()
                    w += tl.load(at, mask=place < zone, other=0.0)
                tl.store(at, w, mask=place < zone)


class KeySums:
    """The launch after the attention of a `plan`."""

    def __init__(self, plan: Plan) -> None:
        launches, (region, *exact) = plan.launches, plan.zones
        panels = launches.batch * launches.heads
        rows = min(max(triton.next_power_of_2(launches.groups * launches.queries), launches.rows), LAUNCH.rows)
        tiles = -(-region * panels // (architecture(launches.attend.device)[1] * LAUNCH.programs * LAUNCH.tile))
        span = min(max(tiles, 1) * LAUNCH.tile, MOST_SPAN)
        self.grid = sum(-(-n // span) for n in (region, *exact)), panels, 1
        self.shape = launches.batch, launches.heads, sum(plan.zones)
        name = f"sums {span}"
        if name not in launches.others:
            own = {"R": rows, "T": LAUNCH.tile, "span": span, "num_warps": 1 if rows <= 16 else 4, "num_stages": LAUNCH.stages}
            given, held = ("query", "region_query", "lse", "observed", "sums"), (*OF_LAYER, *OF_INPUTS, *OF_CALL)
            launches.others[name] = Launcher(sum_keys_kernel, launches.attend.device, given, held, **launches.fixed | own)
        self.launch = launches.others[name]


def sum_keys(plan: Plan, lse: Tensor, arguments: Arguments, observed: Tensor) -> Tensor:
    """The accumulated attention of each slot, fp32 `[B, H, S + max_length + R]`, after `plan.run` has returned `lse` and `arguments`.
    `observed`: how often each query counts, fp32 or bool `[B, Q]`; 0 for padding."""
    sums, (queries, held) = plan.prepared.get("sums") or plan.prepared.setdefault("sums", KeySums(plan)), arguments
    out = torch.empty(sums.shape, dtype=torch.float32, device=lse.device)
    query, turned = queries if len(queries) > 1 else (*queries, plan.rotated(*queries))
    sums.launch(sums.grid, query, turned, lse, observed.contiguous(), out, held=held)
    return out
