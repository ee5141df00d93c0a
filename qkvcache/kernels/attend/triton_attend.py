"""The fused attention kernels: a few queries over a layer whose tokens are quantized, in one pass over the codes.

One program is one warp: it reads one split of the tokens of one (sequence, KV head) for all query heads of
the group. Tokens are the rows of both matrix products (scores^T = K q^T, output^T = V^T p^T), so that a
tensor core serves eight query rows without waste, each code is unpacked once and in the registers where the
product wants it (`device/unpack.py`), and warps share nothing. Codes stream through cp.async. The scale of a
key multiplies its scores, and the product of the query with the mean of keys is added; the scale of a value
joins the exponent, so that the weights that multiply codes never exceed 1:

    u = s + log2(scale);  m = max u;  w = 2^(u - m);  output = sum w * number;  normaliser = sum w / scale

Splits of the quantized region, and the exact tokens as one more split, leave partial outputs, which
`triton_join.py` joins. All exponents are base 2.

Shapes of tiles: T tokens, R query rows, WIDE words of a token, `per` channels in a word. X, K and V are the `PackedLayout` of a codec."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import paged_inputs, pages
from ..device.math import MASKED_SCORE, exp2, inverse, log2
from ..device.scales import group_scales, scale_of_plane, scaled, token_scale
from ..device.unpack import offset_of, plane_offset, unit_of, unpack
from ..store.triton_dequantize import scales_of

LOG2E = tl.constexpr(1.4426950408889634)
BEGIN, SINK_ROW, RING_ROW, SINKS, RING_START, RING_TOKENS = (tl.constexpr(column) for column in paged_inputs.COLUMNS[:6])
BLOCK = tl.constexpr(pages.BLOCK)
EXACT_TILE = tl.constexpr(32)
"""Exact tokens of a tile. One program reads all of them, and with few other tokens all others wait for it."""


@triton.jit
def _channel(X: tl.constexpr, WORDS: tl.constexpr, word, i: tl.constexpr):
    """The channel that plane `i` holds of `word`, an int or int tensor of any shape; WORDS: words of a token."""
    PER: tl.constexpr = X.per
    if X.group > 0:
        return i * WORDS + word
    else:
        return word * PER + i


@triton.jit
def _words(
    plane, WORDS: tl.constexpr, WIDE: tl.constexpr, first: tl.constexpr, valid, AXIS: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    """Words `first` to `first + WIDE` of `plane`, [T, WORDS], for `_tile`."""
    T: tl.constexpr = valid.shape[0]
    at = tl.expand_dims(tl.arange(0, T), 1 - AXIS)
    w = tl.expand_dims(first + tl.arange(0, WIDE), AXIS)
    if TAIL:  # what lies beyond the end may be nan, and nan times a weight of 0 is nan
        return tl.load(plane + (at * WORDS + w), mask=(w < WORDS) & tl.expand_dims(valid, 1 - AXIS), other=0)
    elif WORDS == WIDE:
        # One range makes addresses of a base and constants; products and sums would be computed in each iteration.
        place = tl.reshape(tl.arange(0, T * WORDS), [T, WORDS])
        if AXIS == 0:
            place = tl.max_contiguous(tl.multiple_of(place, [1, WORDS]), [1, WORDS])
        else:
            place = tl.max_contiguous(tl.multiple_of(tl.trans(place), [WORDS, 1]), [WORDS, 1])
        return tl.load(plane + place)
    elif WORDS % WIDE == 0:
        return tl.load(plane + (at * WORDS + w))
    else:
        return tl.load(plane + (at * WORDS + w), mask=w < WORDS, other=0)


@triton.jit
def _widened(words, WIDE: tl.constexpr, AXIS: tl.constexpr):
    """Words of a tile, [T, N] with AXIS 0 and [N, T] with 1, repeated along N up to WIDE. The same register
    serves all repetitions, and is unpacked once."""
    N: tl.constexpr = words.shape[1 - AXIS]
    T: tl.constexpr = words.shape[AXIS]
    if N == WIDE:
        return words
    elif AXIS == 0:
        return tl.reshape(tl.broadcast_to(words[:, None, :], [T, WIDE // N, N]), [T, WIDE])
    else:
        return tl.reshape(tl.broadcast_to(words[None, :, :], [WIDE // N, N, T]), [WIDE, T])


@triton.jit
def _tile(
    X: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr, first: tl.constexpr, planes, valid, AXIS: tl.constexpr,
    TAIL: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Words `first` to `first + WIDE` of the first T tokens of `planes`, as a tuple of X.per planes, fp16
    (the model's dtype for `half`): [T, WIDE] with AXIS 0, as keys are multiplied, and [WIDE, T] with 1,
    loaded transposed, which costs ldmatrix nothing. Beyond the WORDS of a token are zeros, or its words
    again.

    `planes`: words of 16 bits [T, WORDS], of high bits [T, WORDS * X.high / 2], and shifts int16 [32, words]
    (`tables.py`). With TAIL, tokens that are not `valid`, bool [T], read as 0."""
    codes, high, shifts = planes
    KIND: tl.constexpr = X.kind
    READ: tl.constexpr = WORDS if X.group == 0 and WORDS < WIDE and WIDE % WORDS == 0 else WIDE
    low = _words(codes, WORDS, READ, first, valid, AXIS, TAIL)
    h, shift = low, low
    if X.high > 1:
        h = _words(high, WORDS, READ, first, valid, AXIS, TAIL)
    elif X.high == 1:
        HALF: tl.constexpr = WORDS // 2
        at = tl.expand_dims(tl.arange(0, valid.shape[0]), 1 - AXIS)
        w = tl.expand_dims(first + tl.arange(0, READ), AXIS)
        h = tl.load(high + (at * HALF + w % HALF))
        # By eight bytes, which come through L1: by sixteen they would not, and all programs would wait for the same lines of L2.
        shift = tl.load(shifts + tl.max_contiguous(at % 32 * WIDE + w, [1, 4] if AXIS == 0 else [4, 1]))
    return unpack(KIND, _widened(low, WIDE, AXIS), _widened(h, WIDE, AXIS), _widened(shift, WIDE, AXIS), ARCH)


