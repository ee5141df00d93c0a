# mypy: ignore-errors
"""`lag_spread.lag_spread` in one pass over memory.

The window of a token is the end of one block of `lag` tokens and the beginning of the next (van Herk): its maxima and minima are those of a
scan from the end of the first and of a scan from the beginning of the second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .lag_spread import LEAST_RANGE

CHANNELS = 16
"""Tokens in registers at a time."""
MOST_LAG = 256
LEAST = tl.constexpr(LEAST_RANGE)


def supports(x: Tensor, lag: int) -> bool:
    """Whether the kernel takes vectors like `x`."""
    return x.dtype in (torch.float16, torch.bfloat16, torch.float32) and lag <= MOST_LAG


def lag_spread(x: Tensor, count: int, lag: int) -> Tensor:
    """Run `lag_spread.lag_spread` in one launch."""
    batch, heads, _, dim = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    out = torch.empty(batch, heads, count, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _lag_spread_kernel[(triton.cdiv(count, lag), batch * heads)](
            x, *x.stride()[:3], out, heads, count, D=dim, C=min(CHANNELS, triton.next_power_of_2(dim)), LAG=lag,
            L=triton.next_power_of_2(lag), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _higher(a, b):
    return tl.maximum(a, b)


@triton.jit
def _lower(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["heads", "count"])
def _lag_spread_kernel(
    x, stride_b, stride_h, stride_t, out, heads, count, D: tl.constexpr, C: tl.constexpr, LAG: tl.constexpr, L: tl.constexpr
):
    """Grid (blocks of LAG tokens, B * heads). Strides are in elements.

    x      [B, heads, count + LAG or more, D] fp16, bf16 or fp32, channels contiguous: stride_b, stride_h, stride_t
    out    fp32 [B, heads, count], contiguous
    C      channels at a time                       L    `LAG`, padded to a power of two
    """
    i = tl.arange(0, L)
    t = tl.program_id(0).to(tl.int64) * LAG + i
    x += (tl.program_id(1) // heads).to(tl.int64) * stride_b + (tl.program_id(1) % heads).to(tl.int64) * stride_h
    live = (i < LAG) & (t < count)
    ending = (i < LAG) & (t + 1 < count + LAG)  # of the window of token `t`: tokens from `t + 1` on, in this block of windows
    begun = (i > 0) & (i < LAG) & (t < count)  # and those of the next block before `t + LAG`, it included
    mean = tl.zeros([L], tl.float32)
    squares = tl.zeros([L], tl.float32)
    for begin in range(0, D, C):
        c = begin + tl.arange(0, C)
        inside = (c < D)[None, :]
        number = tl.minimum(tl.cast(D - begin, tl.float32), C)
        rows = x + (t * stride_t)[:, None] + c[None, :]
        own = tl.load(rows, mask=live[:, None] & inside, other=0.0).to(tl.float32)
        end = tl.load(rows + stride_t, mask=ending[:, None] & inside, other=0.0).to(tl.float32)
        start = tl.load(rows + LAG * stride_t, mask=begun[:, None] & inside, other=0.0).to(tl.float32)
        high = tl.maximum(
            tl.associative_scan(tl.where(ending[:, None], end, float("-inf")), 0, _higher, reverse=True),
            tl.associative_scan(tl.where(begun[:, None], start, float("-inf")), 0, _higher),
        )
        low = tl.minimum(
            tl.associative_scan(tl.where(ending[:, None], end, float("inf")), 0, _lower, reverse=True),
            tl.associative_scan(tl.where(begun[:, None], start, float("inf")), 0, _lower),
        )
        scaled = tl.where(live[:, None] & inside, (own - low) / tl.maximum(high - low, LEAST), 0.0)
        # Means and squared deviations of parts of the channels are joined.
        part = tl.sum(scaled, 1) / number
        apart = tl.where(inside, scaled - part[:, None], 0.0)
        step = part - mean
        squares += tl.sum(apart * apart, 1) + step * step * (begin * number / (begin + number))
        mean += step * (number / (begin + number))
    tl.store(out + tl.program_id(1).to(tl.int64) * count + t, tl.sqrt(squares / (D - 1)), mask=live)
