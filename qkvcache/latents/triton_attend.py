"""The fused attention kernel over latents: many query heads over one head whose latents are keys and values at once (`reference.py`).

One program reads one split of the tokens of one sequence for a block of query rows. A tile of latents is dequantized once, to fp16 in
shared memory, for both products, as in `triton_tiles.py`: it has the order of channels that is described there. Queries are rotated
as latents are stored, brought into that order and scaled to fp16 beforehand (`query_kernel`).

Splits of the quantized tokens, and the exact tokens as one more, leave partial outputs that `triton_join.py` joins. All
exponents are base 2.

Shapes of tiles: T tokens, R query rows, D channels of a latent, P of a rotated key. K and V are the `PackedLayout` of their codecs."""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.attend.triton_attend import (
    RING_START,
    RING_TOKENS,
    SINKS,
    exact_columns,
    head_of,
    hides_any,
    page_of,
    place_of_program,
    tokens_of_split,
)
from ..kernels.attend.triton_tiles import (
    absorb,
    dequantize,
    largest_scale,
    load_stored,
    page_of_tile,
    power_of,
    shows,
    token_of,
)
from ..kernels.device.math import MASKED_SCORE
from ..kernels.device.unpack import unit_of


@triton.constexpr_function
def _places(layout, dim: int):
    """For divisions of a place in a tile: channels of a word, words, and the places of half a tile."""
    return layout.per, dim // layout.per, dim // 2


@triton.jit
def _loaded(X: tl.constexpr, ONCE: tl.constexpr, D: tl.constexpr, planes, slot, ARCH: tl.constexpr):
    """The tokens `slot`, int [T], as stored at `planes`: numbers of `half`, [T, D], or as in `load_stored`."""
    if X.kind == "half":
        return tl.load((planes[0] + slot * D)[:, None] + tl.arange(0, D)[None, :])
    else:
        return load_stored(X, ONCE, D, planes, slot, ARCH)


@triton.jit
def _numbers(X: tl.constexpr, D: tl.constexpr, loaded, norm, ARCH: tl.constexpr):
    """The numbers, [T, D], of what `_loaded` returned; arguments as in `dequantize`."""
    if X.kind == "half":
        return loaded
    else:
        return dequantize(X, D, loaded, norm, ARCH)


@triton.jit
def _exact_tiles(
    D: tl.constexpr, P: tl.constexpr, T: tl.constexpr, MASK: tl.constexpr, ARCH: tl.constexpr, RING: tl.constexpr,
    state, q, q_rope, scaling, latents, latent_stride, ropes, rope_stride, tokens, start, newest, mask, mask_stride, oldest_slot, count,
):  # fmt: skip
    """Adds tokens in the model's dtype to `state`: running maximum and normaliser, fp32 [R] each, and output, fp32 [R, D]. Returns it.

    q, q_rope   [R, D] and [R, P], model dtype; scaling: of their scores, to base 2
    latents     [tokens, D], a token `latent_stride` elements from the next; ropes [tokens, P]: rope_stride
    start       column of the first token; newest: int [R], the last column that a query row sees
    RING        whether tokens are the `count` of a ring of `tokens` slots from `oldest_slot` on
    """
    t = tl.arange(0, T)
    d = tl.arange(0, D)
    p = tl.arange(0, P)
    for begin in tl.range(0, tokens, T, num_stages=1):
        at = begin + t
        valid, column = exact_columns(at, tokens, start, oldest_slot, count, RING)
        c = tl.load(latents + at[:, None] * latent_stride + d[None, :], mask=valid[:, None], other=0.0)
        r = tl.load(ropes + at[:, None] * rope_stride + p[None, :], mask=valid[:, None], other=0.0)
        s = tl.dot(q, tl.trans(c), input_precision="ieee")
        s = tl.dot(q_rope, tl.trans(r), s, input_precision="ieee") * scaling
        if MASK:
            valid = valid & shows(mask, column, mask_stride, valid)
        s = tl.where(valid[None, :] & (column[None, :] <= newest[:, None]), s, float("-inf"))
        state = absorb(state, s, tl.full([s.shape[0]], 1.0, tl.float32), c, ARCH)
    return state


