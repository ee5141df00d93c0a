"""Attention of many query rows over a layer whose tokens are quantized, in one pass over the codes, on tensor cores that want large tiles.

One program reads one split of the tokens of one (sequence, KV head) for a block of 64 or 128 query rows
(queries times the query heads of a group). Query rows are the rows of both products. A tile of tokens is
dequantized once, to fp16 in shared memory, for all rows of the block, scale and all: for so many rows that is
cheaper than scaling scores and weights, as `triton_attend.py` does for few. fp32 scales are divided by the
largest scale of the split (`largest_scale`), so that fp16 holds the numbers; scores and outputs are multiplied by it.

Splits of the quantized region, and the exact tokens as one more, leave partial outputs in the order of
`triton_attend.py`, which `triton_join.py` joins. All exponents are base 2.

A tile has its channels in the order in which assembly unpacks them (`_reordered`). Queries are reordered
likewise, and outputs stored in the order that they have elsewhere.

Shapes of tiles: T tokens, R query rows. X, K and V are the `PackedLayout` of a codec."""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.math import MASKED_SCORE, exp2
from ..device.scales import group_scales, scaled, token_scale
from ..device.unpack import offset_of, plane_offset, unit_of, unpack
from .triton_attend import (
    BLOCK,
    LOG2E,
    RING_START,
    RING_TOKENS,
    SINKS,
    capped,
    entry_of,
    exact_columns,
    head_of,
    hides_any,
    page_of,
    place_of_program,
    tokens_of_split,
)

LARGEST_ZERO = tl.constexpr(64.0)
"""The largest zero points of a split, in multiples of its largest scale."""


@triton.constexpr_function
def power_of(layout):
    """Factor on relative scales: bytes of tables are subnormal fp16 numbers."""
    return 2.0**15 if layout.kind.startswith("lut") else 1.0


@triton.jit
def _reordered(X: tl.constexpr, x):
    """Vectors `x`, [R, D], with their channels in the order of a tile.

    Of the eight words that a thread loads at once, the first four go to the first half of the tile, the
    others to the second: then threads that store to shared memory at a time do not share banks. Four words
    lie there as two times two words, plane by plane."""
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    PER: tl.constexpr = X.per
    EIGHTS: tl.constexpr = D // PER // 8
    if X.group > 0:
        return tl.reshape(tl.permute(tl.reshape(x, [R, PER, EIGHTS, 2, 2, 2]), (0, 3, 2, 4, 1, 5)), [R, D])
    else:
        return tl.reshape(tl.permute(tl.reshape(x, [R, EIGHTS, 2, 2, 2, PER]), (0, 2, 1, 3, 5, 4)), [R, D])


