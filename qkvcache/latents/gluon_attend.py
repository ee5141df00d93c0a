"""The fused attention kernel over latents on Hopper: `triton_attend.py` with shared memory, layouts
and warps in hand.

One program of two warpgroups has 64 query rows. Shared memory holds these, two tiles of 64 tokens,
dequantized, and the weights of one tile. Both operands of each `wgmma` lie there. Each warpgroup has half of
the channels of the output, and half of the tokens of the scores. Of the tiles i, i + 1 and i + 2, the first
is multiplied by its weights; then the second by the queries, while the third takes the place of the first.

The codes of a tile are loaded before the products and unpacked after them. The lanes of a warp that store at
a time have eight tokens, whose rows have different banks. Tokens of the model's dtype (`half`) are copied to
shared memory.

Arguments, partial outputs, order of channels and exponents are those of
`triton_attend.attend_latents_kernel`."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..kernels.attend.triton_attend import (
    RING_START,
    RING_TOKENS,
    SINKS,
    entry_of,
    exact_columns,
    head_of,
    page_of,
    tokens_of_split,
)
from ..kernels.attend.triton_tiles import LARGEST_ZERO, _interleaved, _power, _words
from ..kernels.device.math import MASKED_SCORE, exp2
from ..kernels.device.scales import group_scales, scaled, token_scale
from ..kernels.device.unpack import offset_of, plane_offset, unit_of, unpack

TILE = gl.constexpr(64)
"""Tokens of a tile, and query rows of a program."""
WARPS = gl.constexpr(8)


@gluon.constexpr_function
def _across(columns: int, each: int):
    """The layout of `[64, columns]` in which four lanes have a row, `each` elements of it at a time, and
    eight lanes eight rows."""
    each = min(each, columns)
    lanes = [[1, 0], [2, 0], [4, 0], *([0, each << i if each << i < columns else 0] for i in range(2))]
    steps = (columns // (4 * each)).bit_length() - 1
    registers = [[0, 1 << i] for i in range(each.bit_length() - 1)] + [[0, 4 * each << i] for i in range(steps)]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0], [32, 0]], [], [64, columns])


@gluon.constexpr_function
def _along(columns: int):
    """The layout of rows of `columns` numbers of 16 bits in which neighbouring lanes read 16 bytes each."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [8, 1], [1, 0])


@gluon.constexpr_function
def _shared(columns: int):
    """The layout of rows of `columns` numbers of 16 bits in shared memory."""
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16)


@gluon.constexpr_function
def _places(layout, dim: int):
    """For divisions of a place in a tile: channels of a word, words, and the places of half a tile."""
    return layout.per, dim // layout.per, dim // 2


@gluon.jit
def _stored(X: gl.constexpr, ONCE: gl.constexpr, D: gl.constexpr, planes, slot, L: gl.constexpr, ARCH: gl.constexpr):
    """Loads what `_tile` unpacks, of the tokens `slot`, int [T], at `planes` (`page_of`): pairs of words
    of codes, int32 [T, pairs] in the layout L; pairs of words of high bits likewise, or codes again;
    scales of groups, or scale and zero of tokens."""
    codes, high, scales = planes
    WORDS: gl.constexpr = D // X.per
    PAIRS: gl.constexpr = WORDS // 2
    pair = gl.arange(0, PAIRS, gl.SliceLayout(0, L))
    codes = gl.load((codes.to(gl.pointer_type(gl.int32)) + slot * PAIRS)[:, None] + pair[None, :])
    bits = codes
    if X.high > 1:
        bits = gl.load((high.to(gl.pointer_type(gl.int32)) + slot * PAIRS)[:, None] + pair[None, :])
    elif X.high == 1:
        HALF: gl.constexpr = PAIRS // 2
        bits = gl.load((high.to(gl.pointer_type(gl.int32)) + slot * HALF)[:, None] + (pair % HALF)[None, :])
    if X.group > 0:
        return codes, bits, group_scales(X, WORDS, scales, slot, ARCH)
    else:
        return codes, bits, token_scale(X, ONCE, scales, slot)


