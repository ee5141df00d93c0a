# mypy: ignore-errors
"""Rotary embedding in one pass over memory: what `rotate.rotate` computes, without its tables and fp32 copies."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, HEADS = 32, 8
"""Tokens and heads of a program, which computes the sines of its tokens once for all its heads."""
TURN = tl.constexpr(2 * math.pi)
TURNS = tl.constexpr(0.5 / math.pi)


def supports(x: Tensor) -> bool:
    """Whether the kernel rotates vectors like `x`."""
    return x.dtype in (torch.float16, torch.bfloat16, torch.float32)


def rotate(x: Tensor, by: Tensor, inv_freq: Tensor, interleaved: bool) -> Tensor:
    """Run `rotate.rotate` in one launch."""
    x = x if x.stride(3) == 1 else x.contiguous()
    batch, heads, tokens, dim = x.shape
    out, by, half = torch.empty_like(x), by.expand(batch, tokens), len(inv_freq)
    step, apart = (2, 1) if interleaved else (1, half)
    with torch.cuda.device_of(x):
        _rotate_kernel[(triton.cdiv(tokens, TOKENS), batch, triton.cdiv(heads, HEADS))](
            (x, *x.stride()[:3]), (out, *out.stride()[:3]), by, *by.stride(), inv_freq, heads, tokens,
            D=dim, HALF=half, STEP=step, APART=apart, N=TOKENS, H=HEADS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["by_b", "by_t", "heads", "tokens"])
def _rotate_kernel(
    x, out, by, by_b, by_t, inv_freq, heads, tokens,
    D: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N tokens, B, groups of H heads). `x` and `out` come with their strides over the first three dimensions, in elements.

    x          [B, heads, tokens, D] fp16, bf16 or fp32, channels contiguous
    out        [B, heads, tokens, D] in the dtype of `x`, channels contiguous
    by         [B, tokens], integers or floats: positions; by_b, by_t
    inv_freq   fp64 [HALF]: the angle of each pair of channels for one position
    STEP       from a pair to the next                  APART   from the first channel of a pair to the second
    """
    x, xb, xh, xt = x
    out, ob, oh, ot = out
    t = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    b = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, triton.next_power_of_2(HALF))
    live = t < tokens
    position = tl.load(by + b * by_b + t * by_t, mask=live, other=0).to(tl.float64)
    turns = position[:, None] * (tl.load(inv_freq + i, mask=i < HALF, other=0.0) * TURNS)[None, :]
    angle = ((turns - tl.floor(turns + 0.5)) * TURN).to(tl.float32)
    cos, sin = tl.cos(angle), tl.sin(angle)
    inside = live[:, None] & (i < HALF)[None, :]
    c = i[None, :] * STEP
    first = tl.program_id(2) * H
    for h in range(first, tl.minimum(first + H, heads)):
        source = x + (b * xb + tl.cast(h, tl.int64) * xh + t * xt)[:, None]
        target = out + (b * ob + tl.cast(h, tl.int64) * oh + t * ot)[:, None]
        one = tl.load(source + c, mask=inside, other=0.0).to(tl.float32)
        two = tl.load(source + c + APART, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + c, one * cos - two * sin, mask=inside)
        tl.store(target + c + APART, two * cos + one * sin, mask=inside)
        if D > 2 * HALF:  # channels without RoPE
            rest = 2 * HALF + tl.arange(0, triton.next_power_of_2(D - 2 * HALF))[None, :]
            tl.store(target + rest, tl.load(source + rest, mask=live[:, None] & (rest < D)), mask=live[:, None] & (rest < D))
