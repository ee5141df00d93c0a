"""Expanding the codes of one side in one launch: what `Codec.decode` computes, for when a whole layer has to be in the model's dtype.

A program decodes a tile of tokens, all channels of them, and turns them back. What is turned are integers (levels counted in half steps),
exact in bfloat16, and the scale follows; where scales span groups, products of code and scale are split into two bfloat16, exact as well.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.base import Codec, Codes
from ..formats.centered import Centered
from ..formats.codebooks import GRID
from ..formats.fp8 import ScaledFloat8
from ..formats.identity import AsIs
from ..formats.int4 import GroupInt4, HiddenZeroInt4
from ..formats.int8 import SymmetricInt8
from ..formats.nvfp4 import BlockFP4
from ..formats.rotated import LloydMax, Rotated
from ..formats.rotation import random_signs, rotation_block, sylvester_matrix
from ..formats.trellis import Trellis
from ..formats.uniform import Uniform
from .triton_levels import LLOYD_MAX_WORDS, TRELLIS_WORDS, signed_levels
from .triton_trellis import TRELLIS_HALF_STEPS, subset_at

GREATEST_HEAD_DIM = 256
CHUNK = 128  # channels that one product rotates: twice as many take two and a butterfly, so that the matrix fits every shared memory

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
HALF_STEPS = tl.constexpr((0.0, 0.0, *(GRID[bits][0] / 2 for bits in (2, 3, 4))))
"""By bits: half a step of the grid that Lloyd-Max levels lie on."""


class Spec(NamedTuple):
    """A codec as kernels know it. Equal specs share one compiled kernel."""

    kind: str
    option: int = 0  # bits, mantissa bits, channels of a group, or how a scale is searched
    rotation: int = 0  # 1: Hadamard, 2: with random signs
    span: str = "each"  # "shared": one scale for all heads of a token, "once": for all tokens too
    planes: tuple[str, str, str] = ("codes", "", "scale")  # names of the buffers: codes, high bits, scales
    centered: bool = False

    @property
    def constants(self) -> tuple[str, int, int, str, bool]:
        """What kernels are compiled for."""
        return self.kind, self.option, self.rotation, self.span, self.centered


@functools.cache
def describe(codec: Codec) -> Spec | None:
    """The spec of `codec`, or None if kernels do not know it."""
    rotation = 0 if codec.rotation is None else 1 + codec.rotation.randomized
    if isinstance(codec, Centered):
        inner = describe(codec.codec)
        return inner and inner._replace(rotation=rotation, centered=True)
    if isinstance(codec, AsIs):
        return Spec("copy", planes=("codes", "", ""))
    if isinstance(codec, SymmetricInt8):
        return Spec("int8", span="each" if codec.scale == "token_head" else "shared")
    if isinstance(codec, ScaledFloat8):
        if codec.scale == "tensor" and not codec.frozen:
            return None  # needs all tokens of the block before it stores the first
        span = "once" if codec.frozen else "each" if codec.scale == "token_head" else "shared"
        return Spec("fp8", 3 if codec.dtype == "e4m3" else 2, span=span)
    if isinstance(codec, Uniform):
        return Spec("uniform", codec.bits, planes=("low", "high", "scale_zero") if codec.bits == 3 else ("codes", "", "scale_zero"))
    if isinstance(codec, GroupInt4):
        return Spec("group", codec.group_size, rotation) if codec.group_size.bit_count() == 1 else None
    if isinstance(codec, HiddenZeroInt4):
        return Spec("hidden", 4, rotation)
    if isinstance(codec, BlockFP4):
        return Spec("nvfp4", ("amax", "four_over_six", "mse").index(codec.search))
    if isinstance(codec, Rotated) and isinstance(codec.quantizer, LloydMax):
        bits = codec.quantizer.bits
        return Spec("lloyd", bits, rotation, planes=("low", "high", "scale") if bits == 3 else ("codes", "", "scale"))
    if isinstance(codec, Rotated) and isinstance(codec.quantizer, Trellis):
        return Spec("trellis", codec.quantizer.bits, rotation, planes=("codes" if codec.quantizer.bits == 2 else "low", "high", "scale"))
    return None


def supports(codec: Codec, head_dim: int) -> bool:
    """Whether `encode_kv` and `decode` know `codec` at `head_dim`."""
    return head_dim <= GREATEST_HEAD_DIM and describe(codec) is not None and codec.refuses(head_dim) is None


def padded(head_dim: int) -> int:
    return 1 << max(6, (head_dim - 1).bit_length())


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def rotation_table(head_dim: int, device: torch.device, dtype: torch.dtype, randomized: bool) -> Tensor:
    """What a kernel rotates by, flat: a matrix of 1 and -1, then the sign of each channel. Blocks lie on the diagonal."""
    chunk, block = min(padded(head_dim), CHUNK), rotation_block(head_dim)
    block = min(block, chunk)
    matrix = torch.block_diag(*[sylvester_matrix(block, torch.device("cpu"))] * (chunk // block))
    signs = torch.ones(padded(head_dim))
    if randomized:
        signs[:head_dim] = random_signs(head_dim, torch.device("cpu"))
    return torch.cat([matrix.flatten(), signs]).to(device, dtype)


def table_of(spec: Spec, x: Tensor) -> Tensor:
    """What the kernel rotates vectors like `x` by; `x` itself, which it does not look at, if nothing is rotated."""
    if not spec.rotation:
        return x
    return rotation_table(x.shape[3], x.device, torch.float16 if x.dtype == torch.float16 else torch.bfloat16, spec.rotation == 2)


def tile(specs: Sequence[Spec], heads: int, tokens: int, width: int, itemsize: int = 2) -> tuple[int, int, int]:
    """Heads and tokens of a tile, and warps, for rows of `width` channels of `itemsize` bytes."""
    rotated = any(spec.rotation for spec in specs)
    # Twice as many rows share the matrix of a product; 64 is what Hopper's takes. fp32, in three parts, needs the registers.
    rows = 16 if rotated and itemsize == 4 else min(max((8192 if rotated else 4096) // width, 16), 64)
    least = 16 if rotated else 1
    if any(spec.kind == "trellis" for spec in specs):
        rows = 16  # a thread has one block of channels at a time: more would not fit in its registers
    # One token or many: every other size would be compiled anew, in the middle of a generate.
    many, long = triton.next_power_of_2(heads), 1 if tokens == 1 else 64
    shared = any(spec.span == "shared" for spec in specs)
    across = many if shared else max(min(many, 16 // long), 1)
    along = max(min(rows // across, long), least // across, 1)
    return across, along, 8 if across * along * width > 8192 or rotated and (width > CHUNK or itemsize == 4) else 4


def known(codec: Codec, x: Tensor) -> Spec:
    spec = describe(codec) if x.shape[3] <= GREATEST_HEAD_DIM else None
    if spec is None:
        raise ValueError(f"no kernel stores {codec} at head_dim {x.shape[3]}: ask `supports` first")
    if x.stride(3) != 1:
        raise ValueError(f"strides {x.stride()}: the channels of a vector must be contiguous")
    return spec


def plane_arguments(spec: Spec, planes: Codes, instead: Tensor) -> list[object]:
    """Codes, high bits and scales, each with its strides over batch and heads; `instead` for those that the spec has not.

    Strides of packed codes count words.
    """
    words = (spec.kind == "uniform" and spec.option < 8) or spec.kind in ("group", "hidden", "nvfp4", "lloyd", "trellis")
    arguments: list[object] = []
    for name, unit in zip(spec.planes, (1 + words, 2, 1), strict=True):
        plane = planes[name] if name else instead
        across = plane.stride(1) // unit if plane.shape[1] > 1 else 0  # heads that share a plane are no step apart
        arguments += [plane, *((plane.stride(0) // unit, across) if name else (0, 0))]
    center = planes["center"] if spec.centered else instead
    return [*arguments, center, *center.stride()[:2]]


def decode(codec: Codec, codes: Codes, out: Tensor) -> None:
    """Decodes `T` tokens into `out` `[B, H, T, D]` in fp16, bf16 or fp32, whose channels are contiguous.

    `codes`: views of planes `[B, H or 1, T, width]`, the tokens of a head contiguous in each, with the buffers kept once among them.

    Raises ValueError for a codec that `supports` does not accept, or an output whose channels are not contiguous.
    """
    spec = known(codec, out)
    batch, heads, tokens, head_dim = out.shape
    if not out.numel():
        return
    if spec.centered:  # what is turned are integers, and the mean joins them afterwards
        codes = codes | {"center": codec.unrotate(codes["center"])}
    width = padded(head_dim)
    table = rotation_table(head_dim, out.device, torch.bfloat16, spec.rotation == 2) if spec.rotation else out
    across, along, warps = tile([spec._replace(span="each")], heads, tokens, width)
    grid = (triton.cdiv(tokens, along) * triton.cdiv(heads, across), batch)
    with torch.cuda.device_of(out):
        _decode_kernel[grid](
            out, *out.stride()[:3], table, *plane_arguments(spec, codes, out), tokens, heads,
            *spec.constants, head_dim, width, across, along, num_warps=warps,
        )  # fmt: skip


@triton.jit
def float8(code, MANTISSA: tl.constexpr):
    """What a byte of E4M3 or E5M2 (int32) stands for. Both are parts of fp16: its upper byte, and one short of a bit of exponent."""
    if MANTISSA == 2:
        value = (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def product(a, b):
    """A product of 16-bit matrices, summed in fp32."""
    if INTERPRETED:  # has no bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b)


@triton.jit
def _times(x, matrix):
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
def turn(x, table, D: tl.constexpr, P: tl.constexpr):
    """Rows times the matrix of 1 and -1, in blocks of the largest power of two that divides D."""
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
def packs(kind: str, option: int) -> bool:
    """Whether codes lie in words of 16 bits."""
    return kind in ("group", "hidden", "nvfp4", "lloyd", "trellis") or (kind == "uniform" and option < 8)


@triton.constexpr_function
def width_of(kind: str, option: int, head_dim: int) -> int:
    """Words of the main plane, or elements where codes are not packed."""
    if not packs(kind, option):
        return head_dim
    if kind == "trellis":
        return head_dim // (16 if option == 2 else 8)
    return head_dim // (8 if kind in ("lloyd", "uniform") and option < 4 else 4)


@triton.constexpr_function
def high_width_of(kind: str, option: int, head_dim: int) -> int:
    """Words of the plane of high bits."""
    return head_dim // (8 if kind == "trellis" and option == 4 else 16)


@triton.jit(do_not_specialize=["tokens", "heads"])
def _decode_kernel(
    out, ob, oh, ot, table, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh, tokens, heads,
    KIND: tl.constexpr, OPTION: tl.constexpr, ROTATION: tl.constexpr, SPAN: tl.constexpr, CENTERED: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = ACROSS * ALONG
    b = tl.program_id(1).to(tl.int64)
    parts = tl.cdiv(heads, ACROSS)
    t0 = ((tl.program_id(0) // parts) * ALONG).to(tl.int64)
    h0 = ((tl.program_id(0) % parts) * ACROSS).to(tl.int64)
    i = tl.arange(0, N)
    c = tl.arange(0, P)
    t = i // ACROSS
    h = i % ACROSS if ACROSS == 1 else (i % ACROSS).to(tl.int64)  # heads may lie far apart
    live = (t0 + t < tokens) & (h0 + h < heads)
    inside = live[:, None] if D == P else live[:, None] & (c < D)[None, :]

    PACKED: tl.constexpr = packs(KIND, OPTION)
    BITS: tl.constexpr = OPTION if KIND == "lloyd" or KIND == "uniform" else 4
    WIDTH: tl.constexpr = width_of(KIND, OPTION, D)
    at = b * cb + h0 * ch + t0 * WIDTH + (h * ch + t * WIDTH)
    if not PACKED:
        code = tl.load(codes + at[:, None] + c[None, :], mask=inside, other=0)
    elif KIND == "trellis":
        # As below, four loads or so for each word.
        half = c // 8 // (D // 16)
        position = (c % 8 // 2 * 4 + half * 2 + c % 2)[None, :]
        block = c // 8 % (D // 16)
        HIGH: tl.constexpr = high_width_of(KIND, OPTION, D)
        at_high = high.to(tl.pointer_type(tl.int16)) + (b * hb + h0 * hh + t0 * HIGH + (h * hh + i // ACROSS * HIGH))[:, None]
        at_high += block[None, :]
        path = tl.load(at_high, mask=inside, other=0).to(tl.int32) & 0xFFFF
        word = codes.to(tl.pointer_type(tl.int16)) + at[:, None] + (block if OPTION == 2 else c // 8)[None, :]
        word = tl.load(word, mask=inside, other=0).to(tl.int32)
        index = (word >> (position ^ 2)) & 1 if OPTION == 2 else (word >> (2 * (c % 8))[None, :]) & 3
        if OPTION == 4:
            negative = (tl.load(at_high + D // 16, mask=inside, other=0).to(tl.int32) >> position) & 1
            index = (index ^ (3 * negative)) | (4 * (1 - negative))
        code = 4 * index + subset_at(path | (path << 16), position)
    elif BITS == 3:
        j = tl.arange(0, P // 8)
        mask = live[:, None] if D == P else live[:, None] & (j < WIDTH)[None, :]
        low = tl.load(codes.to(tl.pointer_type(tl.int16)) + at[:, None] + j[None, :], mask=mask, other=0).to(tl.int32)
        at = b * hb + h0 * hh + t0 * (D // 16) + (h * hh + t * (D // 16))
        word = tl.load(high.to(tl.pointer_type(tl.int16)) + at[:, None] + (j % (D // 16))[None, :], mask=mask, other=0).to(tl.int32)
        word = word >> tl.where(j < D // 16, 2, 0)[None, :]
        e = tl.arange(0, 8)[None, None, :]
        code = ((low[:, :, None] >> (2 * e)) & 3) | (((word[:, :, None] >> (4 * (e // 2) + e % 2)) & 1) << 2)
        code = tl.reshape(code, [N, P])
    elif BITS == 2:
        j = tl.arange(0, P // 8)
        mask = live[:, None] if D == P else live[:, None] & (j < WIDTH)[None, :]
        word = tl.load(codes.to(tl.pointer_type(tl.int16)) + at[:, None] + j[None, :], mask=mask, other=0).to(tl.int32)
        code = tl.reshape((word[:, :, None] >> (2 * tl.arange(0, 8))[None, None, :]) & 3, [N, P])
    elif KIND == "group" or KIND == "nvfp4":
        # A word serves four channels far apart: four loads, all but the first from the cache, instead of an exchange among threads.
        word = tl.load(codes.to(tl.pointer_type(tl.int16)) + at[:, None] + (c % (D // 4))[None, :], mask=inside, other=0).to(tl.int32)
        a = c // (D // 4)
        if KIND == "group":
            code = (word >> (4 * a)[None, :]) & 15
        else:
            sign = tl.where(a == 0, 15, tl.where(a == 1, 12, tl.where(a == 2, 14, 13)))
            half = (((word >> (9 - 3 * tl.minimum(a, 3))[None, :]) & 7) << 9) | (((word >> sign[None, :]) & 1) << 15)
            code = half.to(tl.int16).to(tl.float16, bitcast=True)
    else:
        j = tl.arange(0, P // 4)
        mask = live[:, None] if D == P else live[:, None] & (j < WIDTH)[None, :]
        word = tl.load(codes.to(tl.pointer_type(tl.int16)) + at[:, None] + j[None, :], mask=mask, other=0).to(tl.int32)
        code = tl.reshape((word[:, :, None] >> (4 * tl.arange(0, 4))[None, None, :]) & 15, [N, P])

    COUNT: tl.constexpr = 2 if KIND == "uniform" else D // OPTION if KIND == "group" else D // 16 if KIND == "nvfp4" else 1
    at = scales + b * sb + (h0 * sh + t0 * COUNT + (h * sh + t * COUNT) if SPAN == "each" else t0 + t)

    if KIND == "copy":
        y = code
    elif KIND == "int8" or KIND == "fp8":
        level = code.to(tl.float32) if KIND == "int8" else float8(code.to(tl.int32), OPTION)
        y = level * (tl.load(scales + b * sb) if SPAN == "once" else tl.load(at, mask=live, other=0.0).to(tl.float32)[:, None])
    elif KIND == "uniform":
        scale, zero = tl.load(at, mask=live, other=0.0).to(tl.float32), tl.load(at + 1, mask=live, other=0.0).to(tl.float32)
        y = code.to(tl.float32) * scale[:, None] + zero[:, None]
    elif KIND == "hidden":
        bits = tl.load(at, mask=live, other=0.0).to(tl.int32, bitcast=True)
        level = code - (bits & 15)[:, None]
        if D != P:
            level = tl.where(inside, level, 0)
        scale = (bits & ~15).to(tl.float32, bitcast=True)
        if ROTATION > 0:
            y = turn(level.to(tl.float32).to(tl.bfloat16), table, D, P) * (scale * (D & -D) ** -0.5)[:, None]
        else:
            y = level.to(tl.float32) * scale[:, None]
    elif KIND == "lloyd" or KIND == "trellis":
        if KIND == "lloyd":
            level = signed_levels(code, 2 ** (OPTION - 1), *LLOYD_MAX_WORDS[OPTION])
        else:
            level = signed_levels(code, 2**OPTION, *TRELLIS_WORDS[OPTION])
        if D != P:
            level = tl.where(inside, level, 0)
        scale = tl.load(at, mask=live, other=0.0).to(tl.float32) * (HALF_STEPS[OPTION] if KIND == "lloyd" else TRELLIS_HALF_STEPS[OPTION])
        if ROTATION > 0:
            y = turn(level.to(tl.float32).to(tl.bfloat16), table, D, P) * (scale * (D & -D) ** -0.5)[:, None]
        else:
            y = level.to(tl.float32) * scale[:, None]
    else:
        SIZE: tl.constexpr = 16 if KIND == "nvfp4" else OPTION
        scale = tl.load(at[:, None] + (c // SIZE)[None, :], mask=inside, other=0)
        if KIND == "nvfp4":
            y = code.to(tl.float32) * (float8(scale.to(tl.int32), 3) * 2.0**14)
        else:
            y = (code - 8).to(tl.float32) * scale.to(tl.float32)
            if ROTATION > 0:
                first = y.to(tl.bfloat16)
                second = (y - first.to(tl.float32)).to(tl.bfloat16)
                y = (turn(first, table, D, P) + turn(second, table, D, P)) * (D & -D) ** -0.5
    if ROTATION == 2:
        y *= tl.load(table + min(P, 128) * min(P, 128) + c).to(tl.float32)[None, :]
    if CENTERED:
        y += tl.load(center + (b * eb + (h0 + h) * eh)[:, None] + c[None, :], mask=inside, other=0.0)
    at = b * ob + h0 * oh + t0 * ot + (h * oh + t * ot)
    tl.store(out + at[:, None] + c[None, :], y.to(out.dtype.element_ty), mask=inside)
