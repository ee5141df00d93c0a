"""Hadamard rotations: they spread outlier channels over the whole vector, so that one scale serves all of it.

A vector whose length is not a power of two is rotated in blocks of its largest power-of-two divisor (80 = 5 x 16, 96 = 3 x 32).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

SIGN_SEED = 0x9E3779B9  # the one vLLM's int4_per_token_head draws its signs with, so that errors compare


def rotation_block(head_dim: int) -> int:
    """The largest power of two that divides `head_dim`."""
    block = 1
    while head_dim >= 2 * block and head_dim % (2 * block) == 0:  # torch.compile compares a size, but computes no bits of it
        block *= 2
    return block


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)  # what is made once for all callers must serve those that differentiate too
def sylvester_matrix(size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sylvester's Hadamard matrix, of 1 and -1: symmetric, and `size` times its own inverse."""
    matrix = torch.ones(1, 1, dtype=dtype, device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.to(device)


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """Sylvester's matrix over sqrt(size), fp32: symmetric and its own inverse."""
    return sylvester_matrix(size, device) * size**-0.5


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def random_signs(size: int, device: torch.device) -> Tensor:
    """fp32 `[size]` of 1 and -1, always the same."""
    generator = torch.Generator().manual_seed(SIGN_SEED)
    chance = torch.full((size,), 0.5, dtype=torch.float32, device="cpu")  # other dtypes draw other signs
    return (torch.bernoulli(chance, generator=generator) * 2 - 1).to(device)


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def _signed_matrix(randomized: bool, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    cpu, block = torch.device("cpu"), rotation_block(dim)
    matrix = torch.block_diag(*[sylvester_matrix(block, cpu)] * (dim // block))
    return (random_signs(dim, cpu)[:, None] * matrix if randomized else matrix).to(device, dtype)


def exact_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which a sum of fp16 or bf16 numbers is exact, so that the order of summation does not
    matter. MPS has nothing wider than fp32."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Hadamard:
    """`apply(x) = H (s * x)` with signs `s` if `randomized`, else without."""

    randomized: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """`[..., D]` in any float dtype to fp32 `[..., D]`.

        Summed exactly: codes are chosen from this, and a token must get the same ones alone as in a block,
        where an fp32 product adds in another order; nor may the TF32 setting of the process reach them.
        """
        block = rotation_block(x.shape[-1])
        x = x.to(exact_dtype(x.device))
        if self.randomized:
            x = x * random_signs(x.shape[-1], x.device)
        x = (x.unflatten(-1, (-1, block)) @ sylvester_matrix(block, x.device, x.dtype)).flatten(-2)
        return (x * block**-0.5).float()

    def matrix(self, dim: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """`m` `[D, D]` of 1 and -1, so that `apply(x) = rotation_block(D) ** -0.5 * x @ m`."""
        return _signed_matrix(self.randomized, dim, device, dtype)

    def undo(self, x: Tensor) -> Tensor:
        """fp32 `[..., D]` back: `undo(apply(x)) = x`."""
        block = rotation_block(x.shape[-1])
        x = (x.float().unflatten(-1, (-1, block)) @ hadamard_matrix(block, x.device)).flatten(-2)
        return x * random_signs(x.shape[-1], x.device) if self.randomized else x


def number_of(rotation: Hadamard | None) -> int:
    """The number of `PackedLayout.rotation`: 0 for none, 1 without signs, 2 with random ones."""
    return 0 if rotation is None else 1 + rotation.randomized
