"""The fused attention kernel over latents on Hopper: `triton_attend_latents.py` with shared memory, layouts and warps in hand.

A program has 64 query rows. Shared memory holds these, and two tiles of 64 tokens. One warpgroup fills the tiles: it unpacks codes to fp16, or
copies tokens of the model's dtype. Two others attend to them, by `wgmma`: each computes the scores of all rows, whose weights are then in the
registers where the second product wants them, and has half of the channels of the output. The two do not wait for each other, so that one
multiplies while the other computes weights.

The codes of a tile are loaded into registers a tile before they are unpacked. The lanes of a warp that store at a time have eight tokens,
whose rows have different banks.

Arguments, partial outputs, order of channels and exponents are those of `triton_attend_latents.attend_latents_kernel`."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .attend.triton_attend import _exact_columns, _tiles_of_split, entry_of, head_of, page_of
from .attend.triton_tiles import LARGEST_ZERO, _interleaved, _power, _words
from .device.math import MASKED_SCORE, exp2
from .device.scales import group_scales, scaled, token_scale
from .device.unpack import offset_of, plane_offset, unit_of, unpack

TILE = gl.constexpr(64)
"""Tokens of a tile, and query rows of a program."""
WARPS = gl.constexpr(4)
"""Warps of a warpgroup."""
UNPACKING_REGISTERS = gl.constexpr(104)
ATTENDING_REGISTERS = gl.constexpr(200)
"""Registers of a thread of each warpgroup; a program has 504 of three threads."""


@gluon.constexpr_function
def _across(columns: int, each: int):
    """The layout of `[64, columns]` in which four lanes have a row, `each` elements of it at a time, and eight lanes eight rows."""
    each = min(each, columns)
    lanes = [[1, 0], [2, 0], [4, 0], *([0, each << i] if each << i < columns else [0, 0] for i in range(2))]
    registers = [[0, 1 << i] for i in range(each.bit_length() - 1)]
    registers += [[0, 4 * each << i] for i in range((columns // (4 * each)).bit_length() - 1)] if columns > 4 * each else []
    return gl.DistributedLinearLayout([*registers, [32, 0]], lanes, [[8, 0], [16, 0]], [], [64, columns])


@gluon.constexpr_function
def _along(columns: int):
    """The layout of rows of `columns` numbers of 16 bits in which neighbouring lanes read 16 bytes each."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def _shared(columns: int):
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16)


