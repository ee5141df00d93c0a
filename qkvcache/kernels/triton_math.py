"""Functions of the special function units, without the care for denormals that Triton takes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp2(x, ARCH: tl.constexpr):
    if ARCH > 0:  # without the handling of denormals, which costs five instructions
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def log2(x, ARCH: tl.constexpr):
    if ARCH > 0:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def inverse(x, ARCH: tl.constexpr):
    if ARCH > 0:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x
