"""Quantizing a tile of vectors and storing it into pages: what `Codec.quantize` computes.

A tile has tokens (times heads, where few tokens come at once or where a scale spans heads) of keys or of values, with all channels, in
registers: rotation, scale, codes, packing. Head dims that are no power of two are padded and masked.

The rotation is a product with a matrix of 1 and -1, in which 16-bit inputs are exact; fp32 is split into
three bfloat16, which is exact as well. Only sums round. Codes differ from the codes of `Codec.quantize` where
a channel lies within such a rounding of the border of two codes. Minima and maxima are computed on bit
patterns, since a maximum of floats ignores nan."""

from __future__ import annotations

import triton
import triton.language as tl

from ...formats.base import TINY, Codec
from ...formats.codebooks import GRID, midpoints
from ...formats.uniform import LEAST_SCALE
from ..segments import layout_of
from .triton_dequantize import HALF_STEPS, INTERPRETED, float8, rotate_rows, scales_of, width_of
from .triton_dequantize import supports as dequantizes

_TINY = tl.constexpr(TINY)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_INFINITY = tl.constexpr(0x7F800000)


def supports(codec: Codec, head_dim: int) -> bool:
    """Whether `store_tile` knows `codec` at `head_dim`."""
    layout = layout_of(codec)
    return layout is not None and layout.writable and dequantizes(codec, head_dim)


@triton.jit
def _abs_bits(x):
    """The bits of `|x|`, int32 of the shape of `x`, fp32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _ordered(x):
    """Bits of fp32, int32 of any shape, to integers of the same order, and back: nan lies beyond the infinities."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _range(x):
    """Minimum and maximum of each row of `x`, fp32 [N, P] to [N] each: one of them is nan if a channel is."""
    keys = _ordered(x.to(tl.int32, bitcast=True))
    low = _ordered(tl.min(keys, 1)).to(tl.float32, bitcast=True)
    return low, _ordered(tl.max(keys, 1)).to(tl.float32, bitcast=True)


@triton.jit
def _over(x, scale):
    """`x / scale`, fp32 of shapes that broadcast, rounded once, with one reciprocal for each scale: two steps
    of refinement cost less than a division."""
    if INTERPRETED:  # has no fused multiply-add
        quotient = x / scale
    else:
        inverse = tl.broadcast_to(tl.div_rn(1.0, scale), x.shape)
        scale = tl.broadcast_to(scale, x.shape)
        quotient = x * inverse
        quotient = tl.fma(tl.fma(-quotient, scale, x), inverse, quotient)
    return quotient


