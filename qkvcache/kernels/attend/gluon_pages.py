"""How attention kernels in Gluon read tokens: pages of codes through cp.async, exact tokens, and the mask.

Shapes of tiles: T tokens. X is the `PackedLayout` of a codec."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..device.scales import group_scales_of_word, scale_of_word
from .triton_attend import entry_of, exact_columns, page_of
from .triton_tiles import token_of

# Triton 3.6 has the former names, 3.7 another barrier, 3.9 another copy.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def copied(words: int, warps: int):
    """The layout in which rows of `words` words of 16 bits are copied."""
    lanes = min(32, words // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def in_shared(words: int):
    """The layout of rows of `words` words of 16 bits in shared memory."""
    return gl.SwizzledSharedLayout(8, max(1, 64 // words), min(8, words // 8), [1, 0])


@gluon.jit
def hides_any(mask, begin, end, mask_stride):
    """`hides_any` of `kernels/attend/triton_attend.py`, whose tensors have no layouts."""
    i = gl.arange(0, 1024, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    hidden = gl.full([1024], 0, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for at in range(begin, end, 1024):
        shown = gl.load(mask + (at + i) * mask_stride, mask=at + i < end, other=1)
        hidden = gl.maximum(hidden, (shown == 0).to(gl.int32))
    return gl.max(hidden, 0) != 0


@gluon.constexpr_function
def pages_of_tile(tokens: int, page: int, chosen: int) -> int:
    """Pages of a tile, whose entries are looked up once: 1 or 2; 0: tokens have entries of their own."""
    return 0 if chosen else 1 if tokens <= page else 2 if tokens == 2 * page else 0


# One bit of each lane's mask is set: this is 0, which the compiler does not know.
_ZERO = gl.constexpr("mov.u32 $0, %lanemask_eq; popc.b32 $0, $0; sub.u32 $0, $0, 1;")


@gluon.jit
def by_lane(table):
    """`table`, whose entries each lane loads. What all lanes load from one address is moved to registers that they share, and the move
    waits for the load."""
    return table + gl.inline_asm_elementwise(_ZERO, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def entries_of_tile(table, begin, end, T: gl.constexpr, PAGE: gl.constexpr, CHOSEN: gl.constexpr):
    """The numbers in `table`, int64, of the pages of the tile that begins with the token `begin`, as a tuple. Tokens from `end` on count as
    the last one."""
    PAGES: gl.constexpr = pages_of_tile(T, PAGE, CHOSEN)
    first = gl.minimum(begin, end - 1)
    if PAGES == 0:
        return (first.to(gl.int64),)  # nothing reads it
    elif PAGES == 1:
        return (gl.load(table + first // PAGE).to(gl.int64),)
    else:
        return gl.load(table + first // PAGE).to(gl.int64), gl.load(table + gl.minimum(begin + PAGE, end - 1) // PAGE).to(gl.int64)


@gluon.jit
def entry_of_token(table, t, place, entries, T: gl.constexpr, PAGE: gl.constexpr, BASE: gl.constexpr, CHOSEN: gl.constexpr):
    """The entries of the pages of the tokens `place`, those at `t` of a tile, int [N] each, as in `entry_of`."""
    PAGES: gl.constexpr = pages_of_tile(T, PAGE, CHOSEN)
    if PAGES == 0:
        return entry_of(table, place, place >= 0, CHOSEN if CHOSEN else PAGE, BASE)
    elif PAGES == 1:
        return entries[0] - BASE
    else:
        return gl.where(t < PAGE, entries[0], entries[1]) - BASE


@gluon.jit
def copy_tile(X: gl.constexpr, D: gl.constexpr, head, STRIDES: gl.constexpr, codes, high, table, entries, chosen, begin, end,
          PAGE: gl.constexpr, BASE: gl.constexpr, CHOSEN: gl.constexpr):  # fmt: skip
    """Copies codes and high bits of the tokens from `begin`, a multiple of T, to `end`, one to T, to `codes` and `high`, shared [T, words];
    tokens up to the last one fill the places that are left. `head`: the head in the first page, from `head_of`; `entries`: from
    `entries_of_tile`."""
    T: gl.constexpr = codes.shape[0]
    WORDS: gl.constexpr = D // X.per
    LAYOUT: gl.constexpr = copied(WORDS, gl.num_warps())
    PAGES: gl.constexpr = pages_of_tile(T, PAGE, CHOSEN)
    t = gl.arange(0, T, gl.SliceLayout(1, LAYOUT))
    w = gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))
    place = gl.minimum(begin + t, end - 1)
    if PAGES == 0:
        slot = token_of(chosen, place, CHOSEN) % PAGE
    else:  # of `place`, at fewer instructions; where the second page has no token, the last one is in the first
        last = end - 1 - begin
        of_page = gl.where(t < PAGE, last, gl.where(last < PAGE, last, last - PAGE))
        slot = (0 if T % PAGE == 0 else begin % PAGE) + gl.minimum(t % PAGE, of_page)
    words, bits, _ = page_of(X, D, True, head, STRIDES, entry_of_token(table, t, place, entries, T, PAGE, BASE, CHOSEN), 0)
    at = gl.max_contiguous(gl.multiple_of((slot * WORDS)[:, None] + w[None, :], [1, 8]), [1, 8])
    copy_to_shared(codes, (words if PAGES == 1 else words[:, None]) + at)
    if X.high > 1:
        copy_to_shared(high, (bits if PAGES == 1 else bits[:, None]) + at)
    elif X.high == 1:
        HALF: gl.constexpr = copied(WORDS // 2, gl.num_warps())
        slot = gl.convert_layout(slot * (WORDS // 2), gl.SliceLayout(1, HALF))
        if PAGES != 1:
            bits = gl.convert_layout(bits, gl.SliceLayout(1, HALF))[:, None]
        w = gl.arange(0, WORDS // 2, gl.SliceLayout(0, HALF))
        copy_to_shared(high, bits + gl.max_contiguous(gl.multiple_of(slot[:, None] + w[None, :], [1, 8]), [1, 8]))


@gluon.constexpr_function
def scale_words(layout, dim: int) -> int:
    """Words of 32 bits that the scales of a token fill; 0 where two tokens share one."""
    return {"fp16": 2, "group": 2 * dim // max(layout.group, 1), "block": dim // max(layout.group, 1)}.get(layout.scale, 4) // 4


@gluon.jit
def allocate_scales(X: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, T: gl.constexpr):
    """Shared memory for the scales of STAGES tiles of T tokens, int32 [STAGES * words of a token, T], or [STAGES, T / 2]."""
    WORDS: gl.constexpr = scale_words(X, D)
    SHAPE: gl.constexpr = [STAGES * max(WORDS, 1), T if WORDS else T // 2]
    return gl.allocate_shared_memory(gl.int32, SHAPE, gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def copy_scales(X: gl.constexpr, D: gl.constexpr, ONCE: gl.constexpr, head, STRIDES: gl.constexpr, into, stage, T: gl.constexpr, table,
                entries, chosen, begin, end, PAGE: gl.constexpr, BASE: gl.constexpr, CHOSEN: gl.constexpr):  # fmt: skip
    """Copies the scales of the tokens from `begin` to `end`, one to T, to stage `stage` of `into`, from `allocate_scales`. Other arguments
    as in `copy_tile`."""
    WORDS: gl.constexpr = scale_words(X, D)
    EACH: gl.constexpr = 1 if WORDS else 2
    t = gl.arange(0, T // EACH, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) * EACH
    place = gl.minimum(begin + t, end - 1)
    slot = token_of(chosen, place, CHOSEN) % PAGE * (1 - ONCE)
    _, _, scales = page_of(X, D, ONCE, head, STRIDES, entry_of_token(table, t, place, entries, T, PAGE, BASE, CHOSEN), 0)
    words = scales.to(tl.pointer_type(tl.int32))
    for i in gl.static_range(max(WORDS, 1)):
        copy_to_shared(into.index(stage * max(WORDS, 1) + i), words + (slot * WORDS + i if WORDS else slot // 2))


@gluon.jit
def scales_of_tile(X: gl.constexpr, D: gl.constexpr, stored, stage, ARCH: gl.constexpr, LAYOUT: gl.constexpr):
    """Scale and zero of the tokens of a tile, fp32 [T] each, or the scales of their groups, a tuple of fp16 [T], from stage
    `stage` of `stored`, from `allocate_scales`."""
    WORDS: gl.constexpr = scale_words(X, D)
    if WORDS == 0:
        halves = stored.index(stage)._reinterpret(gl.float16, [2 * stored.shape[1]], gl.SwizzledSharedLayout(1, 1, 1, [0])).load(LAYOUT)
        if X.group > 0:
            return (halves,)
        else:
            return halves.to(gl.float32), gl.full([2 * stored.shape[1]], 0.0, gl.float32, LAYOUT)
    elif X.group > 0:
        by_group = ()
        for i in gl.static_range(WORDS):
            by_group = by_group + group_scales_of_word(X, stored.index(stage * WORDS + i).load(LAYOUT), ARCH)
        return by_group
    else:
        return scale_of_word(X, stored.index(stage).load(LAYOUT))


@gluon.jit
def copy_exact(codes, tokens, stride, begin, slots, oldest_slot, count, RING: gl.constexpr):
    """Copies the exact tokens in the slots from `begin` on to `codes`, shared [T, channels]; arguments as in `exact_columns`."""
    LAYOUT: gl.constexpr = copied(codes.shape[1], gl.num_warps())
    at = begin + gl.arange(0, codes.shape[0], gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, codes.shape[1], gl.SliceLayout(0, LAYOUT))
    valid, _ = exact_columns(at, slots, 0, oldest_slot, count, RING)
    codes.store(gl.load(tokens + at[:, None] * stride + d[None, :], mask=valid[:, None], other=0.0))