@triton.constexpr_function
def words_of_piece(layout, dim: int) -> int:
    """Words of a piece of latents in `gluon_attend.py`, of which all planes are in registers at a time."""
    return min(max(64 // layout.per, 16), 32, dim // layout.per)


@triton.jit(do_not_specialize=["latent_stride", "query_stride", "mean_b", "rows", "scaling"])
def query_kernel(
    latent, query, order, rope_order, weights, mean, q_latent, q_rope, factors, latent_stride, query_stride, mean_b, rows, scaling,
    D: tl.constexpr, P: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Brings queries into the form in which `attend_latents_kernel` multiplies them. Grid (B * rows).

    latent             [B * rows, D], rotated as stored, a row `latent_stride` elements from the next
    query              [B * rows, D + P]: query_stride
    order, rope_order  int64 [D] and [P]: the channel at each place of a tile
    weights            fp32 [D]: of the channels in the sum of a row (`unpack.plane_offset`)
    mean               fp32 [B, D]: mean_b; read if CENTERED
    q_latent, q_rope, factors   as in `attend_latents_kernel`
    scaling            factor of scores, to base 2
    """
    row = tl.program_id(0).to(tl.int64)
    latent += row * latent_stride
    d = tl.arange(0, D)
    p = tl.arange(0, P)
    x = tl.load(latent + d).to(tl.float32)
    center = 0.0
    if CENTERED:
        center = tl.sum(x * tl.load(mean + row // rows * mean_b + d), 0) * scaling
    rope = tl.load(query + row * query_stride + D + tl.load(rope_order + p)).to(tl.float32)
    largest = tl.maximum(tl.maximum(tl.max(tl.abs(x), 0), tl.max(tl.abs(rope), 0)), 1e-30)
    x = tl.load(latent + tl.load(order + d)).to(tl.float32)
    x = (x / largest).to(q_latent.dtype.element_ty)
    tl.store(q_latent + row * D + d, x)
    rope = (rope / largest).to(q_rope.dtype.element_ty)
    tl.store(q_rope + row * P + p, rope)
    tl.store(factors + row * 4, largest * scaling)
    tl.store(factors + row * 4 + 1, center)
    tl.store(factors + row * 4 + 2, tl.sum(x.to(tl.float32) * tl.load(weights + d), 0))
    tl.store(factors + row * 4 + 3, tl.sum(rope.to(tl.float32), 0))


@triton.jit(do_not_specialize=["mask_b", "mask_q", "table_b", "n_sinks", "n_quantized", "queries", "room", "rows_b", "lengths_b"])
def choose_kernel(
    mask, table, rows, lengths, index, entries, counts, mask_b, mask_q, mask_t, table_b, n_sinks, n_quantized, queries, room, rows_b,
    lengths_b, PAGE: tl.constexpr, COUNTED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Lists the quantized tokens that a query sees. Grid (parts of N tokens, B * queries).

    mask             uint8 (0: hidden) [B, queries, columns]: mask_b, mask_q, mask_t
    table, rows, lengths, n_sinks, n_quantized   as in `attend_latents_kernel`
    index, entries   int32 and as `table` [B * queries, room], contiguous, and counts, int32 [B * queries]: as `chosen_tokens` returns them
    """
    part = tl.program_id(0)
    each_query = tl.program_id(1).to(tl.int64)
    b = each_query // queries
    length = n_quantized
    if COUNTED:
        length = tl.load(lengths + b * lengths_b)
        n_sinks = tl.load(rows + b * rows_b + SINKS)
    mask += b * mask_b + each_query % queries * mask_q + n_sinks * mask_t
    i = tl.arange(0, N)
    seen = tl.zeros([N], tl.int32)
    for at in range(0, part * N, N):
        seen += tl.load(mask + (at + i) * mask_t, mask=at + i < length, other=0)
    token = part * N + i
    shown = tl.load(mask + token * mask_t, mask=token < length, other=0).to(tl.int32)
    end = tl.cumsum(shown, 0) + tl.sum(seen, 0)
    listed = (shown != 0) & (end <= room)
    at = each_query * room + end - 1
    tl.store(index + at, token, mask=listed)
    tl.store(entries + at, tl.load(table + b * table_b + token // PAGE, mask=listed), mask=listed)
    if part == tl.num_programs(0) - 1:
        tl.store(counts + each_query, tl.minimum(tl.max(end, 0), room))


# What changes from step to step, or call to call, must not compile the kernel anew.
@triton.jit(
    do_not_specialize=[
        "scaling", "n_sinks", "n_quantized", "n_residual", "least", "queries", "table_b", "rows_b", "lengths_b", "mask_b", "mask_q",
        "mask_t",
    ]
)  # fmt: skip
def attend_latents_kernel(
    query, q_latent, q_rope, factors, table, chosen, counts, rows, lengths, k_planes, v_planes, exact, mask, part, tops,
    query_strides, table_b, rows_b, lengths_b, mask_b, mask_q, mask_t, scaling, n_sinks, n_quantized, n_residual, least, queries,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PAGES: tl.constexpr, G: tl.constexpr, R: tl.constexpr, T: tl.constexpr, TX: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, ARCH: tl.constexpr, EXACT: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Attention of `queries` queries of G heads over sinks, quantized tokens in pages and a residual (`PagedInputs`), split over
    programs. Grid (B, blocks of R query rows, splits); with EXACT, split 0 is that of the exact tokens. Strides are in elements. Channels
    are contiguous. Query row `r` is query `r % queries` of head `r // queries`. With CHOSEN, 1, each query reads tokens of its own: the
    grid is (B * queries, blocks of R heads, splits), and `part` has B * queries for B.

    query          [B, G, queries, D + P] model dtype: query_strides over rows, heads and queries
    q_latent       fp16 (the model's dtype for `half`) [B, G * queries, D], contiguous: rotated as stored, in the order of tiles;
                   q_rope likewise [B, G * queries, P]
    factors        fp32 [B, G * queries, 4], contiguous: of the scores, to base 2, the product with the mean of latents, and sums that are
                   not read
    table, rows, lengths, k_planes, v_planes, exact, KEYS, VALUES, PAGES   as in `attend_kernel`, of one head; with `rows`, rows begin with
                   the first token of their pages, and the rings of row `b` are row `b` of the residual
    chosen         int32 [B * queries, N], read if CHOSEN: indices in pages of the tokens of a query; `table` has the entries of their
                   pages, and table_b is N; counts, int32 [B * queries]: how many there are
    mask           uint8 (0: hidden) [B, columns], with CHOSEN [B, queries, columns], read if MASK: mask_b, mask_q, mask_t
    part, tops     outputs fp32 [B, blocks, splits, R, D], and their maxima and normalisers, fp32 [B, blocks, splits, R, 2]
    scaling        factor of scores, to base 2
    n_sinks, n_quantized, n_residual   tokens, the same for all rows; with `rows`: slots of sinks and of a ring, and a bound
    least          of a split, in tokens: a multiple of T
    CAUSAL         whether the last `queries` tokens, which are exact, are the queries' own
    """
    COUNTED: tl.constexpr = rows is not None
    K: tl.constexpr = KEYS.layout
    V: tl.constexpr = VALUES.layout
    D: tl.constexpr = KEYS.dim
    P: tl.constexpr = VALUES.dim
    PAGE: tl.constexpr = PAGES[0]
    BASE: tl.constexpr = PAGES[1]
    K_ONCE: tl.constexpr = KEYS.once
    V_ONCE: tl.constexpr = VALUES.once
    K_STRIDES: tl.constexpr = KEYS.strides
    V_STRIDES: tl.constexpr = VALUES.strides
    each_query, split, splits = place_of_program(EXACT and not CHOSEN)
    block = tl.program_id(1)
    h = each_query * 0  # there is one head
    each_query = each_query.to(tl.int64)
    b = each_query

    r = block * R + tl.arange(0, R)
    if CHOSEN:
        b = each_query // queries
        live = r < G
        row = tl.minimum(r, G - 1) * queries + each_query % queries
        mask += each_query % queries * mask_q
    else:
        live = r < G * queries
        row = tl.minimum(r, G * queries - 1)
    number = row % queries
    in_ring, length, oldest_slot = n_residual, n_quantized, 0
    if COUNTED:
        rows += b * rows_b
        length = tl.load(lengths + b * lengths_b)
        n_sinks = tl.load(rows + SINKS)
        oldest_slot = tl.load(rows + RING_START)
        in_ring = tl.load(rows + RING_TOKENS)
    if MASK:
        mask += b * mask_b
    panel = each_query * tl.num_programs(1) + block
    out = part + (panel * splits + split) * (R * D) + (tl.arange(0, R) * D)[:, None]
    d = tl.arange(0, D)
    p = tl.arange(0, P)
    state = (tl.full([R], MASKED_SCORE, tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, D], tl.float32))

    if EXACT and split == 0:
        x_rows = query + (b * query_strides[0] + row // queries * query_strides[1] + number * query_strides[2])[:, None]
        x_latent = tl.load(x_rows + d[None, :])
        x_rope = tl.load(x_rows + D + p[None, :])
        newest = n_sinks + length + in_ring - (queries - number if CAUSAL else tl.full([R], 1, tl.int32))
        state = _exact_tiles(
            D, P, TX, MASK, ARCH, False, state, x_latent, x_rope, scaling, exact[0] + b * exact[4], exact[6],
            exact[1] + b * exact[7], exact[9], n_sinks, 0, newest, mask, mask_t, 0, 0,
        )  # fmt: skip
        m, l, acc = _exact_tiles(
            D, P, TX, MASK, ARCH, COUNTED, state, x_latent, x_rope, scaling, exact[2] + b * exact[10], exact[12],
            exact[3] + b * exact[13], exact[15], n_residual, n_sinks + length, newest, mask, mask_t, oldest_slot, in_ring,
        )  # fmt: skip
        tl.store(out + d[None, :], acc, mask=live[:, None])
    else:
        q_row = b * (G * queries) + row
        q = tl.load(q_latent + q_row[:, None] * D + d[None, :])
        qr = tl.load(q_rope + q_row[:, None] * P + p[None, :])
        factor = tl.load(factors + q_row * 4)
        rope_factor = factor
        center = tl.load(factors + q_row * 4 + 1)
        if CHOSEN:
            length = tl.load(counts + each_query)
            chosen += each_query * table_b
        each = tokens_of_split(length, tl.maximum(splits - EXACT, 1), least, T)
        low = tl.multiple_of((split - EXACT) * each, T)
        high = tl.minimum(low + each, length)
        hides = hides_any(mask, n_sinks + low, n_sinks + high, mask_t) if MASK and not CHOSEN else False
        t = tl.arange(0, T)
        unit = 1e-30  # of the output
        if low < high:
            table += each_query * table_b
            UNIT: tl.constexpr = CHOSEN if CHOSEN else PAGE
            k_head = head_of(K, K_ONCE, (k_planes[0], k_planes[1], k_planes[2]), K_STRIDES, b, h)
            v_head = head_of(V, V_ONCE, (v_planes[0], v_planes[1], v_planes[2]), V_STRIDES, b, h)
            unit = tl.maximum(largest_scale(K, D, K_ONCE, k_head, K_STRIDES, table, chosen, low, high, PAGE, BASE, CHOSEN), unit)
            rope_norm = largest_scale(V, P, V_ONCE, v_head, V_STRIDES, table, chosen, low, high, PAGE, BASE, CHOSEN)
            factor *= unit * (unit_of(K) / power_of(K))
            rope_factor *= rope_norm * (unit_of(V) / power_of(V))
            place = tl.minimum(low + t, high - 1)
            page = page_of_tile(table, low, high, place, UNIT, BASE)
            k_here, v_here = page_of(K, D, K_ONCE, k_head, K_STRIDES, page, 0), page_of(V, P, V_ONCE, v_head, V_STRIDES, page, 0)
            here = token_of(chosen, place, CHOSEN)
            stored = (_loaded(K, K_ONCE, D, k_here, here % PAGE, ARCH), _loaded(V, V_ONCE, P, v_here, here % PAGE, ARCH))
            for token in tl.range(low, high, T, num_stages=1):
                c = _numbers(K, D, stored[0], unit, ARCH)
                rope = _numbers(V, P, stored[1], rope_norm, ARCH)
                s = tl.dot(q, tl.trans(c), input_precision="ieee") * factor[:, None]
                s += tl.dot(qr, tl.trans(rope), input_precision="ieee") * rope_factor[:, None] + center[:, None]
                # The next tile, after the product: until then, the fence that hands tiles to it would wait for these loads.
                place = tl.minimum(token + T + t, high - 1)
                page = page_of_tile(table, token + T, high, place, UNIT, BASE)
                k_here, v_here = page_of(K, D, K_ONCE, k_head, K_STRIDES, page, 0), page_of(V, P, V_ONCE, v_head, V_STRIDES, page, 0)
                valid = token + t < high
                here = token_of(chosen, place, CHOSEN)
                stored = (_loaded(K, K_ONCE, D, k_here, here % PAGE, ARCH), _loaded(V, V_ONCE, P, v_here, here % PAGE, ARCH))
                if MASK and hides:
                    valid = valid & shows(mask, n_sinks + token + t, mask_t, valid)
                s = tl.where(valid[None, :], s, float("-inf"))
                state = absorb(state, s, tl.full([R], 1.0, tl.float32), c, ARCH)
        m, l, acc = state
        PER: tl.constexpr = _places(K, D)[0]
        WORDS: tl.constexpr = _places(K, D)[1]
        HALF: tl.constexpr = _places(K, D)[2]
        place = d
        if K.kind != "half":
            word = d // (4 * PER) % (WORDS // 8) * 8 + d // HALF * 4 + d // (2 * PER) % 2 * 2 + d % 2
            place = d // 2 % PER * WORDS + word  # plane after plane, as `reduce_kernel` reads them
        tl.store(out + place[None, :], acc * (unit * (unit_of(K) / power_of(K))), mask=live[:, None])
    entry = (panel * splits + split) * R + tl.arange(0, R)
    tl.store(tops + entry * 2, m)
    tl.store(tops + entry * 2 + 1, l)