@triton.jit
def capped(s, SOFTCAP: tl.constexpr, ARCH: tl.constexpr):
    """Scores `s`, fp32 of any shape, to base 2, after `SOFTCAP * tanh(s / SOFTCAP)`; with SOFTCAP None they are to base 2 already."""
    if SOFTCAP is not None:
        e = exp2(s * (2 * LOG2E / SOFTCAP), ARCH)
        return SOFTCAP * LOG2E * (1 - 2 * inverse(e + 1, ARCH))
    else:
        return s


@triton.jit
def masked(s, mask, mask_rows, mask_stride, column, hides, MASK: tl.constexpr):
    """Scores `s`, fp32 [T, R], under the caller's mask: "float" is additive, "bool" has a row for each query, "row" one for all.

    `mask_rows`: int [R], where the mask of a query row begins; `column`: int [T], the tokens' columns,
    `mask_stride` apart; `hides`: for "row", whether the mask hides any token of the split."""
    if MASK == "row":
        if hides:
            shown = tl.load(mask + column * mask_stride)
            s = tl.where((shown != 0)[:, None], s, MASKED_SCORE)
    elif MASK == "bool":
        shown = tl.load(mask + mask_rows[None, :] + (column * mask_stride)[:, None])
        s = tl.where(shown != 0, s, MASKED_SCORE)
    elif MASK == "float":
        s = s + tl.load(mask + mask_rows[None, :] + (column * mask_stride)[:, None]).to(tl.float32) * LOG2E
        s = tl.maximum(s, MASKED_SCORE)
    return s


@triton.jit
def hides_any(mask, begin, end, mask_stride):
    """Whether the mask, uint8 with columns `mask_stride` apart, hides any column from `begin` to `end`. It
    seldom does, and reading the mask in each tile would wait for memory."""
    i = tl.arange(0, 1024)
    shown = tl.full([1024], 1, tl.uint8)
    for at in range(begin, end, 1024):
        shown = shown & tl.load(mask + (at + i) * mask_stride, mask=at + i < end, other=1)
    return tl.min(shown.to(tl.int32), 0) == 0


@triton.jit
def key_scores(
    K: tl.constexpr, D: tl.constexpr, K_ONCE: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, ARCH: tl.constexpr,
    queries, k_planes, k_scales, valid, visible, hides, column,
):  # fmt: skip
    """The scores, fp32 [T, R] to base 2, of one tile of T quantized keys under the caller's mask. Arguments: see `_region_tile`."""
    q, q_scale, q_sum, q_center = queries
    mask, mask_rows, mask_stride, _ = visible
    KW: tl.constexpr = D // K.per
    KT: tl.constexpr = words_of_tile(K, D)
    KN: tl.constexpr = (KW + KT - 1) // KT
    KP: tl.constexpr = K.per
    slot = tl.arange(0, valid.shape[0])
    s = tl.zeros([valid.shape[0], q_scale.shape[0]], tl.float32)
    if K.group == 0 and K.scale != "hidden" and offset_of(K) != 0:
        s -= (offset_of(K) * q_sum)[None, :]
    if K.group > 0:
        k_by_group = group_scales(K, KW, k_scales, slot, ARCH)
    for c in tl.static_range(KN):
        planes = _tile(K, KW, KT, c * KT, k_planes, valid, 0, False, ARCH)
        for i in tl.static_range(KP):
            k = planes[i]
            if K.group > 0:
                k = scaled(K, k, scale_of_plane(K, KW, k_by_group, k_scales, slot, c * KT, i, 0))
            s = tl.dot(k, q[c * KP + i], s, input_precision="ieee")
    if K.group > 0 or K.scale == "none":
        s = s * q_scale[None, :]
    else:
        scale, zero = token_scale(K, K_ONCE, k_scales, slot)
        if K.scale == "hidden":
            s = (s - (zero[:, None] + offset_of(K)) * q_sum[None, :]) * scale[:, None]
        else:
            s = s * scale[:, None]
            if K.scale == "pair":
                s = s + zero[:, None] * q_sum[None, :]
        s = s * q_scale[None, :]
    if K.centered:
        s = s + q_center[None, :]
    s = capped(s, SOFTCAP, ARCH)
    s = masked(s, mask, mask_rows, mask_stride, column, hides, MASK)
    return s


