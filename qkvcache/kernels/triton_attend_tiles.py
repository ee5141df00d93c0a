"""Attention of many query rows over a layer whose tokens are quantized, in one pass over the codes, on tensor cores that want large tiles.

One program reads one split of the tokens of one (sequence, KV head) for a block of 64 or 128 query rows (queries times the query heads of
a group). Query rows are the rows of both products. A tile of tokens is dequantized once, to fp16 in shared memory, for all rows of the
block, scale and all: for so many rows that is cheaper than scaling scores and weights, as `triton_attend.py` does for few. So that fp16
holds whatever fp32 scales say, they are relative to the largest one of the split (`_norm`), which multiplies scores and outputs.

Splits of the quantized region, and the exact tokens as one more, leave partial outputs in the order of `triton_attend.py`, which
`triton_join.py` joins. All exponents are base 2.

A tile has its channels in the order in which assembly unpacks them (`_word_and_plane`). Queries are reordered likewise, and outputs stored
in the order that they have elsewhere.

Shapes of tiles: T tokens, R query rows. X, K and V are the `PackedLayout` of a codec."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_attend import HIDDEN, LOG2E, _capped, _hides, _tiles_of_split
from .triton_math import exp2
from .triton_scales import group_scales, scaled, token_scale
from .triton_unpack import offset_of, unit_of, unpack

LARGEST_ZERO = tl.constexpr(64.0)
"""How many times as large as the scales of a split its zeros may become."""


@triton.constexpr_function
def _power(layout):
    """Factor on relative scales: bytes of tables are subnormal fp16 numbers."""
    return 2.0**15 if layout.kind.startswith("lut") else 1.0


@triton.jit
def _word_and_plane(X: tl.constexpr, D: tl.constexpr):
    """The word of a token, and the plane of that word, that a tile holds in each channel, int [D] each.

    Of the eight words that a thread loads at once, the first four go to the first half of the tile, the others to the second: then threads
    that store to shared memory at a time do not share banks. Four words lie there as two times two words, plane by plane."""
    at = tl.arange(0, D)
    if X.per == 1:
        return at, at * 0
    else:
        in_half = at % (D // 2)
        four, two = in_half // (4 * X.per), in_half // (2 * X.per) % 2
        return four * 8 + at // (D // 2) * 4 + two * 2 + at % 2, at // 2 % X.per


@triton.jit
def _reordered(X: tl.constexpr, x):
    """Vectors `x`, [R, D], with their channels in the order of a tile."""
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    PER: tl.constexpr = X.per
    EIGHTS: tl.constexpr = D // PER // 8
    if PER == 1:
        return x
    elif X.group > 0:
        return tl.reshape(tl.permute(tl.reshape(x, [R, PER, EIGHTS, 2, 2, 2]), (0, 3, 2, 4, 1, 5)), [R, D])
    else:
        return tl.reshape(tl.permute(tl.reshape(x, [R, EIGHTS, 2, 2, 2, PER]), (0, 2, 1, 3, 5, 4)), [R, D])


@triton.jit
def _interleaved(planes, T: tl.constexpr, WORDS: tl.constexpr, PER: tl.constexpr):
    """A tuple of PER planes [T, WORDS] as one tile [T, WORDS * PER], its channels in the order of `_word_and_plane`."""
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
def _norm(X: tl.constexpr, ONCE: tl.constexpr, scales, low, high):
    """What the scales and zeros of the tokens `low` to `high` are divided by, fp32, at least 1e-30; 1 where fp16 holds them anyway."""
    if X.scale == "none" or X.group > 0:
        return 1.0
    else:
        i = tl.arange(0, 4096)
        most = tl.full([4096], 1e-30, tl.float32)
        for at in range(low, high, 4096):
            scale, zero = token_scale(X, ONCE, scales, tl.minimum(at + i, high - 1))
            if X.scale == "pair":
                scale = tl.maximum(scale, tl.abs(zero) / LARGEST_ZERO)
            most = tl.maximum(most, tl.where(scale < 1e30, scale, 0.0))  # a token that is not finite must not spoil the others
        return tl.max(most, 0)


@triton.jit
def _scales_of_plane(X: tl.constexpr, WORDS: tl.constexpr, by_group, i: tl.constexpr, T: tl.constexpr):
    """Scales of plane `i` of all words, fp16 [T, 1] or [T, WORDS], from those of each group."""
    GROUP: tl.constexpr = X.group
    FIRST: tl.constexpr = i * WORDS // GROUP
    if WORDS <= GROUP:
        return by_group[FIRST][:, None]
    else:
        tl.static_assert(WORDS == 2 * GROUP)
        low = (tl.arange(0, WORDS) < GROUP)[None, :]
        return tl.where(low, by_group[FIRST][:, None], by_group[FIRST + 1][:, None])


@triton.jit
def _stored(X: tl.constexpr, ONCE: tl.constexpr, D: tl.constexpr, codes, high, scales, slot, ARCH: tl.constexpr):
    """What is stored of the tokens `slot`, int [T], of one head, as `_tile` takes it: codes, two words as one int32 [T, words / 2] (`half`:
    the model's dtype [T, D]); then high bits, int16 [T, words]; then the scales of groups, or scale and zero of tokens.

    codes   words of 16 bits [slots, D / X.per]         high   [slots, half as many], read if X.high
    scales  as of `triton_scales.py`
    """
    WORDS: tl.constexpr = D // X.per
    if X.kind == "half":
        return (tl.load(codes + (slot[:, None] * WORDS + tl.arange(0, WORDS)[None, :])),)
    else:
        HALF: tl.constexpr = WORDS // 2
        stored = (tl.load(codes.to(tl.pointer_type(tl.int32)) + (slot[:, None] * HALF + tl.arange(0, HALF)[None, :])),)
        if X.high:
            stored = stored + (tl.load(high + (slot[:, None] * HALF + (tl.arange(0, WORDS) % HALF)[None, :])),)
        if X.group > 0:
            return stored + (group_scales(X, WORDS, scales, slot, ARCH),)
        else:
            return stored + (token_scale(X, ONCE, scales, slot),)


@triton.jit
def _tile(X: tl.constexpr, D: tl.constexpr, stored, norm, ARCH: tl.constexpr):
    """What `_stored` returned as numbers: fp16 [T, D] (the model's dtype for `half`), in units of `unit_of(X) * norm / _power(X)`, the
    channels in the order of `_word_and_plane`. `norm`: fp32, from `_norm`."""
    T: tl.constexpr = stored[0].shape[0]
    WORDS: tl.constexpr = D // X.per
    KIND: tl.constexpr = X.kind
    PER: tl.constexpr = X.per
    if KIND == "half":
        return stored[0]
    else:
        w = tl.reshape(tl.join(stored[0].to(tl.int16), (stored[0] >> 16).to(tl.int16)), [T, WORDS])
        if X.high:
            shift = tl.broadcast_to(tl.where(tl.arange(0, WORDS) >= WORDS // 2, -1, 0).to(tl.int16)[None, :], [T, WORDS])
            planes = unpack(KIND, w, stored[1], shift, ARCH)
        else:
            planes = unpack(KIND, w, w, w, ARCH)
        tiles = ()
        if X.group > 0:
            for i in tl.static_range(PER):
                tiles = tiles + (scaled(X, planes[i], _scales_of_plane(X, WORDS, stored[1 + X.high], i, T)),)
        else:
            scale, zero = stored[1 + X.high]
            inverse_norm = 1.0 / norm
            factor = (scale * (_power(X) * inverse_norm)).to(tl.float16)
            if X.scale == "pair":
                start = zero * inverse_norm - offset_of(X) * factor.to(tl.float32)
            else:
                start = factor.to(tl.float32) * -(offset_of(X) + zero)
            factor = tl.broadcast_to(factor[:, None], [T, WORDS])
            start = tl.broadcast_to(start.to(tl.float16)[:, None], [T, WORDS])
            for i in tl.static_range(PER):
                tiles = tiles + (tl.fma(planes[i], factor, start),)
        return _interleaved(tiles, T, WORDS, PER)


@triton.jit
def _absorb(state, u, factor, v, ARCH: tl.constexpr):
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
def _region_tile(
    K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K_ONCE: tl.constexpr, V_ONCE: tl.constexpr, TAIL: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, ARCH: tl.constexpr,
    state, stored, q, factor, q_center, k_codes, k_high, k_scales, k_norm, v_codes, v_high, v_scales, v_norm, next_slot, valid,
    mask, mask_stride, column, hides, softcap,
):  # fmt: skip
    """Adds a tile, of which `stored` holds keys and values (`_stored`), to `state` (`_absorb`). Returns the new state and what is stored of
    the tokens `next_slot`, int [T]; with TAIL there are none.

    q       [R, D] with `factor` and `q_center` from `_queries`
    valid   bool [T], read with TAIL; column: int [T], columns of the mask, read with MASK if it `hides` any
    """
    k = _tile(K, D, stored[0], k_norm, ARCH)
    v = _tile(V, DV, stored[1], v_norm, ARCH)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    # After the product: until then, the fence that hands tiles to it would wait for these loads.
    if not TAIL:
        stored = (
            _stored(K, K_ONCE, D, k_codes, k_high, k_scales, next_slot, ARCH),
            _stored(V, V_ONCE, DV, v_codes, v_high, v_scales, next_slot, ARCH),
        )
    if SOFTCAP:
        s = _capped(s * factor[:, None] + q_center[:, None], softcap, True, ARCH)
        factor = tl.full(factor.shape, 1.0, tl.float32)
    if TAIL:
        s = tl.where(valid[None, :], s, float("-inf"))
    if MASK and hides:
        s = tl.where((tl.load(mask + column * mask_stride) != 0)[None, :], s, float("-inf"))
    return _absorb(state, s, factor, v, ARCH), stored


@triton.jit
def _exact_tiles(
    D: tl.constexpr, DV: tl.constexpr, T: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, ARCH: tl.constexpr, RING: tl.constexpr,
    state, q, factor, keys, key_stride, values, value_stride, tokens, start, newest, mask, mask_stride, softcap, oldest_slot, count,
):  # fmt: skip
    """Adds tokens in the model's dtype to `state` (`_absorb`) and returns it.

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
        valid = at < tokens
        column = start + at
        if RING:
            turn = (at - oldest_slot + tokens) % tokens
            valid = valid & (turn < count)
            column = start + turn
        k = tl.load(keys + at[:, None] * key_stride + d[None, :], mask=valid[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * factor[:, None]
        s = _capped(s, softcap, SOFTCAP, ARCH)
        if MASK:
            shown = tl.load(mask + column * mask_stride, mask=valid, other=0)
            valid = valid & (shown != 0)
        s = tl.where(valid[None, :] & (column[None, :] <= newest[:, None]), s, HIDDEN)
        v = tl.load(values + at[:, None] * value_stride + e[None, :], mask=(at < tokens)[:, None], other=0.0)
        state = _absorb(state, s, tl.full(factor.shape, 1.0, tl.float32), v, ARCH)
    return state


@triton.jit
def _queries(
    K: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr, query, q_rows, live, rotation, center, scaling
):  # fmt: skip
    """Query rows `q_rows`, int64 [R], as the product with tiles of keys needs them; those that are not `live`, bool [R], are 0.

    Returns [R, D], fp16 (the model's dtype for `half`), and for each row, fp32 [R]: the factor of its scores without that of the tile, and
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
    if K.kind != "half":
        largest = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 1), 1e-30)
        factor *= largest * (unit_of(K) / _power(K))
        x = (x.to(tl.float32) / largest[:, None]).to(tl.float16)
    return _reordered(K, x), factor, q_center


# What changes from step to step, or call to call, must not compile the kernel anew.
@triton.jit(
    do_not_specialize=[
        "scaling", "softcap", "chunks", "n_sinks", "n_quantized", "n_residual", "split_tokens", "heads", "queries", "mask_stride_b",
        "mask_stride_t",
    ]
)  # fmt: skip
def attend_tiles_kernel(
    query, rotation, table, k_codes, k_high, k_scales, v_codes, v_high, v_scales,
    sinks_k, sinks_v, residual_k, residual_v, mask, k_center, part, maxima, sums, counts, q_stride_b, q_stride_h, q_stride_q,
    sinks_stride_b, sinks_stride_h, sinks_stride_t, sinks_v_stride_b, sinks_v_stride_h, sinks_v_stride_t,
    residual_stride_b, residual_stride_h, residual_stride_t, residual_v_stride_b, residual_v_stride_h, residual_v_stride_t,
    mask_stride_b, mask_stride_t, scaling, softcap, chunks, n_sinks, n_quantized, n_residual, split_tokens, heads, queries,
    K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, G: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
    K_SHARED: tl.constexpr, V_SHARED: tl.constexpr, K_ONCE: tl.constexpr, V_ONCE: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    ARCH: tl.constexpr, EXACT: tl.constexpr, TURN: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Causal attention of the last `queries` tokens, which are among the residual, over sinks, a quantized region and the residual
    (`segments.AttentionInputs`), split over programs.

    Grid (splits, blocks of R query rows, B * H); with EXACT, split 0 is that of the exact tokens. Strides are in elements. Channels are
    contiguous. Query row `r` of a KV head is query `r % queries` of query head `h * G + r // queries`.

    query          [B, H * G, queries, D] model dtype               q_stride_b, q_stride_h, q_stride_q
    rotation       fp16 [D, D], `tables.Tables.matrix`; read if K.rotated; TURN: factor of the rotation
    table          int64 [chunks, 8]: `QuantizedRegion.table`
    k_codes, v_codes     [B, H, slots, words] of the first chunk, words of 16 bits (`half`: the model's dtype), contiguous
    k_high, v_high       int16 [B, H, slots, words / 2] likewise; read if a layout has high bits
    k_scales, v_scales   [B, H, slots, scales of a token] likewise; [B, 1, ..] if K_SHARED or V_SHARED, [.., 1, ..] if K_ONCE or V_ONCE
    sinks_k, sinks_v     [B, H, n_sinks, D] and [.., DV] model dtype: sinks_stride_b, _h, _t and sinks_v_stride_b, _h, _t
    residual_k, residual_v   [B, H, n_residual, D] and [.., DV]: residual_stride_b, _h, _t and residual_v_stride_b, _h, _t
    mask           uint8 (0: hidden) [B, columns], read if MASK: mask_stride_b, mask_stride_t
    k_center       fp32 [B, H, D], contiguous; read if K.centered
    part           fp32 [B * H, blocks, splits, R, DV]; maxima, sums fp32 [B * H, blocks, splits, R]; contiguous
    counts         int32 [4 + 2 B], `Buffers.state`, read if COUNTED, the least of a split in tokens: then it counts tokens and chunks,
                   `n_sinks` and `n_residual` are slots, and `n_quantized`, `chunks` and `split_tokens` are not read
    scaling, softcap   factor and cap of scores                     chunks   chunks of the region
    n_sinks, n_quantized, n_residual   tokens, the same for all rows
    split_tokens   quantized tokens of a split, a multiple of T     heads    H
    """
    split = tl.program_id(0)
    block = tl.program_id(1)
    bh = tl.program_id(2)
    splits = tl.num_programs(0)
    b = bh // heads
    h = bh % heads

    r = block * R + tl.arange(0, R)
    live = r < G * queries
    row = tl.minimum(r, G * queries - 1)
    number = row % queries
    total = n_sinks + n_quantized + n_residual
    oldest_slot = 0
    in_ring = n_residual
    if COUNTED > 0:
        total = tl.load(counts + 4 + 2 * b)
        n_quantized = tl.load(counts + 5 + 2 * b)
        chunks = tl.load(counts + 3)
        n_sinks = tl.minimum(n_sinks, total)
        oldest_slot = n_quantized % n_residual
        in_ring = total - n_sinks - n_quantized
        split_tokens = _tiles_of_split(n_quantized, tl.maximum(splits - EXACT, 1), COUNTED, T)
    if MASK:
        mask += b * mask_stride_b
    panel = (bh * tl.num_programs(1) + block).to(tl.int64)
    out = part + (panel * splits + split) * (R * DV) + tl.arange(0, R)[:, None] * DV
    q_rows = b.to(tl.int64) * q_stride_b + (h * G + row // queries) * q_stride_h + number * q_stride_q
    state = (tl.full([R], HIDDEN, tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, DV], tl.float32))
    scaling *= 1.0 if SOFTCAP else LOG2E

    if EXACT and split == 0:
        d = tl.arange(0, D)
        x_query = tl.load(query + q_rows[:, None] + d[None, :], mask=live[:, None], other=0.0)
        x_factor = tl.full([R], 1.0, tl.float32) * scaling
        newest = total - queries + number
        state = _exact_tiles(
            D, DV, T, SOFTCAP, MASK, ARCH, False, state, x_query, x_factor,
            sinks_k + b.to(tl.int64) * sinks_stride_b + h * sinks_stride_h, sinks_stride_t,
            sinks_v + b.to(tl.int64) * sinks_v_stride_b + h * sinks_v_stride_h, sinks_v_stride_t,
            n_sinks, 0, newest, mask, mask_stride_t, softcap, oldest_slot, in_ring,
        )  # fmt: skip
        m, l, acc = _exact_tiles(
            D, DV, T, SOFTCAP, MASK, ARCH, COUNTED > 0, state, x_query, x_factor,
            residual_k + b.to(tl.int64) * residual_stride_b + h * residual_stride_h, residual_stride_t,
            residual_v + b.to(tl.int64) * residual_v_stride_b + h * residual_v_stride_h, residual_v_stride_t,
            n_residual, n_sinks + n_quantized, newest, mask, mask_stride_t, softcap, oldest_slot, in_ring,
        )  # fmt: skip
        tl.store(out + tl.arange(0, DV)[None, :], acc, mask=live[:, None])
    else:
        q, factor, q_center = _queries(K, D, TURN, query, q_rows, live, rotation, k_center + bh * D, scaling)
        # By way of the output's memory: what is loaded, products read from shared memory; what is computed would take registers.
        passing = (part + (panel * splits + split) * (R * DV)).to(tl.pointer_type(q.dtype))
        passing += tl.arange(0, R)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(passing, q)
        tl.debug_barrier()
        q = tl.load(passing)
        begin = tl.multiple_of((split - EXACT) * split_tokens, T)
        end = tl.minimum(begin + split_tokens, n_quantized)
        hides = _hides(mask, n_sinks + begin, n_sinks + end, mask_stride_t) if MASK else False
        t = tl.arange(0, T)
        plane = bh.to(tl.int64)
        kb = b.to(tl.int64) if K_SHARED else plane
        vb = b.to(tl.int64) if V_SHARED else plane
        KW: tl.constexpr = D // K.per
        VW: tl.constexpr = DV // V.per
        KG: tl.constexpr = D // K.group if K.group > 0 else (2 if K.scale == "pair" else 1)
        VG: tl.constexpr = DV // V.group if V.group > 0 else (2 if V.scale == "pair" else 1)
        unit = 1e-30  # that of the output
        for chunk in range(chunks):
            start = tl.load(table + chunk * 8).to(tl.int32)
            capacity = tl.multiple_of(tl.load(table + chunk * 8 + 1), 32)
            low = tl.maximum(begin, start) - start
            high = tl.minimum(end, start + capacity.to(tl.int32)) - start
            k_slots = 1 if K_ONCE else capacity
            v_slots = 1 if V_ONCE else capacity
            kc = k_codes + (tl.multiple_of(tl.load(table + chunk * 8 + 2), 16) + plane * capacity * KW)
            kh = k_high + (tl.multiple_of(tl.load(table + chunk * 8 + 3), 16) + plane * capacity * (KW // 2))
            ks = k_scales + (tl.multiple_of(tl.load(table + chunk * 8 + 4), 16) + kb * k_slots * KG)
            vc = v_codes + (tl.multiple_of(tl.load(table + chunk * 8 + 5), 16) + plane * capacity * VW)
            vh = v_high + (tl.multiple_of(tl.load(table + chunk * 8 + 6), 16) + plane * capacity * (VW // 2))
            vs = v_scales + (tl.multiple_of(tl.load(table + chunk * 8 + 7), 16) + vb * v_slots * VG)
            k_norm = _norm(K, K_ONCE, ks, low, high)
            v_norm = tl.maximum(_norm(V, V_ONCE, vs, low, high), unit)
            m, l, acc = state
            state = m, l, acc * (unit / v_norm)
            unit = v_norm
            k_factor = tl.maximum(factor * k_norm, 1e-37)  # what is hidden stays hidden
            whole = low + tl.maximum(high - low, 0) // T * T
            slot = tl.maximum(tl.minimum(low + t, high - 1), 0)
            stored = (_stored(K, K_ONCE, D, kc, kh, ks, slot, ARCH), _stored(V, V_ONCE, DV, vc, vh, vs, slot, ARCH))
            for token in tl.range(low, whole, T, num_stages=1):
                state, stored = _region_tile(
                    K, V, D, DV, K_ONCE, V_ONCE, False, SOFTCAP, MASK, ARCH, state, stored, q, k_factor, q_center,
                    kc, kh, ks, k_norm, vc, vh, vs, v_norm, tl.minimum(token + T + t, high - 1), t >= 0,
                    mask, mask_stride_t, n_sinks + start + token + t, hides, softcap,
                )  # fmt: skip
            if whole < high:
                slot = tl.minimum(whole + t, high - 1)
                state, stored = _region_tile(
                    K, V, D, DV, K_ONCE, V_ONCE, True, SOFTCAP, MASK, ARCH, state, stored, q, k_factor, q_center,
                    kc, kh, ks, k_norm, vc, vh, vs, v_norm, slot, whole + t < high, mask, mask_stride_t, n_sinks + start + slot, hides,
                    softcap,
                )  # fmt: skip
        m, l, acc = state
        if not SOFTCAP:
            m += q_center
        word, i = _word_and_plane(V, DV)
        acc *= unit * (unit_of(V) / _power(V))
        tl.store(out + (i * VW + word)[None, :], acc, mask=live[:, None])
    entry = (panel * splits + split) * R + tl.arange(0, R)
    tl.store(maxima + entry, m)
    tl.store(sums + entry, l)
