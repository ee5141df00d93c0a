"""`triton_tiles.attend_tiles_kernel` for Hopper, in Gluon: what Triton does one after another runs at the same time here.

Four warps of a program copy codes to shared memory two tiles ahead, and dequantize them to tiles there
(`_produce`). Groups of four warps multiply these tiles, 64 query rows each (`attend_in_turns`): after the weights of
a tile are computed, the keys of the next one, and then the values of this one. Two groups take turns: tensor
cores multiply for one during the softmax of the other. The channels of a tile are plane after plane, as codes
unpack.

Shapes of tiles: T tokens, R query rows. X, K and V are the `PackedLayout` of a codec."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ..device.math import MASKED_SCORE, exp2
from ..device.scales import token_scale
from ..device.unpack import offset_of, plane_offset, unit_of, unpack
from .gluon_pages import (
    allocate_scales,
    barrier,
    by_lane,
    copied,
    copy_exact,
    copy_scales,
    copy_tile,
    entries_of_tile,
    hides_any,
    in_shared,
    pages_of_tile,
    scales_of_tile,
)
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
    page_of,
    place_of_program,
    tokens_of_split,
)
from .triton_tiles import LARGEST_ZERO, power_of, token_of

PRODUCERS, PRODUCERS_REGISTERS = gl.constexpr(4), gl.constexpr(104)
"""Warps that dequantize, or copy in `gluon_dense.py`, and the registers of each of their threads here."""
HAS_KEYS, HAS_VALUES, FREE, TOGETHER = gl.constexpr(4), gl.constexpr(8), gl.constexpr(12), gl.constexpr(14)
"""The first of the barriers that say that a tile of keys, or of values, is complete (one for each of two tiles and two groups of four
warps), that nobody reads a tile any more (one for each of two steps), and that the warps of a group are together (one for each group).
A program has 16 of them, and Triton uses the first three. Its own barriers would have both groups wait for each other."""
OF_TILE = gl.constexpr(256)
"""Threads of a barrier of a tile: the producers and one group."""
EXACT_TILE = gl.constexpr(32)
"""Exact tokens of a tile."""
_WAIT = gl.constexpr("bar.sync $1, $2; mov.u32 $0, 0;")
_ARRIVE = gl.constexpr("bar.arrive $1, $2; mov.u32 $0, 0;")
# A reduction, since the compiler would read the thread's number anew in each step.
_GROUP = gl.constexpr("{ .reg .u32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; redux.sync.max.u32 $0, t, -1; }")
_HIDDEN = gl.constexpr("{ .reg .pred p; setp.ne.s32 p, $2, 0; selp.f32 $0, $1, 0fFF800000, p; }")
_FMA = gl.constexpr("fma.rn.f16x2 $0, $1, $2, $3;")


@gluon.constexpr_function
def product_layout(rows: int, columns: int):
    """The layout of a product of `rows` rows and `columns` columns: 16 rows a warp."""
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, columns, 16])


@gluon.constexpr_function
def tile_layout(dim: int):
    """The layout in shared memory of rows of `dim` channels of 16 bits, as tensor cores read them."""
    return gl.NVMMASharedLayout(min(2 * dim, 128), 16)


@gluon.constexpr_function
def _unpacked(tokens: int, words: int, warps: int):
    """The layout in which rows of `words` words are unpacked. Lanes are next to each other along tokens: so no two of them that store at a
    time share banks."""
    each = min(tokens * words // (32 * warps), 8)
    chunks = min(words // each, 4)
    return gl.BlockedLayout([1, each], [32 // chunks, chunks], [warps, 1], [0, 1])


@gluon.constexpr_function
def _in_halves(layout):
    """`layout`, from `_unpacked`, of rows of two halves: [T, 2, words / 2]."""
    lanes = layout.threads_per_warp
    return gl.BlockedLayout([1, 1, layout.size_per_thread[1]], [lanes[0], 2, lanes[1] // 2], [layout.warps_per_cta[0], 1, 1], [0, 2, 1])


@gluon.jit
def wait_at(number, threads: gl.constexpr):
    """Waits at barrier `number` until `threads` threads wait there or have arrived."""
    gl.inline_asm_elementwise(_WAIT, "=r,r,r", [number, threads], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_at(number, threads: gl.constexpr):
    """Arrives at barrier `number`, as in `wait_at`."""
    gl.inline_asm_elementwise(_ARRIVE, "=r,r,r", [number, threads], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _completes(FIRST: gl.constexpr, tile, GROUPS: gl.constexpr):
    """Tells GROUPS groups that a tile, `tile` of 0 and 1, is complete; FIRST: HAS_KEYS or HAS_VALUES."""
    fence_async_shared()
    for i in gl.static_range(GROUPS):
        arrive_at(FIRST + 2 * tile + i, OF_TILE)


@gluon.jit
def _fma(x, factor, start):
    """`x * factor + start` in fp16, of tensors of one shape."""
    return tl.inline_asm_elementwise(_FMA, "=r,r,r,r", [x, factor, start], dtype=tl.float16, is_pure=True, pack=2)


@gluon.jit
def hidden(s, shown):
    """Scores `s`, fp32 [R, T], that are -inf where `shown`, int32 [1 or R, T], is 0. The compiler must not run it outside of the branch
    where it stands, so that few tiles pay for it."""
    return tl.inline_asm_elementwise(_HIDDEN, "=r,r,r", [s, shown], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def hide_end(s, token, t, high, seen, STEP: gl.constexpr):
    """Scores `s` of the tokens `token + t`, int [T], -inf from the token `high` on. Nothing reads `seen` and STEP."""
    if token + s.shape[1] > high:
        s = hidden(s, (token + t < high).to(gl.int32)[None, :])
    return s


@gluon.jit
def _hide_masked(s, token, t, high, seen, STEP: gl.constexpr):
    """`hide_end`, and without those that a mask hides. `seen`: the mask, its stride, sinks before the tokens, whether it hides any of
    them, and chosen blocks."""
    mask, mask_t, n_sinks, hides, blocks = seen
    s = hide_end(s, token, t, high, seen, STEP)
    if hides:
        place = gl.minimum(token + t, high - 1)
        shown = gl.load(mask + (n_sinks + token_of(blocks, place, STEP)) * mask_t)
        s = hidden(s, (shown != 0).to(gl.int32)[None, :])
    return s


@gluon.jit
def _joined(planes, PER: gl.constexpr):
    """A tuple of PER planes [T, words] as [T, PER * words], plane after plane."""
    T: gl.constexpr = planes[0].shape[0]
    WORDS: gl.constexpr = planes[0].shape[1]
    if PER == 2:
        x = gl.join(planes[0], planes[1])
    elif PER == 4:
        x = gl.reshape(gl.join(gl.join(planes[0], planes[2]), gl.join(planes[1], planes[3])), [T, WORDS, 4])
    else:
        even = gl.join(gl.join(planes[0], planes[4]), gl.join(planes[2], planes[6]))
        odd = gl.join(gl.join(planes[1], planes[5]), gl.join(planes[3], planes[7]))
        x = gl.reshape(gl.join(even, odd), [T, WORDS, 8])
    return gl.reshape(gl.permute(x, (0, 2, 1)), [T, PER * WORDS])


@gluon.jit
def _high_words(X: gl.constexpr, high, low, LAYOUT: gl.constexpr):
    """High bits of the words `low` and by which of them they are shifted, as `unpack` takes both."""
    if X.high > 1:
        return high.load(LAYOUT), low
    elif X.high == 1:
        T: gl.constexpr = low.shape[0]
        HALF: gl.constexpr = low.shape[1] // 2
        gl.static_assert(HALF == 8)
        narrow = high.load(gl.SliceLayout(1, _in_halves(LAYOUT)))
        wide = gl.reshape(tl.broadcast_to(gl.expand_dims(narrow, 1), [T, 2, HALF]), [T, 2 * HALF])
        second = gl.arange(0, 2 * HALF, gl.SliceLayout(0, LAYOUT)) >= HALF
        shift = gl.where(second, -1, 0).to(gl.int16)[None, :]
        return gl.convert_layout(wide, LAYOUT), tl.broadcast_to(shift, [T, 2 * HALF])
    else:
        return low, low


@gluon.jit
def _scale_of_plane(X: gl.constexpr, by_group, i: gl.constexpr, T: gl.constexpr, WORDS: gl.constexpr, LAYOUT: gl.constexpr):
    """Scales of plane `i` of all words, fp16 [T, WORDS], from the scales of each group."""
    GROUP: gl.constexpr = X.group
    FIRST: gl.constexpr = i * WORDS // GROUP
    scale = tl.broadcast_to(by_group[FIRST][:, None], [T, WORDS])
    if WORDS > GROUP:
        group = (gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT)) // GROUP)[None, :]
        for n in gl.static_range(1, WORDS // GROUP):
            scale = gl.where(group == n, tl.broadcast_to(by_group[FIRST + n][:, None], [T, WORDS]), scale)
    return scale


@gluon.jit
def _dequantize(X: gl.constexpr, D: gl.constexpr, into, codes, high, scales, stage, unscale, live, ARCH: gl.constexpr):
    """Dequantizes the words `codes` and `high`, shared [T, words], to `into`, shared fp16 [T, D], in units of `unit_of(X) / unscale`.
    `scales`, `stage`: as in `scales_of_tile`; only the first `live` tokens have any: the others are 0. `unscale`: `power_of(X)` divided by
    the result of `_norm`."""
    T: gl.constexpr = codes.shape[0]
    WORDS: gl.constexpr = codes.shape[1]
    KIND: gl.constexpr = X.kind
    PER: gl.constexpr = X.per
    LAYOUT: gl.constexpr = _unpacked(T, WORDS, gl.num_warps())
    low = codes.load(LAYOUT)
    h, shift = _high_words(X, high, low, LAYOUT)
    planes = unpack(KIND, low, h, shift, ARCH)
    here = scales_of_tile(X, D, scales, stage, ARCH, gl.SliceLayout(1, LAYOUT))
    exists = gl.arange(0, T, gl.SliceLayout(1, LAYOUT)) < live
    numbers = ()
    if X.group > 0:
        by_group = ()
        for i in gl.static_range(len(here)):
            by_group = by_group + (gl.where(exists, here[i], 0.0).to(gl.float16),)
        for i in gl.static_range(PER):
            scale = _scale_of_plane(X, by_group, i, T, WORDS, LAYOUT)
            numbers = numbers + (_fma(planes[i], scale, scale * -offset_of(X)),)
    else:
        scale, zero = here
        factor = gl.where(exists, scale * unscale, 0.0).to(gl.float16)
        offset: gl.constexpr = 0.0 if X.kind == "int2" else offset_of(X)  # each plane of int2 has its own
        if X.scale == "pair":
            start = gl.where(exists, zero * (unscale * (1.0 / power_of(X))), 0.0) - offset * factor.to(gl.float32)
        else:
            start = factor.to(gl.float32) * -(offset + zero)
        start = start.to(gl.float16)
        for i in gl.static_range(PER):
            plane = planes[i]
            if X.kind == "int2":
                plane = (plane - offset_of(X) * plane_offset(X, i)).to(gl.float16)
            numbers = numbers + (_fma(plane, factor[:, None], start[:, None]),)
    into.store(_joined(numbers, PER))


@gluon.jit
def _norm(X: gl.constexpr, D: gl.constexpr, ONCE: gl.constexpr, head, STRIDES: gl.constexpr, table, chosen, low, high,
          PAGE: gl.constexpr, BASE: gl.constexpr, CHOSEN: gl.constexpr):  # fmt: skip
    """`triton_tiles.largest_scale`, whose tensors have no layouts."""
    if X.group > 0:
        return 1.0
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        i = gl.arange(0, 4096, LAYOUT)
        most = gl.full([4096], 1e-30, gl.float32, LAYOUT)
        for at in range(low, high, 4096):
            place = gl.minimum(at + i, high - 1)
            entry = entry_of(table, place, place >= 0, CHOSEN if CHOSEN else PAGE, BASE)
            _, _, here = page_of(X, D, ONCE, head, STRIDES, entry, 0)
            scale, zero = token_scale(X, ONCE, here, token_of(chosen, place, CHOSEN) % PAGE)
            if X.scale == "pair":
                scale = gl.maximum(scale, gl.maximum(zero, -zero) / LARGEST_ZERO)
            most = gl.maximum(most, gl.where(scale < 1e30, scale, 0.0))
        return gl.max(most, 0)


@gluon.jit
def _weights(m, l, u, factor, ARCH: gl.constexpr):
    """Weights of a tile, fp32 [R, T], and the new maximum and normaliser, fp32 [R] each, and what shrinks the output, fp32 [R].

    u   scores, fp32 [R, T], to base 2 once multiplied by `factor`, fp32 [R]"""
    top = gl.maximum(m, gl.max(u, 1) * factor)
    shrink = exp2(m - top, ARCH)
    w = exp2(u * factor[:, None] - top[:, None], ARCH)
    return w, top, l * shrink + gl.sum(w, 1), shrink


@gluon.jit
def _queries(K: gl.constexpr, D: gl.constexpr, TURN: gl.constexpr, query, rows, live, rotation, center, scaling, q):
    """`triton_tiles._queries`: stores queries to `q`, shared fp16 [R, D], plane after plane. Returns factors and products with
    `center`."""
    R: gl.constexpr = q.shape[0]
    own: gl.constexpr = query.dtype.element_ty
    LAYOUT: gl.constexpr = product_layout(R, D)
    LOADED: gl.constexpr = copied(D, R // 16)
    WORDS: gl.constexpr = D // K.per
    place = gl.arange(0, D, gl.SliceLayout(0, LOADED))
    channel = place
    if K.group == 0:
        channel = place % WORDS * K.per + place // WORDS
    at = gl.convert_layout(rows, gl.SliceLayout(1, LOADED))[:, None]
    there = gl.convert_layout(live, gl.SliceLayout(1, LOADED))[:, None]
    if K.rotated:
        x_shared = gl.allocate_shared_memory(own, [R, D], tile_layout(D), gl.load(query + at + place[None, :], mask=there, other=0.0))
        i = gl.arange(0, D, gl.SliceLayout(1, LOADED))
        turn = gl.load(rotation + i[:, None] * D + channel[None, :]).to(own)
        turn_shared = gl.allocate_shared_memory(own, [D, D], tile_layout(D), turn)
        fence_async_shared()
        barrier()
        x = warpgroup_mma(x_shared, turn_shared, gl.full([R, D], 0.0, gl.float32, LAYOUT))
    else:
        x = gl.convert_layout(gl.load(query + at + channel[None, :], mask=there, other=0.0), LAYOUT).to(gl.float32)
    factor = gl.full([R], 1.0, gl.float32, gl.SliceLayout(1, LAYOUT)) * (scaling * TURN)
    q_center = gl.full([R], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    if K.centered:
        mean = gl.convert_layout(gl.load(center + channel), gl.SliceLayout(0, LAYOUT))
        q_center = gl.sum(x * mean[None, :], 1) * factor
    largest = gl.maximum(gl.max(gl.maximum(x, -x), 1), 1e-30)
    factor *= largest * (unit_of(K) / power_of(K))
    q.store((x / largest[:, None]).to(gl.float16))
    return factor, q_center


@gluon.jit
def _exact_tiles(
    D: gl.constexpr, DV: gl.constexpr, SOFTCAP: gl.constexpr, MASK: gl.constexpr, ARCH: gl.constexpr, RING: gl.constexpr,
    state, q, k, v, scaling, keys, key_stride, values, value_stride, tokens, start, newest, mask, mask_stride, oldest_slot, count,
):  # fmt: skip
    """`triton_tiles._exact_tiles`; `q`, `k` and `v` are shared, [R, D], [T, D] and [T, DV], in the model's dtype."""
    m, l, acc = state
    T: gl.constexpr = k.shape[0]
    R: gl.constexpr = q.shape[0]
    SCORES: gl.constexpr = product_layout(R, T)
    t = gl.arange(0, T, gl.SliceLayout(0, SCORES))
    for begin in range(0, tokens, T):
        barrier()
        copy_exact(k, keys, key_stride, begin, tokens, oldest_slot, count, RING)
        copy_exact(v, values, value_stride, begin, tokens, oldest_slot, count, RING)
        fence_async_shared()
        barrier()
        s = warpgroup_mma(q, k.permute((1, 0)), gl.full([R, T], 0.0, gl.float32, SCORES)) * scaling
        s = capped(s, SOFTCAP, ARCH)
        valid, column = exact_columns(begin + t, tokens, start, oldest_slot, count, RING)
        if MASK:
            valid = valid & (gl.load(mask + column * mask_stride, mask=valid, other=0) != 0)
        s = gl.where(valid[None, :] & (column[None, :] <= newest[:, None]), s, MASKED_SCORE)
        w, m, l, shrink = _weights(m, l, s, gl.full([R], 1.0, gl.float32, gl.SliceLayout(1, SCORES)), ARCH)
        p = gl.convert_layout(w.to(q.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
        acc = warpgroup_mma(p, v, acc)
    return m, l, acc


@gluon.jit
def _copy(X: gl.constexpr, D: gl.constexpr, ONCE: gl.constexpr, head, STRIDES: gl.constexpr, codes, high_bits, scales, stage, table,
          entries, blocks, begin, high, PAGE: gl.constexpr, BASE: gl.constexpr, STEP: gl.constexpr):  # fmt: skip
    """Copies the tile that begins at `begin` to stage `stage`; behind the last one, anything of its pages, which nobody reads. `entries`:
    from `entries_of_tile`."""
    T: gl.constexpr = codes.shape[1]
    at = gl.minimum(begin, (high - 1) // T * T)
    end = high
    if pages_of_tile(T, PAGE, STEP) and X.kind != "e4m3" and X.kind != "e5m2":
        end = at + T  # what a page has behind its last token has no weight, and is a number
    copy_tile(X, D, head, STRIDES, codes.index(stage), high_bits.index(stage), table, entries, blocks, at, end, PAGE, BASE, STEP)
    copy_scales(X, D, ONCE, head, STRIDES, scales, stage, T, table, entries, blocks, at, high, PAGE, BASE, STEP)


@gluon.jit
def _produce(
    tiles, low, high, pages, KEYS: gl.constexpr, VALUES: gl.constexpr, GROUPS: gl.constexpr, PAGE: gl.constexpr, BASE: gl.constexpr,
    STEP: gl.constexpr, ARCH: gl.constexpr,
):  # fmt: skip
    """Dequantizes the tokens from `low` to `high`, tile after tile, for GROUPS groups of `_attend`. Keys are one tile ahead of values, and
    have one tile more, whose scores nobody reads.

    tiles   keys and values, shared fp16 [2, T, channels]
    pages   keys and values of the head in the first page, the table, chosen blocks, and what both sides have for `unscale`
    """
    keys, values = tiles
    k_head, v_head, table, blocks, k_unscale, v_unscale = pages
    table = by_lane(table)
    K: gl.constexpr = KEYS.layout
    V: gl.constexpr = VALUES.layout
    D: gl.constexpr = KEYS.dim
    DV: gl.constexpr = VALUES.dim
    K_ONCE: gl.constexpr = KEYS.once
    V_ONCE: gl.constexpr = VALUES.once
    K_STRIDES: gl.constexpr = KEYS.strides
    V_STRIDES: gl.constexpr = VALUES.strides
    T: gl.constexpr = keys.shape[1]
    OF_STEP: gl.constexpr = 32 * PRODUCERS + 128 * GROUPS
    k_codes = gl.allocate_shared_memory(gl.int16, [2, T, D // K.per], in_shared(D // K.per))
    v_codes = gl.allocate_shared_memory(gl.int16, [2, T, DV // V.per], in_shared(DV // V.per))
    k_bits, v_bits = k_codes, v_codes
    if K.high > 0:
        k_bits = gl.allocate_shared_memory(gl.int16, [2, T, D * K.high // 16], in_shared(D * K.high // 16))
    if V.high > 0:
        v_bits = gl.allocate_shared_memory(gl.int16, [2, T, DV * V.high // 16], in_shared(DV * V.high // 16))
    k_scales = allocate_scales(K, D, 2, T)
    v_scales = allocate_scales(V, DV, 2, T)
    k_entries = entries_of_tile(table, low, high, T, PAGE, STEP)
    v_entries = entries_of_tile(table, low + T, high, T, PAGE, STEP)
    _copy(K, D, K_ONCE, k_head, K_STRIDES, k_codes, k_bits, k_scales, 0, table, k_entries, blocks, low, high, PAGE, BASE, STEP)
    async_copy.commit_group()
    _copy(K, D, K_ONCE, k_head, K_STRIDES, k_codes, k_bits, k_scales, 1, table, v_entries, blocks, low + T, high, PAGE, BASE, STEP)
    _copy(V, DV, V_ONCE, v_head, V_STRIDES, v_codes, v_bits, v_scales, 0, table, k_entries, blocks, low, high, PAGE, BASE, STEP)
    async_copy.commit_group()
    tile = low * 0 - 1
    for token in range(low - T, high, T):  # values from here on, keys from the next tile on
        k_entries = entries_of_tile(table, token + 3 * T, high, T, PAGE, STEP)  # long before the copies from these pages
        async_copy.wait_group(1)
        barrier()
        here, after = tile & 1, (tile + 1) & 1
        _dequantize(K, D, keys.index(after), k_codes.index(after), k_bits.index(after), k_scales, after, k_unscale, T, ARCH)
        _completes(HAS_KEYS, after, GROUPS)
        if token >= low:
            wait_at(FREE + after, OF_STEP)
            _dequantize(V, DV, values.index(here), v_codes.index(here), v_bits.index(here), v_scales, here, v_unscale, high - token, ARCH)
            _completes(HAS_VALUES, here, GROUPS)
        ahead = token + 3 * T  # over what was dequantized: Triton has a barrier of these warps here
        _copy(K, D, K_ONCE, k_head, K_STRIDES, k_codes, k_bits, k_scales, after, table, k_entries, blocks, ahead, high, PAGE, BASE, STEP)
        ahead = token + 2 * T
        _copy(V, DV, V_ONCE, v_head, V_STRIDES, v_codes, v_bits, v_scales, here, table, v_entries, blocks, ahead, high, PAGE, BASE, STEP)
        async_copy.commit_group()
        v_entries = k_entries
        tile += 1
    async_copy.wait_group(0)
    wait_at(FREE + ((tile + 1) & 1), OF_STEP)


@gluon.jit
def _attend(
    q, tiles, low, high, seen, results, HIDE: gl.constexpr, CENTERED: gl.constexpr, CAP: gl.constexpr, ARCH: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    """Attention of the R rows of `q`, shared fp16 [R, D], to the tokens from `low` to `high`, which `_produce` dequantizes.

    tiles     as in `_produce`                      seen, HIDE    as in `attend_in_turns`
    results   `part`, `tops` (before: products with the mean of keys, and factors of scores), the first row of the program in both, the
              rows that there are, and the unit of the output
    """
    part, tops, entry, live_rows, unit = results
    R: gl.constexpr = q.shape[0]
    DV: gl.constexpr = tiles[1].shape[2]
    row = gl.arange(0, R, gl.SliceLayout(1, product_layout(R, tiles[0].shape[1])))
    factor = gl.load(tops + (entry + row) * 2 + 1)
    m, l, acc = attend_in_turns(q, tiles, low, high, factor, tops + entry * 2, seen, HIDE, CENTERED, CAP, ARCH, STEP)
    if CENTERED and CAP == 0:
        m += gl.load(tops + (entry + row) * 2)
    _store(part, tops, entry, row, live_rows, DV, m, l, acc * unit)


@gluon.jit
def attend_in_turns(
    q, tiles, low, high, factor, products, seen, HIDE: gl.constexpr, CENTERED: gl.constexpr, CAP: gl.constexpr, ARCH: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    """Maximum, normaliser and output, fp32 [R], [R] and [R, DV], of the rows of `q`, shared [R, D], over the tokens from `low` to `high`.

    tiles      keys and values, shared [2, T, D] and [2 or 3, T, DV], of which other warps say by barriers that they are complete
    factor     of scores, fp32 [R]
    products   of queries with the mean of keys, fp32, each two numbers after the last; read if CENTERED and CAP
    HIDE       a function that hides scores of a tile, as `hide_end`; `seen` and STEP are what it reads
    """
    keys, values = tiles
    R: gl.constexpr = q.shape[0]
    T: gl.constexpr = keys.shape[1]
    DV: gl.constexpr = values.shape[2]
    OF_STEP: gl.constexpr = 32 * PRODUCERS + 2 * R
    SCORES: gl.constexpr = product_layout(R, T)
    OUTPUT: gl.constexpr = product_layout(R, DV)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_OUTPUT: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    m, l, acc = _nothing(R, T, DV)
    t = gl.arange(0, T, gl.SliceLayout(0, SCORES))
    zeros = gl.full([R, T], 0.0, gl.float32, SCORES)
    group = gl.inline_asm_elementwise(_GROUP, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    wait_at(HAS_KEYS + group, OF_TILE)
    s = warpgroup_mma_wait(0, deps=(warpgroup_mma(q, keys.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True),))
    arrive_at(FREE + 1, OF_STEP)
    unfinished = warpgroup_mma_init(acc)
    tile = low * 0
    for token in range(low, high, T):
        of_tile = factor
        if CAP != 0:
            s = s * factor[:, None]
            if CENTERED:
                s = s + gl.load(products + gl.arange(0, R, OF_ROW) * 2)[:, None]
            s = capped(s, CAP, ARCH)
            of_tile = gl.full([R], 1.0, gl.float32, OF_ROW)
        s = HIDE(s, token, t, high, seen, STEP)
        w, m, l, shrink = _weights(m, l, s, of_tile, ARCH)
        # Before the next product, which the compiler would wait for too. Weights are an operand, so that they are packed only after that:
        # until then the last product reads the registers that they take.
        acc, w = warpgroup_mma_wait(0, deps=(unfinished, w))
        p = gl.convert_layout(w.to(values.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
        here, after = tile & 1, (tile + 1) & 1
        wait_at(HAS_KEYS + 2 * after + group, OF_TILE)
        following = warpgroup_mma(q, keys.index(after).permute((1, 0)), zeros, use_acc=False, is_async=True)
        acc = acc * gl.convert_layout(shrink, OF_OUTPUT)[:, None]
        wait_at(HAS_VALUES + 2 * here + group, OF_TILE)
        unfinished = warpgroup_mma(p, values.index(here if values.shape[0] == 2 else tile % values.shape[0]), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(following,))
        wait_at(TOGETHER + group, 128)  # correct without it, but up to 11 % slower in `gluon_dense.py`
        arrive_at(FREE + here, OF_STEP)
        tile += 1
    return m, l, warpgroup_mma_wait(0, deps=(unfinished,))


@gluon.jit
def _nothing(R: gl.constexpr, T: gl.constexpr, DV: gl.constexpr):
    """Maximum, normaliser and output of R rows before the first tile of T tokens."""
    OF_ROW: gl.constexpr = gl.SliceLayout(1, product_layout(R, T))
    m = gl.full([R], MASKED_SCORE, gl.float32, OF_ROW)
    return m, gl.full([R], 0.0, gl.float32, OF_ROW), gl.full([R, DV], 0.0, gl.float32, product_layout(R, DV))


@gluon.jit
def _rows(r, G: gl.constexpr, queries, query_strides, b, h):
    """The query of the rows `r`, int [R], of a KV head, and where the rows begin."""
    row = gl.minimum(r, G * queries - 1)
    number = row % queries
    return number, b * query_strides[0] + (h * G + row // queries) * query_strides[1] + number * query_strides[2]


@gluon.jit
def _store(part, tops, entry, row, live_rows, DV: gl.constexpr, m, l, acc):
    """Stores maxima, normalisers and outputs of the rows `row`, of which there are `live_rows`."""
    OUTPUT: gl.constexpr = acc.type.layout
    at = gl.convert_layout(row, gl.SliceLayout(1, OUTPUT))
    out = part + entry * DV + at[:, None] * DV + gl.arange(0, DV, gl.SliceLayout(0, OUTPUT))[None, :]
    gl.store(out, acc, mask=(at < live_rows)[:, None])
    gl.store(tops + (entry + row) * 2, m, mask=row < live_rows)
    gl.store(tops + (entry + row) * 2 + 1, l, mask=row < live_rows)


# What changes from step to step, or call to call, must not compile the kernel anew.
@gluon.jit(
    do_not_specialize=[
        "scaling", "n_sinks", "n_quantized", "n_residual", "least", "heads", "queries", "table_b", "table_h", "rows_b", "lengths_b",
        "mask_b", "mask_t",
    ]
)  # fmt: skip
def attend_tiles_kernel(
    query, rotation, table, rows, lengths, chosen, k_planes, v_planes, exact, mask, part, tops,
    query_strides, table_b, table_h, rows_b, lengths_b, mean_strides, mask_b, mask_t, scaling, n_sinks, n_quantized, n_residual, least,
    heads, queries,
    KEYS: gl.constexpr, VALUES: gl.constexpr, PAGES: gl.constexpr, G: gl.constexpr, R: gl.constexpr, T: gl.constexpr,
    EXACT: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, ARCH: gl.constexpr,
):  # fmt: skip
    """This kernel has the grid and the arguments of `triton_tiles.attend_tiles_kernel`. It has 2 * R threads and those of PRODUCERS."""
    COUNTED: gl.constexpr = rows is not None
    K: gl.constexpr = KEYS.layout
    V: gl.constexpr = VALUES.layout
    D: gl.constexpr = KEYS.dim
    DV: gl.constexpr = VALUES.dim
    PAGE: gl.constexpr = PAGES[0]
    BASE: gl.constexpr = PAGES[1]
    K_ONCE: gl.constexpr = KEYS.once
    TURN: gl.constexpr = KEYS.turn
    V_ONCE: gl.constexpr = VALUES.once
    K_STRIDES: gl.constexpr = KEYS.strides
    V_STRIDES: gl.constexpr = VALUES.strides
    OF_ROW: gl.constexpr = gl.SliceLayout(1, product_layout(R, EXACT_TILE))
    bh, split, splits = place_of_program(EXACT)
    block = gl.program_id(1)
    b = (bh // heads).to(gl.int64)
    h = bh % heads
    row = gl.arange(0, R, OF_ROW)
    in_ring, stored, oldest_slot = n_residual, n_quantized, 0
    if COUNTED:
        rows += b * rows_b
        stored = gl.load(lengths + b * lengths_b)
        n_sinks = gl.load(rows + SINKS)
        oldest_slot = gl.load(rows + RING_START)
        in_ring = gl.load(rows + RING_TOKENS)
    length = stored
    blocks = table  # nothing reads it
    STEP: gl.constexpr = 0 if chosen is None else BLOCK
    if chosen is not None:
        length = gl.load(chosen[1] + bh)
        blocks = chosen[0] + (b * table_b + h * table_h)
    if MASK:
        mask += b * mask_b
    entry = ((bh * gl.num_programs(1) + block).to(gl.int64) * splits + split) * R
    live_rows = G * queries - block * R
    scaling *= LOG2E if SOFTCAP is None else 1.0

    if EXACT and split == 0:
        own: gl.constexpr = query.dtype.element_ty
        LOADED: gl.constexpr = copied(D, R // 16)
        xq = gl.allocate_shared_memory(own, [R, D], tile_layout(D))
        xk = gl.allocate_shared_memory(own, [EXACT_TILE, D], tile_layout(D))
        xv = gl.allocate_shared_memory(own, [EXACT_TILE, DV], tile_layout(DV))
        number, q_rows = _rows(block * R + row, G, queries, query_strides, b, h)
        at = gl.convert_layout(q_rows, gl.SliceLayout(1, LOADED))[:, None] + gl.arange(0, D, gl.SliceLayout(0, LOADED))[None, :]
        xq.store(gl.load(query + at))
        newest = n_sinks + stored + in_ring - queries + number
        state = _exact_tiles(
            D, DV, SOFTCAP, MASK, ARCH, False, _nothing(R, EXACT_TILE, DV), xq, xk, xv, scaling,
            exact[0] + b * exact[4] + h * exact[5], exact[6],
            exact[1] + b * exact[7] + h * exact[8], exact[9],
            n_sinks, 0, newest, mask, mask_t, 0, 0,
        )  # fmt: skip
        m, l, acc = _exact_tiles(
            D, DV, SOFTCAP, MASK, ARCH, COUNTED, state, xq, xk, xv, scaling,
            exact[2] + b * exact[10] + h * exact[11], exact[12],
            exact[3] + b * exact[13] + h * exact[14], exact[15],
            n_residual, n_sinks + stored, newest, mask, mask_t, oldest_slot, in_ring,
        )  # fmt: skip
        _store(part, tops, entry, row, live_rows, DV, m, l, acc)
    else:
        each = tokens_of_split(length, gl.maximum(splits - EXACT, 1), least, T)
        low = tl.multiple_of((split - EXACT) * each, T)
        high = gl.minimum(low + each, length)
        if low < high:
            table += b * table_b + h * table_h
            k_head = head_of(K, K_ONCE, (k_planes[0], k_planes[1], k_planes[2]), K_STRIDES, b, h)
            v_head = head_of(V, V_ONCE, (v_planes[0], v_planes[1], v_planes[2]), V_STRIDES, b, h)
            hides = low < 0
            if STEP:
                hides = low >= 0
            if MASK and not STEP:
                hides = hides_any(mask, n_sinks + low, n_sinks + high, mask_t)
            k_norm = _norm(K, D, K_ONCE, k_head, K_STRIDES, table, blocks, low, high, PAGE, BASE, STEP)
            v_norm = gl.maximum(_norm(V, DV, V_ONCE, v_head, V_STRIDES, table, blocks, low, high, PAGE, BASE, STEP), 1e-30)
            q = gl.allocate_shared_memory(gl.float16, [R, D], tile_layout(D))
            k_mean = k_planes[3] + b * mean_strides[0] + h * mean_strides[1]
            _, q_rows = _rows(block * R + row, G, queries, query_strides, b, h)
            factor, q_center = _queries(K, D, TURN, query, q_rows, row < live_rows, rotation, k_mean, scaling, q)
            # To the loop through the memory of results, so that it has another layout. No factor of 0: what is hidden stays hidden.
            at = entry + gl.convert_layout(row, factor.type.layout)
            gl.store(tops + at * 2, q_center)
            gl.store(tops + at * 2 + 1, gl.maximum(factor * k_norm, 1e-37))
            keys = gl.allocate_shared_memory(gl.float16, [2, T, D], tile_layout(D))
            values = gl.allocate_shared_memory(gl.float16, [2, T, DV], tile_layout(DV))
            fence_async_shared()
            barrier()
            CENTERED: gl.constexpr = K.centered
            CAP: gl.constexpr = 0.0 if SOFTCAP is None else SOFTCAP
            pages = k_head, v_head, table, blocks, power_of(K) / k_norm, power_of(V) / v_norm
            HIDE: gl.constexpr = _hide_masked if MASK else hide_end
            seen = mask, mask_t, n_sinks, hides, blocks
            results = part, tops, entry, live_rows, v_norm * (unit_of(V) / power_of(V))
            gl.warp_specialize(
                [
                    (_attend, (q, (keys, values), low, high, seen, results, HIDE, CENTERED, CAP, ARCH, STEP)),
                    (_produce, ((keys, values), low, high, pages, KEYS, VALUES, R // 64, PAGE, BASE, STEP, ARCH)),
                ],
                [PRODUCERS],
                [PRODUCERS_REGISTERS],
            )
        else:
            m, l, acc = _nothing(R, EXACT_TILE, DV)
            _store(part, tops, entry, row, live_rows, DV, m, l, acc)
