"""Attention to dense keys and values on Hopper, for `chunked.py`: torch's flash attention is made for earlier GPUs, and cuDNN's has a plan
for each shape, which takes longer to prepare than a turn saves.

TMA, the copy engine, brings tiles of keys and values. Four warps wait for it (`_produce`), and two groups of warps attend to the tiles in
turns, as in `gluon_tiles.py`. There are three tiles of values, so that each copy has a whole step."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..device.math import log2
from .gluon_pages import barrier, copied
from .gluon_tiles import (
    FREE,
    HAS_KEYS,
    HAS_VALUES,
    OF_TILE,
    PRODUCERS,
    arrive_at,
    attend_in_turns,
    hidden,
    hide_end,
    product_layout,
    tile_layout,
    wait_at,
)
from .launches import TILES_COST, architecture
from .triton_attend import LOG2E

ROWS, TILE, WARPS = 128, 128, 8
"""Query rows of a program, tokens of a tile, and warps that multiply."""
_PRODUCERS_REGISTERS = gl.constexpr(40)
# Triton 3.8 has another name.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float, queries: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Attention of queries `[B, H, R, D]` to keys and values `[B, H, T, D]`, all in fp16 or all in bf16: D is 64 or 128, channels are
    contiguous, and 16 divides the addresses and the strides, in bytes, of keys and values. `scaling` is positive. Without `queries`, each
    row sees all tokens. With it, row `r` is token `T - queries + r % queries`, and sees no later token.

    Returns for each of one to eight parts of the tokens the output `[B, H, R, D]` in the dtype of the queries, and the log-sum-exp, fp32
    `[B, H, R]`."""
    (batch, heads, rows, dim), tokens = query.shape, key.shape[2]
    arch, processors = architecture(query.device)
    blocks = -(-rows // ROWS)
    splits = 1 if queries is not None else splits_of(tokens, batch * heads * blocks, processors)
    each = -(-tokens // (splits * TILE)) * TILE
    out = query.new_empty(splits, *query.shape)
    lse = torch.empty(out.shape[:4], dtype=torch.float32, device=query.device)
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    tiles = (TensorDescriptor.from_tensor(x, [1, 1, TILE, dim], layout) for x in (key, value))
    with torch.cuda.device_of(query):
        attend_dense_kernel[blocks, batch * heads, splits](
            query, *tiles, out, lse, query.stride()[:3], scaling, rows, tokens, each, heads, queries or 0,
            CAUSAL=queries is not None, D=dim, R=ROWS, T=TILE, ARCH=arch, num_warps=WARPS,
        )  # fmt: skip
    return list(zip(out, lse, strict=True))


def splits_of(tokens: int, panels: int, processors: int) -> int:
    """The number of splits of the tokens, 1, 2, 4 or 8, that takes the least time; a program fills a multiprocessor. `panels`: blocks of
    query rows of all heads. Other numbers would be merged with parts without weight (`triton_merge.py`)."""
    tiles = -(-tokens // TILE)
    possible = (n for n in (1, 2, 4, 8) if -(-tiles // -(-tiles // n)) == n)
    return min(possible, key=lambda n: -(-panels * n // processors) * (tokens / n + TILES_COST))


@gluon.jit
def _copy(vectors, bh, at, into, copied_all):
    """Copies the tokens from `at` on of `bh`, a row and a head, to `into`, shared [T, D]. `vectors`: a descriptor of [B, H, tokens, D];
    `copied_all`: the barrier that completes then."""
    T: gl.constexpr = into.shape[0]
    D: gl.constexpr = into.shape[1]
    mbarrier.expect(copied_all, 2 * T * D)
    _load(vectors, [bh[0], bh[1], at, 0], copied_all, into._reinterpret(vectors.dtype, [1, 1, T, D], vectors.layout))


@gluon.jit
def _completes(copied_all, turn, FIRST: gl.constexpr, tile, GROUPS: gl.constexpr):
    """Waits for a copy, the `turn`-th one of the barrier, and tells GROUPS groups that tile `tile` of 0 and 1 is complete."""
    mbarrier.wait(copied_all, turn & 1)
    for i in gl.static_range(GROUPS):
        arrive_at(FIRST + 2 * tile + i, OF_TILE)


@gluon.jit
def _produce(tiles, copies, low, high, bh, keys, values, GROUPS: gl.constexpr):
    """Copies the tokens from `low` to `high`, tile after tile, for GROUPS groups of `attend_in_turns`. Keys are one tile ahead of values,
    and have one tile more, whose scores nobody reads.

    tiles          keys and values, shared [2, T, D] and [3, T, D]
    copies         barriers, shared [4, 1]: two that tiles of keys take in turn, then two that tiles of values take in turn
    bh             row and head               keys, values    as in the kernel
    """
    k, v = tiles
    T: gl.constexpr = k.shape[1]
    OF_STEP: gl.constexpr = 32 * PRODUCERS + 128 * GROUPS
    _copy(keys, bh, low, k.index(0), copies.index(0))
    _copy(keys, bh, low + T, k.index(1), copies.index(1))
    _copy(values, bh, low, v.index(0), copies.index(2))
    tile = low * 0
    _completes(copies.index(0), 0, HAS_KEYS, tile, GROUPS)
    for token in range(low, high, T):
        here, after = tile & 1, (tile + 1) & 1
        _completes(copies.index(after), (tile + 1) >> 1, HAS_KEYS, after, GROUPS)
        _completes(copies.index(2 + here), tile >> 1, HAS_VALUES, here, GROUPS)
        wait_at(FREE + after, OF_STEP)
        _copy(keys, bh, token + 2 * T, k.index(here), copies.index(here))
        _copy(values, bh, token + T, v.index((tile + 1) % v.shape[0]), copies.index(2 + after))
        tile += 1
    mbarrier.wait(copies.index((tile + 1) & 1), ((tile + 1) >> 1) & 1)
    mbarrier.wait(copies.index(2 + (tile & 1)), (tile >> 1) & 1)
    wait_at(FREE + ((tile + 1) & 1), OF_STEP)


@gluon.jit
def _hide_later(s, token, t, high, seen, STEP: gl.constexpr):
    """Scores `s` of the tokens `token + t`, -inf where a token is later than the token of the row. `seen`: the token of each row, int [R],
    and the first of these tokens."""
    newest, oldest = seen
    if token + s.shape[1] > oldest + 1:
        s = hidden(s, ((token + t)[None, :] <= newest[:, None]).to(gl.int32))
    return s


@gluon.jit
def _attend(q, tiles, low, high, scaling, results, seen, HIDE: gl.constexpr, ARCH: gl.constexpr):
    """Attention of the rows of `q`, shared [R, D], to the tokens from `low` to `high`, which `_produce` copies.

    results    outputs, log-sum-exps, the first row of the program in both, and the rows that there are
    seen       for `_hide_later`: the first row, the queries, the tokens before them, and the oldest token of a query
    """
    out, lse, entry, live = results
    R: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    OF_ROW: gl.constexpr = gl.SliceLayout(1, product_layout(R, tiles[0].shape[1]))
    OF_OUTPUT: gl.constexpr = gl.SliceLayout(1, product_layout(R, D))
    row = gl.arange(0, R, OF_ROW)
    factor = gl.full([R], 1.0, gl.float32, OF_ROW) * (scaling * LOG2E)
    first, queries, before, oldest = seen
    of_rows = before + (first + row) % queries, oldest
    m, l, acc = attend_in_turns(q, tiles, low, high, factor, lse, of_rows, HIDE, False, 0.0, ARCH, 0)
    gl.store(lse + entry + row, (m + log2(l, ARCH)) * (1 / LOG2E), mask=row < live)
    acc = acc * gl.convert_layout(1 / l, OF_OUTPUT)[:, None]
    at = gl.convert_layout(row, OF_OUTPUT)
    rows = out + entry * D + at[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, acc.type.layout))[None, :]
    gl.store(rows, acc.to(out.dtype.element_ty), mask=(at < live)[:, None])


@gluon.jit(do_not_specialize=["scaling", "rows", "tokens", "heads", "queries"])
def attend_dense_kernel(
    query, keys, values, out, lse, query_strides, scaling, rows, tokens, each, heads, queries,
    CAUSAL: gl.constexpr, D: gl.constexpr, R: gl.constexpr, T: gl.constexpr, ARCH: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of R query rows, B * H, splits of `each` tokens; one split if CAUSAL); 2 * R threads and the threads of PRODUCERS.

    query          [B, H, rows, D] in 16 bits, its strides over the first three dimensions, in elements; channels contiguous
    keys, values   descriptors of tensors [B, H, tokens, D] of that dtype, in tiles of T tokens
    out            [splits, B, H, rows, D], contiguous, of that dtype
    lse            fp32 [splits, B, H, rows], contiguous: log-sum-exps
    each           tokens of a split, a multiple of T            heads    H
    scaling        factor on the scores, positive
    queries        with CAUSAL, row `r` is token `tokens - queries + r % queries`, and sees no later token; else nothing reads it
    """
    LOADED: gl.constexpr = copied(D, R // 16)
    block = gl.num_programs(0) - 1 - gl.program_id(0)  # the last rows, which see the most tokens of their head, first
    bh = gl.program_id(1)
    b = bh // heads
    h = bh % heads
    low = gl.program_id(2) * each
    high = gl.minimum(low + each, tokens)
    first = block * R
    live = rows - first
    seen = first, 1, 0, 0  # nothing reads it
    if CAUSAL:
        begin = first % queries
        end = begin + gl.minimum(live, R)
        high = gl.minimum(tokens - queries + end, tokens)
        seen = first, queries, tokens - queries, tokens - queries + (begin if end <= queries else 0)
    HIDE: gl.constexpr = _hide_later if CAUSAL else hide_end
    row = gl.minimum(first + gl.arange(0, R, gl.SliceLayout(1, LOADED)), rows - 1)
    query += b.to(gl.int64) * query_strides[0] + h.to(gl.int64) * query_strides[1]
    at = (row.to(gl.int64) * query_strides[2])[:, None] + gl.arange(0, D, gl.SliceLayout(0, LOADED))[None, :]
    q = gl.allocate_shared_memory(query.dtype.element_ty, [R, D], tile_layout(D), gl.load(query + at))
    tiles = (
        gl.allocate_shared_memory(keys.dtype, [2, T, D], tile_layout(D)),
        gl.allocate_shared_memory(values.dtype, [3, T, D], tile_layout(D)),
    )
    copies = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(copies.index(i), count=1)
    fence_async_shared()
    barrier()
    entry = (gl.program_id(2) * gl.num_programs(1) + bh).to(gl.int64) * rows + first
    gl.warp_specialize(
        [
            (_attend, (q, tiles, low, high, scaling, (out, lse, entry, live), seen, HIDE, ARCH)),
            (_produce, (tiles, copies, low, high, (b, h), keys, values, R // 64)),
        ],
        [PRODUCERS],
        [_PRODUCERS_REGISTERS],
    )
