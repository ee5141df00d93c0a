"""The fused attention kernel over latents on Hopper: `triton_attend_latents.py` with shared memory, layouts and tensor cores in hand.

One program of two warpgroups has 64 query rows. Shared memory holds these, two tiles of 64 tokens, dequantized, and the weights of one tile.
Products are `wgmma` with both operands in shared memory. They run while the same warps unpack: of the tiles i, i + 1 and i + 2, the first is
multiplied by its weights and the second by the queries, while the third is unpacked into the place that the first has left. Each warpgroup
has half of the channels of the output, and half of the tokens of the scores.

The codes of a tile are loaded into registers an iteration before they are unpacked. A thread has one token, and those of a warp that store at
a time have eight, whose rows have different banks. Tokens of the model's dtype (`half`) are copied to shared memory instead.

Arguments, partial outputs, order of channels and exponents are those of `triton_attend_latents.attend_latents_kernel`."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .attend.triton_attend import _exact_columns, _tiles_of_split, entry_of, head_of, page_of
from .attend.triton_tiles import LARGEST_ZERO, _interleaved, _power, _words
from .device.math import MASKED_SCORE, exp2
from .device.scales import group_scales, scaled, token_scale
from .device.unpack import offset_of, plane_offset, unit_of, unpack

WARPS = 8
TILE = 64
"""Tokens of a tile, and query rows of a program."""


@gluon.constexpr_function
def _across(columns: int, each: int):
    """The layout of `[64, columns]` in which four lanes have a row, `each` elements of it at a time, and eight lanes eight rows."""
    each = min(each, columns)
    lanes = [[1, 0], [2, 0], [4, 0], *([0, each << i] if each << i < columns else [0, 0] for i in range(2))]
    registers = [[0, 1 << i] for i in range(each.bit_length() - 1)]
    registers += [[0, 4 * each << i] for i in range((columns // (4 * each)).bit_length() - 1)] if columns > 4 * each else []
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0], [32, 0]], [], [TILE, columns])


@gluon.constexpr_function
def _along(columns: int):
    """The layout of rows of `columns` numbers of 16 bits in which neighbouring lanes read 16 bytes each."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def _places(layout, dim: int):
    """For divisions of a place in a tile: channels of a word, words, and the places of half a tile."""
    return layout.per, dim // layout.per, dim // 2


@gluon.constexpr_function
def _shared(columns: int):
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16)


