"""`triton_attend.attend_latents_kernel` for Hopper's tensor cores, in Gluon: latents are the left operands of both products.

Tokens are the rows of the first product (scores^T = K q^T) and channels the rows of the second (output^T = V^T p^T). A program copies the
codes of a tile to shared memory once. Both products read them from there into the registers of their left operand, the second one
transposed, which ldmatrix does at no cost, and unpack them there: dequantized latents are never stored. In a tile of 128 tokens, each group
of four warps has tokens of its own in the first product and channels of its own in the second one, for all query rows, so that each code is
unpacked once for each product. In smaller tiles it has all tokens and channels for query rows of its own. Scales of tokens multiply scores,
and join the exponent of weights, as in `kernels/attend/triton_attend.py`.

Outputs of 128 tokens a tile leave few registers: vectors of query rows are in shared memory while nothing needs them.

Shapes of tiles: T tokens, R query rows, D channels of a latent, P of a rotated key. X, K and V are the `PackedLayout` of codecs."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..formats.base import PackedLayout
from ..kernels.attend.gluon_pages import barrier, copied, copy_exact, copy_tile, entries_of_tile, entry_of_token, hides_any, in_shared
from ..kernels.attend.triton_attend import (
    RING_START,
    RING_TOKENS,
    SINKS,
    _sums_weights,
    exact_columns,
    head_of,
    page_of,
    place_of_program,
    tokens_of_split,
)
from ..kernels.attend.triton_tiles import token_of
from ..kernels.device.math import MASKED_SCORE, exp2, inverse, log2
from ..kernels.device.scales import token_scale
from ..kernels.device.unpack import HALF_PLANES, offset_of, plane_offset, unit_of, unpack
from .triton_attend import words_of_piece

EXACT_LAYOUT = gl.constexpr(PackedLayout("half"))
EXACT_TILE = gl.constexpr(64)
"""The most tokens of a tile of exact tokens."""
SPAN = gl.constexpr(32)
"""Words of a token that are loaded from shared memory at once, for the product with queries."""

_RAISED = gl.constexpr("""{
.reg .b32 x;
xor.b32 x, $2, 0x80808080;
prmt.b32 $0, x, 0x64646464, 0x4240;
prmt.b32 $1, x, 0x64646464, 0x4341;
}""")
"""Two words of int8 codes to the fp16 numbers 1152 + n, which spares keys a subtraction: the difference is exact, and taken from scores.
Sums of values over many tokens would lose too many bits to it."""


@gluon.constexpr_function
def _key_offset(layout) -> float:
    """`offset_of` numbers of keys, as `_keys` returns them."""
    return 1152.0 if layout.kind == "int8" else offset_of(layout)


@gluon.jit
def _keys(X: gl.constexpr, low, high, ARCH: gl.constexpr):
    """`unpack`, but for the offset of int8."""
    KIND: gl.constexpr = X.kind
    if KIND == "int8":
        return tl.inline_asm_elementwise(_RAISED, "=&r,=&r,r", [low], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        return unpack(KIND, low, high, low, ARCH)


@gluon.constexpr_function
def _halves(layout, dim: int, products) -> int:
    """2: a word has eight channels, and a plane half of the rows of a product, which has two planes then; else 1."""
    return 2 if layout.per == 8 and 16 * products.warps_per_cta[0] > dim // 8 else 1


@gluon.constexpr_function
def _text_of_half(kind: str, own: bool) -> str:
    return HALF_PLANES["int2 odd" if own and kind == "int2" else kind]


@gluon.constexpr_function
def _in_halves(tokens: int):
    """The layout of a left operand of eight warps, [2, 64, tokens], of which four have a half each."""
    wide = [[0, 0, 16 << i] for i in range((tokens // 16).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, 16, 0], [0, 32, 0], [1, 0, 0]]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 8, 0], [0, 0, 8], *wide], lanes, warps, [], [2, 64, tokens])


@gluon.jit
def _pairs_of_planes(X: gl.constexpr, low, high):
    """Pairs of planes of words, [64, tokens], that all warps have: [128, tokens], of which four warps unpack the plane of an even channel
    and the other four that of the odd one after it."""
    TOKENS: gl.constexpr = low.shape[1]
    A: gl.constexpr = low.type.layout
    HALVES: gl.constexpr = _in_halves(TOKENS)
    odd = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))[:, None, None].broadcast_to([2, 64, TOKENS])
    low = gl.convert_layout(low, gl.SliceLayout(0, HALVES))[None, :, :].broadcast_to([2, 64, TOKENS])
    high = gl.convert_layout(high, gl.SliceLayout(0, HALVES))[None, :, :].broadcast_to([2, 64, TOKENS])
    planes = _half_planes(X, low, high, odd, False)
    pairs = ()
    for i in gl.static_range(4):
        pairs = pairs + (gl.convert_layout(gl.reshape(planes[i], [128, TOKENS]), A),)
    return pairs


@gluon.jit
def _half_planes(X: gl.constexpr, low, high, odd, OWN: gl.constexpr):
    """The planes of even channels, as `unpack` returns them, or of odd ones, which have the offsets of the even ones; with OWN, which says
    that all are odd, their own. `odd`: int, 0 or 1."""
    KIND: gl.constexpr = X.kind
    TEXT: gl.constexpr = _text_of_half(KIND, OWN)
    shift = odd * 2 if KIND == "int2" else 2 - odd * 2
    return tl.inline_asm_elementwise(
        TEXT, "=&r,=&r,=&r,=&r,r,r,r", [low, high, shift.to(gl.int16)], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True, pack=2,
    )  # fmt: skip


@gluon.constexpr_function
def _products(warps: int, groups: int, rows: int):
    """The layout of both products: `groups` groups of warps have query rows of their own."""
    return gl.NVMMADistributedLayout([3, 0], [warps // groups, groups], [16, rows // groups, 16])


@gluon.constexpr_function
def tokens_of_piece(layout, tokens: int) -> int:
    """Tokens of a piece of values, of which all planes are in registers at a time."""
    return min(tokens, max(64 // layout.per, 16))


@gluon.jit
def _divided(x, N: gl.constexpr, LAYOUT: gl.constexpr):
    """The columns of `x`, [T, words], in N pieces, as a tuple: N is 1 or 2. Nothing moves between threads."""
    if N == 1:
        return (x,)
    else:
        gl.static_assert(N == 2)
        T: gl.constexpr = x.shape[0]
        WORDS: gl.constexpr = x.shape[1]
        first, second = gl.split(gl.permute(gl.reshape(x, [T, 2, WORDS // 2]), (0, 2, 1)))
        return (gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT))


@gluon.jit
def _words(
    X: gl.constexpr, codes, high, t: gl.constexpr, tokens: gl.constexpr, w: gl.constexpr, words: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Codes and high bits, `words` words from word `w` on of `tokens` tokens from token `t` on, as the left operand of a product."""
    A: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    low = codes.slice(t, tokens, 0).slice(w, words, 1).load(A)
    if X.high > 1:
        return low, high.slice(t, tokens, 0).slice(w, words, 1).load(A)
    else:
        return low, low


