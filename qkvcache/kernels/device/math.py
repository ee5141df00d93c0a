"""Exponentials, logarithms and reciprocals of the special function units of NVIDIA GPUs, without Triton's
handling of denormal numbers, which costs five instructions. `ARCH` is the compute capability (90: Hopper), or
0 where there is no NVIDIA assembly: plain Triton there."""

from __future__ import annotations

import triton
import triton.language as tl

from ..attend.reference import MASKED_BELOW as BELOW
from ..attend.reference import MASKED_SCORE as SCORE

MASKED_SCORE, MASKED_BELOW = tl.constexpr(SCORE), tl.constexpr(BELOW)


@triton.jit
def exp2(x, ARCH: tl.constexpr):
    """2 to the power of `x`, fp32 of any shape; denormal results are 0 where ARCH > 0."""
    if ARCH > 0:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def log2(x, ARCH: tl.constexpr):
    """The logarithm of `x`, fp32 of any shape, to base 2."""
    if ARCH > 0:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def inverse(x, ARCH: tl.constexpr):
    """1 / `x`, fp32 of any shape."""
    if ARCH > 0:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x