@triton.jit
def _region_tile(
    K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K_ONCE: tl.constexpr, V_ONCE: tl.constexpr,
    TAIL: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, ARCH: tl.constexpr,
    state, queries, k_planes, k_scales, v_planes, v_scales, valid, visible, hides, column,
):  # fmt: skip
    """Adds one tile of T quantized tokens to `state`: running maximum fp32 [R], normaliser fp32 [T, R], what
    all channels of the output share fp32 [T, R], the sum of weights, negative, fp32 [16, R]
    (`_sums_weights`), and a tuple of the planes of the output, fp32 [VT, R] each. Returns the new state.

    queries  as `query_planes` returns them
    k_planes   as in `_tile`, from the tile's first token on; k_scales as in `device/scales.py`; K_ONCE: one scale
               serves all tokens; v_planes, v_scales, V_ONCE: the same of values
    valid    bool [T], read with TAIL; column: int [T], columns in the mask
    visible  as in `exact_tiles`; hides: as in `masked`
    """
    VW: tl.constexpr = DV // V.per
    VT: tl.constexpr = words_of_tile(V, DV)
    m, l, y, z, acc = state
    slot = tl.arange(0, l.shape[0])
    VN: tl.constexpr = (VW + VT - 1) // VT
    VP: tl.constexpr = V.per

    s = key_scores(K, D, K_ONCE, SOFTCAP, MASK, ARCH, queries, k_planes, k_scales, valid, visible, hides, column)

    PER_TOKEN: tl.constexpr = (V.group == 0) & (V.scale != "none")
    if PER_TOKEN:
        scale, zero = token_scale(V, V_ONCE, v_scales, slot)
        scale = tl.where(scale < 1e-27, 1e-27, scale)  # an all-zero vector has weight too
        if TAIL:
            scale = tl.where(valid, scale, 1.0)
            zero = tl.where(valid, zero, 0.0)
        s = s + log2(scale, ARCH)[:, None]
    if TAIL:
        s = tl.where(valid[:, None], s, MASKED_SCORE)

    top = tl.maximum(m, tl.max(s, 0))
    shrink = exp2(m - top, ARCH)
    w = exp2(s - top[None, :], ARCH)
    if TAIL:
        w = tl.where(valid[:, None], w, 0.0)
    p = w.to(tl.float16)
    if V.kind == "half":
        p = w.to(v_planes[0].dtype.element_ty)
    if PER_TOKEN:
        unscale = inverse(scale, ARCH)
        own = w * unscale[:, None]
        l = l * shrink[None, :] + own
        rounded = p.to(tl.float32)  # as they multiply numbers: what is taken away for an offset must be what the offset brought
        if V.scale == "hidden":
            y = y * shrink[None, :] - rounded * (zero + offset_of(V))[:, None]
        elif V.scale == "pair":
            start = zero * unscale
            start -= offset_of(V) * unit_of(V)
            y = y * shrink[None, :] + rounded * start[:, None]
        if _sums_weights(V):  # a product sums weights at no conversion
            z = tl.dot(tl.full([16, p.shape[0]], -1 / 16, tl.float16), p, z * shrink[None, :], input_precision="ieee")
    else:
        l = l * shrink[None, :] + w

    new = ()
    if V.group > 0:
        v_by_group = group_scales(V, VW, v_scales, slot, ARCH)
    for c in tl.static_range(VN):
        planes = _tile(V, VW, VT, c * VT, v_planes, valid, 1, TAIL, ARCH)
        for i in tl.static_range(VP):
            v = planes[i]
            if V.group > 0:
                scale = scale_of_plane(V, VW, v_by_group, v_scales, slot, c * VT, i, 1)
                if TAIL:
                    scale = tl.where(valid[None, :], scale, 0.0)
                v = scaled(V, v, scale)
            new = new + (tl.dot(v, p, acc[c * VP + i] * shrink[None, :], input_precision="ieee"),)
    return top, l, y, z, new


@triton.jit
def exact_columns(at, tokens, start, oldest_slot, count, RING: tl.constexpr):
    """Return whether the slots `at`, int [T], hold one of the exact tokens, bool [T], and their columns, int
    [T]. Arguments: see `exact_tiles`."""
    valid = at < tokens
    column = start + at
    if RING:
        turn = (at - oldest_slot + tokens) % tokens
        valid = valid & (turn < count)
        column = start + turn
    return valid, column