@gluon.jit
def _transposed_words(
    X: gl.constexpr, codes, high, t: gl.constexpr, tokens: gl.constexpr, w: gl.constexpr, words: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """`_words`, transposed."""
    A: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    low = codes.slice(t, tokens, 0).slice(w, words, 1).permute((1, 0)).load(A)
    if X.high > 1:
        return low, high.slice(t, tokens, 0).slice(w, words, 1).permute((1, 0)).load(A)
    else:
        return low, low


@gluon.jit
def _scores(X: gl.constexpr, D: gl.constexpr, codes, high, q, zero, s, FIRST: gl.constexpr, ARCH: gl.constexpr, LAYOUT: gl.constexpr):
    """Adds the product of a tile of keys with queries to `s`, fp32 [T, R], which counts as 0 with FIRST, and returns it. Keys are as from
    `unpack` with FIRST, else as from `_keys`.

    codes, high   shared [T, words]          q   shared [pieces, R, words of a piece]: piece after piece of words, of each all planes
    zero          0, unknown to the compiler, which would keep the addresses of all pieces in registers between tiles else"""
    # A load brings WIDE words of all tokens, which are unpacked in EACH pieces.
    KIND: gl.constexpr = X.kind
    PER: gl.constexpr = X.per
    T: gl.constexpr = codes.shape[0]
    WORDS: gl.constexpr = D // PER
    PIECE: gl.constexpr = words_of_piece(X, D)
    WIDE: gl.constexpr = min(max(SPAN * 64 // max(T, 64), PIECE), WORDS)
    COUNT: gl.constexpr = WORDS // WIDE
    EACH: gl.constexpr = WIDE // PIECE
    HALVES: gl.constexpr = _halves(X, D, LAYOUT)
    A: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    in_flight = ()
    low, h = _words(X, codes, high, 0, T, 0, WIDE, LAYOUT)
    for c in gl.static_range(COUNT):
        lows = _divided(low, EACH, A)
        highs = _divided(h, EACH, A)
        if HALVES == 1 and c + 1 < COUNT:  # before the words here are unpacked, which would wait for them else
            low, h = _words(X, codes, high, 0, T, (c + 1) * WIDE, WIDE, LAYOUT)
        for j in gl.static_range(EACH):
            if HALVES == 2:  # half of the registers
                for odd in gl.static_range(2):
                    planes = _half_planes(X, lows[j], highs[j], gl.full(lows[j].shape, odd, gl.int16, A), odd == 1)
                    if odd == 1 and j + 1 == EACH and c + 1 < COUNT:  # registers of the words here are free
                        low, h = _words(X, codes, high, 0, T, (c + 1) * WIDE, WIDE, LAYOUT)
                    for i in gl.static_range(PER // 2):
                        of_piece = q.index(zero + ((c * EACH + j) * PER + 2 * i + odd)).permute((1, 0))
                        s = warpgroup_mma(planes[i], of_piece, s, use_acc=not FIRST or c + j + i + odd > 0, is_async=True)
                    if c + j + odd > 0:
                        warpgroup_mma_wait(PER // 2, deps=in_flight)
                    in_flight = planes
            else:
                planes = unpack(KIND, lows[j], highs[j], lows[j], ARCH) if FIRST else _keys(X, lows[j], highs[j], ARCH)
                for i in gl.static_range(PER):
                    of_piece = q.index(zero + ((c * EACH + j) * PER + i)).permute((1, 0))
                    s = warpgroup_mma(planes[i], of_piece, s, use_acc=not FIRST or c + j + i > 0, is_async=True)
                if c + j > 0:  # registers of operands are free once their product is done
                    warpgroup_mma_wait(PER, deps=in_flight)
                in_flight = planes
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def _weighed(X: gl.constexpr, D: gl.constexpr, codes, high, low, h, p, acc, ARCH: gl.constexpr, LAYOUT: gl.constexpr):
    """Adds the product of a tile of values with weights `p`, shared [T, R], to `acc`: a tuple of fp32 [M, R], the planes of M words after
    the planes of the M words before, or pairs of planes where there are half as many words. Returns it, complete. `low`, `h`: from
    `_first_values`."""
    HALVES: gl.constexpr = _halves(X, D, LAYOUT)
    PER: gl.constexpr = X.per // HALVES
    KIND: gl.constexpr = X.kind
    T: gl.constexpr = codes.shape[0]
    M: gl.constexpr = 16 * LAYOUT.warps_per_cta[0] // HALVES
    COUNT: gl.constexpr = D // X.per // M
    TOKENS: gl.constexpr = tokens_of_piece(X, T)
    in_flight = ()
    for t in gl.static_range(T // TOKENS):
        new = ()
        for c in gl.static_range(COUNT):
            here, here_h = low, h
            if c + 1 < COUNT:
                low, h = _transposed_words(X, codes, high, t * TOKENS, TOKENS, (c + 1) * M, M, LAYOUT)
            elif (t + 1) * TOKENS < T:
                low, h = _transposed_words(X, codes, high, (t + 1) * TOKENS, TOKENS, 0, M, LAYOUT)
            if HALVES == 2:
                planes = _pairs_of_planes(X, here, here_h)
            else:
                planes = unpack(KIND, here, here_h, here, ARCH)
            for i in gl.static_range(PER):
                new = new + (warpgroup_mma(planes[i], p.slice(t * TOKENS, TOKENS, 0), acc[c * PER + i], is_async=True),)
            if t + c > 0:
                warpgroup_mma_wait(PER, deps=in_flight)
            in_flight = planes
        acc = new
    return warpgroup_mma_wait(0, deps=acc)


@gluon.jit
def _first_values(X: gl.constexpr, D: gl.constexpr, codes, high, LAYOUT: gl.constexpr):
    """Return the words that `_weighed` unpacks first."""
    return _transposed_words(
        X, codes, high, 0, tokens_of_piece(X, codes.shape[0]), 0, 16 * LAYOUT.warps_per_cta[0] // _halves(X, D, LAYOUT), LAYOUT
    )


@gluon.jit
def _of_thread(x):
    """Sums over the tokens of `x`, fp32 [T, R], that a thread holds: [T / 16, 8, R]."""
    T: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[1]
    return gl.sum(gl.reshape(x, [T // 16, 2, 8, R]), 1)


@gluon.jit
def _nothing(D: gl.constexpr, T: gl.constexpr, R: gl.constexpr, LAYOUT: gl.constexpr):
    """The state before the first tile: maximum, fp32 [R], normaliser, as `_of_thread`, and output, as in `_weighed`."""
    M: gl.constexpr = 16 * LAYOUT.warps_per_cta[0]
    acc = ()
    for _ in gl.static_range(D // M):
        acc = acc + (gl.full([M, R], 0.0, gl.float32, LAYOUT),)
    m = gl.full([R], MASKED_SCORE, gl.float32, gl.SliceLayout(0, LAYOUT))
    return m, _of_thread(gl.full([T, R], 0.0, gl.float32, LAYOUT)), acc


@gluon.jit
def _store(out, D: gl.constexpr, first, x, live):
    """Stores `x`, fp32 [M, R], channels from `first` on, where rows are `live`, bool [R], to `out`: [R, D]."""
    LAYOUT: gl.constexpr = x.type.layout
    word = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    r = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(out + (r * D)[None, :] + (first + word)[:, None], x, mask=live[None, :])


@gluon.jit
def _store_tops(tops, m, l):
    """Stores maxima `m`, fp32 [R], and normalisers `l`, as `_of_thread`, to `tops`: [R, 2]."""
    LAYOUT: gl.constexpr = m.type.layout
    r = gl.arange(0, m.shape[0], LAYOUT)
    gl.store(tops + r * 2, m)
    gl.store(tops + r * 2 + 1, _of_all(l, LAYOUT))


@gluon.jit
def _shrunk(x, shrink):
    """Sums `x` as `_of_thread` returns them, times `shrink`, fp32 [R]."""
    LAYOUT: gl.constexpr = x.type.layout
    return x * gl.convert_layout(shrink, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]


@gluon.jit
def _of_all(x, LAYOUT: gl.constexpr):
    """The sums over all tokens, fp32 [R]."""
    return gl.convert_layout(gl.sum(gl.sum(x, 0), 0), LAYOUT)


@gluon.jit
def _scales(X: gl.constexpr, D: gl.constexpr, ONCE: gl.constexpr, head, STRIDES: gl.constexpr, table, entries, chosen, begin, end,
            T: gl.constexpr, PAGE: gl.constexpr, BASE: gl.constexpr, CHOSEN: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Scale and zero of the tokens from `begin` on, fp32 [T] each. `entries`: from `entries_of_tile`."""
    t = gl.arange(0, T, LAYOUT)
    place = gl.minimum(begin + t, end - 1)
    if X.scale == "none":
        return gl.full([T], 1.0, gl.float32, LAYOUT), gl.full([T], 0.0, gl.float32, LAYOUT)
    else:
        token = token_of(chosen, place, CHOSEN)
        entry = entry_of_token(table, t, place, entries, T, PAGE, BASE, CHOSEN)
        _, _, scales = page_of(X, D, ONCE, head, STRIDES, entry, 0)
        return token_scale(X, ONCE, scales, token % PAGE)


@gluon.jit
def _load_queries(q, query, rows, first: gl.constexpr):
    """Copies pieces of queries, from channel `first` on of the rows that begin at `rows`, int64 [R], to `q`, shared [pieces, R, channels
    of a piece]."""
    PIECES: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[2]
    LAYOUT: gl.constexpr = copied(WIDTH, gl.num_warps())
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    at = query + gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT))[:, None] + first + d[None, :]
    for i in gl.static_range(PIECES):
        q.index(i).store(gl.load(at + i * WIDTH))


@gluon.jit
def _rescaled(acc, shrink):
    """A tuple of fp32 [M, R], times `shrink`, fp32 [R]."""
    new = ()
    COUNT: gl.constexpr = len(acc)
    for i in gl.static_range(COUNT):
        new = new + (acc[i] * shrink[None, :],)
    return new


@gluon.jit
def _exact_tiles(
    D: gl.constexpr, P: gl.constexpr, MASK: gl.constexpr, ARCH: gl.constexpr, RING: gl.constexpr, LAYOUT: gl.constexpr,
    state, q, q_rope, codes, rope_codes, p, scaling, latents, latent_stride, ropes, rope_stride, slots, start, newest, mask, mask_stride,
    oldest_slot, count,
):  # fmt: skip
    """Adds tokens in the model's dtype to `state`: running maximum, fp32 [R], normaliser, as `_of_thread`, and output, as in `_weighed`.
    Returns it. Arguments as in `triton_attend._exact_tiles`; `q`, `q_rope`, `codes`, `rope_codes` and `p` are shared."""
    X: gl.constexpr = EXACT_LAYOUT
    m, l, acc = state
    T: gl.constexpr = codes.shape[0]
    t = gl.arange(0, T, gl.SliceLayout(1, LAYOUT))
    for begin in range(0, slots, T):
        copy_exact(codes, latents, latent_stride, begin, slots, oldest_slot, count, RING)
        copy_exact(rope_codes, ropes, rope_stride, begin, slots, oldest_slot, count, RING)
        valid, column = exact_columns(begin + t, slots, start, oldest_slot, count, RING)
        s = _scores(
            X, P, rope_codes, rope_codes, q_rope, begin >> 30, gl.full([T, p.shape[1]], 0.0, gl.float32, LAYOUT), True, ARCH, LAYOUT
        )
        s = _scores(X, D, codes, codes, q, begin >> 30, s, False, ARCH, LAYOUT) * scaling
        if MASK:
            valid = valid & (gl.load(mask + column * mask_stride, mask=valid, other=0) != 0)
        s = gl.where(valid[:, None] & (column[:, None] <= newest[None, :]), s, float("-inf"))
        top = gl.maximum(m, gl.max(s, 0))
        shrink = exp2(m - top, ARCH)
        w = exp2(s - top[None, :], ARCH)
        m = top
        l = _shrunk(l, shrink) + _of_thread(w)
        p.store(w.to(p.dtype))
        fence_async_shared()
        low, h = _first_values(X, D, codes, codes, LAYOUT)
        acc = _weighed(X, D, codes, codes, low, h, p, _rescaled(acc, shrink), ARCH, LAYOUT)
    return m, l, acc


@gluon.jit(
    do_not_specialize=[
        "scaling", "n_sinks", "n_quantized", "n_residual", "least", "queries", "table_b", "rows_b", "lengths_b", "mask_b", "mask_q",
        "mask_t",
    ]
)  # fmt: skip
def attend_latents_kernel(
    query, q_latent, q_rope, factors, table, chosen, counts, rows, lengths, k_planes, v_planes, exact, mask, part, tops,
    query_strides, table_b, rows_b, lengths_b, mask_b, mask_q, mask_t, scaling, n_sinks, n_quantized, n_residual, least, queries,
    KEYS: gl.constexpr, VALUES: gl.constexpr, PAGES: gl.constexpr, G: gl.constexpr, R: gl.constexpr, T: gl.constexpr,
    MASK: gl.constexpr, CAUSAL: gl.constexpr, ARCH: gl.constexpr, EXACT: gl.constexpr, CHOSEN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """This kernel has the grid and the arguments of `triton_attend.attend_latents_kernel`. These arguments differ:

    q_latent, q_rope   channels in the order of `_scores`: piece after piece of words, of each plane after plane
    factors        fp32 [B, G * queries, 4]: of the scores, to base 2, the product with the mean of latents, and the sums of `q_latent` and
                   of `q_rope`, which nothing reads here
    STAGES         tiles of codes in shared memory
    """
    gl.static_assert(STAGES > 1)
    gl.static_assert(STAGES == 2 or T <= EXACT_TILE)
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
    LAYOUT: gl.constexpr = _products(gl.num_warps(), 16 * gl.num_warps() // T, R)
    OF_ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    OF_TOKEN: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    M: gl.constexpr = 16 * LAYOUT.warps_per_cta[0]
    PER: gl.constexpr = K.per
    KW: gl.constexpr = D // PER
    VW: gl.constexpr = P // V.per
    SWIZZLE: gl.constexpr = min(128, 2 * R)
    HALVES: gl.constexpr = _halves(K, D, LAYOUT)
    HAS_ZERO: gl.constexpr = K.scale == "hidden" or K.scale == "pair"
    ROPES: gl.constexpr = 1 if T > EXACT_TILE else STAGES
    each_query, split, splits = place_of_program(EXACT and not CHOSEN)
    block = gl.program_id(1)
    h = each_query * 0  # there is one head
    each_query = each_query.to(gl.int64)
    b = each_query
    r = block * R + gl.arange(0, R, OF_ROW)
    if CHOSEN:
        b = each_query // queries
        mask += each_query % queries * mask_q
        live = r < G
        row = gl.minimum(r, G - 1) * queries + each_query % queries
    else:
        live = r < G * queries
        row = gl.minimum(r, G * queries - 1)
    in_ring, length, oldest_slot = n_residual, n_quantized, 0
    if COUNTED:
        rows += b * rows_b
        length = gl.load(lengths + b * lengths_b)
        n_sinks = gl.load(rows + SINKS)
        oldest_slot = gl.load(rows + RING_START)
        in_ring = gl.load(rows + RING_TOKENS)
    if MASK:
        mask += b * mask_b
    panel = (each_query * gl.num_programs(1) + block) * splits + split
    part += panel * (R * D)
    tops += panel * (R * 2)

    if EXACT and split == 0:
        own: gl.constexpr = query.dtype.element_ty
        WIDTH: gl.constexpr = words_of_piece(EXACT_LAYOUT, D)
        XT: gl.constexpr = min(T, EXACT_TILE)
        X_LAYOUT: gl.constexpr = _products(gl.num_warps(), 16 * gl.num_warps() // XT, R)
        XM: gl.constexpr = 16 * X_LAYOUT.warps_per_cta[0]
        OF_X_ROW: gl.constexpr = gl.SliceLayout(0, X_LAYOUT)
        x_row = gl.convert_layout(row, OF_X_ROW)
        x_latent = gl.allocate_shared_memory(own, [D // WIDTH, R, WIDTH], gl.NVMMASharedLayout(2 * WIDTH, 16))
        x_rope = gl.allocate_shared_memory(own, [P // WIDTH, R, WIDTH], gl.NVMMASharedLayout(2 * WIDTH, 16))
        x_rows = b * query_strides[0] + x_row // queries * query_strides[1] + x_row % queries * query_strides[2]
        _load_queries(x_latent, query, x_rows, 0)
        _load_queries(x_rope, query, x_rows, D)
        fence_async_shared()
        latents = gl.allocate_shared_memory(own, [XT, D], in_shared(D))
        ropes = gl.allocate_shared_memory(own, [XT, P], in_shared(P))
        weights = gl.allocate_shared_memory(own, [XT, R], gl.NVMMASharedLayout(SWIZZLE, 16))
        newest = n_sinks + length + in_ring - (queries - x_row % queries if CAUSAL else gl.full([R], 1, gl.int32, OF_X_ROW))
        state = _exact_tiles(
            D, P, MASK, ARCH, False, X_LAYOUT, _nothing(D, XT, R, X_LAYOUT), x_latent, x_rope, latents, ropes, weights, scaling,
            exact[0] + b * exact[4], exact[6], exact[1] + b * exact[7], exact[9], n_sinks, 0, newest, mask, mask_t, 0, 0,
        )  # fmt: skip
        x_m, x_l, x_acc = _exact_tiles(
            D, P, MASK, ARCH, COUNTED, X_LAYOUT, state, x_latent, x_rope, latents, ropes, weights, scaling, exact[2] + b * exact[10],
            exact[12], exact[3] + b * exact[13], exact[15], n_residual, n_sinks + length, newest, mask, mask_t, oldest_slot, in_ring,
        )  # fmt: skip
        for c in gl.static_range(D // XM):
            _store(part, D, c * XM, x_acc[c], gl.convert_layout(live, OF_X_ROW))
        _store_tops(tops, x_m, x_l)
    else:
        if CHOSEN:
            length = gl.load(counts + each_query)
            chosen += each_query * table_b
        table += each_query * table_b
        each = tokens_of_split(length, gl.maximum(splits - EXACT, 1), least, T)
        low = tl.multiple_of((split - EXACT) * each, T)
        high = gl.minimum(low + each, length)
        m, l, acc = _nothing(D, T, R, LAYOUT)
        y, z = l, l
        if low < high:
            held: gl.constexpr = q_latent.dtype.element_ty
            PIECE: gl.constexpr = words_of_piece(K, D)
            ROPE: gl.constexpr = words_of_piece(V, P)
            q = gl.allocate_shared_memory(held, [D // PIECE, R, PIECE], gl.NVMMASharedLayout(2 * PIECE, 16))
            qr = gl.allocate_shared_memory(held, [P // ROPE, R, ROPE], gl.NVMMASharedLayout(2 * ROPE, 16))
            q_row = b * (G * queries) + row
            _load_queries(q, q_latent, q_row * D, 0)
            _load_queries(qr, q_rope, q_row * P, 0)
            fence_async_shared()
            of_rows = gl.allocate_shared_memory(gl.float32, [3, R], gl.SwizzledSharedLayout(1, 1, 1, [0]))
            factor, q_sum, maxima = of_rows.index(0), of_rows.index(1), of_rows.index(2)
            each_factor = gl.load(factors + q_row * 4) * unit_of(K)
            factor.store(each_factor)
            q_sum.store(gl.load(factors + q_row * 4 + 2) * (each_factor * (1.0 if HAS_ZERO else _key_offset(K))))
            maxima.store(m)
            if MASK and not CHOSEN:
                hides = hides_any(mask, n_sinks + low, n_sinks + high, mask_t)
            k_head = head_of(K, K_ONCE, (k_planes[0], k_planes[1], k_planes[2]), K_STRIDES, b, h)
            v_head = head_of(V, V_ONCE, (v_planes[0], v_planes[1], v_planes[2]), V_STRIDES, b, h)
            codes = gl.allocate_shared_memory(k_planes[0].dtype.element_ty, [STAGES, T, KW], in_shared(KW))
            bits = codes
            if K.high > 1:
                bits = gl.allocate_shared_memory(gl.int16, [STAGES, T, KW], in_shared(KW))
            rope_codes = gl.allocate_shared_memory(v_planes[0].dtype.element_ty, [ROPES, T, VW], in_shared(VW))
            p = gl.allocate_shared_memory(held, [T, R], gl.NVMMASharedLayout(SWIZZLE, 16))
            t = gl.arange(0, T, OF_TOKEN)
            # Pages are looked up a tile ahead of the copies from them: loads that follow one another would be waited for.
            for i in gl.static_range(STAGES - 1):
                if low + i * T < high:
                    entries = entries_of_tile(table, low + i * T, high, T, PAGE, CHOSEN)
                    copy_tile(
                        K, D, k_head, K_STRIDES, codes.index(i), bits.index(i), table, entries, chosen, low + i * T, high, PAGE, BASE,
                        CHOSEN,
                    )  # fmt: skip
                    ropes = rope_codes.index(i)
                    copy_tile(V, P, v_head, V_STRIDES, ropes, ropes, table, entries, chosen, low + i * T, high, PAGE, BASE, CHOSEN)
                async_copy.commit_group()
            entries = entries_of_tile(table, low, high, T, PAGE, CHOSEN)
            scale, zero = _scales(K, D, K_ONCE, k_head, K_STRIDES, table, entries, chosen, low, high, T, PAGE, BASE, CHOSEN, OF_TOKEN)
            rope_scale, _ = _scales(V, P, V_ONCE, v_head, V_STRIDES, table, entries, chosen, low, high, T, PAGE, BASE, CHOSEN, OF_TOKEN)
            entries = entries_of_tile(table, low + T, high, T, PAGE, CHOSEN)
            ahead_entries = entries if STAGES == 2 else entries_of_tile(table, low + (STAGES - 1) * T, high, T, PAGE, CHOSEN)
            stage = low * 0
            for token in range(low, high, T):
                async_copy.wait_group(STAGES - 2 if ROPES > 1 else 0)
                barrier()
                ahead = token + (STAGES - 1) * T
                if ahead < high:
                    into = (stage + STAGES - 1) % STAGES
                    copy_tile(
                        K, D, k_head, K_STRIDES, codes.index(into), bits.index(into), table, ahead_entries, chosen, ahead, high, PAGE, BASE,
                        CHOSEN,
                    )  # fmt: skip
                    if ROPES > 1:
                        ropes = rope_codes.index(into)
                        copy_tile(V, P, v_head, V_STRIDES, ropes, ropes, table, ahead_entries, chosen, ahead, high, PAGE, BASE, CHOSEN)
                async_copy.commit_group()
                # Before the loads of the next tile: what waits for a load waits for all that were issued meanwhile.
                scale = gl.maximum(scale, 1e-27)  # an all-zero vector has weight too
                unscale = inverse(scale, ARCH)
                weight = log2(scale, ARCH)
                rope_scale = rope_scale * (unit_of(V) / unit_of(K)) * unscale
                if ROPES > 1:
                    following = gl.minimum(token + T, high - 1)
                    next_scale, next_zero = _scales(
                        K, D, K_ONCE, k_head, K_STRIDES, table, entries, chosen, following, high, T, PAGE, BASE, CHOSEN, OF_TOKEN
                    )
                    next_rope, _ = _scales(
                        V, P, V_ONCE, v_head, V_STRIDES, table, entries, chosen, following, high, T, PAGE, BASE, CHOSEN, OF_TOKEN
                    )
                    entries = entries_of_tile(table, token + 2 * T, high, T, PAGE, CHOSEN)
                    ahead_entries = entries if STAGES == 2 else entries_of_tile(table, ahead + T, high, T, PAGE, CHOSEN)
                here, here_bits = codes.index(stage), bits.index(stage)
                ropes = rope_codes.index(stage if ROPES > 1 else 0)
                s = _scores(V, P, ropes, ropes, qr, token >> 30, gl.full([T, R], 0.0, gl.float32, LAYOUT), True, ARCH, LAYOUT)
                if V.scale != "none" or K.scale != "none":
                    s = s * rope_scale[:, None]
                s = _scores(K, D, here, here_bits, q, token >> 30, s, False, ARCH, LAYOUT)
                valid = token + t < high
                if MASK and not CHOSEN:
                    if hides:
                        valid = valid & (gl.load(mask + (n_sinks + token + t) * mask_t, mask=valid, other=0) != 0)
                weight = gl.where(valid, weight, float("-inf"))
                s = s * factor.load(OF_ROW)[None, :]
                if _key_offset(K) != 0 and not HAS_ZERO:
                    s = s - q_sum.load(OF_ROW)[None, :]
                s = s * scale[:, None] + weight[:, None]
                if K.scale == "hidden":
                    s = s - ((zero + _key_offset(K)) * scale)[:, None] * q_sum.load(OF_ROW)[None, :]
                elif K.scale == "pair":
                    s = s + (zero - _key_offset(K) * scale)[:, None] * q_sum.load(OF_ROW)[None, :]
                if MASK and not CHOSEN:  # what is hidden need not be finite
                    s = gl.where(valid[:, None], s, float("-inf"))
                m = maxima.load(OF_ROW)
                top = gl.maximum(m, gl.max(s, 0))
                shrink = exp2(m - top, ARCH)
                w = exp2(s - top[None, :], ARCH)
                maxima.store(top)
                weights = w.to(held)
                p.store(weights)
                fence_async_shared()
                # Behind the fence, which would wait for them.
                if ROPES == 1:  # no warp reads this tile's: maxima were exchanged
                    if token + T < high:
                        copy_tile(V, P, v_head, V_STRIDES, ropes, ropes, table, entries, chosen, token + T, high, PAGE, BASE, CHOSEN)
                    async_copy.commit_group()
                    following = gl.minimum(token + T, high - 1)
                    next_scale, next_zero = _scales(
                        K, D, K_ONCE, k_head, K_STRIDES, table, entries, chosen, following, high, T, PAGE, BASE, CHOSEN, OF_TOKEN
                    )
                    next_rope, _ = _scales(
                        V, P, V_ONCE, v_head, V_STRIDES, table, entries, chosen, following, high, T, PAGE, BASE, CHOSEN, OF_TOKEN
                    )
                    entries = entries_of_tile(table, token + 2 * T, high, T, PAGE, CHOSEN)
                    ahead_entries = entries
                first, first_bits = _first_values(K, D, here, here_bits, LAYOUT)
                if K.scale == "none":
                    l = _shrunk(l, shrink) + _of_thread(w)
                else:
                    l = _shrunk(l, shrink) + _of_thread(w * unscale[:, None])
                    rounded = weights.to(gl.float32)  # as they multiply numbers
                    if K.scale == "hidden":
                        y = _shrunk(y, shrink) - _of_thread(rounded * (zero + offset_of(K))[:, None])
                    elif K.scale == "pair":
                        y = _shrunk(y, shrink) + _of_thread(rounded * (zero * unscale - offset_of(K) * unit_of(K))[:, None])
                    if _sums_weights(K):
                        z = _shrunk(z, shrink) - _of_thread(rounded)
                acc = _weighed(K, D, here, here_bits, first, first_bits, p, _rescaled(acc, shrink), ARCH, LAYOUT)
                scale, zero, rope_scale = next_scale, next_zero, next_rope
                stage = (stage + 1) % STAGES
            async_copy.wait_group(0)
            m = maxima.load(OF_ROW) + gl.load(factors + q_row * 4 + 1)
        constant = _of_all(y, OF_ROW)
        offset = _of_all(z, OF_ROW) * (offset_of(K) * unit_of(K))
        for c in gl.static_range(HALVES * KW // M):
            for i in gl.static_range(PER // HALVES):
                x = acc[c * PER + i] * unit_of(K)
                if K.scale != "none":
                    of_plane = constant
                    if _sums_weights(K):
                        of_plane = of_plane + offset * plane_offset(K, HALVES * i)
                    x = x + of_plane[None, :]
                _store(part, D, HALVES * i * KW + c * M, x, live)
        _store_tops(tops, m, l)
