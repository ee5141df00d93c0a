"""`Codec.dequantize` of keys or values in one launch, where a whole layer must be in the model's dtype.

A program dequantizes a tile of tokens with all channels, and rotates it back. It rotates integers (levels
counted in half steps), which are exact in bfloat16, and multiplies by the scale afterwards. Where scales span
groups, products of code and scale are split into two bfloat16, which is exact as well."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.base import Codec, Codes, PackedLayout
from ...formats.codebooks import GRID
from ...formats.rotation import random_signs, rotation_block, sylvester_matrix
from ..pages import Pages
from ..segments import layout_of

GREATEST_HEAD_DIM, GREATEST_POWER = 256, 512
"""The greatest head_dim, and the greatest that is a power of two."""
REGION_TILE = 32
"""Tokens of a program that dequantizes pages: of 32, 64, 128 and 256 the best for int8 and fp8 on an H100, at
nine and eight tenths of the speed of a copy (`eval/results/past.jsonl`, "dequantized region")."""
CHUNK = 128  # channels that one product rotates: twice as many take two and a butterfly, so that the matrix fits every shared memory

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
HALF_STEPS = tl.constexpr((0.0, 0.0, *(GRID[bits][0] / 2 for bits in (2, 3, 4))))
"""Half a step of the grid that Lloyd-Max levels lie on, by bits."""


def _level_words(positive: tuple[int, ...]) -> tuple[int, ...]:
    """Twice the positive levels in steps of the grid, one byte each, as two signed words of 32 bits; missing levels are 0."""
    twice = bytes(2 * n + 1 for n in positive).ljust(8, b"\0")
    return tuple(int.from_bytes(twice[at : at + 4], "little", signed=True) for at in (0, 4))


LEVEL_WORDS = tl.constexpr(tuple(_level_words(GRID[bits][1] if bits in GRID else ()) for bits in range(5)))
"""Levels by bits, as constants, so that dequantizing loads no table."""

BYTES = ("int8", "int8_halves", "e4m3", "e5m2")
COMBINATIONS = {
    ("half", "none"),
    *((kind, scale) for kind in BYTES for scale in ("fp32", "fp16")),
    *((kind, "pair") for kind in ("uint8", "int4", "int3")),
    ("int4", "hidden"),
    ("int4", "group"),
    ("e2m1", "block"),
    *((kind, "fp16") for kind in ("int2", "lut3", "lut4")),
}
"""Kinds of codes and of scales that kernels quantize and dequantize."""


@functools.cache
def supports(codec: Codec, head_dim: int) -> bool:
    """Whether `decode` can dequantize `codec` at `head_dim`."""
    layout = layout_of(codec)
    greatest = GREATEST_HEAD_DIM if head_dim & (head_dim - 1) else GREATEST_POWER
    if layout is None or head_dim > greatest or codec.refuses(head_dim) is not None:
        return False
    return (layout.kind, layout.scale) in COMBINATIONS and layout.group & (layout.group - 1) == 0


@triton.constexpr_function
def padded(head_dim: int) -> int:
    """Channels of a row in a kernel: a power of two of at least 64."""
    return 1 << max(6, (head_dim - 1).bit_length())


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def rotation_table(head_dim: int, device: torch.device, dtype: torch.dtype, randomized: bool) -> Tensor:
    """Return the rotation that kernels apply, flat: a matrix of 1 and -1 [C, C], C = min(padded(head_dim),
    128), with blocks on its diagonal, then the sign of each channel [padded(head_dim)]."""
    chunk, block = min(padded(head_dim), CHUNK), rotation_block(head_dim)
    block = min(block, chunk)
    matrix = torch.block_diag(*[sylvester_matrix(block, torch.device("cpu"))] * (chunk // block))
    signs = torch.ones(padded(head_dim), dtype=torch.float32, device="cpu")
    if randomized:
        signs[:head_dim] = random_signs(head_dim, torch.device("cpu"))
    return torch.cat([matrix.flatten(), signs]).to(device, dtype)


def table_of(layout: PackedLayout, x: Tensor) -> Tensor:
    """The table that kernels rotate vectors like `x` by; `x` itself, which is not read, if nothing is rotated."""
    if not layout.rotated:
        return x
    return rotation_table(x.shape[3], x.device, torch.float16 if x.dtype == torch.float16 else torch.bfloat16, layout.rotation == 2)


@functools.cache
def tile(layouts: tuple[PackedLayout, ...], heads: int, tokens: int, width: int, itemsize: int = 2) -> tuple[int, int, int]:
    """Heads and tokens of a tile, and warps of its program, for vectors of `width` channels, padded, of `itemsize` bytes each."""
    rotated = any(layout.rotated for layout in layouts)
    # Twice as many rows share the matrix of a product; 64 is what Hopper's takes. fp32, in three parts, needs the registers.
    rows = 16 if rotated and itemsize == 4 else min(max((8192 if rotated else 4096) // width, 16), 64)
    least = 16 if rotated else 1
    # One token or many: every other size would be compiled anew, in the middle of a generate.
    many, long = triton.next_power_of_2(heads), 1 if tokens == 1 else 64
    shared = any(layout.span == "shared" for layout in layouts)
    across = many if shared else max(min(many, 16 // long), 1)
    along = max(min(rows // across, long), least // across, 1)
    return across, along, 8 if across * along * width > 8192 or rotated and (width > CHUNK or itemsize == 4) else 4


@functools.cache
def tile_of_pages(layouts: tuple[PackedLayout, ...], heads: int, tokens: int, width: int) -> tuple[int, int, int]:
    """`tile`, of at most 32 tokens: addresses of more, each in a page of its own, would not fit in registers."""
    across, along, warps = tile(tuple(replace(layout, span="each") for layout in layouts), heads, tokens, width)
    return across, min(along, 32), warps


def known(codec: Codec, x: Tensor, writes: bool = True) -> PackedLayout:
    """The layout of `codec`, for vectors `x` `[B, H, T, D]`. Raises ValueError for a codec that kernels
    cannot read, or cannot write if `writes`, and for vectors whose channels are not contiguous."""
    layout = layout_of(codec)
    if layout is None or not supports(codec, x.shape[3]) or writes > layout.writable:
        raise ValueError(f"no kernel for {codec} at head_dim {x.shape[3]}: ask `supports` first")
    if x.stride(3) != 1:
        raise ValueError(f"strides {x.stride()}: the channels of a vector must be contiguous")
    return layout


def plane_arguments(layout: PackedLayout, planes: Codes, x: Tensor, table: Tensor) -> tuple[object, ...]:
    """Return the kernel arguments `planes` of a codec, for vectors like `x` that are rotated by `table` (`rotation_table`):

        table, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh

    codes, high bits, scales and the mean, each with its strides over rows (or entries of pages) and heads. In
    place of what the codec has not stands `x`, which is not read. Strides of packed codes and of high bits
    count words of 16 bits."""
    arguments: list[object] = [table]
    for name, unit, once in zip(layout.planes, (1 + layout.packed, 2, 1), (False, False, layout.span == "once"), strict=True):
        plane = planes[name] if name else x
        across = plane.stride(1) // unit if plane.shape[1] > 1 else 0  # heads that share a plane are no step apart
        rows = 0 if once and plane.shape[0] == 1 else plane.stride(0) // unit  # one row may serve all
        arguments += [plane, *((rows, across) if name else (0, 0))]
    if not layout.centered:
        return (*arguments, x, 0, 0)
    center = planes["center"]
    return (*arguments, center, center.stride(0) if center.shape[0] > 1 else 0, center.stride(1))


def planes_to_read(codec: Codec, codes: Codes, out: Tensor) -> tuple[PackedLayout, tuple[object, ...]]:
    """The layout of `codec`, and `plane_arguments` for dequantizing `codes`, with the buffers kept once, into vectors like `out`."""
    layout = known(codec, out, writes=False)
    if layout.centered:  # integers are rotated, and the mean is added afterwards
        codes = codes | {"center": codec.unrotate(codes["center"])}
    table = rotation_table(out.shape[3], out.device, torch.bfloat16, layout.rotation == 2) if layout.rotated else out
    return layout, plane_arguments(layout, codes, out, table)


def decode(codec: Codec, codes: Codes, out: Tensor) -> None:
    """Dequantizes `T` tokens into `out` `[B, H, T, D]` in fp16, bf16 or fp32, whose channels are contiguous.

    `codes`: views of planes `[B, H or 1, T, width]`, the tokens of a head contiguous in each, with the buffers kept once among them.

    Raises ValueError for a codec that `supports` does not accept, or an output whose channels are not contiguous."""
    (layout, planes), (batch, heads, tokens, head_dim) = planes_to_read(codec, codes, out), out.shape
    if not out.numel():
        return
    across, along, warps = tile((replace(layout, span="each"),), heads, tokens, padded(head_dim))
    with torch.cuda.device_of(out):
        _dequantize_kernel[(triton.cdiv(tokens, along) * triton.cdiv(heads, across), batch)](
            (out, *out.stride()[:3]), planes, tokens, heads, layout, head_dim, across, along, num_warps=warps
        )


def dequantize_pages(pages: Pages, out: tuple[Tensor, Tensor], begin: int = 0) -> None:
    """Run `reference.dequantize_pages` in one launch, for outputs in fp16, bf16 or fp32 of any strides with contiguous channels."""
    batch, heads, tokens = out[0].shape[:3]
    if not batch * heads * tokens:
        return
    parts = list(zip(pages.codecs, pages.planes, pages.statistics, out, strict=True))
    layouts = tuple(_rotated(known(codec, x, writes=False)) for codec, _, _, x in parts)
    sides = (
        (x, *x.stride()[:3], plane_arguments(layout, each | once, x, x)) for layout, (_, each, once, x) in zip(layouts, parts, strict=True)
    )
    table, lengths = pages.table, pages.table if pages.lengths is None else pages.lengths
    with torch.cuda.device_of(out[0]):
        _dequantize_pages_kernel[(-(-tokens // REGION_TILE), batch * heads, 2)](
            tuple(sides), table, lengths, *pages.strides, begin, tokens, heads, layouts, tuple(x.shape[3] for x in out), REGION_TILE,
            pages.page_size, pages.firsts[0], pages.lengths is not None, num_warps=4,
        )  # fmt: skip


@functools.cache
def _rotated(layout: PackedLayout) -> PackedLayout:
    """The layout without its rotation, for reading vectors as stored."""
    return replace(layout, rotation=0)


@triton.jit
def float8(code, MANTISSA: tl.constexpr):
    """The value of a byte of E4M3 (MANTISSA 3) or E5M2 (2), `code` int32 of any shape, in fp32. Both are
    parts of fp16: E5M2 is its upper byte, E4M3 has one bit of exponent less."""
    if MANTISSA == 2:
        value = (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def _signed_levels(code, HALF: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr):
    """Twice the levels of `code`, int32 of any shape and below `2 * HALF`, in steps of the grid: odd int32
    between -255 and 255. W0 and W1 are `LEVEL_WORDS`."""
    rank = tl.where(code >= HALF, code - HALF, HALF - 1 - code)
    word = tl.full(code.shape, W0, tl.int32)
    if HALF > 4:
        word = tl.where(rank < 4, word, tl.full(code.shape, W1, tl.int32))
    level = (word >> (8 * (rank & 3))) & 0xFF
    return tl.where(code >= HALF, level, -level)


@triton.jit
def product(a, b):
    """The product of 16-bit matrices [N, C] and [C, C], summed in fp32."""
    if INTERPRETED:  # has no bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b)


@triton.jit
def _times(x, matrix):
    """`x` [N, C], fp32 or 16-bit, times `matrix` [C, C], 16-bit: fp32. fp32 is split into three bfloat16."""
    if x.dtype == tl.float32:
        first = x.to(tl.bfloat16)
        x -= first.to(tl.float32)
        second = x.to(tl.bfloat16)
        third = (x - second.to(tl.float32)).to(tl.bfloat16)
        y = product(third, matrix) + product(second, matrix) + product(first, matrix)
    else:
        y = product(x, matrix)
    return y


@triton.jit
def rotate_rows(x, table, D: tl.constexpr, P: tl.constexpr):
    """Rows `x` [N, P] times the matrix of 1 and -1 in `table` (`rotation_table`), in blocks of the largest power of two that divides D:
    fp32 [N, P]. Above 256, D is P."""
    if P > 256:
        left, right = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, P // 2]), [0, 2, 1]))
        left, right = _rotate_halves(left, table, P // 2, P // 2), _rotate_halves(right, table, P // 2, P // 2)
        return tl.reshape(tl.permute(tl.join(left + right, left - right), [0, 2, 1]), [x.shape[0], P])
    else:
        return _rotate_halves(x, table, D, P)


@triton.jit
def _rotate_halves(x, table, D: tl.constexpr, P: tl.constexpr):
    """`rotate_rows` of at most 256 channels."""
    C: tl.constexpr = min(P, 128)
    i = tl.arange(0, C)
    matrix = tl.load(table + i[:, None] * C + i[None, :])
    if P == C:
        y = _times(x, matrix)
    else:
        left, right = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, C]), [0, 2, 1]))
        left, right = _times(left, matrix), _times(right, matrix)
        if D == P:
            left, right = left + right, left - right
        y = tl.reshape(tl.permute(tl.join(left, right), [0, 2, 1]), [x.shape[0], P])
    return y


@triton.constexpr_function
def width_of(layout: PackedLayout, head_dim: int) -> int:
    """Words of the main plane, or elements where codes are not packed."""
    return head_dim // layout.per if layout.packed else head_dim


@triton.constexpr_function
def scales_of(layout: PackedLayout, head_dim: int) -> int:
    """Elements of the plane of scales."""
    return head_dim // layout.group if layout.group else 2 if layout.scale == "pair" else 1


@triton.constexpr_function
def side_of(layouts: tuple[PackedLayout, PackedLayout], side: int) -> PackedLayout:
    """The layout of keys (`side` 0) or of values (1); Triton does not take `layouts[side]` for a constant."""
    return layouts[side]


@triton.jit
def vectors(tokens, heads, ACROSS: tl.constexpr, ALONG: tl.constexpr):
    """The vectors of a program's tile, N = ACROSS * ALONG: its row, its first head, and of each vector head
    and token, int64 [N], and whether it exists, bool [N]."""
    parts = tl.cdiv(heads, ACROSS)
    h0 = ((tl.program_id(0) % parts) * ACROSS).to(tl.int64)
    i = tl.arange(0, ACROSS * ALONG)
    h = h0 + i % ACROSS
    t = ((tl.program_id(0) // parts) * ALONG).to(tl.int64) + i // ACROSS
    return tl.program_id(1).to(tl.int64), h0, h, t, (t < tokens) & (h < heads)


@triton.jit
def load_tile(live, block, row, h0, slot, planes, L: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr):
    """Dequantizes vectors: fp32 [N, padded(D)], or the dtype of codes of kind "half". Arguments as in
    `triton_quantize.store_tile`; vectors that are not live, bool [N], are not read."""
    table, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh = planes
    N: tl.constexpr = live.shape[0]
    P: tl.constexpr = padded(D)
    i = tl.arange(0, N)
    c = tl.arange(0, P)
    h = i % ACROSS if ACROSS == 1 else (i % ACROSS).to(tl.int64)
    slot = slot.to(tl.int64)
    inside = live[:, None] if D == P else live[:, None] & (c < D)[None, :]

    WIDTH: tl.constexpr = width_of(L, D)
    at = block * cb + h0 * ch + (h * ch + slot * WIDTH)
    if not L.packed:
        code = tl.load(codes + at[:, None] + c[None, :], mask=inside, other=0)
    elif L.group > 0:
        # A word serves four channels far apart: four loads, all but the first from the cache, instead of an exchange among threads.
        word = tl.load(codes.to(tl.pointer_type(tl.int16)) + at[:, None] + (c % (D // 4))[None, :], mask=inside, other=0).to(tl.int32)
        a = c // (D // 4)
        if L.scale == "group":
            code = (word >> (4 * a)[None, :]) & 15
        else:
            sign = tl.where(a == 0, 15, tl.where(a == 1, 12, tl.where(a == 2, 14, 13)))
            half = (((word >> (9 - 3 * tl.minimum(a, 3))[None, :]) & 7) << 9) | (((word >> sign[None, :]) & 1) << 15)
            code = half.to(tl.int16).to(tl.float16, bitcast=True)
    else:
        PER: tl.constexpr = L.per
        BITS: tl.constexpr = 16 // PER  # of a code, those in this plane
        j = tl.arange(0, P // PER)
        e = tl.arange(0, PER)[None, None, :]
        mask = live[:, None] if D == P else live[:, None] & (j < WIDTH)[None, :]
        word = tl.load(codes.to(tl.pointer_type(tl.int16)) + at[:, None] + j[None, :], mask=mask, other=0).to(tl.int32)
        if L.high > 1:
            at = block * hb + h0 * hh + (h * hh + slot * WIDTH)
            upper = tl.load(high.to(tl.pointer_type(tl.int16)) + at[:, None] + j[None, :], mask=mask, other=0).to(tl.int32)
            lower = (word[:, :, None] >> (BITS * (e ^ (BITS == 2)))) & (2**BITS - 1)
            code = lower | ((upper[:, :, None] >> (BITS * e)) & (2**BITS - 1)) << BITS
        else:
            code = (word[:, :, None] >> (BITS * e)) & (2**BITS - 1)
        if L.high == 1:
            at = block * hb + h0 * hh + (h * hh + slot * (D // 16))
            word = tl.load(high.to(tl.pointer_type(tl.int16)) + at[:, None] + (j % (D // 16))[None, :], mask=mask, other=0).to(tl.int32)
            word = word >> tl.where(j < D // 16, 2, 0)[None, :]
            code = code | (((word[:, :, None] >> (4 * (e // 2) + e % 2)) & 1) << 2)
        code = tl.reshape(code, [N, P])

    COUNT: tl.constexpr = scales_of(L, D)
    # Heads may have copies of the scales that they share: `sh` is 0 if they have not.
    at = scales + block * sb + (h0 * sh + (h * sh + (slot * COUNT if L.span == "each" else slot)))

    if L.kind == "half":
        y = code
    elif L.bits == 8 and L.scale != "pair":
        if L.kind == "e4m3" or L.kind == "e5m2":
            level = float8(code.to(tl.int32), 3 if L.kind == "e4m3" else 2)
        elif L.high:
            level = (code - 128).to(tl.float32)
        else:
            level = code.to(tl.float32)
        y = level * (tl.load(scales + row * sb) if L.span == "once" else tl.load(at, mask=live, other=0.0).to(tl.float32)[:, None])
    elif L.scale == "pair":
        scale, zero = tl.load(at, mask=live, other=0.0).to(tl.float32), tl.load(at + 1, mask=live, other=0.0).to(tl.float32)
        y = code.to(tl.float32) * scale[:, None] + zero[:, None]
    elif L.group == 0:
        if L.scale == "hidden":
            bits = tl.load(at, mask=live, other=0.0).to(tl.int32, bitcast=True)
            level = code - (bits & 15)[:, None]
            scale = (bits & ~15).to(tl.float32, bitcast=True)
        else:
            level = _signed_levels(code, 2 ** (L.bits - 1), *LEVEL_WORDS[L.bits])
            scale = tl.load(at, mask=live, other=0.0).to(tl.float32) * HALF_STEPS[L.bits]
        if D != P:
            level = tl.where(inside, level, 0)
        if L.rotated:
            y = rotate_rows(level.to(tl.float32).to(tl.bfloat16), table, D, P) * (scale * (D & -D) ** -0.5)[:, None]
        else:
            y = level.to(tl.float32) * scale[:, None]
    else:
        scale = tl.load(at[:, None] + (c // L.group)[None, :], mask=inside, other=0)
        if L.scale == "block":
            y = code.to(tl.float32) * (float8(scale.to(tl.int32), 3) * 2.0**14)
        else:
            y = (code - 8).to(tl.float32) * scale.to(tl.float32)
            if L.rotated:
                first = y.to(tl.bfloat16)
                second = (y - first.to(tl.float32)).to(tl.bfloat16)
                y = (rotate_rows(first, table, D, P) + rotate_rows(second, table, D, P)) * (D & -D) ** -0.5
    if L.rotation == 2:
        y *= tl.load(table + min(P, 128) * min(P, 128) + c).to(tl.float32)[None, :]
    if L.centered:
        y += tl.load(center + (row * eb + (h0 + h) * eh)[:, None] + c[None, :], mask=inside, other=0.0)
    return y


@triton.jit
def load_vectors(at, live, D: tl.constexpr):
    """Vectors of D channels that begin at the pointers `at` [N], as [N, padded(D)]: 0 unless `live` [N], and beyond channel D."""
    P: tl.constexpr = padded(D)
    c = tl.arange(0, P)
    inside = live[:, None] if P == D else live[:, None] & (c < D)[None, :]
    return tl.load(at[:, None] + c[None, :], mask=inside, other=0.0)


@triton.jit
def store_vectors(at, y, live, D: tl.constexpr):
    """Stores the first D channels of `y` [N, P] to vectors that begin at the pointers `at` [N], if `live` [N]."""
    c = tl.arange(0, y.shape[1])
    inside = live[:, None] if y.shape[1] == D else live[:, None] & (c < D)[None, :]
    tl.store(at[:, None] + c[None, :], y.to(at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "heads"])
def _dequantize_kernel(
    out, planes, tokens, heads, L: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr
):  # fmt: skip
    """Dequantizes `tokens` tokens. Grid (tiles of ALONG tokens and ACROSS heads, B). Strides are in elements,
    of packed codes and high bits in words of 16 bits.

    out      [B, H, tokens, D] fp16, bf16 or fp32, channels contiguous, with its strides over the first three dimensions
    planes   `plane_arguments`. The rotation is in bf16, the mean fp32 [B, H, 1, D], rotated back. Codes [B, H', tokens, width], tokens
             contiguous, H' being H, or 1 if heads share them; high bits and scales [B, H', tokens, scales of a token] likewise
    L        `PackedLayout`; what it has not is not read                heads    H
    """
    b, h0, h, t, live = vectors(tokens, heads, ACROSS, ALONG)
    y = load_tile(live, b, b, h0, t, planes, L, D, ACROSS)
    x, xb, xh, xt = out
    store_vectors(x + (b * xb + h * xh + t * xt), y, live, D)


@triton.jit(do_not_specialize=["table_b", "table_h", "lengths_b", "lengths_h", "begin", "tokens", "heads"])
def _dequantize_pages_kernel(
    sides, table, lengths, table_b, table_h, lengths_b, lengths_h, begin, tokens, heads,
    L: tl.constexpr, D: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, BASE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Dequantizes `tokens` tokens from `begin` on. Grid (tiles of N tokens, B * H, 2): keys, values. Strides
    are in elements, of packed codes and high bits in words of 16 bits.

    sides     of keys, then of values: the output [B, H, tokens, D] fp16, bf16 or fp32, channels contiguous, with its strides over the first
              three dimensions; then `plane_arguments` of the first page: codes [entries, H', PAGE, width], H'
              being H, or 1 if heads share them or have pages of their own; high bits and scales likewise,
              scales [B, H', 1, 1] if one is kept for all tokens; the mean, fp32 [B, H, 1, D]
    table     int32 or int64 [B, P] or [B, H, P], entries of pages, BASE being the first: table_b, table_h (0: all heads share)
    lengths   int32 [B] or [B, H]: lengths_b, lengths_h (0: all heads share); read if COUNTED: zeros are written beyond
    heads     H                      L      layouts, without their rotation
    """
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    t = tl.program_id(0) * N + tl.arange(0, N)
    place = begin + t
    exists = t < tokens
    if COUNTED:
        exists = exists & (place < tl.load(lengths + b * lengths_b + h * lengths_h))
    page = tl.load(table + b * table_b + h * table_h + place // PAGE, mask=exists, other=BASE).to(tl.int64) - BASE
    for i in tl.static_range(2):
        if tl.program_id(2) == i:
            x, xb, xh, xt, planes = sides[i]
            y = load_tile(exists, page, b, h, place % PAGE, planes, side_of(L, i), D[i], 1)
            if COUNTED:
                y = tl.where(exists[:, None], y, 0.0)
            store_vectors(x + (b * xb + h * xh + t.to(tl.int64) * xt), y, t < tokens, D[i])