@triton.jit
def exact_tiles(
    D: tl.constexpr, DV: tl.constexpr, T: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, RING: tl.constexpr, ARCH: tl.constexpr,
    state, q, q_scale, keys, key_stride, values, value_stride, tokens, start, visible, oldest_slot, count,
):  # fmt: skip
    """Adds tokens in the model's dtype to `state`: running maximum and normaliser, fp32 [R] each, and output, fp32 [DVP, R]. Returns it.

    q        [DP, R] model dtype; `q_scale` fp32 [R]
    keys     [tokens, D], a token `key_stride` elements from the next; values [tokens, DV]: value_stride
    start    column of the first token
    visible  mask, `mask_rows` and `mask_stride` as in `masked`; newest, int [R], the last column that a query row sees, read if CAUSAL
    RING     whether tokens are the `count` of a ring of `tokens` slots from `oldest_slot` on
    """
    mask, mask_rows, mask_stride, newest = visible
    DP: tl.constexpr = max(triton.next_power_of_2(D), 16)
    DVP: tl.constexpr = max(triton.next_power_of_2(DV), 16)
    m, l, acc = state
    t = tl.arange(0, T)
    d = tl.arange(0, DP)
    e = tl.arange(0, DVP)
    for begin in tl.range(0, tokens, T, num_stages=1):
        at = begin + t
        valid, column = exact_columns(at, tokens, start, oldest_slot, count, RING)
        k = tl.load(keys + at[:, None] * key_stride + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
        s = tl.dot(k, q, input_precision="ieee") * q_scale[None, :]
        s = capped(s, SOFTCAP, ARCH)
        s = masked(s, mask, mask_rows, mask_stride, tl.where(valid, column, start), True, MASK)
        if CAUSAL:
            s = tl.where(column[:, None] <= newest[None, :], s, MASKED_SCORE)
        s = tl.where(valid[:, None], s, MASKED_SCORE)
        top = tl.maximum(m, tl.max(s, 0))
        shrink = exp2(m - top, ARCH)
        w = tl.where(valid[:, None], exp2(s - top[None, :], ARCH), 0.0)
        l = l * shrink + tl.sum(w, 0)
        v = tl.load(values + at[None, :] * value_stride + e[:, None], mask=valid[None, :] & (e < DV)[:, None], other=0.0)
        acc = tl.dot(v, w.to(v.dtype), acc * shrink[None, :], input_precision="ieee")
        m = top
    return m, l, acc


@triton.jit
def _butterflies(tiles, N: tl.constexpr, BIT: tl.constexpr):
    """One stage of the Hadamard transform across N tiles, a tuple of tensors of one shape: sums and
    differences of tiles whose numbers differ in the bit BIT."""
    new = ()
    for i in tl.static_range(N):
        if i & BIT:
            new = new + (tiles[i ^ BIT] - tiles[i],)
        else:
            new = new + (tiles[i] + tiles[i ^ BIT],)
    return new


@triton.jit
def query_planes(
    K: tl.constexpr, KW: tl.constexpr, KT: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr, ARCH: tl.constexpr,
    SOFTCAP: tl.constexpr, region_query, q_rows, live, rotation, center, scaling,
):  # fmt: skip
    """Query rows `q_rows`, int64 [R], of `region_query`, as the product with planes of keys needs them. Rows
    that are not `live`, bool [R], are 0.

    Returns planes, a tuple of [KT, R], fp16 (the model's dtype for `half`), and for each row, fp32 [R]: the factor of its scores, the sum
    of its channels, and its product with `center`, the mean of keys, fp32 [D]."""
    KP: tl.constexpr = K.per
    KN: tl.constexpr = (KW + KT - 1) // KT
    R: tl.constexpr = q_rows.shape[0]
    log2e = LOG2E if SOFTCAP is None else 1.0
    amax = tl.zeros([R], tl.float32)
    # The queries, in planes like the keys' and normalised by their largest channel, so that fp16 holds them; as rows, since the product
    # that turns them then leaves channels where the keys' product wants them: else every tile would shuffle them again.
    q = ()
    j = tl.arange(0, KT)
    for c in tl.static_range(KN):
        for i in tl.static_range(KP):
            channel = _channel(K, KW, c * KT + j, i)
            inside = (c * KT + j < KW)[None, :] & live[:, None]
            x = tl.load(region_query + q_rows[:, None] + channel[None, :], mask=inside, other=0.0)
            if K.rotated:
                x = x * tl.load(rotation[1] + channel, mask=c * KT + j < KW, other=0.0).to(x.dtype)[None, :]
                turn = tl.load(rotation[0] + j[:, None] * KT + j[None, :]).to(x.dtype)
                x = tl.dot(x, turn, input_precision="ieee")  # which is symmetric
            q = q + (x,)
    if K.rotated:
        KNP: tl.constexpr = KN * KP
        q = _butterflies(q, KNP, 1)
        q = _butterflies(q, KNP, 2)
        if KP > 4:
            q = _butterflies(q, KNP, 4)
        if K.group > 0:  # in which case there are four planes
            if KN > 1:
                q = _butterflies(q, KNP, 4)
            if KN > 2:
                q = _butterflies(q, KNP, 8)
    q_center = tl.zeros([R], tl.float32)
    if K.centered:  # the mean is rotated like the keys
        for c in tl.static_range(KN):
            for i in tl.static_range(KP):
                channel = _channel(K, KW, c * KT + j, i)
                mean = tl.load(center + channel, mask=c * KT + j < KW, other=0.0)
                q_center += tl.sum(q[c * KP + i].to(tl.float32) * mean[None, :], 1)
        q_center *= scaling * TURN * log2e
    if K.kind != "half":
        for i in tl.static_range(KN * KP):
            amax = tl.maximum(amax, tl.max(tl.abs(q[i].to(tl.float32)), 1))
    q_sum = tl.zeros([R], tl.float32)
    if K.kind == "half":
        q_scale = tl.full([R], 1.0, tl.float32) * scaling * log2e
    else:
        normal = 1.0 / tl.where(amax < 1e-30, 1e-30, amax)
        q_scale = amax * (scaling * unit_of(K) * TURN) * log2e
        tiles = ()
        for i in tl.static_range(KN * KP):
            x = (q[i].to(tl.float32) * normal[:, None]).to(tl.float16)
            q_sum += tl.sum(x.to(tl.float32), 1) * plane_offset(K, i % KP)
            tiles = tiles + (x,)
        q = tiles
    tiles = ()
    for i in tl.static_range(KN * KP):
        tiles = tiles + (tl.trans(q[i]),)
    q = tiles
    return q, q_scale, q_sum, q_center


@triton.constexpr_function
def words_of_tile(layout, head_dim):
    """Words of a token in one tile: all of them, padded to a power of two, or 16 where scales are by group."""
    return 16 if layout.group > 0 else max(triton.next_power_of_2(head_dim // layout.per), 16)


@triton.constexpr_function
def _sums_weights(layout):
    """Whether the offset is taken from the output at the end: it is the same for all tokens."""
    return offset_of(layout) != 0 and layout.scale in ("fp16", "fp32")


@triton.jit
def _empty_state(m, V: tl.constexpr, VW: tl.constexpr, VT: tl.constexpr, T: tl.constexpr):
    """The state of `_region_tile` before the first tile, `m` fp32 [R] being the running maximum."""
    R: tl.constexpr = m.shape[0]
    TILES: tl.constexpr = (VW + VT - 1) // VT * V.per
    acc = ()
    for i in tl.static_range(TILES):
        acc = acc + (tl.zeros([VT, R], tl.float32),)
    return m, tl.zeros([T, R], tl.float32), tl.zeros([T, R], tl.float32), tl.zeros([16, R], tl.float32), acc


@triton.jit
def _store_region(out, at, state, live, V: tl.constexpr, DV: tl.constexpr, VW: tl.constexpr, VT: tl.constexpr):
    """Stores the output of a split into the rows `at`, int [R], of `out`, fp32 [.., DV], if they are `live`, bool [R], plane after plane:
    `reduce_kernel` puts channels in order. Returns the maximum and the normaliser, fp32 [R] each."""
    m, l, y, z, acc = state
    VP: tl.constexpr = V.per
    VN: tl.constexpr = (VW + VT - 1) // VT
    y = tl.sum(y, 0)
    z = tl.sum(z, 0) * (offset_of(V) * unit_of(V))
    for c in tl.static_range(VN):
        word = c * VT + tl.arange(0, VT)
        for i in tl.static_range(VP):
            place = at[None, :] * DV + i * VW + word[:, None]
            constant = y + z * plane_offset(V, i) if _sums_weights(V) else y
            tl.store(out + place, acc[c * VP + i] * unit_of(V) + constant[None, :], mask=(word < VW)[:, None] & live[None, :])
    return m, tl.sum(l, 0)


@triton.jit
def place_of_program(LAST: tl.constexpr):
    """The number of a program among those of its split, its split, and how many splits there are.

    With LAST, split 0, of the exact tokens, runs after all others: its programs are brief, and fill the
    places of the GPU that would wait for the longest ones. Else the splits of a row follow one another: where
    memory is the bound, brief programs that wait for their loads run beside others."""
    splits = tl.num_programs(2)
    if LAST:
        return tl.program_id(0), (tl.program_id(2) + 1) % splits, splits
    else:
        number = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        return number // splits, number % splits, splits


@triton.jit
def tokens_of_split(span, many, least, T: tl.constexpr):
    """Tokens of each of `many` splits of `span` tokens: whole tiles of T tokens, and no fewer than `least`."""
    return tl.maximum(tl.cdiv(tl.cdiv(span, many), T) * T, least)


@triton.jit
def page_of(X: tl.constexpr, D: tl.constexpr, ONCE: tl.constexpr, planes, strides: tl.constexpr, page, slot):
    """Pointers to the codes, high bits and scales of one head at `slot` of a page, a multiple of 16, from
    `planes`, those of the head in the first page: what is left of an address is the same in all tiles.
    `page`: int64, entries from the first page's; strides over entries, and over heads, of each plane; ONCE:
    one scale serves all tokens."""
    codes, high, scales = planes
    codes += tl.multiple_of(page * strides[0] + slot * (D // X.per), 16)
    if X.high:
        high += tl.multiple_of(page * strides[2] + slot * (D * X.high // 16), 16)
    if X.scale != "none" and not ONCE:
        scales += tl.multiple_of(page * strides[4] + slot * scales_of(X, D), 16)
    return codes, high, scales


@triton.jit
def head_of(X: tl.constexpr, ONCE: tl.constexpr, planes, strides: tl.constexpr, b, h):
    """Pointers to the codes, high bits and scales of head `h` in the first page; with ONCE, scales of row
    `b`. Arguments as in `page_of`."""
    codes, high, scales = planes
    codes += tl.multiple_of(h * strides[1], 16)
    if X.high:
        high += tl.multiple_of(h * strides[3], 16)
    if X.scale != "none":
        scales += h * strides[5]
        if ONCE:
            scales += b * strides[4]
    return codes, high, scales


@triton.jit
def entry_of(table, token, live, PAGE: tl.constexpr, BASE: tl.constexpr):
    """The entry of the page of `token` in `table`, an int64 less BASE; read if `live`."""
    return tl.load(table + token // PAGE, mask=live, other=BASE).to(tl.int64) - BASE


@triton.jit
def place_of(table, chosen, at, live, PAGE: tl.constexpr, BASE: tl.constexpr):
    """The entry of the page of the tile that begins with the token `at` among those that are read, as in `entry_of`, and the tile's first
    token among those that are stored. `chosen`: the blocks of BLOCK tokens that are read, and `table` has an entry for each of them; None:
    all tokens are read."""
    if chosen is None:
        return entry_of(table, at, live, PAGE, BASE), at
    else:
        token = at + (tl.load(chosen + at // BLOCK, mask=live, other=0) - at // BLOCK) * BLOCK
        return entry_of(table, at, live, BLOCK, BASE), tl.multiple_of(token, 16)


# What changes from step to step, or call to call, must not compile the kernel anew: these are no tuples, whose numbers Triton specializes.
@triton.jit(
    do_not_specialize=[
        "scaling", "n_sinks", "n_quantized", "n_residual", "least", "heads", "queries", "skip", "table_b", "table_h", "rows_b", "lengths_b",
        "lengths_h", "mask_b", "mask_h", "mask_q", "mask_t",
    ]
)  # fmt: skip
def attend_kernel(
    query, region_query, rotation, table, rows, lengths, items, chosen, k_planes, v_planes, exact, mask, part, tops,
    query_strides, table_b, table_h, rows_b, lengths_b, lengths_h, mean_strides, mask_b, mask_h, mask_q, mask_t,
    scaling, n_sinks, n_quantized, n_residual, least, heads, queries, skip,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PAGES: tl.constexpr, G: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
    EXACT: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, ARCH: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    """Attention of `queries` queries over sinks, quantized tokens in pages, and a residual (`PagedInputs`), split over programs.

    Grid (B * H, blocks of R query rows, splits); with EXACT, split 0 has the exact tokens. With ITEMS, the
    splits of all rows are those of the items, and the grid is (H, blocks, N), as if N were the splits of one
    row. Strides are in elements, words of 16 bits for packed codes. Channels are contiguous. Query row `r` of
    a KV head is query `r % queries` of query head `h * G + r // queries`; of an item for M rows, it is the
    query of head `h * G + r // M` of the row `r % M` of the item.

    query          [B, H * G, queries, D] model dtype: query_strides over rows, heads and queries
    region_query   the same; or fp32 and rotated beforehand, with the strides of `query`
    rotation       fp16 [KT, KT] and signs fp32 [D]: `tables.Tables`; read if keys are rotated
    table          int32 or int64 [B, P] or [B, H, P], entries of pages: table_b, table_h (0: all heads share)
    rows           int32 [B, 8], `paged_inputs.COLUMNS`: rows_b; None: rows are alike
    lengths        int32 [B] or [B, H], tokens in the pages: lengths_b, lengths_h (0: all heads share); read with `rows`
    items          int32 [N, ITEMS], `work.Splits.items` or `work.Splits.shared`; ITEMS 0: each row has as many splits
    chosen         `Pages.chosen`: blocks int32 [B, H, P] with the strides of `table`, which has their entries, and lengths int32 [B * H];
                   None: all tokens are read
    k_planes       of the first page: codes [entries, H', PAGE, words], words of 16 bits (`half`: the model's dtype), high bits int16
                   [entries, H', PAGE, words / 2], scales [entries, H', PAGE, scales of a token], or [B, H'] if one serves all tokens; the
                   last two dimensions contiguous; mean fp32 [B, H, D]; shifts int16 [32, words] of high bits. What a codec has not is not
                   read. mean_strides   over rows and heads of the mean of keys
    v_planes       the same of values
    exact          sinks [E, H, S, D] and [.., DV], residual [F, H, .., D] and [.., DV]: keys, values, keys, values; E and F are B unless
                   there are `rows`; then for each of the four its strides over rows, heads and tokens
    mask           uint8 (0: hidden) or additive, [B, H * G, queries, columns]: mask_b, mask_h, mask_q, mask_t; MASK as in `masked`
    part, tops     outputs fp32 [panels, splits, R, DV], and for each of their rows its maximum and its normaliser, fp32 [.., 2]; a panel is
                   a block of query rows of a (row, KV head), or with ITEMS of a KV head
    scaling        factor of scores                                SOFTCAP  their cap; None: none
    n_sinks, n_quantized, n_residual   tokens, the same for all rows; with `rows`, slots of sinks and of a ring, and a bound on quantized
                   tokens
    least          of a split, in tokens: a multiple of T
    skip           tokens at the beginning of pages that another launch reads, a multiple of T; not with ITEMS
    KEYS, VALUES   `tables.Side`                                   PAGES    tokens of a page, and the entry of the first page
    CAUSAL         whether the last `queries` tokens are the queries' own
    """
    COUNTED: tl.constexpr = rows is not None
    K: tl.constexpr = KEYS.layout
    V: tl.constexpr = VALUES.layout
    D: tl.constexpr = KEYS.dim
    K_ONCE: tl.constexpr = KEYS.once
    V_ONCE: tl.constexpr = VALUES.once
    K_STRIDES: tl.constexpr = KEYS.strides
    V_STRIDES: tl.constexpr = VALUES.strides
    TURN: tl.constexpr = KEYS.turn
    DV: tl.constexpr = VALUES.dim
    PAGE: tl.constexpr = PAGES[0]
    BASE: tl.constexpr = PAGES[1]
    bh, split, splits = place_of_program(EXACT and not ITEMS and KEYS.layout.kind != "half")
    block = tl.program_id(1)
    panel = (bh * tl.num_programs(1) + block).to(tl.int64)
    b = (bh // heads).to(tl.int64)
    h = bh % heads
    is_exact = EXACT and split == 0
    r = block * R + tl.arange(0, R)
    live = r < G * queries
    row = tl.minimum(r, G * queries - 1)
    head = h * G + row // queries
    number = row % queries
    if ITEMS:
        item = items + split * ITEMS
        b = tl.load(item).to(tl.int64)
        first = tl.load(item + 1)
        low = tl.multiple_of(tl.maximum(first, 0), T)
        high = tl.load(item + 2)
        is_exact = EXACT and first < 0  # without exact tokens, this item reads nothing
    of = b
    if ITEMS > 3:  # queries of the rows that share the tokens; a row that is missing repeats the first
        mate = r % (ITEMS - 3)
        of = tl.load(item + 3 + mate).to(tl.int64)
        head = h * G + tl.minimum(r // (ITEMS - 3), G - 1)
        live = (low < high) & (r < (ITEMS - 3) * G) & ((mate == 0) | (of != b))
    first_token, row_sinks, in_ring, length = 0, n_sinks, n_residual, n_quantized
    if COUNTED:
        rows += b * rows_b
        first_token = tl.load(rows + BEGIN)
        row_sinks = tl.load(rows + SINKS)
        in_ring = tl.load(rows + RING_TOKENS)
        length = tl.load(lengths + b * lengths_b + h * lengths_h)
    shift = row_sinks - first_token  # from places among the quantized tokens to columns
    total = tl.maximum(length, first_token) + shift + in_ring
    blocks = chosen
    if chosen is not None:  # from here on, places are those among the tokens that are read
        length = tl.load(chosen[1] + bh)
        blocks = chosen[0] + (b * table_b + h * table_h)
        first = tl.load(blocks, mask=length > 0, other=0)
        first_token = tl.where(first == first_token // BLOCK, first_token - first_token // BLOCK * BLOCK, 0)
    if MASK == "row":
        mask += b * mask_b
    visible = mask, b * mask_b + head * mask_h + number * mask_q, mask_t, total - queries + number
    if not ITEMS:  # the first tile begins at a multiple of T, so that no tile crosses a page
        origin = tl.maximum(first_token // T * T, skip)
        each = tokens_of_split(tl.maximum(length - origin, 0), tl.maximum(splits - EXACT, 1), least, T)
        low = tl.multiple_of(origin + (split - EXACT) * each, T)
        high = tl.minimum(low + each, length)
    entry = (panel * splits + split) * R
    out = part + entry * DV
    out_row = tl.arange(0, R)
    m = tl.full([R], MASKED_SCORE, tl.float32)
    l = tl.zeros([R], tl.float32)
    q_rows = of * query_strides[0] + head * query_strides[1] + number * query_strides[2]

    if is_exact:
        DP: tl.constexpr = max(triton.next_power_of_2(D), 16)
        DVP: tl.constexpr = max(triton.next_power_of_2(DV), 16)
        d = tl.arange(0, DP)
        x_query = tl.load(query + q_rows[None, :] + d[:, None], mask=(d < D)[:, None] & live[None, :], other=0.0)
        x_scale = tl.full([R], 1.0, tl.float32) * scaling * (LOG2E if SOFTCAP is None else 1.0)
        sink_row, ring_row, oldest_slot = b, b, 0
        if COUNTED:
            sink_row = tl.load(rows + SINK_ROW).to(tl.int64)
            ring_row = tl.load(rows + RING_ROW).to(tl.int64)
            oldest_slot = tl.load(rows + RING_START)
        state = exact_tiles(
            D, DV, EXACT_TILE, SOFTCAP, MASK, CAUSAL, False, ARCH,
            (m, l, tl.zeros([DVP, R], tl.float32)), x_query, x_scale,
            exact[0] + sink_row * exact[4] + h * exact[5], exact[6],
            exact[1] + sink_row * exact[7] + h * exact[8], exact[9],
            row_sinks, 0, visible, 0, 0,
        )  # fmt: skip
        m, l, x_out = exact_tiles(
            D, DV, EXACT_TILE, SOFTCAP, MASK, CAUSAL, COUNTED, ARCH, state, x_query, x_scale,
            exact[2] + ring_row * exact[10] + h * exact[11], exact[12],
            exact[3] + ring_row * exact[13] + h * exact[14], exact[15],
            n_residual, total - in_ring, visible, oldest_slot, in_ring,
        )  # fmt: skip
        e = tl.arange(0, DVP)
        tl.store(out + out_row[None, :] * DV + e[:, None], x_out, mask=(e < DV)[:, None] & live[None, :])
    elif low < high:
        KW: tl.constexpr = D // K.per
        VW: tl.constexpr = DV // V.per
        KT: tl.constexpr = words_of_tile(K, D)
        VT: tl.constexpr = words_of_tile(V, DV)
        k_mean, k_shifts, v_shifts = k_planes[3], k_planes[4], v_planes[4]
        if K.centered:
            k_mean += b * mean_strides[0] + h * mean_strides[1]
        t = tl.arange(0, T)
        table += b * table_b + h * table_h
        whole_low = tl.multiple_of(tl.cdiv(tl.maximum(low, first_token), T) * T, T)
        whole_high = tl.multiple_of(high // T * T, T)
        # The page of a tile is looked up one tile ahead: what loads codes must not wait for another load of its own tile.
        page, following = place_of(table, blocks, whole_low, whole_low < whole_high, PAGE, BASE)
        q = query_planes(K, KW, KT, D, TURN, ARCH, SOFTCAP, region_query, q_rows, live, rotation, k_mean, scaling)
        state = _empty_state(m, V, VW, VT, T)
        hides = chosen is not None
        if MASK == "row" and chosen is None:
            hides = hides_any(mask, shift + tl.maximum(low, first_token), shift + high, mask_t)
        k_head = head_of(K, K_ONCE, (k_planes[0], k_planes[1], k_planes[2]), K_STRIDES, b, h)
        v_head = head_of(V, V_ONCE, (v_planes[0], v_planes[1], v_planes[2]), V_STRIDES, b, h)
        for at in range(whole_low, whole_high, T):
            token = at
            if chosen is not None:
                token = following
            k_codes, k_high, k_scales = page_of(K, D, K_ONCE, k_head, K_STRIDES, page, token % PAGE)
            v_codes, v_high, v_scales = page_of(V, DV, V_ONCE, v_head, V_STRIDES, page, token % PAGE)
            page, following = place_of(table, blocks, at + T, at + T < whole_high, PAGE, BASE)
            same = tl.multiple_of(at % 32, 32)  # 0: else shifts would leave the loop, and be moved between threads in each iteration
            state = _region_tile(
                K, V, D, DV, K_ONCE, V_ONCE, False, SOFTCAP, MASK, ARCH, state, q, (k_codes, k_high, k_shifts + same),
                k_scales, (v_codes, v_high, v_shifts + same), v_scales, t >= 0, visible, hides, shift + token + t,
            )  # fmt: skip
        for edge in tl.range(0, 2, num_stages=1):  # the tile before them, of which the first tokens do not count, and the one behind
            at = tl.where(edge == 0, whole_low - T, whole_high)
            if (edge == 0 and whole_low > low) or (edge == 1 and whole_high < high and whole_high >= whole_low):
                page, token = place_of(table, blocks, at, True, PAGE, BASE)
                k_codes, k_high, k_scales = page_of(K, D, K_ONCE, k_head, K_STRIDES, page, token % PAGE)
                v_codes, v_high, v_scales = page_of(V, DV, V_ONCE, v_head, V_STRIDES, page, token % PAGE)
                place = at + t
                state = _region_tile(
                    K, V, D, DV, K_ONCE, V_ONCE, True, SOFTCAP, MASK, ARCH, state, q, (k_codes, k_high, k_shifts),
                    k_scales, (v_codes, v_high, v_shifts), v_scales, (place >= first_token) & (place < high), visible, hides,
                    shift + token - at + tl.minimum(tl.maximum(place, first_token), high - 1),
                )  # fmt: skip
        m, l = _store_region(out, out_row, state, live, V, DV, VW, VT)
    tl.store(tops + (entry + out_row) * 2, m, mask=live)
    tl.store(tops + (entry + out_row) * 2 + 1, l, mask=live)