@triton.jit
def _whole(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """`x`, fp32, truncated to int32 and clamped to LOW and HIGH; nan becomes a bound."""
    return tl.minimum(tl.maximum(x, LOW), HIGH).to(tl.int32)


@triton.jit
def _minifloat(x, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """The code of `x` >= 0, within range, in a float format of `MANTISSA` bits and least normal number 2^LEAST: nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    cut: tl.constexpr = 23 - MANTISSA
    normal = ((bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)) >> cut) - ((126 + LEAST) << MANTISSA)
    # Added to this power of two, whose last bit is the step of subnormal numbers, x is rounded to that.
    anchor: tl.constexpr = 127 + cut + LEAST
    small = (x + 2.0 ** (cut + LEAST)).to(tl.int32, bitcast=True) - (anchor << 23)
    return tl.where(x < 2.0**LEAST, small, normal)


@triton.jit
def _apply(x, table, D: tl.constexpr, P: tl.constexpr, SIGNED: tl.constexpr):
    """`Hadamard.apply` for rows `x` [N, P], 16-bit or fp32: fp32 [N, P]. `table`: `rotation_table`; SIGNED: random signs come first."""
    if SIGNED:
        signs = tl.load(table + min(P, 128) * min(P, 128) + tl.arange(0, P)).to(tl.float32)
        x = (x.to(tl.float32) * signs[None, :]).to(x.dtype)
    return rotate_rows(x, table, D, P) * (D & -D) ** -0.5


@triton.jit
def _store_words(at, words, live, COUNT: tl.constexpr):
    """Stores the first COUNT columns of `words`, int32 [N, >= COUNT], as int16 to rows that begin at the
    pointers `at` [N], if `live` [N]."""
    j = tl.arange(0, words.shape[1])
    mask = live[:, None] if words.shape[1] == COUNT else live[:, None] & (j < COUNT)[None, :]
    tl.store(at[:, None] + j[None, :], words.to(tl.int16), mask=mask)


@triton.jit
def _store_codes(low, high, codes, live, L: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Stores codes in the order of channels, int32 [N, P], packed as `packing.pack` does, to rows at the pointers `low` and (if L.high)
    `high` [N], if `live` [N]. Fields of a word do not overlap, so that their sum is their union."""
    N: tl.constexpr = codes.shape[0]
    if L.high > 1:
        HALF: tl.constexpr = L.high
        i = tl.arange(0, L.per)[None, None, :]
        codes = tl.reshape(codes, [N, P // L.per, L.per])
        words = tl.sum(((codes & (2**HALF - 1)) << (HALF * (i ^ (HALF == 2)))) | ((codes >> HALF) << (16 + HALF * i)), 2)
        _store_words(low, words, live, D // L.per)
        _store_words(high, words >> 16, live, D // L.per)
    elif L.bits == 4:
        words = tl.sum(tl.reshape(codes, [N, P // 4, 4]) << (4 * tl.arange(0, 4))[None, None, :], 2)
        _store_words(low, words, live, D // 4)
    elif L.bits == 2:
        _store_words(low, tl.sum(tl.reshape(codes, [N, P // 8, 8]) << (2 * tl.arange(0, 8))[None, None, :], 2), live, D // 8)
    else:
        i = tl.arange(0, 8)[None, None, :]
        codes = tl.reshape(codes, [N, P // 8, 8])
        words = tl.sum(((codes & 3) << (2 * i)) | ((codes >> 2) << (16 + 4 * (i // 2) + i % 2)), 2)
        _store_words(low, words, live, D // 8)
        words = words >> 16
        if D == P:
            words = tl.sum(tl.reshape(words, [N, 2, P // 16]) << (2 - 2 * tl.arange(0, 2))[None, :, None], 1)
        else:
            j = tl.minimum(tl.arange(0, P // 8) + D // 16, P // 8 - 1)
            words = (words << 2) | tl.gather(words, tl.broadcast_to(j[None, :], words.shape), 1)
        _store_words(high, words, live, D // 16)


@triton.jit
def _store_planes(at, codes, live, E2M1: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Stores 4-bit codes in the order of channels, int32 [N, P], as words of `packing.to_planes`, to rows at
    the pointers `at` [N], if `live` [N]."""
    a = tl.arange(0, 4)[None, :, None]
    if D != P:
        c = tl.arange(0, P)
        c = tl.minimum(c // (P // 4) * (D // 4) + c % (P // 4), P - 1)
        codes = tl.gather(codes, tl.broadcast_to(c[None, :], codes.shape), 1)
    codes = tl.reshape(codes, [codes.shape[0], 4, P // 4])
    if E2M1:
        sign = tl.where(a == 0, 15, tl.where(a == 1, 12, tl.where(a == 2, 14, 13)))
        codes = ((codes & 7) << (9 - 3 * a)) | ((codes >> 3) << sign)
    else:
        codes = codes << (4 * a)
    _store_words(at, tl.sum(codes, 1), live, D // 4)


@triton.jit
def _fp4_error(x, scale):
    """Squared error of E2M1 for blocks of magnitudes `x`, fp32 [N, G, 16], under `scale` [N, G, 1]: fp32 [N, G, 1]."""
    q = tl.minimum(_over(x, scale), 6.0)
    # The step is half the power of two below q, or .5 under 1; what is added leaves no bit below it.
    power = tl.maximum(q.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    anchor = (power + (22 << 23)).to(tl.float32, bitcast=True)
    error = ((q + anchor) - anchor) * scale - x
    return tl.sum(error * error, 2)[:, :, None]


@triton.jit
def _fp4_scale(magnitude, absmax, SEARCH: tl.constexpr):
    """Scales of blocks of 16 as bytes of E4M3, int32 [N, G, 1], from `magnitude` fp32 [N, G, 16] and its
    maxima `absmax` [N, G, 1]. SEARCH 0: maximum / 6; 1: the better of 6 and 4; 2: the best of eight."""
    six = _minifloat(tl.minimum(tl.maximum(tl.div_rn(absmax, 6.0), 2.0**-9), 448.0), 3, -6)
    if SEARCH == 0:
        return six
    four = _minifloat(tl.minimum(tl.maximum(tl.div_rn(absmax, 4.0), 2.0**-9), 448.0), 3, -6)
    best = six if SEARCH == 1 else four
    least = _fp4_error(magnitude, float8(best, 3))
    for below in tl.range(0 if SEARCH == 1 else 1, 1 if SEARCH == 1 else 8):
        other = tl.minimum(tl.maximum(four - below, 1), 126)
        error = _fp4_error(magnitude, float8(other, 3))
        best = tl.where(error < least, other, best)
        least = tl.minimum(error, least)
    return best


@triton.jit
def _lloyd(x, BITS: tl.constexpr):
    """Codes of `x`, fp32 of any shape, and twice the magnitudes of their levels in steps of the grid: int32 each."""
    # Twice the level in the low half, the rank in the high half: one sum for both.
    if BITS == 2:
        reached = _climb(tl.abs(x), _AT2, _UP2, 2)
    elif BITS == 3:
        reached = _climb(tl.abs(x), _AT3, _UP3, 4)
    else:
        reached = _climb(tl.abs(x), _AT4, _UP4, 8)
    rank = reached >> 16
    half: tl.constexpr = 2 ** (BITS - 1)
    return tl.where(x < 0, half - 1 - rank, half + rank), reached & 0xFFFF


@triton.jit
def _climb(x, AT: tl.constexpr, UP: tl.constexpr, COUNT: tl.constexpr):
    """The sum of the entries among COUNT of UP whose thresholds in AT are at most `x`, fp32 of any shape and not negative: int32."""
    reached = tl.full(x.shape, UP[0], tl.int32)
    for i in tl.static_range(1, COUNT):
        reached += tl.where(x >= AT[i], UP[i], 0)
    return reached


def _rungs(bits: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Thresholds of magnitudes, and what `_lloyd` adds at each."""
    odd = [2 * n + 1 for n in GRID[bits][1]]
    up = (odd[0], *((1 << 16) + high - low for low, high in zip(odd, odd[1:], strict=False)))
    return (0.0, *midpoints(bits)[2 ** (bits - 1) :]), up


_AT2, _UP2 = map(tl.constexpr, _rungs(2))
_AT3, _UP3 = map(tl.constexpr, _rungs(3))
_AT4, _UP4 = map(tl.constexpr, _rungs(4))


@triton.jit
def store_tile(raw, live, block, row, h0, slot, planes, L: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr):
    """Quantizes vectors and stores those that are live and have a slot. Vector `i` of a tile is of head `h0 + i % ACROSS`.

    raw      [N, padded(D)] of N / ACROSS tokens and ACROSS heads; live: bool [N], those that take part in shared scales
    block    int64, scalar or [N]: the page, counted in entries, of planes [entries, H', PAGE, width]; slot: [N], negative: none
    row      int64: the batch row of statistics
    planes   `plane_arguments`: planes as in `block`, words of 16 bits where codes are packed, and the mean fp32 [rows, H, D]
    """
    table, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh = planes
    N: tl.constexpr = raw.shape[0]
    P: tl.constexpr = raw.shape[1]
    ALONG: tl.constexpr = N // ACROSS
    i = tl.arange(0, N)
    c = tl.arange(0, P)
    there = live[:, None] if D == P else live[:, None] & (c < D)[None, :]
    live = live & (slot >= 0)
    inside = live[:, None] if D == P else live[:, None] & (c < D)[None, :]
    h = i % ACROSS if ACROSS == 1 else (i % ACROSS).to(tl.int64)
    slot = slot.to(tl.int64)

    WIDTH: tl.constexpr = width_of(L, D)
    at = block * cb + h0.to(tl.int64) * ch + (h * ch + slot * WIDTH)
    at = codes.to(tl.pointer_type(tl.int16)) + at if L.packed else codes + at
    at_high = at
    if L.high:
        at_high = high.to(tl.pointer_type(tl.int16)) + (block * hb + h0.to(tl.int64) * hh + (h * hh + slot * (D * L.high // 16)))
    COUNT: tl.constexpr = scales_of(L, D)
    if L.span == "each":
        at_scale = scales + block * sb + h0.to(tl.int64) * sh + (h * sh + slot * COUNT)
    else:  # ACROSS covers all heads, or nothing is stored
        at_scale = scales + block * sb + (h * sh + slot)

    if L.kind == "half":
        tl.store(at[:, None] + c[None, :], raw, mask=inside)
    y = _apply(raw, table, D, P, L.rotation == 2) if L.rotated else raw.to(tl.float32)
    if L.centered:
        y -= tl.load(center + (row * eb + (h0 + h) * eh)[:, None] + c[None, :], mask=there, other=0.0)

    if L.bits == 8 and L.scale != "pair":
        top: tl.constexpr = 448.0 if L.kind == "e4m3" else 57344.0 if L.kind == "e5m2" else 127.0
        if L.span == "once":
            scale = tl.load(scales + row * sb)
            quotient = tl.div_rn(y, tl.maximum(scale, _TINY))
        else:
            bits = tl.max(_abs_bits(y), 1)
            if L.span == "shared":
                shared = tl.max(tl.reshape(bits, [ALONG, ACROSS]), 1)
                bits = tl.reshape(tl.broadcast_to(shared[:, None], [ALONG, ACROSS]), [N])
            scale = tl.div_rn(bits.to(tl.float32, bitcast=True), top).to(scales.dtype.element_ty)
            tl.store(at_scale, scale, mask=live)  # of heads that share one all store the same
            quotient = _over(y, tl.maximum(scale.to(tl.float32), _TINY)[:, None])
        if top == 127.0:
            packed = _whole(quotient + tl.where(y < 0, -0.5, 0.5), -127.0, 127.0)
        else:
            sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
            packed = _minifloat(tl.minimum(tl.abs(quotient), top), 3 if L.kind == "e4m3" else 2, -6 if L.kind == "e4m3" else -14) | sign
            packed = tl.where(_abs_bits(y) >= _INFINITY, 0x7F, packed)  # saturation is for numbers
        if L.high:
            _store_codes(at, at_high, packed + 128, live, L, D, P)
        else:
            tl.store(at[:, None] + c[None, :], packed.to(codes.dtype.element_ty), mask=inside)

    if L.scale == "pair":
        top: tl.constexpr = 2.0**L.bits - 1
        # Padding repeats the first channel of the row: neither least nor greatest change.
        low, greatest = _range(y if D == P else tl.where((c < D)[None, :], y, tl.sum(tl.where((c == 0)[None, :], y, 0.0), 1)[:, None]))
        zero = low.to(tl.float16)
        scale = tl.div_rn(greatest - zero.to(tl.float32), top)
        scale = tl.where(scale < _LEAST_SCALE, _LEAST_SCALE, scale).to(tl.float16)
        tl.store(at_scale, scale, mask=live)
        tl.store(at_scale + 1, zero, mask=live)
        quotient = _over(y - zero.to(tl.float32)[:, None], scale.to(tl.float32)[:, None])
        packed = _whole(quotient + 0.5, 0.0, top)
        if L.bits == 8:
            tl.store(at[:, None] + c[None, :], packed.to(tl.uint8), mask=inside)
        else:
            _store_codes(at, at_high, packed, live, L, D, P)

    if L.scale == "hidden":
        low, greatest = _range(y)
        # Not tl.minimum, which would put zero in the place of nan.
        low, greatest = tl.where(low > 0, 0.0, low), tl.where(greatest < 0, 0.0, greatest)
        scale = tl.div_rn(greatest - low, 15.0)
        zero = _whole(tl.div_rn(-low, tl.maximum(scale, _TINY)) + 0.5, 0.0, 15.0)
        bits = scale.to(tl.int32, bitcast=True) & ~15
        tl.store(at_scale, (bits | zero).to(tl.float32, bitcast=True), mask=live)
        scale = tl.maximum(bits.to(tl.float32, bitcast=True), _TINY)[:, None]
        packed = _whole(_over(y, scale) + zero.to(tl.float32)[:, None] + 0.5, 0.0, 15.0)
        _store_codes(at, at_high, packed, live, L, D, P)

    if L.bits < 8 and L.scale == "fp16":
        full = y if L.centered else raw.to(tl.float32)
        norm = tl.sqrt_rn(tl.sum(full * full, 1))
        unit = y * tl.div_rn(D**0.5, norm + 1e-8)[:, None]
        packed, level = _lloyd(unit, L.bits)
        squares = level * level if D == P else tl.where((c < D)[None, :], level * level, 0)
        length = tl.sqrt_rn(tl.sum(squares, 1).to(tl.float32)) * HALF_STEPS[L.bits]
        tl.store(at_scale, tl.div_rn(norm, length).to(tl.float16), mask=live)
        _store_codes(at, at_high, packed, live, L, D, P)

    if L.group > 0:
        SIZE: tl.constexpr = L.group
        g = tl.arange(0, P // SIZE)
        blocks = tl.reshape(y, [N, P // SIZE, SIZE])
        absmax = tl.max(_abs_bits(blocks), 2)[:, :, None].to(tl.float32, bitcast=True)
        if L.scale == "group":
            scale = tl.div_rn(absmax, 7.0).to(tl.float16)
            packed = _whole(_over(blocks, tl.maximum(scale.to(tl.float32), _TINY)) + 8.5, 1.0, 15.0)
        else:
            magnitude = tl.abs(blocks)
            scale = tl.where(_abs_bits(absmax) >= _INFINITY, 127, _fp4_scale(magnitude, absmax, L.search))
            packed = _minifloat(tl.minimum(_over(magnitude, float8(scale, 3)), 6.0), 1, 0)
            packed |= (blocks.to(tl.int32, bitcast=True) >> 28) & 8
        mask = live[:, None] & (g < COUNT)[None, :]
        scale = tl.reshape(scale, [N, P // SIZE]).to(scales.dtype.element_ty)
        tl.store(at_scale[:, None] + g[None, :], scale, mask=mask)
        _store_planes(at, tl.reshape(packed, [N, P]), live, L.scale == "block", D, P)