@gluon.constexpr_function
def _places(layout, dim: int):
    """For divisions of a place in a tile: channels of a word, words, and the places of half a tile."""
    return layout.per, dim // layout.per, dim // 2


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
        N: gl.constexpr = 512 if CHOSEN else 4096
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
def _given():
    """What all threads have written to shared memory, `wgmma` may read from here on."""
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _hides(mask, begin, end, mask_stride):
    """Whether the mask hides any column from `begin` to `end`, as of `triton_attend._hides`."""
    i = gl.arange(0, 1024, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    shown = (i * 0 + 1).to(gl.uint8)
    for at in range(begin, end, 1024):
        shown = shown & gl.load(mask + (at + i) * mask_stride, mask=at + i < end, other=1)
    return gl.min(shown.to(gl.int32), 0) == 0


@gluon.jit
def _unpacked(
    K: gl.constexpr, V: gl.constexpr, D: gl.constexpr, P: gl.constexpr, K_ONCE: gl.constexpr, V_ONCE: gl.constexpr, k_strides: gl.constexpr,
    v_strides: gl.constexpr, PAGE: gl.constexpr, BASE: gl.constexpr, CHOSEN: gl.constexpr, ARCH: gl.constexpr,
    k, k_rope, full, empty, k_head, v_head, table, chosen, low, high, unit, rope_norm,
):  # fmt: skip
    """Fills the tiles k and k_rope, in turns, with the quantized tokens from `low` to `high`. `empty` and `full` say whose turn it is."""
    T: gl.constexpr = TILE
    K_ROWS: gl.constexpr = _across(D // K.per // 2, 4)
    V_ROWS: gl.constexpr = _across(P // V.per // 2, 4)
    k_row = gl.arange(0, T, gl.SliceLayout(1, K_ROWS))
    v_row = gl.arange(0, T, gl.SliceLayout(1, V_ROWS))
    if low < high:
        k_entry = _entries(table, low, high, k_row, CHOSEN, PAGE, BASE)
        v_entry = _entries(table, low, high, v_row, CHOSEN, PAGE, BASE)
        planes, slot = _side(K, D, K_ONCE, k_head, k_strides, k_entry, chosen, low, high, k_row, PAGE, CHOSEN)
        k_stored = _stored(K, K_ONCE, D, planes, slot, K_ROWS, ARCH)
        planes, slot = _side(V, P, V_ONCE, v_head, v_strides, v_entry, chosen, low, high, v_row, PAGE, CHOSEN)
        v_stored = _stored(V, V_ONCE, P, planes, slot, V_ROWS, ARCH)
        k_entry = _entries(table, low + T, high, k_row, CHOSEN, PAGE, BASE)
        v_entry = _entries(table, low + T, high, v_row, CHOSEN, PAGE, BASE)
        for i in range(gl.cdiv(high - low, T)):
            here = i % 2
            mbarrier.wait(empty.index(here), i // 2 % 2 ^ 1)
            k.index(here).store(_tile(K, D, k_stored, unit, K_ROWS, ARCH))
            k_rope.index(here).store(_tile(V, P, v_stored, rope_norm, V_ROWS, ARCH))
            _filled(full.index(here))
            # After the fence, which would wait for these loads.
            begin = low + (i + 1) * T
            planes, slot = _side(K, D, K_ONCE, k_head, k_strides, k_entry, chosen, begin, high, k_row, PAGE, CHOSEN)
            k_stored = _stored(K, K_ONCE, D, planes, slot, K_ROWS, ARCH)
            planes, slot = _side(V, P, V_ONCE, v_head, v_strides, v_entry, chosen, begin, high, v_row, PAGE, CHOSEN)
            v_stored = _stored(V, V_ONCE, P, planes, slot, V_ROWS, ARCH)
            k_entry = _entries(table, begin + T, high, k_row, CHOSEN, PAGE, BASE)
            v_entry = _entries(table, begin + T, high, v_row, CHOSEN, PAGE, BASE)


@gluon.jit
def _copied(
    K: gl.constexpr, V: gl.constexpr, D: gl.constexpr, P: gl.constexpr, K_ONCE: gl.constexpr, V_ONCE: gl.constexpr, k_strides: gl.constexpr,
    v_strides: gl.constexpr, PAGE: gl.constexpr, BASE: gl.constexpr, CHOSEN: gl.constexpr, ARCH: gl.constexpr,
    k, k_rope, full, empty, k_head, v_head, table, chosen, low, high, unit, rope_norm,
):  # fmt: skip
    """`_unpacked` of tokens in the model's dtype: a tile is said to be full when the copy of the next one has begun."""
    T: gl.constexpr = TILE
    K_ROWS: gl.constexpr = _along(D)
    V_ROWS: gl.constexpr = _along(P)
    k_row = gl.arange(0, T, gl.SliceLayout(1, K_ROWS))
    v_row = gl.arange(0, T, gl.SliceLayout(1, V_ROWS))
    d = gl.arange(0, D, gl.SliceLayout(0, K_ROWS))
    p = gl.arange(0, P, gl.SliceLayout(0, V_ROWS))
    if low < high:
        k_entry = _entries(table, low, high, k_row, CHOSEN, PAGE, BASE)
        v_entry = _entries(table, low, high, v_row, CHOSEN, PAGE, BASE)
        tiles = gl.cdiv(high - low, T)
        for i in range(tiles + 1):
            here = i % 2
            if i < tiles:
                mbarrier.wait(empty.index(here), i // 2 % 2 ^ 1)
                begin = low + i * T
                planes, slot = _side(K, D, K_ONCE, k_head, k_strides, k_entry, chosen, begin, high, k_row, PAGE, CHOSEN)
                async_copy.async_copy_global_to_shared(k.index(here), (planes[0] + slot * D)[:, None] + d[None, :])
                planes, slot = _side(V, P, V_ONCE, v_head, v_strides, v_entry, chosen, begin, high, v_row, PAGE, CHOSEN)
                async_copy.async_copy_global_to_shared(k_rope.index(here), (planes[0] + slot * P)[:, None] + p[None, :])
            async_copy.commit_group()
            k_entry = _entries(table, low + (i + 1) * T, high, k_row, CHOSEN, PAGE, BASE)
            v_entry = _entries(table, low + (i + 1) * T, high, v_row, CHOSEN, PAGE, BASE)
            if i > 0:
                async_copy.wait_group(1)
                _filled(full.index(1 - here))


@gluon.jit
def _exact(D: gl.constexpr, P: gl.constexpr, k, k_rope, full, empty, exact, strides, b, n_sinks, n_residual):
    """`_unpacked` of the exact tokens: tiles of sinks, and then of the ring."""
    T: gl.constexpr = TILE
    t = gl.arange(0, T, gl.SliceLayout(1, _along(D)))
    u = gl.arange(0, T, gl.SliceLayout(1, _along(P)))
    d = gl.arange(0, D, gl.SliceLayout(0, _along(D)))
    p = gl.arange(0, P, gl.SliceLayout(0, _along(P)))
    of_sinks = gl.cdiv(n_sinks, T)
    for i in range(of_sinks + gl.cdiv(n_residual, T)):
        latents, ropes, latent_stride, rope_stride = exact[2] + b * strides[6], exact[3] + b * strides[9], strides[8], strides[11]
        begin, tokens = (i - of_sinks) * T, n_residual
        if i < of_sinks:
            latents, ropes, latent_stride, rope_stride = exact[0] + b * strides[0], exact[1] + b * strides[3], strides[2], strides[5]
            begin, tokens = i * T, n_sinks
        here = i % 2
        mbarrier.wait(empty.index(here), i // 2 % 2 ^ 1)
        at = (begin + t)[:, None]
        k.index(here).store(gl.load(latents + at * latent_stride + d[None, :], mask=at < tokens, other=0.0))
        at = (begin + u)[:, None]
        k_rope.index(here).store(gl.load(ropes + at * rope_stride + p[None, :], mask=at < tokens, other=0.0))
        _filled(full.index(here))


@gluon.jit
def _filled(full):
    """Says that the warpgroup has filled a tile."""
    _given()
    mbarrier.arrive(full)


@gluon.jit
def _attended(
    W: gl.constexpr, K: gl.constexpr, D: gl.constexpr, P: gl.constexpr, G: gl.constexpr, EXACT: gl.constexpr, MASK: gl.constexpr,
    CAUSAL: gl.constexpr, CHOSEN: gl.constexpr, ARCH: gl.constexpr, shared, results, given,
):  # fmt: skip
    """Attends to the tiles k and k_rope: the quantized tokens from `low` to `high`, or with EXACT the exact ones, of which sinks have tiles of
    their own. Stores half W of the channels of the output at `out`, [R, D], and maxima and normalisers at `tops` and `totals`, [R]."""
    q, q_rope, k, k_rope, full, empty = shared
    out, tops, totals = results
    factors, unit, rope_norm, scaling, block, each_query, b, queries, low, high = given[:10]
    n_sinks, n_residual, in_ring, oldest_slot, stored, mask, mask_t, hides = given[10:]
    T: gl.constexpr = TILE
    R: gl.constexpr = TILE
    N: gl.constexpr = D // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, T, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OF_OUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    t = gl.arange(0, T, gl.SliceLayout(0, S_LAYOUT))
    r = gl.arange(0, R, BY_ROW)
    row, _ = _row_of(block * R + r, each_query, queries, G, CHOSEN)
    if EXACT:
        factor = gl.full([R], 1.0, gl.float32, BY_ROW) * scaling
        of_sinks = gl.cdiv(n_sinks, T)
        tiles = of_sinks + gl.cdiv(n_residual, T)
        newest = n_sinks + stored + in_ring - 1 + row * 0
        if CAUSAL:
            newest = n_sinks + stored + in_ring - (queries - row % queries)
    else:
        _, _, factor = _factors(factors, b * (G * queries) + row, unit, rope_norm)
        tiles = gl.cdiv(high - low, T)
    m = gl.full([R], MASKED_SCORE, gl.float32, BY_ROW)
    l = gl.zeros([R], gl.float32, BY_ROW)
    acc = gl.zeros([R, N], gl.float32, O_LAYOUT)
    for i in range(tiles):
        here = i % 2
        mbarrier.wait(full.index(here), i // 2 % 2)
        s = warpgroup_mma(q, k.index(here).permute((1, 0)), gl.zeros([R, T], gl.float32, S_LAYOUT), use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [warpgroup_mma(q_rope, k_rope.index(here).permute((1, 0)), s, is_async=True)])
        if EXACT:
            begin, count, slots, oldest, start = (i - of_sinks) * T, in_ring, n_residual, oldest_slot, n_sinks + stored
            if i < of_sinks:
                begin, count, slots, oldest, start = i * T, n_sinks, n_sinks, oldest_slot * 0, n_sinks * 0
            valid, column = _exact_columns(begin + t, slots, start, oldest, count, True)
            if MASK:
                valid = valid & (gl.load(mask + column * mask_t, mask=valid, other=0) != 0)
            s = gl.where(valid[None, :] & (column[None, :] <= newest[:, None]), s, float("-inf"))
        else:
            token = low + i * T + t
            valid = token < high
            if MASK and not CHOSEN:
                if hides:
                    valid = valid & (gl.load(mask + (n_sinks + token) * mask_t, mask=valid, other=0) != 0)
            s = gl.where(valid[None, :], s, float("-inf"))
        top = gl.maximum(m, gl.max(s, 1) * factor)
        shrink = exp2(m - top, ARCH)
        w = exp2(s * factor[:, None] - top[:, None], ARCH)
        l = l * shrink + gl.sum(w, 1)
        m = top
        w = gl.convert_layout(w.to(k.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        acc = acc * gl.convert_layout(shrink, OF_OUT)[:, None]
        acc = warpgroup_mma(w, k.index(here).slice(W * N, N, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        gl.thread_barrier()  # all warps have read the tile
        mbarrier.arrive(empty.index(here))
    o = W * N + gl.arange(0, N, gl.SliceLayout(0, O_LAYOUT))
    place = o
    if EXACT:
        outwards = 1.0
    else:
        m += gl.load(factors + (b * (G * queries) + row) * 3 + 2)
        outwards = unit * (unit_of(K) / _power(K))
        if K.kind != "half":
            PER: gl.constexpr = _places(K, D)[0]
            WORDS: gl.constexpr = _places(K, D)[1]
            HALF: gl.constexpr = _places(K, D)[2]
            word = o // (4 * PER) % (WORDS // 8) * 8 + o // HALF * 4 + o // (2 * PER) % 2 * 2 + o % 2
            place = o // 2 % PER * WORDS + word  # plane after plane, as `reduce_kernel` reads them
    p = gl.arange(0, R, OF_OUT)
    _, live = _row_of(block * R + p, each_query, queries, G, CHOSEN)
    gl.store(out + (p * D)[:, None] + place[None, :], acc * outwards, mask=live[:, None])
    if W == 0:
        gl.store(tops + r, m)
        gl.store(totals + r, l)


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
    split = gl.num_programs(0) - 1 - gl.program_id(0)  # the exact tokens, of which there are few, last
    block = gl.program_id(1)
    each_query = gl.program_id(2).to(gl.int64)
    b = each_query
    h = gl.program_id(2) * 0  # there is one head
    splits = gl.num_programs(0)
    if CHOSEN:
        b = each_query // queries
        mask += each_query % queries * mask_q
    stored, oldest_slot, in_ring = n_quantized, gl.to_tensor(0), n_residual
    if COUNTED:
        rows += b * rows_b
        stored = gl.load(lengths + b * lengths_b)
        n_sinks = gl.load(rows + 3)
        oldest_slot = gl.load(rows + 4)
        in_ring = gl.load(rows + 5)
    if MASK:
        mask += b * mask_b
    panel = each_query * gl.num_programs(1) + block
    out = part + (panel * splits + split) * (R * D)
    entries = gl.num_programs(2).to(gl.int64) * gl.num_programs(1) * (splits * R)
    tops = part + (entries * D + (panel * splits + split) * R)
    totals = tops + entries

    DTYPE: gl.constexpr = query.dtype.element_ty
    STORED: gl.constexpr = DTYPE if K.kind == "half" else gl.float16
    q = gl.allocate_shared_memory(STORED, [R, D], _shared(D))
    qr = gl.allocate_shared_memory(STORED, [R, P], _shared(P))
    k = gl.allocate_shared_memory(STORED, [2, T, D], _shared(D))
    k_rope = gl.allocate_shared_memory(STORED, [2, T, P], _shared(P))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)

    x_row, _ = _row_of(block * R + gl.arange(0, R, gl.SliceLayout(1, _along(D))), each_query, queries, G, CHOSEN)
    y_row, _ = _row_of(block * R + gl.arange(0, R, gl.SliceLayout(1, _along(P))), each_query, queries, G, CHOSEN)
    d = gl.arange(0, D, gl.SliceLayout(0, _along(D)))
    p = gl.arange(0, P, gl.SliceLayout(0, _along(P)))
    results = out, tops, totals
    if EXACT and split == 0:
        xq = q._reinterpret(DTYPE, [R, D], _shared(D))
        xr = qr._reinterpret(DTYPE, [R, P], _shared(P))
        xk = k._reinterpret(DTYPE, [2, T, D], _shared(D))
        xkr = k_rope._reinterpret(DTYPE, [2, T, P], _shared(P))
        at = query + b * query_b + (x_row // queries * query_h + x_row % queries * query_q)
        xq.store(gl.load(at[:, None] + d[None, :]))
        at = query + b * query_b + (y_row // queries * query_h + y_row % queries * query_q)
        xr.store(gl.load(at[:, None] + (D + p)[None, :]))
        _given()
        x_shared = xq, xr, xk, xkr, full, empty
        x_given = (
            factors, 1.0, 1.0, scaling, block, each_query, b, queries, 0, 0, n_sinks, n_residual, in_ring, oldest_slot, stored, mask, mask_t,
            False,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (_attended, (0, K, D, P, G, True, MASK, CAUSAL, CHOSEN, ARCH, x_shared, results, x_given)),
                (_attended, (1, K, D, P, G, True, MASK, CAUSAL, CHOSEN, ARCH, x_shared, results, x_given)),
                (_exact, (D, P, xk, xkr, full, empty, exact, exact_strides, b, n_sinks, n_residual)),
            ],
            [WARPS, WARPS],
            [ATTENDING_REGISTERS, UNPACKING_REGISTERS],
        )
    else:
        length = stored
        if CHOSEN:
            length = gl.load(counts + each_query)
            chosen += each_query * table_b
        each = _tiles_of_split(length, gl.maximum(splits - EXACT, 1), least, T)
        low = (split - EXACT) * each
        high = gl.minimum(low + each, length)
        hides = _hides(mask, n_sinks + low, n_sinks + high, mask_t) if MASK and not CHOSEN else False
        table += each_query * table_b
        k_head = head_of(K, K_ONCE, (k_planes[0], k_planes[1], k_planes[2]), k_strides, b, h)
        v_head = head_of(V, V_ONCE, (v_planes[0], v_planes[1], v_planes[2]), v_strides, b, h)
        unit = _norm(K, D, K_ONCE, k_head, k_strides, table, chosen, low, high, PAGE, BASE, CHOSEN)
        rope_norm = _norm(V, P, V_ONCE, v_head, v_strides, table, chosen, low, high, PAGE, BASE, CHOSEN)
        # Both products have one factor, the larger one: the queries of the other are scaled.
        q_row = b * (G * queries) + x_row
        own, other, common = _factors(factors, q_row, unit, rope_norm)
        x = gl.load(q_latent + q_row[:, None] * D + d[None, :]).to(gl.float32) * (own / common)[:, None]
        q.store(x.to(STORED))
        q_row = b * (G * queries) + y_row
        own, other, common = _factors(factors, q_row, unit, rope_norm)
        x = gl.load(q_rope + q_row[:, None] * P + p[None, :]).to(gl.float32) * (other / common)[:, None]
        qr.store(x.to(STORED))
        _given()
        shared = q, qr, k, k_rope, full, empty
        given = (
            factors, unit, rope_norm, scaling, block, each_query, b, queries, low, high, n_sinks, n_residual, in_ring, oldest_slot, stored,
            mask, mask_t, hides,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (_attended, (0, K, D, P, G, False, MASK, CAUSAL, CHOSEN, ARCH, shared, results, given)),
                (_attended, (1, K, D, P, G, False, MASK, CAUSAL, CHOSEN, ARCH, shared, results, given)),
                (
                    _copied if K.kind == "half" else _unpacked,
                    (
                        K, V, D, P, K_ONCE, V_ONCE, k_strides, v_strides, PAGE, BASE, CHOSEN, ARCH, k, k_rope, full, empty, k_head, v_head,
                        table, chosen, low, high, unit, rope_norm,
                    ),
                ),
            ],
            [WARPS, WARPS],
            [ATTENDING_REGISTERS, UNPACKING_REGISTERS],
        )
