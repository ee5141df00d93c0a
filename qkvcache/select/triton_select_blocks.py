"""`select_blocks` in two launches: the weights of blocks, from the codes of keys, and the blocks with the largest ones.

Neither waits for the host, nor does work if all tokens fit in the budget, so that a captured step serves any number of tokens."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.base import PackedLayout
from ..kernels.attend.launches import architecture
from ..kernels.attend.plan import OF_CALL, OF_INPUTS, Layer, Plan, held_of, layer_of, plane_strides
from ..kernels.attend.reference import Options
from ..kernels.attend.triton_attend import (
    BEGIN,
    SINKS,
    entry_of,
    head_of,
    hides_any,
    key_scores,
    page_of,
    query_planes,
    words_of_tile,
)
from ..kernels.device.math import MASKED_SCORE, exp2, log2
from ..kernels.host.launch import Held, Launcher
from ..kernels.pages import BLOCK, WHOLE, AttentionBudget, PagedInputs, Pages, Selection
from ..kernels.segments import planes_of
from . import select_blocks as reference

TILE, PROGRAMS = 64, 20
"""The launch that scores blocks: tokens of a tile, and programs of a multiprocessor, each of one warp. With 32 query rows and two warps,
in place of 16 and one, it is slower."""
LEAST_SPLIT = 256
"""Fewest tokens of a program."""
BITS = 20
"""Leading bits of weights that are compared; of those that are equal in them, the first are read."""
MASKED_BELOW = tl.constexpr(-1e29)
_BLOCK, _WHOLE = tl.constexpr(BLOCK), tl.constexpr(WHOLE)


@triton.jit
def read_of(stored, tokens, share):
    """`AttentionBudget.blocks` of `stored` blocks."""
    of_share = ((stored.to(tl.int64) * share + _WHOLE - 1) // _WHOLE).to(tl.int32)
    return tl.minimum(tl.maximum(tl.cdiv(tokens, _BLOCK), of_share), stored)


@triton.jit(
    do_not_specialize=[
        "scaling", "n_sinks", "n_quantized", "tokens", "share", "heads", "queries", "room", "table_b", "rows_b", "lengths_b", "mask_b",
        "mask_h", "mask_q", "mask_t",
    ]
)  # fmt: skip
def score_blocks_kernel(
    region_query, rotation, table, rows, lengths, items, k_planes, mask, scores,
    query_strides, table_b, rows_b, lengths_b, mean_strides, mask_b, mask_h, mask_q, mask_t, scaling, n_sinks, n_quantized, tokens, share,
    heads, queries, room,
    KEYS: tl.constexpr, PAGES: tl.constexpr, G: tl.constexpr, R: tl.constexpr, T: tl.constexpr, SOFTCAP: tl.constexpr,
    MASK: tl.constexpr, ARCH: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """The log of the summed weights of each block, without the normaliser, to base 2. Grid (splits, blocks of R query rows, B * H), or with
    ITEMS (N, blocks, H) for the N splits of all rows.

    scores         fp32 [B * H, room, G * queries]; not written beyond a row's tokens, and for rows that read all blocks
    tokens, share  `pages.AttentionBudget`                       room       blocks of `n_quantized` tokens
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
    split = tl.program_id(0)
    block = tl.program_id(1)
    bh = tl.program_id(2)
    b = (bh // heads).to(tl.int64)
    h = bh % heads
    if ITEMS:
        b = tl.load(items + split * ITEMS).to(tl.int64)
        low = tl.multiple_of(tl.load(items + split * ITEMS + 1), T)
        high = tl.load(items + split * ITEMS + 2)
        bh = b * heads + h
    first_token, shift, length = 0, n_sinks, n_quantized
    if COUNTED:
        rows += b * rows_b
        first_token = tl.load(rows + BEGIN)
        shift = tl.load(rows + SINKS) - first_token  # from places among the quantized tokens to columns
        length = tl.load(lengths + b * lengths_b)
    end = tl.cdiv(length, _BLOCK)
    stored = end - first_token // _BLOCK
    if not ITEMS:
        each = tl.cdiv(tl.cdiv(length, tl.num_programs(0)), T) * T
        low = tl.multiple_of(split * each, T)
        high = tl.minimum(low + each, length)
    if (read_of(stored, tokens, share) < stored) & (low >= 0) & (low < high):
        KW: tl.constexpr = D // K.per
        KT: tl.constexpr = words_of_tile(K, D)
        r = block * R + tl.arange(0, R)
        live = r < G * queries
        row = tl.minimum(r, G * queries - 1)
        head = h * G + row // queries
        number = row % queries
        q_rows = b * query_strides[0] + head * query_strides[1] + number * query_strides[2]
        mean, shifts = k_planes[3], k_planes[4]
        if K.centered:
            mean += b * mean_strides[0] + h * mean_strides[1]
        q = query_planes(K, KW, KT, D, TURN, ARCH, SOFTCAP, region_query, q_rows, live, rotation, mean, scaling)
        hides = True
        if MASK == "row":
            mask += b * mask_b
            hides = hides_any(mask, shift + tl.maximum(low, first_token), shift + high, mask_t)
        visible = mask, b * mask_b + head * mask_h + number * mask_q, mask_t, 0
        t = tl.arange(0, T)
        i = tl.arange(0, T // _BLOCK)
        table += b * table_b
        planes = head_of(K, K_ONCE, (k_planes[0], k_planes[1], k_planes[2]), K_STRIDES, b, h)
        scores += bh.to(tl.int64) * room * (G * queries)
        page = entry_of(table, low, True, PAGE, BASE)
        for token in range(low, high, T):
            codes, bits, scales = page_of(K, D, K_ONCE, planes, K_STRIDES, page, token % PAGE)
            page = entry_of(table, token + T, token + T < high, PAGE, BASE)
            same = tl.multiple_of(token % 32, 32)  # as in `attend_kernel`
            place = token + t
            valid = (place >= first_token) & (place < high)
            column = shift + tl.minimum(tl.maximum(place, first_token), high - 1)
            s = key_scores(K, D, K_ONCE, SOFTCAP, MASK, ARCH, q, (codes, bits, shifts + same), scales, valid, visible, hides, column)
            s = tl.where(valid[:, None], s, MASKED_SCORE)
            s = tl.reshape(s, [T // _BLOCK, _BLOCK, R])
            top = tl.max(s, 1)
            sums = top + log2(tl.sum(exp2(s - tl.expand_dims(top, 1), ARCH), 1), ARCH)
            at = token // _BLOCK + i
            tl.store(scores + at[:, None] * (G * queries) + r[None, :], sums, mask=(at < end)[:, None] & live[None, :])


@triton.jit(
    do_not_specialize=[
        "n_quantized", "tokens", "share", "heads", "queries", "room", "chosen_room", "table_b", "rows_b", "lengths_b",
    ]
)  # fmt: skip
def choose_blocks_kernel(
    scores, table, rows, lengths, blocks, entries, read, table_b, rows_b, lengths_b, n_quantized, tokens, share, heads, queries, room,
    chosen_room,
    N: tl.constexpr, PAGE: tl.constexpr, COUNTED: tl.constexpr, ARCH: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The blocks of the largest weights, one program for a row and KV head. Grid (B * H).

    scores         of `score_blocks_kernel`; `queries`: rows of queries, G * Q; N: a power of two, at least the blocks of a row
    blocks, entries, read   `pages.Selection`, `chosen_room` blocks
    """
    bh = tl.program_id(0)
    b = (bh // heads).to(tl.int64)
    first, length = 0, n_quantized
    if COUNTED:
        first = tl.load(rows + b * rows_b + BEGIN) // BLOCK
        length = tl.load(lengths + b * lengths_b)
    end = tl.cdiv(length, BLOCK)
    stored = tl.maximum(end - first, 0)
    count = read_of(stored, tokens, share)
    i = tl.arange(0, N)
    exists = (i >= first) & (i < end)
    chosen = exists
    if count < stored:
        weights = tl.zeros([N], tl.float32)
        scores += bh.to(tl.int64) * room * queries
        for r in range(queries):
            x = tl.load(scores + i * queries + r, mask=exists, other=MASKED_SCORE)
            top = tl.max(x, 0)
            x = tl.where(exists, exp2(x - top, ARCH), 0.0)
            total = tl.sum(x, 0)
            weights += tl.where(top > MASKED_BELOW, x / total, 0.0)
        key = tl.where(exists, weights.to(tl.int32, bitcast=True) >> (31 - BITS), -1)  # weights are not negative
        threshold = 0
        for bit in range(BITS):  # several bits at a time are slower: they take more registers than a thread has
            higher = threshold + (1 << (BITS - 1 - bit))
            threshold = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= count, higher, threshold)
        above = key > threshold
        equal = key == threshold
        missing = count - tl.sum(above.to(tl.int32), 0)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    entry = tl.load(table + b * table_b + i * BLOCK // PAGE, mask=exists, other=0)
    place = bh * chosen_room + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(blocks + place, i, mask=chosen)
    tl.store(entries + place, entry, mask=chosen)
    partial = tl.sum((chosen & (i == end - 1)).to(tl.int32), 0)
    tl.store(read + bh, count * BLOCK - partial * (end * BLOCK - length))


def stages_of(layout: PackedLayout) -> int:
    """Tiles in flight of the launch that scores blocks: the best measured on an H100."""
    return 2 if layout.bits <= 4 else 3


def _keys(layer: Layer, pages: Pages) -> tuple[Held, dict[str, Any]]:
    """The planes of keys that choose blocks, and their layout and strides: of the upper halves of codes, where they have a plane of their
    own, and of the index, where the pages lie in host memory."""
    kind = layer.kind
    keys, planes = kind.constants["KEYS"], layer.held.values["k_planes"]
    layout, strides = keys.layout, keys.strides
    upper = layout.upper or layout
    if pages.index is not None:
        planes = *planes_of(upper, pages.index.planes[0] | pages.statistics[0]), *planes[3:]
        strides = plane_strides(planes[:4], keys.once)[:6]
    elif upper is not layout:
        (low, high, *others), strides = planes, (*strides[2:4], *strides[:2], *strides[4:])
        planes = high, low, *others
    held = Held(k_planes=planes, mean_strides=layer.held.values["mean_strides"])
    return held, {"KEYS": replace(keys, layout=upper, strides=strides), "num_stages": stages_of(upper)}


def select_blocks(query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, **options: Unpack[Options]) -> Selection:
    """Run `select_blocks.select_blocks` on the device."""
    pages, room, device = inputs.pages, -(-inputs.max_length // BLOCK), query.device
    budget: AttentionBudget = inputs.budget  # type: ignore[assignment]
    heads, chosen, arch = inputs.ring[0].shape[1], budget.blocks(room), architecture(device)[0]
    shape, rows = (len(query), heads, chosen), query.shape[1] // heads * min(query.shape[2], reference.SAMPLED)
    scores = torch.empty(len(query) * heads * room * rows, dtype=torch.float32, device=device)
    numbers = torch.empty(shape, dtype=torch.int32, device=device), torch.empty(shape, dtype=pages.table.dtype, device=device)
    selection = Selection(*numbers, torch.empty(shape[:2], dtype=torch.int32, device=device))
    limits = {"n_quantized": inputs.max_length, "tokens": budget.tokens, "share": budget.share, "room": room}
    _score(reference.sampled(query), inputs, None if mask is None else reference.sampled(mask), options, scores, rows, limits)
    choose = _choosing(device, max(triton.next_power_of_2(room), 32), pages.page_size, inputs.rows is not None, arch)
    sizes = Held(heads=heads, queries=rows, chosen_room=chosen, **limits)
    held = sizes, held_of(inputs, layer_of(inputs).kind.empty)
    choose((len(query) * heads, 1, 1), scores, *numbers, selection.lengths, held=held)
    return selection


def _score(
    query: Tensor, inputs: PagedInputs, mask: Tensor | None, options: Options, scores: Tensor, rows: int, limits: dict[str, int]
) -> None:
    """A launch of `score_blocks_kernel`."""
    splits, layer = inputs.splits, layer_of(inputs)
    plan = Plan(query, inputs, mask, options, None, None if splits is None else splits.items)
    launches = plan.launches
    arch, processors = architecture(query.device)
    panels, small = launches.batch * launches.heads, 8 if rows <= 8 and (arch or query.device.type == "cpu") else 16
    row_blocks = -(-rows // small)
    parts = min(max(processors * PROGRAMS // (panels * row_blocks), 1), -(-inputs.max_length // LEAST_SPLIT))
    key = "index" if inputs.pages.index is not None else "keys"
    if key not in inputs.launches:
        inputs.launches[key] = _keys(layer, inputs.pages)
    keys, constants = inputs.launches[key]
    if key not in launches.others:
        sizes = {"R": small, "T": TILE, "num_warps": 1}
        given, of = ("region_query", "scores"), (*OF_KEYS, *OF_LIMITS, "table", "table_b", *OF_INPUTS, *OF_CALL)
        launches.others[key] = Launcher(score_blocks_kernel, query.device, given, of, **launches.fixed | constants | sizes)
    grid = (parts, row_blocks, panels) if splits is None else (len(splits.items), row_blocks, launches.heads)
    table = (inputs.pages.index or inputs.pages).table
    of_call = Held(**limits, table=table, table_b=table.stride(0))
    held = keys, of_call, held_of(inputs, layer.kind.empty), plan.held
    launches.others[key](grid, plan.rotated(query), scores, held=held)


OF_KEYS = "k_planes", "mean_strides"
OF_LIMITS = "n_quantized", "tokens", "share", "room"
OF_CHOICE = "heads", "queries", "chosen_room", *OF_LIMITS


@functools.lru_cache(maxsize=64)
def _choosing(device: torch.device, blocks: int, page_size: int, counted: bool, arch: int) -> Launcher:
    """Launches of `choose_blocks_kernel` for up to `blocks` blocks."""
    constants = {"N": blocks, "PAGE": page_size, "COUNTED": counted, "ARCH": arch, "BITS": BITS, "BLOCK": BLOCK}
    given, held = ("scores", "blocks", "entries", "read"), (*OF_CHOICE, *OF_INPUTS)
    return Launcher(choose_blocks_kernel, device, given, held, **constants, num_warps=min(max(blocks // 256, 4), 32))
