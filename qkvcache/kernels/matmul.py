"""Products whose terms are summed in fp32, or exactly, in few passes over memory."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK = 2**25
"""Elements of products of vectors and matrices in memory at a time."""
COLUMNS_A_ROW = 16
"""Channels for each row of a product with int8 from which on bytes of the rows take less time than channels in fp32."""
GREATEST = 0x7F7F00
"""An integer of three signed bytes that leaves room for the rounding of a division: the greatest is 0x7F7F7F."""


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of `[B, H, M, K]` and `[B, H, K, N]` in fp32, without gradients. Matrices of 16 bits are multiplied as they are where the GPU
    sums products in fp32."""
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


def matmul_levels(a: Tensor, levels: Tensor, transposed: bool = False) -> Tensor:
    """`a @ levels`, or `a @ levels.mT`, of `a` `[B, H, M, K]` in fp32 and levels in int8 or a float dtype.

    A CPU that multiplies bytes multiplies int8 levels as they are by the three bytes of each number in `a`, rounded to 2^-23 of the largest
    of its row. Converting all levels to fp32 for few rows would take longer than multiplying them."""
    if not (levels.dtype == torch.int8 and a.dtype == torch.float32 and a.shape[2] * COLUMNS_A_ROW <= levels.shape[3] and _by_bytes(a)):
        levels = levels.to(a.dtype)
        return a @ (levels.mT if transposed else levels)
    batch, heads, rows, width = a.shape
    step = torch.linalg.vector_norm(a, torch.inf, -1, keepdim=True).clamp_min_(1e-30) / GREATEST
    whole = (a / step).round_().int().contiguous().add_(0x808080).bitwise_xor_(0x808080)  # with signed bytes
    parts = whole.view(torch.int8).view(-1, rows, width, 4)[..., :3].movedim(-1, 1).contiguous().view(-1, 3 * rows, width)
    # Of matrices whose numbers are apart, `_int_mm` returns another product.
    pairs = zip(parts, levels.expand(batch, heads, -1, -1).contiguous().flatten(0, 1), strict=True)
    if transposed:  # with few columns, oneDNN is faster than with few rows
        products = torch.stack([torch._int_mm(matrix, part.mT) for part, matrix in pairs]).float() @ _weights_of_bytes(rows)
        return products.mT.contiguous().unflatten(0, (batch, heads)) * step
    products = torch.stack([torch._int_mm(part, matrix) for part, matrix in pairs]).float()
    return (_weights_of_bytes(rows).mT @ products).unflatten(0, (batch, heads)) * step


@functools.cache
@torch.inference_mode(False)
def _weights_of_bytes(rows: int) -> Tensor:
    """fp32 `[3 * rows, rows]`, by which the products of bytes are added."""
    return torch.cat([torch.eye(rows, dtype=torch.float32) * 256**i for i in range(3)])


def _by_bytes(a: Tensor) -> bool:
    differentiable = a.requires_grad and torch.is_grad_enabled()
    return a.device.type == "cpu" and not (torch.compiler.is_compiling() or differentiable) and _multiplies_bytes()


@functools.cache
def _multiplies_bytes() -> bool:
    """Whether the CPU has instructions that sum products of bytes in 32 bits. Without them, oneDNN's sums of two products saturate."""
    return bool(torch.cpu._is_vnni_supported() and torch.backends.mkldnn.is_available())