@triton.jit
def _plane_by_plane(X: tl.constexpr, x):
    """Vectors `x`, [R, D], in the order of a tile, with their channels plane after plane, as `reduce_kernel` reads them."""
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    PER: tl.constexpr = X.per
    return tl.reshape(tl.permute(tl.reshape(x, [R, 2, D // PER // 8, 2, PER, 2]), (0, 4, 2, 1, 3, 5)), [R, D])


@triton.jit
def _interleaved(planes, T: tl.constexpr, WORDS: tl.constexpr, PER: tl.constexpr):
    """PER planes [T, WORDS], a tuple, as one tile [T, WORDS * PER], channels in the order of `_reordered`."""
    if PER == 2:
        x = tl.join(planes[0], planes[1])
        x = tl.permute(tl.reshape(x, [T, WORDS // 8, 2, 2, 2, 2]), (0, 2, 1, 3, 5, 4))
    elif PER == 4:
        x = tl.join(tl.join(planes[0], planes[1]), tl.join(planes[2], planes[3]))
        x = tl.permute(tl.reshape(x, [T, WORDS // 8, 2, 2, 2, 2, 2]), (0, 2, 1, 3, 6, 5, 4))
    else:
        first = tl.join(tl.join(planes[0], planes[1]), tl.join(planes[2], planes[3]))
        last = tl.join(tl.join(planes[4], planes[5]), tl.join(planes[6], planes[7]))
        x = tl.permute(tl.reshape(tl.join(first, last), [T, WORDS // 8, 2, 2, 2, 2, 2, 2]), (0, 2, 1, 3, 7, 6, 5, 4))
    return tl.reshape(x, [T, WORDS * PER])


@triton.jit
def token_of(blocks, place, BLOCK: tl.constexpr):
    """The tokens at `place`, int [T], among those that are read: their indices in the row's pages."""
    if BLOCK:
        return tl.load(blocks + place // BLOCK) * BLOCK + place % BLOCK
    else:
        return place


@triton.jit
def largest_scale(
    X: tl.constexpr,
    D: tl.constexpr,
    ONCE: tl.constexpr,
    planes,
    strides: tl.constexpr,
    table,
    blocks,
    low,
    high,
    PAGE: tl.constexpr,
    BASE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the divisor of the scales and zeros of the tokens that are read from `low` to `high`, fp32, at
    least 1e-30; 1 if fp16 holds them anyway. `planes`, `strides`: as in `page_of`; `blocks`: those that are
    read, if BLOCK is not 0."""
    if X.group > 0 or X.scale == "none":
        return 1.0
    else:
        i = tl.arange(0, 4096)
        most = tl.full([4096], 1e-30, tl.float32)
        for at in range(low, high, 4096):
            place = tl.minimum(at + i, high - 1)
            entry = entry_of(table, place, place >= 0, BLOCK if BLOCK else PAGE, BASE)
            _, _, here = page_of(X, D, ONCE, planes, strides, entry, 0)
            scale, zero = token_scale(X, ONCE, here, token_of(blocks, place, BLOCK) % PAGE)
            if X.scale == "pair":
                scale = tl.maximum(scale, tl.abs(zero) / LARGEST_ZERO)
            most = tl.maximum(most, tl.where(scale < 1e30, scale, 0.0))  # a token that is not finite must not spoil the others
        return tl.max(most, 0)


@triton.jit
def page_of_tile(table, begin, high, place, PAGE: tl.constexpr, BASE: tl.constexpr):
    """The entries of the pages of a tile's tokens `place`, int [T], from `begin` on and below `high`: one, or
    [T] where tiles are longer than pages."""
    if place.shape[0] <= PAGE:
        return entry_of(table, tl.minimum(begin, high - 1), True, PAGE, BASE)
    else:
        return entry_of(table, place, place >= 0, PAGE, BASE)


@triton.jit
def _scales_of_plane(X: tl.constexpr, WORDS: tl.constexpr, by_group, i: tl.constexpr, T: tl.constexpr):
    """Scales of plane `i` of all words, fp16 [T, 1] or [T, WORDS], from the scales of each group."""
    GROUP: tl.constexpr = X.group
    FIRST: tl.constexpr = i * WORDS // GROUP
    if WORDS <= GROUP:
        return by_group[FIRST][:, None]
    else:
        tl.static_assert(WORDS % GROUP == 0)
        group = (tl.arange(0, WORDS) // GROUP)[None, :]
        scale = tl.broadcast_to(by_group[FIRST][:, None], [T, WORDS])
        for n in tl.static_range(1, WORDS // GROUP):
            scale = tl.where(group == n, by_group[FIRST + n][:, None], scale)
        return scale


@triton.jit
def load_stored(X: tl.constexpr, ONCE: tl.constexpr, D: tl.constexpr, planes, slot, ARCH: tl.constexpr):
    """Load the stored planes of the tokens `slot`, int [T], of one head, in the form that `dequantize` takes:
    codes, two words as one int32 [T, words / 2]; then high bits, if X.high, likewise where codes have two,
    else int16 [T, words]; then the scales of groups, or scale and zero of tokens.

    `planes`: pointers to the planes of the page, or [T], of each token's page: words of 16 bits [slots, D /
    X.per], high bits [slots, X.high / 2 as many], and scales as in `device/scales.py`."""
    codes, high, scales = planes
    WORDS: tl.constexpr = D // X.per
    HALF: tl.constexpr = WORDS // 2
    codes = codes.to(tl.pointer_type(tl.int32)) + slot * HALF
    stored = (tl.load(codes[:, None] + tl.arange(0, HALF)[None, :]),)
    if X.high > 1:
        high = high.to(tl.pointer_type(tl.int32)) + slot * HALF
        stored = stored + (tl.load(high[:, None] + tl.arange(0, HALF)[None, :]),)
    elif X.high == 1:
        stored = stored + (tl.load((high + slot * HALF)[:, None] + (tl.arange(0, WORDS) % HALF)[None, :]),)
    if X.group > 0:
        return stored + (group_scales(X, WORDS, scales, slot, ARCH),)
    else:
        return stored + (token_scale(X, ONCE, scales, slot),)


@triton.jit
def _words(pairs):
    """Pairs of words, int32 [T, N], as int16 [T, 2 * N]."""
    return tl.reshape(tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)), [pairs.shape[0], 2 * pairs.shape[1]])


@triton.jit
def dequantize(X: tl.constexpr, D: tl.constexpr, stored, norm, ARCH: tl.constexpr):
    """The numbers in the result of `load_stored`: fp16 [T, D], in units of `unit_of(X) * norm / power_of(X)`,
    the channels in the order of `_reordered`. `norm`: fp32, from `largest_scale`."""
    T: tl.constexpr = stored[0].shape[0]
    WORDS: tl.constexpr = D // X.per
    KIND: tl.constexpr = X.kind
    PER: tl.constexpr = X.per
    w = _words(stored[0])
    if X.high > 1:
        planes = unpack(KIND, w, _words(stored[1]), w, ARCH)
    elif X.high == 1:
        shift = tl.broadcast_to(tl.where(tl.arange(0, WORDS) >= WORDS // 2, -1, 0).to(tl.int16)[None, :], [T, WORDS])
        planes = unpack(KIND, w, stored[1], shift, ARCH)
    else:
        planes = unpack(KIND, w, w, w, ARCH)
    if X.group > 0:
        tiles = ()
        for i in tl.static_range(PER):
            tiles = tiles + (scaled(X, planes[i], _scales_of_plane(X, WORDS, stored[1], i, T)),)
        return _interleaved(tiles, T, WORDS, PER)
    else:
        scale, zero = stored[2 if X.high else 1]
        offset = offset_of(X)
        if X.kind == "int2":  # whose planes have offsets of their own
            levels = ()
            for i in tl.static_range(PER):
                levels = levels + ((planes[i] - offset_of(X) * plane_offset(X, i)).to(tl.float16),)
            planes, offset = levels, 0.0
        inverse_norm = 1.0 / norm
        factor = (scale * (power_of(X) * inverse_norm)).to(tl.float16)
        if X.scale == "pair":
            start = zero * inverse_norm - offset * factor.to(tl.float32)
        else:
            start = factor.to(tl.float32) * -(offset + zero)
        factor = tl.broadcast_to(factor[:, None], [T, D])
        start = tl.broadcast_to(start.to(tl.float16)[:, None], [T, D])
        return tl.fma(_interleaved(planes, T, WORDS, PER), factor, start)


@triton.jit
def absorb(state, u, factor, v, ARCH: tl.constexpr):
    """Adds one tile to `state`: running maximum and normaliser, fp32 [R] each, and output, fp32 [R, DV]. Returns it.

    u   scores, fp32 [R, T], to base 2 once multiplied by `factor`, fp32 [R]         v   values [T, DV]
    """
    m, l, acc = state
    top = tl.maximum(m, tl.max(u, 1) * factor)
    shrink = exp2(m - top, ARCH)
    w = exp2(u * factor[:, None] - top[:, None], ARCH)
    l = l * shrink + tl.sum(w, 1)
    return top, l, tl.dot(w.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")


@triton.jit
def shows(mask, column, mask_stride, valid):
    """Whether `mask`, uint8 with columns `mask_stride` apart, shows the columns `column`, int [T], which are read where `valid`, bool [T]:
    bool [T].

    The maximum over one column keeps the compiler from loading in the layout of scores, where a thread has the addresses of 16 tokens."""
    shown = tl.load(mask + (column * mask_stride)[:, None], mask=valid[:, None], other=0).to(tl.int32)
    return tl.max(shown, 1) != 0


@triton.jit
def _region_tile(
    K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K_ONCE: tl.constexpr, V_ONCE: tl.constexpr, TAIL: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, ARCH: tl.constexpr,
    state, stored, queries, k_planes, k_norm, v_planes, v_norm, next_slot, valid, mask, mask_stride, column, hides,
):  # fmt: skip
    """Adds a tile, whose keys and values `stored` holds (`load_stored`), to `state` (`absorb`). Returns the
    new state and what is stored of the tokens `next_slot`, int [T]; with TAIL there are none.

    queries   as `_queries` returns them, the factor times the factor of the tile; k_planes: as in `load_stored`; k_norm: as in `dequantize`
    valid     bool [T], which tokens there are; column: int [T], columns of the mask, read with MASK if it `hides` any
    """
    q, factor, q_center = queries
    k = dequantize(K, D, stored[0], k_norm, ARCH)
    v = dequantize(V, DV, stored[1], v_norm, ARCH)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    # After the product: until then, the fence that hands tiles to it would wait for these loads.
    if not TAIL:
        stored = load_stored(K, K_ONCE, D, k_planes, next_slot, ARCH), load_stored(V, V_ONCE, DV, v_planes, next_slot, ARCH)
    if SOFTCAP is not None:
        s = capped(s * factor[:, None] + q_center[:, None], SOFTCAP, ARCH)
        factor = tl.full(factor.shape, 1.0, tl.float32)
    if TAIL:
        s = tl.where(valid[None, :], s, float("-inf"))
    if MASK and hides:
        s = tl.where(shows(mask, column, mask_stride, valid)[None, :], s, float("-inf"))
    return absorb(state, s, factor, v, ARCH), stored


@triton.jit
def _exact_tiles(
    D: tl.constexpr, DV: tl.constexpr, T: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, ARCH: tl.constexpr, RING: tl.constexpr,
    state, q, factor, keys, key_stride, values, value_stride, tokens, start, newest, mask, mask_stride, oldest_slot, count,
):  # fmt: skip
    """Adds tokens in the model's dtype to `state` (`absorb`) and returns it.

    q        [R, D] model dtype; `factor` of its scores, fp32 [R]
    keys     [tokens, D], a token `key_stride` elements from the next; values [tokens, DV]: value_stride
    start    column of the first token; newest: int [R], the last column that a query row sees
    RING     whether tokens are the `count` of a ring of `tokens` slots from `oldest_slot` on
    """
    t = tl.arange(0, T)
    d = tl.arange(0, D)
    e = tl.arange(0, DV)
    for begin in tl.range(0, tokens, T, num_stages=1):
        at = begin + t
        valid, column = exact_columns(at, tokens, start, oldest_slot, count, RING)
        k = tl.load(keys + at[:, None] * key_stride + d[None, :], mask=valid[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * factor[:, None]
        s = capped(s, SOFTCAP, ARCH)
        if MASK:
            valid = valid & shows(mask, column, mask_stride, valid)
        s = tl.where(valid[None, :] & (column[None, :] <= newest[:, None]), s, MASKED_SCORE)
        v = tl.load(values + at[:, None] * value_stride + e[None, :], mask=(at < tokens)[:, None], other=0.0)
        state = absorb(state, s, tl.full(factor.shape, 1.0, tl.float32), v, ARCH)
    return state


@triton.jit
def _queries(
    K: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr, query, q_rows, live, rotation, center, scaling
):  # fmt: skip
    """Query rows `q_rows`, int64 [R], as the product with tiles of keys needs them; those that are not `live`, bool [R], are 0.

    Returns [R, D], fp16, and for each row, fp32 [R]: the factor of its scores without that of the tile, and
    its product with `center`, the mean of keys, fp32 [D]."""
    R: tl.constexpr = q_rows.shape[0]
    d = tl.arange(0, D)
    x = tl.load(query + q_rows[:, None] + d[None, :], mask=live[:, None], other=0.0)
    if K.rotated:
        turn = tl.load(rotation + d[:, None] * D + d[None, :]).to(x.dtype)
        x = tl.dot(x, turn, input_precision="ieee")
    factor = tl.full([R], 1.0, tl.float32) * (scaling * TURN)
    q_center = tl.zeros([R], tl.float32)
    if K.centered:
        q_center = tl.sum(x.to(tl.float32) * tl.load(center + d)[None, :], 1) * factor
    largest = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 1), 1e-30)
    factor *= largest * (unit_of(K) / power_of(K))
    return _reordered(K, (x.to(tl.float32) / largest[:, None]).to(tl.float16)), factor, q_center


# What changes from step to step, or call to call, must not compile the kernel anew.
@triton.jit(
    do_not_specialize=[
        "scaling", "n_sinks", "n_quantized", "n_residual", "least", "heads", "queries", "table_b", "table_h", "rows_b", "lengths_b",
        "mask_b", "mask_t",
    ]
)  # fmt: skip
def attend_tiles_kernel(
    query, rotation, table, rows, lengths, chosen, k_planes, v_planes, exact, mask, part, tops,
    query_strides, table_b, table_h, rows_b, lengths_b, mean_strides, mask_b, mask_t, scaling, n_sinks, n_quantized, n_residual, least,
    heads, queries,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PAGES: tl.constexpr, G: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
    EXACT: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Causal attention of the last `queries` tokens, which are among the residual, over sinks, quantized
    tokens in pages that heads share and the residual (`paged_inputs.PagedInputs`), split over programs.

    Grid (B * H, blocks of R query rows, splits); with EXACT, split 0 has the exact tokens. Strides are in elements. Channels are
    contiguous. Query row `r` of a KV head is query `r % queries` of query head `h * G + r // queries`.

    query          [B, H * G, queries, D] model dtype: query_strides over rows, heads and queries
    rotation       fp16 [D, D], `tables.Tables.matrix`; read if keys are rotated
    table, rows, lengths, chosen, k_planes, v_planes, exact, part, tops, KEYS, VALUES, PAGES, SOFTCAP   as in `attend_kernel`; with `rows`,
                   rows begin with the first token of their pages, and the rings of row `b` are row `b` of the residual
    mask           uint8 (0: hidden) [B, columns], read if MASK: mask_b, mask_t
    scaling        factor of scores
    n_sinks, n_quantized, n_residual   tokens, the same for all rows; with `rows`: slots of sinks and of a ring, and a bound
    least          of a split, in tokens: a multiple of T
    """
    COUNTED: tl.constexpr = rows is not None
    K: tl.constexpr = KEYS.layout
    V: tl.constexpr = VALUES.layout
    D: tl.constexpr = KEYS.dim
    DV: tl.constexpr = VALUES.dim
    PAGE: tl.constexpr = PAGES[0]
    BASE: tl.constexpr = PAGES[1]
    K_ONCE: tl.constexpr = KEYS.once
    TURN: tl.constexpr = KEYS.turn
    V_ONCE: tl.constexpr = VALUES.once
    K_STRIDES: tl.constexpr = KEYS.strides
    V_STRIDES: tl.constexpr = VALUES.strides
    bh, split, splits = place_of_program(False)
    block = tl.program_id(1)
    b = (bh // heads).to(tl.int64)
    h = bh % heads

    r = block * R + tl.arange(0, R)
    live = r < G * queries
    row = tl.minimum(r, G * queries - 1)
    number = row % queries
    in_ring, stored, oldest_slot = n_residual, n_quantized, 0
    if COUNTED:
        rows += b * rows_b
        stored = tl.load(lengths + b * lengths_b)
        n_sinks = tl.load(rows + SINKS)
        oldest_slot = tl.load(rows + RING_START)
        in_ring = tl.load(rows + RING_TOKENS)
    length = stored
    blocks = chosen
    STEP: tl.constexpr = 0 if chosen is None else BLOCK
    if chosen is not None:
        length = tl.load(chosen[1] + bh)
        blocks = chosen[0] + (b * table_b + h * table_h)
    if MASK:
        mask += b * mask_b
    entry = ((bh * tl.num_programs(1) + block).to(tl.int64) * splits + split) * R
    out_row = tl.arange(0, R)
    out = part + entry * DV + out_row[:, None] * DV + tl.arange(0, DV)[None, :]
    q_rows = b * query_strides[0] + (h * G + row // queries) * query_strides[1] + number * query_strides[2]
    state = (tl.full([R], MASKED_SCORE, tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, DV], tl.float32))
    scaling *= LOG2E if SOFTCAP is None else 1.0

    if EXACT and split == 0:
        x_query = tl.load(query + q_rows[:, None] + tl.arange(0, D)[None, :], mask=live[:, None], other=0.0)
        x_factor = tl.full([R], 1.0, tl.float32) * scaling
        newest = n_sinks + stored + in_ring - queries + number
        state = _exact_tiles(
            D, DV, T, SOFTCAP, MASK, ARCH, False, state, x_query, x_factor,
            exact[0] + b * exact[4] + h * exact[5], exact[6],
            exact[1] + b * exact[7] + h * exact[8], exact[9],
            n_sinks, 0, newest, mask, mask_t, 0, 0,
        )  # fmt: skip
        m, l, acc = _exact_tiles(
            D, DV, T, SOFTCAP, MASK, ARCH, COUNTED, state, x_query, x_factor,
            exact[2] + b * exact[10] + h * exact[11], exact[12],
            exact[3] + b * exact[13] + h * exact[14], exact[15],
            n_residual, n_sinks + stored, newest, mask, mask_t, oldest_slot, in_ring,
        )  # fmt: skip
        tl.store(out, acc, mask=live[:, None])
    else:
        k_mean = k_planes[3] + b * mean_strides[0] + h * mean_strides[1]
        q, factor, q_center = _queries(K, D, TURN, query, q_rows, live, rotation, k_mean, scaling)
        # Through the output's memory: loaded operands lie in shared memory, computed ones would take registers.
        passing = (part + entry * DV).to(tl.pointer_type(q.dtype)) + out_row[:, None] * (2 * DV) + tl.arange(0, D)[None, :]
        tl.store(passing, q, mask=live[:, None])
        tl.debug_barrier()
        q = tl.load(passing)
        each = tokens_of_split(length, tl.maximum(splits - EXACT, 1), least, T)
        low = tl.multiple_of((split - EXACT) * each, T)
        high = tl.minimum(low + each, length)
        hides = STEP > 0
        if MASK and not STEP:
            hides = hides_any(mask, n_sinks + low, n_sinks + high, mask_t)
        t = tl.arange(0, T)
        unit = 1e-30  # of the output
        if low < high:
            table += b * table_b + h * table_h
            UNIT: tl.constexpr = STEP if STEP else PAGE
            k_head = head_of(K, K_ONCE, (k_planes[0], k_planes[1], k_planes[2]), K_STRIDES, b, h)
            v_head = head_of(V, V_ONCE, (v_planes[0], v_planes[1], v_planes[2]), V_STRIDES, b, h)
            k_norm = largest_scale(K, D, K_ONCE, k_head, K_STRIDES, table, blocks, low, high, PAGE, BASE, STEP)
            unit = tl.maximum(largest_scale(V, DV, V_ONCE, v_head, V_STRIDES, table, blocks, low, high, PAGE, BASE, STEP), unit)
            queries_here = q, tl.maximum(factor * k_norm, 1e-37), q_center  # no factor of 0: what is hidden stays hidden
            whole = low + (high - low) // T * T
            place = tl.minimum(low + t, high - 1)
            page = page_of_tile(table, low, high, place, UNIT, BASE)
            k_here, v_here = (
                page_of(K, D, K_ONCE, k_head, K_STRIDES, page, 0),
                page_of(V, DV, V_ONCE, v_head, V_STRIDES, page, 0),
            )
            here = token_of(blocks, place, STEP)
            tiles = (load_stored(K, K_ONCE, D, k_here, here % PAGE, ARCH), load_stored(V, V_ONCE, DV, v_here, here % PAGE, ARCH))
            for token in tl.range(low, whole, T, num_stages=1):
                place = tl.minimum(token + T + t, high - 1)
                page = page_of_tile(table, token + T, high, place, UNIT, BASE)
                k_here, v_here = (
                    page_of(K, D, K_ONCE, k_head, K_STRIDES, page, 0),
                    page_of(V, DV, V_ONCE, v_head, V_STRIDES, page, 0),
                )
                following = token_of(blocks, place, STEP)
                column = n_sinks + token + t
                if STEP:
                    column = n_sinks + here
                state, tiles = _region_tile(
                    K, V, D, DV, K_ONCE, V_ONCE, False, SOFTCAP, MASK, ARCH, state, tiles, queries_here, k_here, k_norm, v_here, unit,
                    following % PAGE, t >= 0, mask, mask_t, column, hides,
                )  # fmt: skip
                here = following
            if whole < high:
                here = token_of(blocks, tl.minimum(whole + t, high - 1), STEP)
                state, tiles = _region_tile(
                    K, V, D, DV, K_ONCE, V_ONCE, True, SOFTCAP, MASK, ARCH, state, tiles, queries_here, k_here, k_norm, v_here, unit,
                    here % PAGE, whole + t < high, mask, mask_t, n_sinks + here, hides,
                )  # fmt: skip
        m, l, acc = state
        if SOFTCAP is None:
            m += q_center
        tl.store(out, _plane_by_plane(V, acc * (unit * (unit_of(V) / power_of(V)))), mask=live[:, None])
    tl.store(tops + (entry + out_row) * 2, m, mask=live)
    tl.store(tops + (entry + out_row) * 2 + 1, l, mask=live)
