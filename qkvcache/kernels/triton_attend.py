"""The fused attention kernel: a few queries over a layer whose body is packed, in one pass over the codes.

One program is one warp: it takes one split of the tokens of one (sequence, KV head) for all query heads of the group. Tokens are the rows
of both matrix products (scores^T = K q^T, output^T = V^T p^T), so that a tensor core serves eight query rows without waste, each code is
unpacked once and in the registers where the product wants it (`triton_unpack.py`), and warps share nothing. Codes stream through cp.async.
A key's scale multiplies its scores, and what the mean of keys gives is added; a value's scale joins the exponent, so that the weights that
multiply codes never exceed 1:

    u = s + log2(scale);  m = max u;  w = 2^(u - m);  output = sum w * number;  normaliser = sum w / scale

Splits of the body, and the exact tokens as one more split, leave partial sums, which `triton_join.py` adds up. With MASS, weights go to
scratch, for `triton_mass.py`. All exponents are base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_mass import BODY_GRAIN, EXACT_GRAIN, keep
from .triton_math import exp2, inverse, log2
from .triton_scales import group_scales, scale_of_plane, scaled, token_scale
from .triton_unpack import unpack

HIDDEN = tl.constexpr(-1e30)  # finite: a row that sees nothing must come out as numbers
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _channel(X: tl.constexpr, WORDS: tl.constexpr, word, i: tl.constexpr):
    """Which channel plane `i` of a word holds."""
    PER: tl.constexpr = X.per
    if X.group > 0:
        return i * WORDS + word
    else:
        return word * PER + i


@triton.jit
def _tile_of_keys(
    X: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr, first: tl.constexpr, codes, high, shifts, slot, ARCH: tl.constexpr
):
    """Planes `[T, WIDE]` of words from `first` on."""
    KIND: tl.constexpr = X.kind
    j = tl.arange(0, WIDE)
    word = first + j
    at = slot[:, None] * WORDS + word[None, :]
    if X.halved:
        w = tl.load(codes + (slot[:, None] * (WORDS // 2) + (word % (WORDS // 2))[None, :]))
    elif WORDS % WIDE == 0:
        w = tl.load(codes + at)
    else:
        w = tl.load(codes + at, mask=word[None, :] < WORDS, other=0)
    if X.high:
        HALF: tl.constexpr = WORDS // 2
        at = slot[:, None] * (WORDS if X.signed else HALF) + (word % HALF)[None, :]
        h = tl.load(high + at)
        signs = tl.load(high + HALF + at) if X.signed else h
        # By eight bytes, which come through L1: by sixteen they would not, and all programs would wait for the same lines of L2.
        shift = tl.load(shifts + tl.max_contiguous((slot % 32)[:, None] * WIDE + word[None, :], [1, 4]))
        return unpack(KIND, w, h, shift, signs, ARCH)
    else:
        return unpack(KIND, w, w, w, w, ARCH)


@triton.jit
def _tile_of_values(
    X: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr, first: tl.constexpr, codes, high, shifts, slot, valid,
    TAIL: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Planes `[WIDE, T]`: loaded transposed, which costs ldmatrix nothing."""
    KIND: tl.constexpr = X.kind
    j = tl.arange(0, WIDE)
    word = first + j
    at = slot[None, :] * WORDS + word[:, None]
    if X.halved:  # no code is nan, whatever it is
        w = tl.load(codes + (slot[None, :] * (WORDS // 2) + (word % (WORDS // 2))[:, None]))
    elif TAIL:  # what lies beyond the end may be nan, and nan times a weight of 0 is nan
        w = tl.load(codes + at, mask=(word[:, None] < WORDS) & valid[None, :], other=0)
    elif WORDS % WIDE == 0:
        w = tl.load(codes + at)
    else:
        w = tl.load(codes + at, mask=word[:, None] < WORDS, other=0)
    if X.high:
        HALF: tl.constexpr = WORDS // 2
        at = slot[None, :] * (WORDS if X.signed else HALF) + (word % HALF)[:, None]
        h = tl.load(high + at)
        signs = tl.load(high + HALF + at) if X.signed else h
        shift = tl.load(shifts + tl.max_contiguous((slot % 32)[None, :] * WIDE + word[:, None], [4, 1]))
        return unpack(KIND, w, h, shift, signs, ARCH)
    else:
        return unpack(KIND, w, w, w, w, ARCH)


@triton.jit
def _capped(s, softcap, SOFTCAP: tl.constexpr, ARCH: tl.constexpr):
    """Scores to base 2, after `softcap * tanh(s / softcap)`."""
    if SOFTCAP:
        e = exp2(s * (2 * LOG2E / softcap), ARCH)
        return softcap * LOG2E * (1 - 2 * inverse(e + 1, ARCH))
    else:
        return s


@triton.jit
def _masked(s, mask, mask_rows, mask_stride, column, hides, MASK: tl.constexpr):
    """Scores `[T, R]` under the caller's mask: additive, bool, or bool and the same for all rows; of that `hides` says whether to look."""
    if MASK == "row":
        if hides:
            shown = tl.load(mask + column * mask_stride)
            s = tl.where((shown != 0)[:, None], s, HIDDEN)
    elif MASK == "bool":
        shown = tl.load(mask + mask_rows[None, :] + (column * mask_stride)[:, None])
        s = tl.where(shown != 0, s, HIDDEN)
    elif MASK == "float":
        s = s + tl.load(mask + mask_rows[None, :] + (column * mask_stride)[:, None]).to(tl.float32) * LOG2E
        s = tl.maximum(s, HIDDEN)
    return s


@triton.jit
def _hides(mask, begin, end, mask_stride):
    """Whether the mask hides a column from `begin` to `end`: seldom, and a look at each tile's part would wait for memory."""
    i = tl.arange(0, 1024)
    shown = tl.full([1024], 1, tl.uint8)
    for at in range(begin, end, 1024):
        shown = shown & tl.load(mask + (at + i) * mask_stride, mask=at + i < end, other=1)
    return tl.min(shown.to(tl.int32), 0) == 0


@triton.jit
def _body_tile(
    K: tl.constexpr, V: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr, KT: tl.constexpr, VT: tl.constexpr,
    K_ONCE: tl.constexpr, V_ONCE: tl.constexpr, TAIL: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, ARCH: tl.constexpr,
    state, q, q_scale, q_sum, q_center, k_codes, k_high, k_shifts, k_scales, v_codes, v_high, v_shifts, v_scales, slot, valid,
    mask, mask_rows, mask_stride, column, hides, oldest, softcap, WINDOW: tl.constexpr, weights, tops, place, count, MASS: tl.constexpr,
):  # fmt: skip
    """One tile of tokens joins the running maximum, normaliser, constant part and planes of the output, `state`."""
    m, l, z, acc = state
    KN: tl.constexpr = (KW + KT - 1) // KT
    VN: tl.constexpr = (VW + VT - 1) // VT
    KP: tl.constexpr = K.per
    VP: tl.constexpr = V.per

    s = tl.zeros(l.shape, tl.float32)
    if K.group == 0 and K.scale != "hidden" and K.offset != 0:
        s -= (K.offset * q_sum)[None, :]
    if K.group > 0:
        found = group_scales(K, KW, k_scales, slot, ARCH)
    for c in tl.static_range(KN):
        planes = _tile_of_keys(K, KW, KT, c * KT, k_codes, k_high, k_shifts, slot, ARCH)
        for i in tl.static_range(KP):
            k = planes[i]
            if K.group > 0:
                k = scaled(K, k, scale_of_plane(K, KW, found, k_scales, slot, c * KT, i, 0))
            s = tl.dot(k, q[c * KP + i], s, input_precision="ieee")
    if K.group > 0 or K.scale == "none":
        s = s * q_scale[None, :]
    else:
        scale, zero = token_scale(K, K_ONCE, k_scales, slot)
        if K.scale == "hidden":
            s = (s - (zero[:, None] + K.offset) * q_sum[None, :]) * scale[:, None]
        else:
            s = s * scale[:, None]
            if K.scale == "pair":
                s = s + zero[:, None] * q_sum[None, :]
        s = s * q_scale[None, :]
    if K.centered:
        s = s + q_center[None, :]
    s = _capped(s, softcap, SOFTCAP, ARCH)
    s = _masked(s, mask, mask_rows, mask_stride, column, hides, MASK)
    if WINDOW:
        s = tl.where(column[:, None] >= oldest[None, :], s, HIDDEN)

    PER_TOKEN: tl.constexpr = (V.group == 0) & (V.scale != "none")
    if PER_TOKEN:
        scale, zero = token_scale(V, V_ONCE, v_scales, slot)
        scale = tl.where(scale < 1e-27, 1e-27, scale)  # an all-zero vector has weight too
        if TAIL:
            scale = tl.where(valid, scale, 1.0)
            zero = tl.where(valid, zero, 0.0)
        s = s + log2(scale, ARCH)[:, None]
    if TAIL:
        s = tl.where(valid[:, None], s, HIDDEN)

    top = tl.maximum(m, tl.max(s, 0))
    shrink = exp2(m - top, ARCH)
    w = exp2(s - top[None, :], ARCH)
    if TAIL:
        w = tl.where(valid[:, None], w, 0.0)
    p = w.to(tl.float16)
    if V.kind == "half":
        p = w.to(v_codes.dtype.element_ty)
    if PER_TOKEN:
        unscale = inverse(scale, ARCH)
        l = l * shrink[None, :] + w * unscale[:, None]
        rounded = p.to(tl.float32)  # as they multiply numbers: what is taken away for an offset must be what the offset brought
        if V.scale == "hidden":
            z = z * shrink[None, :] - rounded * (zero + V.offset)[:, None]
        elif V.scale == "pair":
            z = z * shrink[None, :] + rounded * (zero * unscale - V.offset * V.unit)[:, None]
        elif V.offset != 0:  # the same for all tokens: a product sums weights at no conversion
            z = tl.dot(tl.full([16, p.shape[0]], -1 / 16, tl.float16), p, z * shrink[None, :], input_precision="ieee")
        if MASS > 0:
            keep(weights, tops, w * unscale[:, None], top, place, count, BODY_GRAIN, MASS)
    else:
        l = l * shrink[None, :] + w
        if MASS > 0:
            keep(weights, tops, w, top, place, count, BODY_GRAIN, MASS)

    new = ()
    if V.group > 0:
        found_v = group_scales(V, VW, v_scales, slot, ARCH)
    for c in tl.static_range(VN):
        planes = _tile_of_values(V, VW, VT, c * VT, v_codes, v_high, v_shifts, slot, valid, TAIL, ARCH)
        for i in tl.static_range(VP):
            v = planes[i]
            if V.group > 0:
                scale = scale_of_plane(V, VW, found_v, v_scales, slot, c * VT, i, 1)
                if TAIL:
                    scale = tl.where(valid[None, :], scale, 0.0)
                v = scaled(V, v, scale)
            new = new + (tl.dot(v, p, acc[c * VP + i] * shrink[None, :], input_precision="ieee"),)
    return top, l, z, new


@triton.jit
def _exact_tiles(
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, T: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    ARCH: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, RING: tl.constexpr,
    state, q, q_scale, keys, key_stride, values, value_stride, tokens, start, newest, oldest, mask, mask_rows, mask_stride, softcap,
    weights, tops, total, last, MASS: tl.constexpr,
):  # fmt: skip
    """Tokens in the model's dtype, `keys` `[tokens, D]`, whose columns begin at `start`; of a ring, the newest is in slot `last`."""
    m, l, acc = state
    t = tl.arange(0, T)
    d = tl.arange(0, DP)
    e = tl.arange(0, DVP)
    for begin in tl.range(0, tokens, T, num_stages=1):
        at = begin + t
        valid = at < tokens
        column = start + at
        if RING:
            column = total - 1 - (last - at + tokens) % tokens
            valid = valid & (column >= start)
        k = tl.load(keys + at[:, None] * key_stride + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
        s = tl.dot(k, q, input_precision="ieee") * q_scale[None, :]
        s = _capped(s, softcap, SOFTCAP, ARCH)
        s = _masked(s, mask, mask_rows, mask_stride, tl.where(valid, column, start), True, MASK)
        if WINDOW:
            s = tl.where(column[:, None] >= oldest[None, :], s, HIDDEN)
        if CAUSAL:
            s = tl.where(column[:, None] <= newest[None, :], s, HIDDEN)
        s = tl.where(valid[:, None], s, HIDDEN)
        top = tl.maximum(m, tl.max(s, 0))
        shrink = exp2(m - top, ARCH)
        w = tl.where(valid[:, None], exp2(s - top[None, :], ARCH), 0.0)
        l = l * shrink + tl.sum(w, 0)
        if MASS > 0:
            keep(weights, tops, w, top, begin, tokens - begin, EXACT_GRAIN, MASS)
        v = tl.load(values + at[None, :] * value_stride + e[:, None], mask=valid[None, :] & (e < DV)[:, None], other=0.0)
        acc = tl.dot(v, w.to(v.dtype), acc * shrink[None, :], input_precision="ieee")
        m = top
    return m, l, acc


@triton.jit
def _butterflies(tiles, N: tl.constexpr, BIT: tl.constexpr):
    """One stage of the Hadamard transform across `N` tiles: the one in the bit `BIT` of their numbers."""
    new = ()
    for i in tl.static_range(N):
        if i & BIT:
            new = new + (tiles[i ^ BIT] - tiles[i],)
        else:
            new = new + (tiles[i] + tiles[i ^ BIT],)
    return new


# What changes from step to step, or call to call, must not compile the kernel anew.
@triton.jit(
    do_not_specialize=[
        "scaling", "softcap", "window", "chunks", "n_first", "n_body", "n_recent", "split_tokens", "heads", "queries",
        "mask_stride_b", "mask_stride_h", "mask_stride_q", "mask_stride_t", "slots", "grains",
    ]
)  # fmt: skip
def attend_kernel(
    query, body_query, turning, signs, table, k_codes, k_high, k_shifts, k_scales, v_codes, v_high, v_shifts, v_scales,
    first_k, first_v, recent_k, recent_v, mask, k_center, part, maxima, sums, weights, tops,
    counts, q_stride_b, q_stride_h, q_stride_q, first_stride_b, first_stride_h, first_stride_t,
    first_v_stride_b, first_v_stride_h, first_v_stride_t,
    recent_stride_b, recent_stride_h, recent_stride_t, recent_v_stride_b, recent_v_stride_h, recent_v_stride_t,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_t,
    scaling, softcap, window, chunks, n_first, n_body, n_recent, split_tokens, heads, queries, slots, grains,
    K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, TX: tl.constexpr, K_SHARED: tl.constexpr, V_SHARED: tl.constexpr, K_ONCE: tl.constexpr, V_ONCE: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, ARCH: tl.constexpr,
    EXACT: tl.constexpr, TURN: tl.constexpr, MASS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Grid (splits, row blocks, batch * heads); with EXACT, split 0 is that of the exact zones. MASS: columns of the scratch, 0 if none.
    COUNTED: tokens are those of a storage, whose `counts` (`Buffers.state`) say how many each row has; the least of a split."""
    split = tl.program_id(0)
    block = tl.program_id(1)
    bh = tl.program_id(2)
    splits = tl.num_programs(0)
    b = bh // heads
    h = bh % heads
    KW: tl.constexpr = D // K.per
    VW: tl.constexpr = DV // V.per
    # Words of a tile: all of a token's, or sixteen where scales are by group.
    KT: tl.constexpr = 16 if K.group > 0 else max(triton.next_power_of_2(KW), 16)
    VT: tl.constexpr = 16 if V.group > 0 else max(triton.next_power_of_2(VW), 16)
    KP: tl.constexpr = K.per
    VP: tl.constexpr = V.per
    KN: tl.constexpr = (KW + KT - 1) // KT
    VN: tl.constexpr = (VW + VT - 1) // VT

    r = block * R + tl.arange(0, R)
    live = r < G * queries
    row = tl.minimum(r, G * queries - 1)
    head = h * G + row // queries
    number = row % queries
    total = n_first + n_body + n_recent
    last = 0
    if COUNTED > 0:
        total = tl.load(counts + 4 + 2 * b)
        n_body = tl.load(counts + 5 + 2 * b)
        chunks = tl.load(counts + 3)
        last = (tl.maximum(total - n_first, 1) - 1) % n_recent
        n_first = tl.minimum(n_first, total)
        many = tl.maximum(splits - 1, 1) if EXACT else splits
        split_tokens = tl.maximum(tl.cdiv(tl.cdiv(n_body, many), T) * T, COUNTED)
    newest = total - queries + number
    oldest = newest - window + 1
    if MASK == "row":
        mask += b * mask_stride_b
    mask_rows = b * mask_stride_b + head * mask_stride_h + number * mask_stride_q
    out = part + ((bh * tl.num_programs(1) + block).to(tl.int64) * splits + split) * (R * DV)
    m = tl.full([R], HIDDEN, tl.float32)
    q_rows = b.to(tl.int64) * q_stride_b + head * q_stride_h + number * q_stride_q
    log2e = 1.0 if SOFTCAP else LOG2E
    if MASS > 0:
        panel = (bh * tl.num_programs(1) + block).to(tl.int64)
        weights += panel * slots * MASS
        tops += panel * grains * MASS

    if EXACT and split == 0:
        DP: tl.constexpr = max(triton.next_power_of_2(D), 16)
        DVP: tl.constexpr = max(triton.next_power_of_2(DV), 16)
        d = tl.arange(0, DP)
        x_query = tl.load(query + q_rows[None, :] + d[:, None], mask=(d < D)[:, None] & live[None, :], other=0.0)
        x_scale = tl.full([R], 1.0, tl.float32) * scaling * log2e
        exact = (m, tl.zeros([R], tl.float32), tl.zeros([DVP, R], tl.float32))
        if MASS > 0:
            weights += tl.cdiv(n_body, BODY_GRAIN) * BODY_GRAIN * MASS
            tops += tl.cdiv(n_body, BODY_GRAIN) * MASS
        exact = _exact_tiles(
            D, DV, DP, DVP, TX, SOFTCAP, MASK, ARCH, WINDOW, CAUSAL, False, exact, x_query, x_scale,
            first_k + b.to(tl.int64) * first_stride_b + h * first_stride_h, first_stride_t,
            first_v + b.to(tl.int64) * first_v_stride_b + h * first_v_stride_h, first_v_stride_t,
            n_first, 0, newest, oldest, mask, mask_rows, mask_stride_t, softcap, weights, tops, total, last, MASS,
        )  # fmt: skip
        if MASS > 0:
            weights += tl.cdiv(n_first, EXACT_GRAIN) * EXACT_GRAIN * MASS
            tops += tl.cdiv(n_first, EXACT_GRAIN) * MASS
        exact = _exact_tiles(
            D, DV, DP, DVP, TX, SOFTCAP, MASK, ARCH, WINDOW, CAUSAL, COUNTED > 0, exact, x_query, x_scale,
            recent_k + b.to(tl.int64) * recent_stride_b + h * recent_stride_h, recent_stride_t,
            recent_v + b.to(tl.int64) * recent_v_stride_b + h * recent_v_stride_h, recent_v_stride_t,
            n_recent, n_first + n_body, newest, oldest, mask, mask_rows, mask_stride_t, softcap, weights, tops, total, last, MASS,
        )  # fmt: skip
        m, l, x_out = exact
        e = tl.arange(0, DVP)
        tl.store(out + tl.arange(0, R)[None, :] * DV + e[:, None], x_out, mask=(e < DV)[:, None] & live[None, :])
    else:
        # The queries, in planes like the keys' and normalised by their largest channel, so that fp16 holds them; as rows, since the product
        # that turns them then leaves channels where the keys' product wants them: else every tile would shuffle them again.
        q = ()
        amax = tl.zeros([R], tl.float32)
        j = tl.arange(0, KT)
        for c in tl.static_range(KN):
            for i in tl.static_range(KP):
                channel = _channel(K, KW, c * KT + j, i)
                inside = (c * KT + j < KW)[None, :] & live[:, None]
                x = tl.load(body_query + q_rows[:, None] + channel[None, :], mask=inside, other=0.0)
                if K.rotated:
                    x = x * tl.load(signs + channel, mask=c * KT + j < KW, other=0.0).to(x.dtype)[None, :]
                    turn = tl.load(turning + j[:, None] * KT + j[None, :]).to(x.dtype)
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
                    mean = tl.load(k_center + bh * D + channel, mask=c * KT + j < KW, other=0.0)
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
            q_scale = amax * (scaling * K.unit * TURN) * log2e
            tiles = ()
            for i in tl.static_range(KN * KP):
                x = (q[i].to(tl.float32) * normal[:, None]).to(tl.float16)
                q_sum += tl.sum(x.to(tl.float32), 1)
                tiles = tiles + (x,)
            q = tiles
        tiles = ()
        for i in tl.static_range(KN * KP):
            tiles = tiles + (tl.trans(q[i]),)
        q = tiles

        acc = ()
        for i in tl.static_range(VN * VP):
            acc = acc + (tl.zeros([VT, R], tl.float32),)
        SUMMED: tl.constexpr = V.offset != 0 and (V.scale == "fp16" or V.scale == "fp32")
        state = (m, tl.zeros([T, R], tl.float32), tl.zeros([16 if SUMMED else T, R], tl.float32), acc)
        begin = tl.multiple_of((split - 1 if EXACT else split) * split_tokens, T)
        end = tl.minimum(begin + split_tokens, n_body)
        if WINDOW:
            begin = tl.maximum(begin, (total - queries - window + 1 - n_first) // T * T)
        hides = _hides(mask, n_first + begin, n_first + end, mask_stride_t) if MASK == "row" else False
        t = tl.arange(0, T)
        plane = bh.to(tl.int64)
        kb = b.to(tl.int64) if K_SHARED else plane
        vb = b.to(tl.int64) if V_SHARED else plane
        KG: tl.constexpr = D // K.group if K.group > 0 else (2 if K.scale == "pair" else 1)
        VG: tl.constexpr = DV // V.group if V.group > 0 else (2 if V.scale == "pair" else 1)
        for chunk in range(chunks):
            start = tl.load(table + chunk * 8).to(tl.int32)
            capacity = tl.multiple_of(tl.load(table + chunk * 8 + 1), 32)
            low = tl.maximum(begin, start) - start
            high = tl.minimum(end, start + capacity.to(tl.int32)) - start
            k_slots = 1 if K_ONCE else capacity
            v_slots = 1 if V_ONCE else capacity
            kc = k_codes + (tl.multiple_of(tl.load(table + chunk * 8 + 2), 16) + plane * capacity * (KW // 2 if K.halved else KW))
            kh = k_high + (tl.multiple_of(tl.load(table + chunk * 8 + 3), 16) + plane * capacity * (KW if K.signed else KW // 2))
            ks = k_scales + (tl.multiple_of(tl.load(table + chunk * 8 + 4), 16) + kb * k_slots * KG)
            vc = v_codes + (tl.multiple_of(tl.load(table + chunk * 8 + 5), 16) + plane * capacity * (VW // 2 if V.halved else VW))
            vh = v_high + (tl.multiple_of(tl.load(table + chunk * 8 + 6), 16) + plane * capacity * (VW if V.signed else VW // 2))
            vs = v_scales + (tl.multiple_of(tl.load(table + chunk * 8 + 7), 16) + vb * v_slots * VG)
            whole = low + tl.maximum(high - low, 0) // T * T
            for token in range(low, whole, T):
                slot = token + t
                state = _body_tile(
                    K, V, KW, VW, KT, VT, K_ONCE, V_ONCE, False, SOFTCAP, MASK, ARCH, state, q, q_scale, q_sum, q_center,
                    kc, kh, k_shifts, ks, vc, vh, v_shifts, vs, slot, t >= 0, mask, mask_rows, mask_stride_t,
                    n_first + start + token + t, hides, oldest, softcap, WINDOW, weights, tops, start + token, T, MASS,
                )  # fmt: skip
            if whole < high:
                slot = whole + t
                column = tl.minimum(start + whole + t, start + high - 1) + n_first
                state = _body_tile(
                    K, V, KW, VW, KT, VT, K_ONCE, V_ONCE, True, SOFTCAP, MASK, ARCH, state, q, q_scale, q_sum, q_center,
                    kc, kh, k_shifts, ks, vc, vh, v_shifts, vs, slot, whole + t < high,
                    mask, mask_rows, mask_stride_t, column, hides, oldest, softcap, WINDOW, weights, tops,
                    start + whole, high - whole, MASS,
                )  # fmt: skip
        m, l2, z2, acc = state
        l = tl.sum(l2, 0)
        z = tl.sum(z2, 0)
        if SUMMED:
            z *= V.offset * V.unit
        j = tl.arange(0, VT)
        for c in tl.static_range(VN):
            for i in tl.static_range(VP):  # plane after plane: `_reduce` puts channels in order
                word = c * VT + j
                place = tl.arange(0, R)[None, :] * DV + i * VW + word[:, None]
                tl.store(out + place, acc[c * VP + i] * V.unit + z[None, :], mask=(word < VW)[:, None] & live[None, :])
    entry = (bh * tl.num_programs(1) + block) * splits * R + split * R + tl.arange(0, R)
    tl.store(maxima + entry, m)
    tl.store(sums + entry, l)
