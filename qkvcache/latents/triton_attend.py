"""The fused attention kernel over latents: many query heads over one head whose latents are keys and values at once (`reference.py`).

One program reads one split of the tokens of one sequence for a block of query rows. A tile of latents is dequantized once, to fp16 in
shared memory, for both products, as in `triton_tiles.py`: it has the order of channels that is described there. Queries are rotated
as latents are stored, brought into that order and scaled to fp16 beforehand (`query_kernel`).

Splits of the quantized tokens, and the exact tokens as one more, leave partial outputs that `triton_join.py` joins. All
exponents are base 2.

Shapes of tiles: T tokens, R query rows, D channels of a latent, P of a rotated key. K and V are the `PackedLayout` of their codecs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.base import Codec, PackedLayout
from ..formats.rotation import rotation_block
from ..kernels.attend.launches import Launch, architecture, split
from ..kernels.attend.plan import OF_INPUTS, OF_LAYER, Kind, Layer, held_of, layer_of
from ..kernels.attend.triton_attend import (
    LOG2E,
    RING_START,
    RING_TOKENS,
    SINKS,
    exact_columns,
    head_of,
    hides_any,
    page_of,
    tokens_of_split,
)
from ..kernels.attend.triton_join import reduce_kernel
from ..kernels.attend.triton_tiles import (
    _absorb,
    _norm,
    _page_of_tile,
    _power,
    _shown,
    _stored,
    _tile,
    _token_of,
)
from ..kernels.device.math import MASKED_SCORE
from ..kernels.device.unpack import unit_of
from ..kernels.host.launch import Held, Launcher
from ..kernels.paged_inputs import PagedInputs
from ..kernels.segments import layout_of
from ..kernels.work import LEAST_SPLIT
from .reference import LEAST_SAVED


@triton.constexpr_function
def _places(layout, dim: int):
    """For divisions of a place in a tile: channels of a word, words, and the places of half a tile."""
    return layout.per, dim // layout.per, dim // 2


@triton.jit
def _loaded(X: tl.constexpr, ONCE: tl.constexpr, D: tl.constexpr, planes, slot, ARCH: tl.constexpr):
    """What is stored of the tokens `slot`, int [T], at `planes`: numbers of `half`, [T, D], or as in `_stored`."""
    if X.kind == "half":
        return tl.load((planes[0] + slot * D)[:, None] + tl.arange(0, D)[None, :])
    else:
        return _stored(X, ONCE, D, planes, slot, ARCH)


@triton.jit
def _numbers(X: tl.constexpr, D: tl.constexpr, loaded, norm, ARCH: tl.constexpr):
    """The numbers, [T, D], of what `_loaded` returned; arguments as in `_tile`."""
    if X.kind == "half":
        return loaded
    else:
        return _tile(X, D, loaded, norm, ARCH)


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
            valid = valid & _shown(mask, column, mask_stride, valid)
        s = tl.where(valid[None, :] & (column[None, :] <= newest[:, None]), s, float("-inf"))
        state = _absorb(state, s, tl.full([s.shape[0]], 1.0, tl.float32), c, ARCH)
    return state


@triton.jit(do_not_specialize=["latent_stride", "query_stride", "mean_b", "rows", "scaling", "latent_unit", "rope_unit"])
def query_kernel(
    latent, query, order, rope_order, mean, q_latent, q_rope, factors, latent_stride, query_stride, mean_b, rows, scaling, latent_unit,
    rope_unit, D: tl.constexpr, P: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Brings queries into the form in which `attend_latents_kernel` multiplies them. Grid (B * rows).

    latent             [B * rows, D], rotated as stored, a row `latent_stride` elements from the next
    query              [B * rows, D + P]: query_stride
    order, rope_order  int64 [D] and [P]: the channel at each place of a tile
    mean               fp32 [B, D]: mean_b; read if CENTERED
    q_latent, q_rope, factors   as in `attend_latents_kernel`
    scaling, latent_unit, rope_unit   factor of scores, to base 2, and the units of the numbers in tiles
    """
    row = tl.program_id(0).to(tl.int64)
    latent += row * latent_stride
    d = tl.arange(0, D)
    p = tl.arange(0, P)
    x = tl.load(latent + d).to(tl.float32)
    center = 0.0
    if CENTERED:
        center = tl.sum(x * tl.load(mean + row // rows * mean_b + d), 0) * scaling
    largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
    x = tl.load(latent + tl.load(order + d)).to(tl.float32)
    tl.store(q_latent + row * D + d, (x / largest).to(q_latent.dtype.element_ty))
    tl.store(factors + row * 3, largest * scaling * latent_unit)
    tl.store(factors + row * 3 + 2, center)
    x = tl.load(query + row * query_stride + D + tl.load(rope_order + p)).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
    tl.store(q_rope + row * P + p, (x / largest).to(q_rope.dtype.element_ty))
    tl.store(factors + row * 3 + 1, largest * scaling * rope_unit)


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
    programs. Grid (splits, blocks of R query rows, B); with EXACT, split 0 is that of the exact tokens. Strides are in elements. Channels
    are contiguous. Query row `r` is query `r % queries` of head `r // queries`. With CHOSEN, 1, each query reads tokens of its own: the
    grid is (splits, blocks of R heads, B * queries), and `part` has B * queries for B.

    query          [B, G, queries, D + P] model dtype: query_strides over rows, heads and queries
    q_latent       fp16 (the model's dtype for `half`) [B, G * queries, D], contiguous: rotated as stored, in the order of tiles;
                   q_rope likewise [B, G * queries, P]
    factors        fp32 [B, G * queries, 3], contiguous: of the scores of both, to base 2, and the product with the mean of latents
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
    split = tl.program_id(0)
    block = tl.program_id(1)
    each_query = tl.program_id(2).to(tl.int64)
    b = each_query
    splits = tl.num_programs(0)
    h = tl.program_id(2) * 0  # there is one head

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
        factor = tl.load(factors + q_row * 3)
        rope_factor = tl.load(factors + q_row * 3 + 1)
        center = tl.load(factors + q_row * 3 + 2)
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
            unit = tl.maximum(_norm(K, D, K_ONCE, k_head, K_STRIDES, table, chosen, low, high, PAGE, BASE, CHOSEN), unit)
            rope_norm = _norm(V, P, V_ONCE, v_head, V_STRIDES, table, chosen, low, high, PAGE, BASE, CHOSEN)
            factor *= unit
            rope_factor *= rope_norm
            place = tl.minimum(low + t, high - 1)
            page = _page_of_tile(table, low, high, place, UNIT, BASE)
            k_here, v_here = page_of(K, D, K_ONCE, k_head, K_STRIDES, page, 0), page_of(V, P, V_ONCE, v_head, V_STRIDES, page, 0)
            here = _token_of(chosen, place, CHOSEN)
            stored = (_loaded(K, K_ONCE, D, k_here, here % PAGE, ARCH), _loaded(V, V_ONCE, P, v_here, here % PAGE, ARCH))
            for token in tl.range(low, high, T, num_stages=1):
                c = _numbers(K, D, stored[0], unit, ARCH)
                rope = _numbers(V, P, stored[1], rope_norm, ARCH)
                s = tl.dot(q, tl.trans(c), input_precision="ieee") * factor[:, None]
                s += tl.dot(qr, tl.trans(rope), input_precision="ieee") * rope_factor[:, None] + center[:, None]
                # The next tile, after the product: until then, the fence that hands tiles to it would wait for these loads.
                place = tl.minimum(token + T + t, high - 1)
                page = _page_of_tile(table, token + T, high, place, UNIT, BASE)
                k_here, v_here = page_of(K, D, K_ONCE, k_head, K_STRIDES, page, 0), page_of(V, P, V_ONCE, v_head, V_STRIDES, page, 0)
                valid = token + t < high
                here = _token_of(chosen, place, CHOSEN)
                stored = (_loaded(K, K_ONCE, D, k_here, here % PAGE, ARCH), _loaded(V, V_ONCE, P, v_here, here % PAGE, ARCH))
                if MASK and hides:
                    valid = valid & _shown(mask, n_sinks + token + t, mask_t, valid)
                s = tl.where(valid[None, :], s, float("-inf"))
                state = _absorb(state, s, tl.full([R], 1.0, tl.float32), c, ARCH)
        m, l, acc = state
        PER: tl.constexpr = _places(K, D)[0]
        WORDS: tl.constexpr = _places(K, D)[1]
        HALF: tl.constexpr = _places(K, D)[2]
        place = d
        if K.kind != "half":
            word = d // (4 * PER) % (WORDS // 8) * 8 + d // HALF * 4 + d // (2 * PER) % 2 * 2 + d % 2
            place = d // 2 % PER * WORDS + word  # plane after plane, as `reduce_kernel` reads them
        tl.store(out + place[None, :], acc * (unit * (unit_of(K) / _power(K))), mask=live[:, None])
    entry = (panel * splits + split) * R + tl.arange(0, R)
    tl.store(tops + entry * 2, m)
    tl.store(tops + entry * 2 + 1, l)


def launched(arch: int, rows: int) -> Launch:
    """The launch for `rows` query rows, on NVIDIA GPUs of compute capability `arch`; 0: on others, and in the interpreter."""
    if arch // 10 in (9, 10):
        return Launch(64, 1, None, 1, 8, 64) if rows > 16 else Launch(64, 1, None, 1, 4, 16)
    return Launch(32, 1, None, 1, 4, 16)


CHOSEN_FROM = 4096
"""Tokens of which a program lists those that a query sees."""
MOST_PARTIAL = 2**28
"""Bytes of partial outputs of queries that read tokens of their own; more queries are divided among launches."""
MOST_RANK, MOST_CHANNELS = 512, 576
"""The most channels of a latent, since the outputs of a program are in registers, and of a latent and its rotated key,
since queries and tiles are in shared memory."""


def supports(inputs: PagedInputs, query: Tensor, mask: Tensor | None, causal: bool, chosen: int | None = None) -> bool:
    """Whether the kernel serves these inputs: codes in pages, in fp16 or bf16, under no mask but one that hides columns or, with `chosen`,
    shows at most so many tokens to each query."""
    known = inputs.prepared.of_layer.get("latents")
    if known is None:
        rank, rope = (x.shape[3] for x in inputs.ring)
        layouts = [layout_of(codec) for codec in inputs.pages.codecs]
        known = inputs.pages.by_page and not inputs.pages.per_head and all(layouts)
        known = known and rank <= MOST_RANK and rank + rope <= MOST_CHANNELS
        known = known and all(map(_in_tiles, layouts, (rank, rope)))
        known = inputs.prepared.of_layer["latents"] = known and not layouts[1].rotated and not layouts[1].centered  # type: ignore[union-attr]
    if not known or query.dtype != inputs.ring[0].dtype or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if causal and query.shape[2] > inputs.slots[2]:
        return False
    return (
        mask is None or (mask.dtype == torch.bool and all(n == 1 for n in (1, 1, 1, *mask.shape)[-3:-1])) or _gathers(inputs, mask, chosen)
    )


def _gathers(inputs: PagedInputs, mask: Tensor | None, chosen: int | None) -> bool:
    """Whether each query reads tokens of its own: at most half of all, or others than the other queries."""
    if mask is None or chosen is None or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
        return False
    return mask.shape[2] > 1 or LEAST_SAVED * chosen <= inputs.max_length


def _in_tiles(layout: PackedLayout | None, dim: int) -> bool:
    """Whether tiles can be made of this layout: words of powers of two, in whole groups."""
    if layout is None or dim & (dim - 1) or dim < 16 or dim // layout.per < 8:
        return False
    words = dim // layout.per
    return not layout.group or layout.group % words == 0 or words % layout.group == 0


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def _order(layout: PackedLayout, dim: int, device: torch.device) -> Tensor:
    """The channel at each place of a tile (`triton_tiles._reordered`), int64 `[D]`."""
    eighths = dim // layout.per // 8
    channel = torch.arange(dim, device=device)
    if layout.kind == "half":
        return channel
    if layout.group:
        return channel.view(layout.per, eighths, 2, 2, 2).permute(2, 1, 3, 0, 4).flatten()
    return channel.view(eighths, 2, 2, 2, layout.per).permute(1, 0, 2, 4, 3).flatten()


@functools.lru_cache(maxsize=32)
def _units(codecs: tuple[PackedLayout, PackedLayout]) -> tuple[float, float]:
    """The units of the numbers in tiles of both sides."""
    latent, rope = (float(unit_of.fn(layout)) / float(_power.fn(layout)) for layout in codecs)
    return latent, rope


def _turned(codec: Codec, x: Tensor) -> Tensor:
    """Queries `[N, D]`, rotated as keys are stored."""
    if codec.rotation is None:
        return x
    matrix = codec.rotation.matrix(x.shape[1], x.device, x.dtype)
    return torch.addmm(matrix[0], x, matrix, beta=0, alpha=rotation_block(x.shape[1]) ** -0.5)


def prepare(codecs: tuple[Codec, Codec], dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Allocates the tensors that are cached for these codecs (`tables.py` says why)."""
    for codec, dim in zip(codecs, dims, strict=True):
        if (layout := layout_of(codec)) and _in_tiles(layout, dim):
            _order(dataclasses.replace(layout, search=0), dim, device)
    if codecs[0].rotation is not None:
        codecs[0].rotation.matrix(dims[0], device, dtype)


def attend_latent_pages(
    query: Tensor,
    inputs: PagedInputs,
    mask: Tensor | None = None,
    *,
    scaling: float,
    causal: bool = False,
    chosen: int | None = None,
) -> Tensor:
    """Run `reference.attend_latent_pages` in one pass over the codes; with `chosen`, the most tokens that a query sees under the mask,
    over those that it sees."""
    layer, (batch, heads, queries, _), device = layer_of(inputs), query.shape, query.device
    kind, (sinks, region, ring) = layer.kind, inputs.slots
    rank, rope, empty = kind.constants["KEYS"].dim, kind.constants["VALUES"].dim, kind.empty
    arch, processors = architecture(device)
    rows, base2, exact, gathers = heads * queries, float(scaling * LOG2E.value), int(sinks + ring > 0), _gathers(inputs, mask, chosen)
    launch = launched(arch, heads if gathers else rows)
    most = max(MOST_PARTIAL // (4 * batch * -(-heads // launch.rows) * launch.rows * rank * (exact + 1)), 1)
    if gathers and queries > most:
        parts = zip(query.split(most, 2), mask.split(most, 2), strict=True)  # type: ignore[union-attr]
        return torch.cat([attend_latent_pages(x, inputs, y, scaling=scaling, chosen=chosen) for x, y in parts], dim=2)
    query = query if query.stride(-1) == 1 else query.contiguous()
    flat = query.reshape(batch * rows, rank + rope)
    turned = _turned(inputs.pages.codecs[0], flat[:, :rank])
    key = "latents", query.shape, mask is None, causal, exact, gathers, launch
    if key not in kind.launches:
        kind.launches[key] = LatentLaunches(kind, *key[1:])
    launches: LatentLaunches = kind.launches[key]
    means = _means(layer, inputs, queries if gathers else 1)
    dtype = query.dtype if kind.use.key.kind == "half" else torch.float16
    latent, rotated = (torch.empty(batch * rows, dim, dtype=dtype, device=device) for dim in (rank, rope))
    factors = torch.empty(batch * rows, 3, dtype=torch.float32, device=device)
    strides = Held(latent_stride=turned.stride(0), query_stride=flat.stride(0), scaling=base2)
    launches.queries((batch * rows, 1, 1), turned, flat, latent, rotated, factors, held=(strides, means))

    (table_b, *_), table, index, counts = inputs.pages.strides, inputs.pages.table, empty, empty
    if gathers:
        index, table, counts = chosen_tokens(inputs, mask, queries, chosen)  # type: ignore[arg-type]
        table_b = index.shape[1]
    blocks, groups = (-(-heads // launch.rows), batch * queries) if gathers else (-(-rows // launch.rows), batch)
    panels = groups * blocks
    splits = (
        max(split(min(region, table_b) if gathers else region, panels, launch.tile, processors + panels) if region else 0, 1 - exact)
        + exact
    )
    entries = panels * splits * launch.rows
    part, tops = (torch.empty(entries * n, dtype=torch.float32, device=device) for n in (rank, 2))
    shown, mask_strides = empty, (0, 0, 0)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())].expand(batch, 1, -1, sum(inputs.slots) if mask.shape[-1] == 1 else -1)
        shown, mask_strides = mask.view(torch.uint8), (mask.stride(0), mask.stride(2), mask.stride(3))
    call = Held(
        query_strides=tuple(query.stride()[:3]), table_b=table_b, mask_b=mask_strides[0],
        mask_q=mask_strides[1], mask_t=mask_strides[2], scaling=base2, n_quantized=region,
    )  # fmt: skip
    held = call, layer.held, held_of(inputs, empty)
    launches.attend((splits, blocks, groups), query, latent, rotated, factors, table, index, counts, shown, part, tops, held=held)
    out = query.new_empty_strided((batch, heads, queries, rank), launches.out_strides)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=device)
    join = Held(splits=splits)
    launches.reduce(launches.reduce_grid, part, tops, empty, out, lse, held=(join, means))
    return out


def _means(layer: Layer, inputs: PagedInputs, queries: int) -> Held:
    """The mean of latents; where each of several queries is a row of its own, with the mean of its row."""
    key = "means", queries
    if key not in inputs.prepared.of_layer:
        mean, (mean_b, mean_h) = layer.held.values["k_planes"][3], layer.held.values["mean_strides"]
        center = mean.repeat_interleave(queries, 0) if mean_b and queries > 1 else mean
        inputs.prepared.of_layer[key] = Held(mean=mean, mean_b=mean_b, center=center, center_b=mean_b, center_h=mean_h)
    return inputs.prepared.of_layer[key]


def chosen_tokens(inputs: PagedInputs, mask: Tensor, queries: int, chosen: int) -> tuple[Tensor, Tensor, Tensor]:
    """The indices in pages of the quantized tokens that each query sees under `mask` `[B, 1, Q, T]`, int32
    `[B * Q, N]`, the entries of their pages, and how many there are, int32 `[B * Q]`. What follows the last one is
    not written."""
    (sinks, region, _), pages, rows = inputs.slots, inputs.pages, inputs.rows
    shown = mask.expand(len(pages.table), 1, queries, -1).view(torch.uint8)
    index = shown.new_empty(len(pages.table) * queries, min(chosen, region), dtype=torch.int32)
    entries, counts = torch.empty_like(index, dtype=pages.table.dtype), index.new_empty(len(index))
    call = Held(
        mask_b=shown.stride(0), mask_q=shown.stride(2), mask_t=shown.stride(3), table_b=pages.table.stride(0),
        n_sinks=sinks, n_quantized=region, queries=queries, room=index.shape[1],
        rows_b=0 if rows is None else rows.stride(0), lengths_b=pages.strides[2],
    )  # fmt: skip
    counted: Any = (index, index) if rows is None else (rows, pages.lengths)  # nothing reads the former
    launch = _choosing(index.device, pages.page_size, rows is not None, CHOSEN_FROM)
    launch((-(-region // CHOSEN_FROM), len(index), 1), shown, pages.table, *counted, index, entries, counts, held=(call,))
    return index, entries, counts


@functools.lru_cache(maxsize=8)
def _choosing(device: torch.device, page_size: int, counted: bool, tokens: int) -> Launcher:
    given = "mask", "table", "rows", "lengths", "index", "entries", "counts"
    held = "mask_b", "mask_q", "mask_t", "table_b", "n_sinks", "n_quantized", "queries", "room", "rows_b", "lengths_b"
    return Launcher(choose_kernel, device, given, held, PAGE=page_size, COUNTED=counted, N=tokens, num_warps=16)


OF_MEANS = "mean", "mean_b", "center", "center_b", "center_h"
OF_LATENTS = "query_strides", "table_b", "mask_b", "mask_q", "mask_t", "scaling", "n_quantized"


class LatentLaunches:
    """The kernels of attention calls of one shape, `[B, Hq, Q, R + P]`, with all constants."""

    def __init__(self, kind: Kind, shape: torch.Size, unmasked: bool, causal: bool, exact: int, gathers: bool, launch: Launch) -> None:
        (batch, heads, queries, _), device, use = shape, kind.empty.device, kind.use
        rank, rope, rows = kind.constants["KEYS"].dim, kind.constants["VALUES"].dim, heads * queries
        latent_unit, rope_unit = _units((use.key, use.value))
        self.queries = Launcher(
            query_kernel, device, ("latent", "query", "q_latent", "q_rope", "factors"),
            ("latent_stride", "query_stride", "scaling", *OF_MEANS), order=_order(use.key, rank, device),
            rope_order=_order(use.value, rope, device), rows=rows, latent_unit=latent_unit, rope_unit=rope_unit, D=rank, P=rope,
            CENTERED=use.key.centered, num_warps=1,
        )  # fmt: skip
        shared = kind.constants | {"G": heads, "R": launch.rows, "EXACT": bool(exact), "queries": queries}
        given = "query", "q_latent", "q_rope", "factors", "table", "chosen", "counts", "mask", "part", "tops"
        self.attend = Launcher(
            attend_latents_kernel, device, given, (*OF_LATENTS, *OF_LAYER, *OF_INPUTS), **shared | {"TX": launch.tile // 2},
            least=LEAST_SPLIT, T=launch.tile, MASK=not unmasked, CAUSAL=causal and queries > 1, ARCH=architecture(device)[0],
            CHOSEN=int(gathers), num_warps=launch.warps, num_stages=1,
        )  # fmt: skip
        block = rotation_block(rank) if use.key.rotated else 1
        columns = rank if use.key.rotated else min(rank, 128)
        self.out_strides = heads * queries * rank, rank, heads * rank, 1
        out_strides = self.out_strides[:3]
        if gathers:  # each query is a row of its own
            batch, queries, rows, out_strides = batch * queries, 1, heads, (heads * rank, *out_strides[1:])
        self.reduce_grid = rows, batch, rank // columns
        self.reduce = Launcher(
            reduce_kernel, device, ("part", "tops", "sinks", "out", "lse"), ("splits", *OF_MEANS),
            **shared | {"V": use.key, "DV": rank, "queries": queries}, C=columns, S=8, SINKS=False, ITEMS=False, SHARED=0,
            TURN=block**-0.5, STAGES=block.bit_length() - 1, signs=use.queries.signs, blocks=-(-rows // launch.rows), heads=1, firsts=None,
            shares=None, before=0, branches=1, shared_splits=0, shared_blocks=0, out_strides=out_strides,
            num_warps=4 if use.key.rotated else 1,
        )  # fmt: skip
