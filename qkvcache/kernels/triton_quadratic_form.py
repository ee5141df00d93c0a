# mypy: ignore-errors
"""Quadratic forms of vectors in one pass over them: what `matmul.quadratic_form` computes, without products in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 64
"""Tokens of a program, which reads the matrices of a head's group once."""


def supports(x: Tensor) -> bool:
    """Whether the kernel takes vectors like `x`."""
    return x.dtype in (torch.float16, torch.bfloat16) and x.shape[3] % 16 == 0 and x.shape[3] <= 128


def quadratic_form(x: Tensor, matrices: Tensor) -> Tensor:
    """Run `matmul.quadratic_form` in one launch."""
    batch, heads, tokens, dim = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    groups = matrices.shape[1] // heads
    matrices = matrices.to(x.dtype).contiguous()
    out = torch.empty(batch, heads, groups, tokens, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _quadratic_form_kernel[(triton.cdiv(tokens, TOKENS), batch * heads)](
            x, *x.stride()[:3], matrices, matrices.stride(0) if len(matrices) > 1 else 0, out, heads, tokens,
            G=groups, D=dim, DP=triton.next_power_of_2(dim), N=TOKENS, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["heads", "tokens"])
def _quadratic_form_kernel(
    x, stride_b, stride_h, stride_t, matrices, matrices_stride_b, out, heads, tokens,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N tokens, B * heads). Strides are in elements.

    x          [B, heads, tokens, D] fp16 or bf16, channels contiguous: stride_b, stride_h, stride_t
    matrices   [B or 1, heads * G, D, D] in the dtype of `x`, contiguous: matrices_stride_b over the first dimension, 0 if it is 1
    out        fp32 [B, heads, G, tokens], contiguous
    DP         `D`, padded to a power of two
    """
    t = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    c = tl.arange(0, DP)
    live = t < tokens
    rows = x + b * stride_b + h * stride_h + (t * stride_t)[:, None] + c[None, :]
    vectors = tl.load(rows, mask=live[:, None] & (c < D)[None, :], other=0.0)
    for g in range(G):
        matrix = matrices + b * matrices_stride_b + (h * G + g) * D * D + c[:, None] * D + c[None, :]
        products = tl.dot(vectors, tl.load(matrix, mask=(c < D)[:, None] & (c < D)[None, :], other=0.0))
        place = (tl.program_id(1).to(tl.int64) * G + g) * tokens + t
        tl.store(out + place, tl.sum(products * vectors.to(tl.float32), 1), mask=live)