@gluon.jit
def _scales_of_plane(X: gl.constexpr, WORDS: gl.constexpr, by_group, i: gl.constexpr, like):
    """Scales of plane `i` of all words, fp16 in the shape and layout of `like`, [T, WORDS], from those of
    each group."""
    L: gl.constexpr = like.type.layout
    FIRST: gl.constexpr = i * WORDS // X.group
    scale = tl.broadcast_to(gl.convert_layout(by_group[FIRST], gl.SliceLayout(1, L))[:, None], like.shape)
    group = (gl.arange(0, WORDS, gl.SliceLayout(0, L)) // X.group)[None, :]
    for n in gl.static_range(1, WORDS // X.group):
        scale = gl.where(group == n, gl.convert_layout(by_group[FIRST + n], gl.SliceLayout(1, L))[:, None], scale)
    return scale


@gluon.jit
def _tile(X: gl.constexpr, D: gl.constexpr, stored, norm, L: gl.constexpr, ARCH: gl.constexpr):
    """Converts the result of `_stored` to numbers, as `triton_tiles._tile` does."""
    codes, bits, scales = stored
    WORDS: gl.constexpr = D // X.per
    PER: gl.constexpr = X.per
    KIND: gl.constexpr = X.kind
    w = _words(codes)
    shift = w
    if X.high == 1:
        second = gl.arange(0, WORDS // 2, gl.SliceLayout(0, L)) >= WORDS // 4
        shift = _words(gl.where(second[None, :], -1, codes * 0))
    planes = unpack(KIND, w, _words(bits), shift, ARCH)
    tiles = ()
    if X.group > 0:
        for i in gl.static_range(PER):
            tiles = tiles + (scaled(X, planes[i], _scales_of_plane(X, WORDS, scales, i, planes[i])),)
    else:
        scale, zero = scales
        BY_ROW: gl.constexpr = gl.SliceLayout(1, planes[0].type.layout)
        offset = 0.0 if X.kind == "int2" else offset_of(X)
        inverse_norm = 1.0 / norm
        factor = (scale * (_power(X) * inverse_norm)).to(gl.float16)
        if X.scale == "pair":
            start = zero * inverse_norm - offset * factor.to(gl.float32)
        else:
            start = factor.to(gl.float32) * -(offset + zero)
        factor = gl.convert_layout(factor, BY_ROW)[:, None]
        start = gl.convert_layout(start.to(gl.float16), BY_ROW)[:, None]
        for i in gl.static_range(PER):
            x = planes[i]
            if X.kind == "int2":  # whose planes have offsets of their own
                x = (x - offset_of(X) * plane_offset(X, i)).to(gl.float16)
            tiles = tiles + (gl.fma(x, tl.broadcast_to(factor, x.shape), tl.broadcast_to(start, x.shape)),)
    return _interleaved(tiles, codes.shape[0], WORDS, PER)


@gluon.jit
def _token_of(chosen, place, CHOSEN: gl.constexpr):
    """The tokens at `place`, int [T], among those that are read: their indices in the row's pages."""
    if CHOSEN:
        return gl.load(chosen + place)
    else:
        return place


@gluon.jit
def _norm(
    X: gl.constexpr, D: gl.constexpr, ONCE: gl.constexpr, planes, strides: gl.constexpr, table, chosen, low,
    high, PAGE: gl.constexpr, BASE: gl.constexpr, CHOSEN: gl.constexpr,
):  # fmt: skip
    """The divisor of the scales and zeros of the tokens from `low` to `high`, as of `triton_tiles._norm`."""
    if X.group > 0 or X.scale == "none":
        return 1.0
    else:
        N: gl.constexpr = 512 if CHOSEN else 4096
        L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        i = gl.arange(0, N, L)
        most = gl.full([N], 1e-30, gl.float32, L)
        for at in range(low, high, N):
            place = gl.minimum(at + i, high - 1)
            entry = entry_of(table, place, place >= 0, CHOSEN if CHOSEN else PAGE, BASE)
            _, _, here = page_of(X, D, ONCE, planes, strides, entry, 0)
            scale, zero = token_scale(X, ONCE, here, _token_of(chosen, place, CHOSEN) % PAGE)
            if X.scale == "pair":
                scale = gl.maximum(scale, gl.abs(zero) / LARGEST_ZERO)
            most = gl.maximum(most, gl.where(scale < 1e30, scale, 0.0))
        return gl.max(most, 0)


@gluon.jit
def _hides_any(mask, begin, end, mask_stride):
    """Whether the mask hides any column from `begin` to `end`, as of `kernels.attend.triton_attend.hides_any`."""
    i = gl.arange(0, 1024, gl.BlockedLayout([1], [32], [WARPS], [0]))
    shown = (i * 0 + 1).to(gl.uint8)
    for at in range(begin, end, 1024):
        shown = shown & gl.load(mask + (at + i) * mask_stride, mask=at + i < end, other=1)
    return gl.min(shown.to(gl.int32), 0) == 0


@gluon.jit
def _row_of(r, each_query, queries, G: gl.constexpr, CHOSEN: gl.constexpr):
    """The query rows of the row of the batch that are the rows `r`, int [R], of all blocks; and which
    there are."""
    if CHOSEN:
        return gl.minimum(r, G - 1) * queries + each_query % queries, r < G
    else:
        return gl.minimum(r, G * queries - 1).to(gl.int64), r < G * queries


@gluon.jit
def _factors(factors, row, unit, rope_norm):
    """The factors of both products of the query rows `row`, int [R], and the larger one."""
    own = gl.load(factors + row * 3) * unit
    other = gl.load(factors + row * 3 + 1) * rope_norm
    return own, other, gl.maximum(gl.abs(own), gl.abs(other))


@gluon.jit
def _entries(table, begin, high, row, CHOSEN: gl.constexpr, PAGE: gl.constexpr, BASE: gl.constexpr):
    """The entries of the pages of the tokens `begin + row`, int [T], below `high`: one, or [T] of chosen
    tokens."""
    if CHOSEN:
        return entry_of(table, gl.minimum(begin + row, high - 1), row >= 0, 1, BASE)
    else:
        return entry_of(table, gl.minimum(begin, high - 1), True, PAGE, BASE)


@gluon.jit
def _side(
    X: gl.constexpr, D: gl.constexpr, ONCE: gl.constexpr, head, strides: gl.constexpr, entry, chosen, begin,
    high, row, PAGE: gl.constexpr, CHOSEN: gl.constexpr,
):  # fmt: skip
    """Pointers to the planes of the tokens `begin + row`, int [T], below `high`, in their pages `entry`,
    and their slots."""
    slot = _token_of(chosen, gl.minimum(begin + row, high - 1), CHOSEN) % PAGE
    return page_of(X, D, ONCE, head, strides, entry, 0), slot


@gluon.jit
def _given():
    """What all threads have written to shared memory, `wgmma` may read from here on."""
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _copied(D: gl.constexpr, planes, slot, L: gl.constexpr, shared):
    """Begins to copy the tokens `slot`, int [T], to shared memory, in the layout L."""
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    async_copy.async_copy_global_to_shared(shared, (planes[0] + slot * D)[:, None] + d[None, :])
    async_copy.commit_group()


@gluon.jit
def _begun(q, q_rope, k, k_rope, zero):
    """Begins the products of queries and a tile."""
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(q_rope, k_rope.permute((1, 0)), s, is_async=True)


@gluon.jit
def _weights(s, factor, m, l, ARCH: gl.constexpr):
    """The weights of scores `s`, fp32 [R, T], to base 2 once multiplied by `factor`, [R]; the new maximum,
    [R], and normaliser, [R, 2, 4], one of each thread; and what the sums so far shrink by."""
    top = gl.maximum(m, gl.max(s, 1) * factor)
    shrink = exp2(m - top, ARCH)
    w = exp2(s * factor[:, None] - top[:, None], ARCH)
    own = gl.sum(gl.sum(gl.reshape(w, [w.shape[0], 2, w.shape[1] // 16, 4, 2]), 4), 2)
    BY_THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, own.type.layout))
    shrunk = gl.expand_dims(gl.expand_dims(gl.convert_layout(shrink, BY_THREAD), 1), 2)
    return w, top, l * shrunk + own, shrink


@gluon.jit
def _shrunk(acc, shrink):
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _exact_tiles(
    D: gl.constexpr, P: gl.constexpr, MASK: gl.constexpr, ARCH: gl.constexpr, S_LAYOUT: gl.constexpr,
    state, shared, factor, latents, latent_stride, ropes, rope_stride, tokens, start, newest, mask,
    mask_stride, oldest_slot, count,
):  # fmt: skip
    """Adds tokens in the model's dtype to `state`: the `count` of a ring of `tokens` slots from
    `oldest_slot` on. Other arguments as of `triton_attend._exact_tiles`."""
    m, l, acc = state
    q, q_rope, k, k_rope, weights = shared
    T: gl.constexpr = TILE
    t = gl.arange(0, T, gl.SliceLayout(1, _along(D)))
    u = gl.arange(0, T, gl.SliceLayout(1, _along(P)))
    d = gl.arange(0, D, gl.SliceLayout(0, _along(D)))[None, :]
    p = gl.arange(0, P, gl.SliceLayout(0, _along(P)))[None, :]
    nothing = gl.zeros([T, T], gl.float32, S_LAYOUT)
    for begin in range(0, tokens, T):
        gl.thread_barrier()  # all warps have read the tile before
        at = (begin + t)[:, None]
        k.store(gl.load(latents + at * latent_stride + d, mask=at < tokens, other=0.0))
        at = (begin + u)[:, None]
        k_rope.store(gl.load(ropes + at * rope_stride + p, mask=at < tokens, other=0.0))
        _given()
        s = warpgroup_mma_wait(0, [_begun(q, q_rope, k, k_rope, nothing)])
        at = begin + gl.arange(0, T, gl.SliceLayout(0, S_LAYOUT))
        valid, column = exact_columns(at, tokens, start, oldest_slot, count, True)
        if MASK:
            valid = valid & (gl.load(mask + column * mask_stride, mask=valid, other=0) != 0)
        s = gl.where(valid[None, :] & (column[None, :] <= newest[:, None]), s, float("-inf"))
        w, m, l, shrink = _weights(s, factor, m, l, ARCH)
        weights.store(w.to(k.dtype))
        _given()
        acc = warpgroup_mma_wait(0, [warpgroup_mma(weights, k, _shrunk(acc, shrink), is_async=True)])
    return m, l, acc


@gluon.jit(
    do_not_specialize=[
        "scaling", "n_sinks", "n_quantized", "n_residual", "least", "queries", "table_b", "rows_b",
        "lengths_b", "mask_b", "mask_q", "mask_t",
    ]
)  # fmt: skip
def attend_latents_kernel(
    query, q_latent, q_rope, factors, table, chosen, counts, rows, lengths, k_planes, v_planes, exact, mask,
    part, tops, query_strides, table_b, rows_b, lengths_b, mask_b, mask_q, mask_t, scaling, n_sinks, n_quantized,
    n_residual, least, queries,
    KEYS: gl.constexpr, VALUES: gl.constexpr, PAGES: gl.constexpr, G: gl.constexpr, MASK: gl.constexpr,
    CAUSAL: gl.constexpr, ARCH: gl.constexpr, EXACT: gl.constexpr, CHOSEN: gl.constexpr,
):  # fmt: skip
    """Arguments as of `triton_attend.attend_latents_kernel`."""
    COUNTED: gl.constexpr = rows is not None
    K: gl.constexpr = KEYS.layout
    V: gl.constexpr = VALUES.layout
    D: gl.constexpr = KEYS.dim
    P: gl.constexpr = VALUES.dim
    PAGE: gl.constexpr = PAGES[0]
    BASE: gl.constexpr = PAGES[1]
    K_ONCE: gl.constexpr = KEYS.once
    V_ONCE: gl.constexpr = VALUES.once
    K_STRIDES: gl.constexpr = KEYS.strides
    V_STRIDES: gl.constexpr = VALUES.strides
    T: gl.constexpr = TILE
    split = gl.num_programs(0) - 1 - gl.program_id(0)  # the exact tokens, of which there are few, last
    block = gl.program_id(1)
    each_query = gl.program_id(2).to(gl.int64)
    b = each_query
    h = gl.program_id(2) * 0  # there is one head
    splits = gl.num_programs(0)
    if CHOSEN:
        b = each_query // queries
        mask += each_query % queries * mask_q
    stored, oldest_slot, in_ring = n_quantized, n_quantized * 0, n_residual
    if COUNTED:
        rows += b * rows_b
        stored = gl.load(lengths + b * lengths_b)
        n_sinks = gl.load(rows + SINKS)
        oldest_slot = gl.load(rows + RING_START)
        in_ring = gl.load(rows + RING_TOKENS)
    if MASK:
        mask += b * mask_b
    panel = each_query * gl.num_programs(1) + block

    HALF_KIND: gl.constexpr = K.kind == "half"
    DTYPE: gl.constexpr = query.dtype.element_ty
    STORED: gl.constexpr = DTYPE if HALF_KIND else gl.float16
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, T // 2, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q = gl.allocate_shared_memory(STORED, [T, D], _shared(D))
    qr = gl.allocate_shared_memory(STORED, [T, P], _shared(P))
    tiles = gl.allocate_shared_memory(STORED, [2, T, D], _shared(D))
    rope_tiles = gl.allocate_shared_memory(STORED, [2, T, P], _shared(P))
    weights = gl.allocate_shared_memory(STORED, [T, T], _shared(T))

    row, _ = _row_of(block * T + gl.arange(0, T, BY_ROW), each_query, queries, G, CHOSEN)
    r = block * T + gl.arange(0, T, gl.SliceLayout(1, _along(D)))
    q_row, _ = _row_of(r, each_query, queries, G, CHOSEN)
    r = block * T + gl.arange(0, T, gl.SliceLayout(1, _along(P)))
    qr_row, _ = _row_of(r, each_query, queries, G, CHOSEN)
    d = gl.arange(0, D, gl.SliceLayout(0, _along(D)))[None, :]
    p = gl.arange(0, P, gl.SliceLayout(0, _along(P)))[None, :]
    nothing = gl.zeros([T, T], gl.float32, S_LAYOUT)
    m = gl.full([T], MASKED_SCORE, gl.float32, BY_ROW)
    l = gl.sum(gl.sum(gl.reshape(nothing, [T, 2, T // 16, 4, 2]), 4), 2)
    acc = gl.zeros([T, D], gl.float32, O_LAYOUT)
    unit = 1.0  # that of the output
    o = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    place = o
    if not HALF_KIND:
        PER: gl.constexpr = _places(K, D)[0]
        WORDS: gl.constexpr = _places(K, D)[1]
        HALF: gl.constexpr = _places(K, D)[2]
        word = o // (4 * PER) % (WORDS // 8) * 8 + o // HALF * 4 + o // (2 * PER) % 2 * 2 + o % 2
        place = o // 2 % PER * WORDS + word  # plane after plane, as `reduce_kernel` reads them
    if EXACT and split == 0:
        place = o
        xq = q._reinterpret(DTYPE, [T, D], _shared(D))
        xqr = qr._reinterpret(DTYPE, [T, P], _shared(P))
        xk = tiles.index(0)._reinterpret(DTYPE, [T, D], _shared(D))
        xkr = rope_tiles.index(0)._reinterpret(DTYPE, [T, P], _shared(P))
        shared = xq, xqr, xk, xkr, weights._reinterpret(DTYPE, [T, T], _shared(T))
        x_query = query + b * query_strides[0]
        xq.store(gl.load(x_query + (q_row // queries * query_strides[1] + q_row % queries * query_strides[2])[:, None] + d))
        xqr.store(gl.load(x_query + (qr_row // queries * query_strides[1] + qr_row % queries * query_strides[2])[:, None] + (D + p)))
        newest = n_sinks + stored + in_ring - 1 + row * 0
        if CAUSAL:
            newest = n_sinks + stored + in_ring - (queries - row % queries)
        x_factor = gl.full([T], 1.0, gl.float32, BY_ROW) * scaling
        state = _exact_tiles(
            D, P, MASK, ARCH, S_LAYOUT, (m, l, acc), shared, x_factor, exact[0] + b * exact[4],
            exact[6], exact[1] + b * exact[7], exact[9], n_sinks, 0, newest, mask, mask_t, 0, n_sinks,
        )  # fmt: skip
        m, l, acc = _exact_tiles(
            D, P, MASK, ARCH, S_LAYOUT, state, shared, x_factor, exact[2] + b * exact[10],
            exact[12], exact[3] + b * exact[13], exact[15], n_residual, n_sinks + stored,
            newest, mask, mask_t, oldest_slot, in_ring,
        )  # fmt: skip
    else:
        length = stored
        if CHOSEN:
            length = gl.load(counts + each_query)
            chosen += each_query * table_b
        each = tokens_of_split(length, gl.maximum(splits - EXACT, 1), least, T)
        low = (split - EXACT) * each
        high = gl.minimum(low + each, length)
        hides = _hides_any(mask, n_sinks + low, n_sinks + high, mask_t) if MASK and not CHOSEN else False
        if low < high:
            table += each_query * table_b
            k_head = head_of(K, K_ONCE, (k_planes[0], k_planes[1], k_planes[2]), K_STRIDES, b, h)
            v_head = head_of(V, V_ONCE, (v_planes[0], v_planes[1], v_planes[2]), V_STRIDES, b, h)
            norm = _norm(K, D, K_ONCE, k_head, K_STRIDES, table, chosen, low, high, PAGE, BASE, CHOSEN)
            rope_norm = _norm(V, P, V_ONCE, v_head, V_STRIDES, table, chosen, low, high, PAGE, BASE, CHOSEN)
            unit *= norm * (unit_of(K) / _power(K))
            # Both products have one factor, the larger one: the queries of the other are scaled.
            at = b * (G * queries) + q_row
            own, other, larger = _factors(factors, at, norm, rope_norm)
            x = gl.load(q_latent + (at * D)[:, None] + d).to(gl.float32) * (own / larger)[:, None]
            q.store(x.to(STORED))
            rope_at = b * (G * queries) + qr_row
            rope_own, rope_other, rope_larger = _factors(factors, rope_at, norm, rope_norm)
            y = gl.load(q_rope + (rope_at * P)[:, None] + p).to(gl.float32) * (rope_other / rope_larger)[:, None]
            qr.store(y.to(STORED))
            row += b * (G * queries)
            s_own, s_other, factor = _factors(factors, row, norm, rope_norm)

            K_ROWS: gl.constexpr = _along(D) if HALF_KIND else _across(D // K.per // 2, 4)
            V_ROWS: gl.constexpr = _along(P) if HALF_KIND else _across(P // V.per // 2, 4)
            k_row = gl.arange(0, T, gl.SliceLayout(1, K_ROWS))
            v_row = gl.arange(0, T, gl.SliceLayout(1, V_ROWS))
            k_entry = _entries(table, low, high, k_row, CHOSEN, PAGE, BASE)
            v_entry = _entries(table, low, high, v_row, CHOSEN, PAGE, BASE)
            for i in gl.static_range(2):  # the first two tiles
                begin = low + i * T
                k_at, k_slot = _side(K, D, K_ONCE, k_head, K_STRIDES, k_entry, chosen, begin, high, k_row, PAGE, CHOSEN)
                v_at, v_slot = _side(V, P, V_ONCE, v_head, V_STRIDES, v_entry, chosen, begin, high, v_row, PAGE, CHOSEN)
                if HALF_KIND:
                    _copied(D, k_at, k_slot, K_ROWS, tiles.index(i))
                    _copied(P, v_at, v_slot, V_ROWS, rope_tiles.index(i))
                else:
                    k_stored = _stored(K, K_ONCE, D, k_at, k_slot, K_ROWS, ARCH)
                    v_stored = _stored(V, V_ONCE, P, v_at, v_slot, V_ROWS, ARCH)
                    tiles.index(i).store(_tile(K, D, k_stored, norm, K_ROWS, ARCH))
                    rope_tiles.index(i).store(_tile(V, P, v_stored, rope_norm, V_ROWS, ARCH))
                k_entry = _entries(table, begin + T, high, k_row, CHOSEN, PAGE, BASE)
                v_entry = _entries(table, begin + T, high, v_row, CHOSEN, PAGE, BASE)
            async_copy.wait_group(0)
            _given()
            s = warpgroup_mma_wait(0, [_begun(q, qr, tiles.index(0), rope_tiles.index(0), nothing)])
            here = 0
            for token in range(low, high, T):
                at_token = token + gl.arange(0, T, gl.SliceLayout(0, S_LAYOUT))
                valid = at_token < high
                if MASK and not CHOSEN:
                    if hides:
                        valid = valid & (gl.load(mask + (n_sinks + at_token) * mask_t, mask=valid, other=0) != 0)
                s = gl.where(valid[None, :], s, float("-inf"))
                w, m, l, shrink = _weights(s, factor, m, l, ARCH)
                weights.store(w.to(STORED))
                acc = _shrunk(acc, shrink)
                async_copy.wait_group(0)
                _given()
                begin = token + 2 * T
                k_at, k_slot = _side(K, D, K_ONCE, k_head, K_STRIDES, k_entry, chosen, begin, high, k_row, PAGE, CHOSEN)
                v_at, v_slot = _side(V, P, V_ONCE, v_head, V_STRIDES, v_entry, chosen, begin, high, v_row, PAGE, CHOSEN)
                if not HALF_KIND:  # after the fence, which would wait for these loads
                    k_stored = _stored(K, K_ONCE, D, k_at, k_slot, K_ROWS, ARCH)
                    v_stored = _stored(V, V_ONCE, P, v_at, v_slot, V_ROWS, ARCH)
                k_entry = _entries(table, begin + T, high, k_row, CHOSEN, PAGE, BASE)
                v_entry = _entries(table, begin + T, high, v_row, CHOSEN, PAGE, BASE)
                k, k_rope = tiles.index(here), rope_tiles.index(here)
                acc = warpgroup_mma_wait(0, [warpgroup_mma(weights, k, acc, is_async=True)])
                gl.thread_barrier()  # all warps have read the tile
                if HALF_KIND:
                    _copied(D, k_at, k_slot, K_ROWS, k)
                    _copied(P, v_at, v_slot, V_ROWS, k_rope)
                here = 1 - here
                begun = _begun(q, qr, tiles.index(here), rope_tiles.index(here), nothing)
                if not HALF_KIND:
                    k.store(_tile(K, D, k_stored, norm, K_ROWS, ARCH))
                    k_rope.store(_tile(V, P, v_stored, rope_norm, V_ROWS, ARCH))
                s = warpgroup_mma_wait(0, [begun])
            m += gl.load(factors + row * 3 + 2)
    r = gl.arange(0, T, gl.SliceLayout(1, O_LAYOUT))
    _, live = _row_of(block * T + r, each_query, queries, G, CHOSEN)
    first = (panel * splits + split) * T
    gl.store(part + first * D + (r * D)[:, None] + place[None, :], acc * unit, mask=live[:, None])
    entry = first + gl.arange(0, T, BY_ROW)
    gl.store(tops + entry * 2, m)
    gl.store(tops + entry * 2 + 1, gl.convert_layout(gl.sum(gl.sum(l, 2), 1), BY_ROW))
