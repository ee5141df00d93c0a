"""Products whose terms are summed in fp32, in few passes over memory."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2**25
"""Elements of products of vectors and matrices in memory at a time."""


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of `[B, H, M, K]` and `[B, H, K, N]` in fp32, without gradients. Matrices of 16 bits are
    multiplied as they are where the GPU sums products in fp32."""
    halves = a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16)
    if halves and a.is_cuda and not torch.version.hip and not torch.compiler.is_compiling():
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])
    return a.float() @ b.float()


def quadratic_form(x: Tensor, matrices: Tensor) -> Tensor:
    """`x M x` of vectors `[B, H, T, D]` and the matrices `[B or 1, Hq, D, D]` of the query heads of each head: fp32 `[B, H, Hq / H, T]`."""
    batch, heads, tokens, dim = x.shape
    side_by_side = matrices.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3).to(x.dtype)  # [B or 1, H, D, G * D]
    block = max(BLOCK // (batch * matrices.shape[1] * dim), 1)
    parts = []
    for part in x.split(block, dim=2):
        product = (part @ side_by_side).unflatten(-1, (-1, dim))  # [B, H, t, G, D]
        parts.append(product.mul_(part[:, :, :, None]).sum(-1, dtype=torch.float32))
    return torch.cat(parts, dim=2).transpose(2, 3)