@gluon.jit
def _stored(X: gl.constexpr, ONCE: gl.constexpr, D: gl.constexpr, planes, slot, L: gl.constexpr, ARCH: gl.constexpr):
    """Loads what `_tile` unpacks, of the tokens `slot`, int [T], at `planes` (`page_of`): pairs of words of codes, int32 [T, pairs] in the
    layout L; pairs of words of high bits likewise, or codes again; scales of groups, or scale and zero of tokens."""
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
    """Scales of plane `i` of all words, fp16 in the layout of `like`, [T, WORDS], from those of each group."""
    L: gl.constexpr = like.type.layout
    FIRST: gl.constexpr = i * WORDS // X.group
    scale = gl.convert_layout(by_group[FIRST], gl.SliceLayout(1, L))[:, None]
    if WORDS > X.group:
        group = (gl.arange(0, WORDS, gl.SliceLayout(0, L)) // X.group)[None, :]
        scale = tl.broadcast_to(scale, like.shape)
        for n in gl.static_range(1, WORDS // X.group):
            scale = gl.where(group == n, gl.convert_layout(by_group[FIRST + n], gl.SliceLayout(1, L))[:, None], scale)
    return scale


@gluon.jit
def _tile(X: gl.constexpr, D: gl.constexpr, stored, norm, L: gl.constexpr, ARCH: gl.constexpr):
    """Convert the result of `_stored` to numbers, as `triton_tiles._tile` does."""
    codes, bits, scales = stored
    WORDS: gl.constexpr = D // X.per
    PER: gl.constexpr = X.per
    T: gl.constexpr = codes.shape[0]
    w = _words(codes)
    shift = w
    if X.high == 1:
        second = gl.arange(0, WORDS // 2, gl.SliceLayout(0, L)) >= WORDS // 4
        shift = _words(gl.where(second[None, :], -1, codes * 0))
    KIND: gl.constexpr = X.kind
    planes = unpack(KIND, w, _words(bits), shift, ARCH)
    tiles = ()
    if X.group > 0:
        for i in gl.static_range(PER):
            tiles = tiles + (scaled(X, planes[i], _scales_of_plane(X, WORDS, scales, i, planes[i])),)
    else:
        scale, zero = scales
        P: gl.constexpr = gl.SliceLayout(1, planes[0].type.layout)
        offset = 0.0 if X.kind == "int2" else offset_of(X)
        inverse_norm = 1.0 / norm
        factor = (scale * (_power(X) * inverse_norm)).to(gl.float16)
        if X.scale == "pair":
            start = zero * inverse_norm - offset * factor.to(gl.float32)
        else:
            start = factor.to(gl.float32) * -(offset + zero)
        factor = gl.convert_layout(factor, P)[:, None]
        start = gl.convert_layout(start.to(gl.float16), P)[:, None]
        for i in gl.static_range(PER):
            x = planes[i]
            if X.kind == "int2":  # whose planes have offsets of their own
                x = (x - offset_of(X) * plane_offset(X, i)).to(gl.float16)
            tiles = tiles + (gl.fma(x, tl.broadcast_to(factor, x.shape), tl.broadcast_to(start, x.shape)),)
    return _interleaved(tiles, T, WORDS, PER)


@gluon.jit
def _norm(
    X: gl.constexpr, D: gl.constexpr, ONCE: gl.constexpr, planes, strides: gl.constexpr, table, chosen, low, high, PAGE: gl.constexpr,
    BASE: gl.constexpr, CHOSEN: gl.constexpr,
):  # fmt: skip
    """The divisor of the scales and zeros of the tokens from `low` to `high`, as of `triton_tiles._norm`."""
    if X.group > 0 or X.scale == "none":
        return 1.0
    else:
        L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        i = gl.arange(0, 4096, L)
        most = gl.full([4096], 1e-30, gl.float32, L)
        for at in range(low, high, 4096):
            place = gl.minimum(at + i, high - 1)
            entry = entry_of(table, place, place >= 0, CHOSEN if CHOSEN else PAGE, BASE)
            _, _, here = page_of(X, D, ONCE, planes, strides, entry, 0)
            scale, zero = token_scale(X, ONCE, here, _token_of(chosen, place, CHOSEN) % PAGE)
            if X.scale == "pair":
                scale = gl.maximum(scale, gl.abs(zero) / LARGEST_ZERO)
            most = gl.maximum(most, gl.where(scale < 1e30, scale, 0.0))
        return gl.max(most, 0)


@gluon.jit
def _token_of(chosen, place, CHOSEN: gl.constexpr):
    """The tokens at `place`, int [T], among those that are read: their indices in the row's pages."""
    if CHOSEN:
        return gl.load(chosen + place)
    else:
        return place


@gluon.jit
def _side(
    X: gl.constexpr, D: gl.constexpr, ONCE: gl.constexpr, head, strides: gl.constexpr, entry, chosen, begin, high, row, PAGE: gl.constexpr,
    CHOSEN: gl.constexpr,
):  # fmt: skip
    """Pointers to the planes of the tokens `begin + row`, int [T], below `high`, in their pages `entry`, and their slots there."""
    slot = _token_of(chosen, gl.minimum(begin + row, high - 1), CHOSEN) % PAGE
    return page_of(X, D, ONCE, head, strides, entry, 0), slot


@gluon.jit
def _copied(D: gl.constexpr, planes, slot, L: gl.constexpr, shared):
    """Begins to copy the tokens `slot`, int [T], to shared memory, in the layout L."""
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    async_copy.async_copy_global_to_shared(shared, (planes[0] + slot * D)[:, None] + d[None, :])
    async_copy.commit_group()


@gluon.jit
def _row_of(r, each_query, queries, G: gl.constexpr, CHOSEN: gl.constexpr):
    """The query rows `r`, int [R], of a program, and which there are."""
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
    """The entries of the pages of the tokens `begin + row`, int [T], below `high`: one, or [T] of chosen tokens."""
    if CHOSEN:
        return entry_of(table, gl.minimum(begin + row, high - 1), row >= 0, 1, BASE)
    else:
        return entry_of(table, gl.minimum(begin, high - 1), True, PAGE, BASE)


@gluon.jit
def _hides(mask, begin, end, mask_stride):
    """Whether the mask hides any column from `begin` to `end`, as of `triton_attend._hides`."""
    i = gl.arange(0, 1024, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    shown = (i * 0 + 1).to(gl.uint8)
    for at in range(begin, end, 1024):
        shown = shown & gl.load(mask + (at + i) * mask_stride, mask=at + i < end, other=1)
    return gl.min(shown.to(gl.int32), 0) == 0


@gluon.jit
def _weights(s, factor, m, l, ARCH: gl.constexpr):
    """Softmax of scores `s`, fp32 [R, T], to base 2 once multiplied by `factor`, [R]: the weights, the new maximum, [R], and normaliser,
    [R, 2, 4]: one of each thread; and what the sums so far shrink by."""
    top = gl.maximum(m, gl.max(s, 1) * factor)
    shrink = exp2(m - top, ARCH)
    w = exp2(s * factor[:, None] - top[:, None], ARCH)
    own = gl.sum(gl.sum(gl.reshape(w, [w.shape[0], 2, w.shape[1] // 16, 4, 2]), 4), 2)
    by_thread: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, own.type.layout))
    l = gl.convert_layout(l, own.type.layout) * gl.expand_dims(gl.expand_dims(gl.convert_layout(shrink, by_thread), 1), 2) + own
    return w, top, l, shrink


@gluon.jit
def _shrunk(acc, shrink):
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _begun(q, q_rope, k, k_rope, zero):
    """Begins the products of queries and a tile: two groups of `wgmma`."""
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(q_rope, k_rope.permute((1, 0)), s, is_async=True)


@gluon.jit
def _given():
    """What all threads have written to shared memory is read by `wgmma` from here on."""
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _exact_tiles(
    D: gl.constexpr, P: gl.constexpr, MASK: gl.constexpr, ARCH: gl.constexpr, RING: gl.constexpr, S_LAYOUT: gl.constexpr,
    state, q, q_rope, k, k_rope, weights, factor, latents, latent_stride, ropes, rope_stride, tokens, start, newest, mask, mask_stride,
    oldest_slot, count,
):  # fmt: skip
    """Adds tokens in the model's dtype to `state`. Arguments as of `triton_attend_latents._exact_tiles`; k, k_rope, weights: shared memory."""
    m, l, acc = state
    T: gl.constexpr = k.shape[0]
    BY_TOKEN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    t = gl.arange(0, T, gl.SliceLayout(1, _along(D)))
    u = gl.arange(0, T, gl.SliceLayout(1, _along(P)))
    d = gl.arange(0, D, gl.SliceLayout(0, _along(D)))
    p = gl.arange(0, P, gl.SliceLayout(0, _along(P)))
    for begin in range(0, tokens, T):
        gl.thread_barrier()
        k.store(gl.load(latents + (begin + t)[:, None] * latent_stride + d[None, :], mask=(begin + t < tokens)[:, None], other=0.0))
        k_rope.store(gl.load(ropes + (begin + u)[:, None] * rope_stride + p[None, :], mask=(begin + u < tokens)[:, None], other=0.0))
        _given()
        s = warpgroup_mma_wait(0, [_begun(q, q_rope, k, k_rope, gl.zeros([T, T], gl.float32, S_LAYOUT))])
        valid, column = _exact_columns(begin + gl.arange(0, T, BY_TOKEN), tokens, start, oldest_slot, count, RING)
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
        "scaling", "n_sinks", "n_quantized", "n_residual", "least", "queries", "table_b", "rows_b", "lengths_b", "mask_b",
        "mask_q", "mask_t",
    ]
)  # fmt: skip
def attend_latents_kernel(
    query, q_latent, q_rope, factors, table, chosen, counts, rows, lengths, k_planes, v_planes, exact, mask, part,
    query_b, query_h, query_q, table_b, rows_b, lengths_b, exact_strides, mask_b, mask_q, mask_t,
    scaling, n_sinks, n_quantized, n_residual, least, queries,
    K: gl.constexpr, V: gl.constexpr, D: gl.constexpr, P: gl.constexpr, G: gl.constexpr, R: gl.constexpr, T: gl.constexpr,
    TX: gl.constexpr, PAGE: gl.constexpr, BASE: gl.constexpr, COUNTED: gl.constexpr, K_ONCE: gl.constexpr, V_ONCE: gl.constexpr,
    k_strides: gl.constexpr, v_strides: gl.constexpr, MASK: gl.constexpr, CAUSAL: gl.constexpr, ARCH: gl.constexpr, EXACT: gl.constexpr,
    CHOSEN: gl.constexpr,
):  # fmt: skip
    """Arguments as of `triton_attend_latents.attend_latents_kernel`; R and T are 64."""
    HALF_KIND: gl.constexpr = K.kind == "half"
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, T // 2, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    BY_TOKEN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    split = gl.num_programs(0) - 1 - gl.program_id(0)  # the exact tokens, of which there are few, last
    block = gl.program_id(1)
    each_query = gl.program_id(2).to(gl.int64)
    b = each_query
    h = gl.program_id(2) * 0  # there is one head
    splits = gl.num_programs(0)
    if CHOSEN:
        b = each_query // queries
        mask += each_query % queries * mask_q
    length, oldest_slot, in_ring = n_quantized, 0, n_residual
    if COUNTED:
        rows += b * rows_b
        length = gl.load(lengths + b * lengths_b)
        n_sinks = gl.load(rows + 3)
        oldest_slot = gl.load(rows + 4)
        in_ring = gl.load(rows + 5)
    if MASK:
        mask += b * mask_b
    panel = each_query * gl.num_programs(1) + block

    DTYPE: gl.constexpr = query.dtype.element_ty
    STORED: gl.constexpr = DTYPE if HALF_KIND else gl.float16
    q_shared = gl.allocate_shared_memory(STORED, [R, D], _shared(D))
    q_rope_shared = gl.allocate_shared_memory(STORED, [R, P], _shared(P))
    k_shared = gl.allocate_shared_memory(STORED, [2, T, D], _shared(D))
    k_rope_shared = gl.allocate_shared_memory(STORED, [2, T, P], _shared(P))
    weights = gl.allocate_shared_memory(STORED, [R, T], _shared(T))

    row, _ = _row_of(block * R + gl.arange(0, R, BY_ROW), each_query, queries, G, CHOSEN)
    x_row, _ = _row_of(block * R + gl.arange(0, R, gl.SliceLayout(1, _along(D))), each_query, queries, G, CHOSEN)
    y_row, _ = _row_of(block * R + gl.arange(0, R, gl.SliceLayout(1, _along(P))), each_query, queries, G, CHOSEN)
    d = gl.arange(0, D, gl.SliceLayout(0, _along(D)))
    p = gl.arange(0, P, gl.SliceLayout(0, _along(P)))
    m = gl.full([R], MASKED_SCORE, gl.float32, BY_ROW)
    nothing = gl.zeros([R, T], gl.float32, S_LAYOUT)
    l = gl.sum(gl.sum(gl.reshape(nothing, [R, 2, T // 16, 4, 2]), 4), 2)
    acc = gl.zeros([R, D], gl.float32, O_LAYOUT)
    o_row, live = _row_of(block * R + gl.arange(0, R, gl.SliceLayout(1, O_LAYOUT)), each_query, queries, G, CHOSEN)
    o = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    out = part + (panel * splits + split) * (R * D)
    out = out + (gl.arange(0, R, gl.SliceLayout(1, O_LAYOUT)) * D)[:, None]

    if EXACT and split == 0:
        xq = q_shared._reinterpret(DTYPE, [R, D], _shared(D))
        xr = q_rope_shared._reinterpret(DTYPE, [R, P], _shared(P))
        xk = k_shared.index(0)._reinterpret(DTYPE, [T, D], _shared(D))
        xkr = k_rope_shared.index(0)._reinterpret(DTYPE, [T, P], _shared(P))
        xw = weights._reinterpret(DTYPE, [R, T], _shared(T))
        at = query + b * query_b + (x_row // queries * query_h + x_row % queries * query_q)
        xq.store(gl.load(at[:, None] + d[None, :]))
        at = query + b * query_b + (y_row // queries * query_h + y_row % queries * query_q)
        xr.store(gl.load(at[:, None] + (D + p)[None, :]))
        number = row % queries
        newest = n_sinks + length + in_ring - 1 + number * 0
        if CAUSAL:
            newest = n_sinks + length + in_ring - (queries - number)
        factor = gl.full([R], 1.0, gl.float32, BY_ROW) * scaling
        state = m, l, acc
        state = _exact_tiles(
            D, P, MASK, ARCH, False, S_LAYOUT, state, xq, xr, xk, xkr, xw, factor, exact[0] + b * exact_strides[0], exact_strides[2],
            exact[1] + b * exact_strides[3], exact_strides[5], n_sinks, 0, newest, mask, mask_t, 0, 0,
        )  # fmt: skip
        m, l, acc = _exact_tiles(
            D, P, MASK, ARCH, COUNTED, S_LAYOUT, state, xq, xr, xk, xkr, xw, factor, exact[2] + b * exact_strides[6], exact_strides[8],
            exact[3] + b * exact_strides[9], exact_strides[11], n_residual, n_sinks + length, newest, mask, mask_t, oldest_slot, in_ring,
        )  # fmt: skip
        gl.store(out + o[None, :], acc, mask=live[:, None])
    else:
        if CHOSEN:
            length = gl.load(counts + each_query)
            chosen += each_query * table_b
        each = _tiles_of_split(length, gl.maximum(splits - EXACT, 1), least, T)
        low = (split - EXACT) * each
        high = gl.minimum(low + each, length)
        hides = _hides(mask, n_sinks + low, n_sinks + high, mask_t) if MASK and not CHOSEN else False
        unit = 1e-30  # that of the output
        if low < high:
            table += each_query * table_b
            k_head = head_of(K, K_ONCE, (k_planes[0], k_planes[1], k_planes[2]), k_strides, b, h)
            v_head = head_of(V, V_ONCE, (v_planes[0], v_planes[1], v_planes[2]), v_strides, b, h)
            unit = gl.maximum(_norm(K, D, K_ONCE, k_head, k_strides, table, chosen, low, high, PAGE, BASE, CHOSEN), unit)
            rope_norm = _norm(V, P, V_ONCE, v_head, v_strides, table, chosen, low, high, PAGE, BASE, CHOSEN)
            # Both products have one factor, the larger one: the queries of the other are scaled.
            own, other, factor = _factors(factors, b * (G * queries) + row, unit, rope_norm)
            center = gl.load(factors + (b * (G * queries) + row) * 3 + 2)
            q_row = b * (G * queries) + x_row
            own, other, common = _factors(factors, q_row, unit, rope_norm)
            x = gl.load(q_latent + q_row[:, None] * D + d[None, :]).to(gl.float32) * (own / common)[:, None]
            q_shared.store(x.to(STORED))
            q_row = b * (G * queries) + y_row
            own, other, common = _factors(factors, q_row, unit, rope_norm)
            x = gl.load(q_rope + q_row[:, None] * P + p[None, :]).to(gl.float32) * (other / common)[:, None]
            q_rope_shared.store(x.to(STORED))

            K_ROWS: gl.constexpr = _along(D) if HALF_KIND else _across(D // K.per // 2, 4)
            V_ROWS: gl.constexpr = _along(P) if HALF_KIND else _across(P // V.per // 2, 4)
            k_row = gl.arange(0, T, gl.SliceLayout(1, K_ROWS))
            v_row = gl.arange(0, T, gl.SliceLayout(1, V_ROWS))
            t = gl.arange(0, T, BY_TOKEN)
            for i in gl.static_range(2):  # the first two tiles
                begin = low + i * T
                entry = _entries(table, begin, high, k_row, CHOSEN, PAGE, BASE)
                planes, slot = _side(K, D, K_ONCE, k_head, k_strides, entry, chosen, begin, high, k_row, PAGE, CHOSEN)
                if HALF_KIND:
                    _copied(D, planes, slot, K_ROWS, k_shared.index(i))
                else:
                    k_shared.index(i).store(_tile(K, D, _stored(K, K_ONCE, D, planes, slot, K_ROWS, ARCH), unit, K_ROWS, ARCH))
                entry = _entries(table, begin, high, v_row, CHOSEN, PAGE, BASE)
                planes, slot = _side(V, P, V_ONCE, v_head, v_strides, entry, chosen, begin, high, v_row, PAGE, CHOSEN)
                if HALF_KIND:
                    _copied(P, planes, slot, V_ROWS, k_rope_shared.index(i))
                else:
                    k_rope_shared.index(i).store(_tile(V, P, _stored(V, V_ONCE, P, planes, slot, V_ROWS, ARCH), rope_norm, V_ROWS, ARCH))
            begin = low + 2 * T
            k_entry = _entries(table, begin, high, k_row, CHOSEN, PAGE, BASE)
            v_entry = _entries(table, begin, high, v_row, CHOSEN, PAGE, BASE)
            if not HALF_KIND:
                planes, slot = _side(K, D, K_ONCE, k_head, k_strides, k_entry, chosen, begin, high, k_row, PAGE, CHOSEN)
                k_stored = _stored(K, K_ONCE, D, planes, slot, K_ROWS, ARCH)
                planes, slot = _side(V, P, V_ONCE, v_head, v_strides, v_entry, chosen, begin, high, v_row, PAGE, CHOSEN)
                v_stored = _stored(V, V_ONCE, P, planes, slot, V_ROWS, ARCH)
                k_entry = _entries(table, begin + T, high, k_row, CHOSEN, PAGE, BASE)
                v_entry = _entries(table, begin + T, high, v_row, CHOSEN, PAGE, BASE)
            async_copy.wait_group(0)
            _given()
            s = warpgroup_mma_wait(0, [_begun(q_shared, q_rope_shared, k_shared.index(0), k_rope_shared.index(0), nothing)])
            here = 0
            for token in range(low, high, T):
                valid = token + t < high
                if MASK and not CHOSEN:
                    if hides:
                        valid = valid & (gl.load(mask + (n_sinks + token + t) * mask_t, mask=valid, other=0) != 0)
                s = gl.where(valid[None, :], s, float("-inf"))
                w, m, l, shrink = _weights(s, factor, m, l, ARCH)
                weights.store(w.to(STORED))
                acc = _shrunk(acc, shrink)
                async_copy.wait_group(0)
                _given()
                k, k_rope = k_shared.index(here), k_rope_shared.index(here)
                summed = warpgroup_mma(weights, k, acc, is_async=True)
                begun = _begun(q_shared, q_rope_shared, k_shared.index(1 - here), k_rope_shared.index(1 - here), nothing)
                acc = warpgroup_mma_wait(2, [summed])
                gl.thread_barrier()  # all warps have read the tile
                begin = token + (2 if HALF_KIND else 3) * T
                if not HALF_KIND:
                    k.store(_tile(K, D, k_stored, unit, K_ROWS, ARCH))
                    k_rope.store(_tile(V, P, v_stored, rope_norm, V_ROWS, ARCH))
                planes, slot = _side(K, D, K_ONCE, k_head, k_strides, k_entry, chosen, begin, high, k_row, PAGE, CHOSEN)
                if HALF_KIND:
                    _copied(D, planes, slot, K_ROWS, k)
                else:
                    k_stored = _stored(K, K_ONCE, D, planes, slot, K_ROWS, ARCH)
                planes, slot = _side(V, P, V_ONCE, v_head, v_strides, v_entry, chosen, begin, high, v_row, PAGE, CHOSEN)
                if HALF_KIND:
                    _copied(P, planes, slot, V_ROWS, k_rope)
                else:
                    v_stored = _stored(V, V_ONCE, P, planes, slot, V_ROWS, ARCH)
                k_entry = _entries(table, begin + T, high, k_row, CHOSEN, PAGE, BASE)
                v_entry = _entries(table, begin + T, high, v_row, CHOSEN, PAGE, BASE)
                s = warpgroup_mma_wait(0, [begun])
                here = 1 - here
            m += center
        PER: gl.constexpr = _places(K, D)[0]
        WORDS: gl.constexpr = _places(K, D)[1]
        HALF: gl.constexpr = _places(K, D)[2]
        place = o
        if not HALF_KIND:
            word = o // (4 * PER) % (WORDS // 8) * 8 + o // HALF * 4 + o // (2 * PER) % 2 * 2 + o % 2
            place = o // 2 % PER * WORDS + word  # plane after plane, as `reduce_kernel` reads them
        gl.store(out + place[None, :], acc * (unit * (unit_of(K) / _power(K))), mask=live[:, None])
    entry = (panel * splits + split) * R + gl.arange(0, R, BY_ROW)
    entries = gl.num_programs(2).to(gl.int64) * gl.num_programs(1) * (splits * R)
    gl.store(part + (entries * D + entry), m)
    total = gl.sum(gl.sum(l, 2), 1)
    gl.store(part + (entries * (D + 1) + entry), gl.convert_layout(total, BY_ROW))
