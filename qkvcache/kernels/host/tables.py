"""Constant tensors that kernels read: they depend on codecs and shapes alone, and are cached for the process.

A CUDA graph reuses the memory of tensors that are allocated while it is captured, so that none of those may
be cached: `dispatch.prepare` allocates all of them beforehand.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...formats.base import Codec, PackedLayout
from ...formats.rotation import Hadamard, random_signs, rotation_block, sylvester_matrix
from ..segments import layout_of

CPU = torch.device("cpu")
PLAIN = PackedLayout("half", planes=("codes", "", ""))
"""The layout of keys or values without quantized tokens."""


@dataclasses.dataclass(frozen=True)
class Side:
    """Keys or values as a constant of a kernel.

    layout   of the codes
    dim      channels
    once     whether one scale serves all tokens
    strides  over entries and heads of the codes, the high bits and the scales (over rows and heads with `once`), in elements: constants, so
             that all planes of a page have one product
    turn     factor of the rotation of queries, in the kernel
    """

    layout: PackedLayout
    dim: int
    once: bool
    strides: tuple[int, ...]
    turn: float = 1.0


class Rotation(NamedTuple):
    """The rotation of queries for quantized keys."""

    whole: Tensor | None
    """Rotates queries before the attention kernel where it cannot, fp16 `[D, D]`; else None."""
    words: Tensor
    """Rotates the words of a tile, fp16 `[words, words]`; additions across planes follow, `signs` come before, `factor` after."""
    matrix: Tensor
    """Rotates queries whole, fp16 `[D, D]`; `factor` comes after."""
    signs: Tensor
    """Signs of the channels of keys, fp32 `[D]`."""
    factor: float


class Tables(NamedTuple):
    """The constant tensors of one pair of codecs, head_dim and device."""

    key: PackedLayout
    value: PackedLayout
    queries: Rotation
    k_shifts: Tensor
    """int16 `[32, words]`: see `_shifts`."""
    v_shifts: Tensor
    v_signs: Tensor
    """Signs of the channels of values, fp32 `[Dv]`."""
    v_block: int
    """Channels in a block of the rotation of values; 1 if they are not rotated."""
    empty: Tensor
    """The argument in place of a tensor that there is not."""


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)  # cached for all callers, also those that differentiate
def tables(codecs: tuple[Codec, Codec] | None, dim: int, value_dim: int, device: torch.device) -> Tables:
    """Return the tables for quantized tokens of these codecs (keys, values); None: for exact tokens alone."""
    key, value = (PLAIN, PLAIN) if codecs is None else (dataclasses.replace(layout_of(codec) or PLAIN, search=0) for codec in codecs)
    k_rotation, v_rotation = (None, None) if codecs is None else (codec.rotation for codec in codecs)
    whole, factor, v_block = None, 1.0, 1
    words = matrix = signs = v_signs = empty = torch.empty(0, dtype=torch.float32, device=device)
    shifts = {"k_shifts": _shifts(key, dim, device), "v_shifts": _shifts(value, value_dim, device)}
    if k_rotation:
        factor, matrix = rotation_block(dim) ** -0.5, k_rotation.matrix(dim, device, torch.float16)
        if key.group and dim & (dim - 1):  # words of whole planes cut across the blocks of the rotation
            whole, key = matrix, dataclasses.replace(key, rotation=0)
        else:
            words, signs = _across_words(key, dim).to(device, torch.float16), _signs(k_rotation, dim, device)
    if v_rotation:
        v_signs, v_block = _signs(v_rotation, value_dim, device), rotation_block(value_dim)
    rotation = Rotation(whole, words, matrix, signs, factor)
    return Tables(key, value, rotation, v_signs=v_signs, v_block=v_block, empty=empty, **shifts)


def _across_words(codec: PackedLayout, dim: int) -> Tensor:
    """The rotation across the words of a tile, fp32 `[words, words]`: matrices of 1 and -1 on the diagonal."""
    width = 16 if codec.group else max(triton.next_power_of_2(dim // codec.per), 16)
    size = min(16, dim // codec.per) if codec.group else rotation_block(dim) // codec.per
    matrix = torch.zeros(width, width, dtype=torch.float32, device=CPU)
    for at in range(0, min(width, dim // codec.per), size):
        matrix[at : at + size, at : at + size] = sylvester_matrix(size, CPU)
    return matrix


def _signs(rotation: Hadamard, dim: int, device: torch.device) -> Tensor:
    """Signs of channels, fp32 `[dim]`."""
    return random_signs(dim, device) if rotation.randomized else torch.ones(dim, dtype=torch.float32, device=device)


def _shifts(codec: PackedLayout, dim: int, device: torch.device) -> Tensor:
    """Whether words of high bits are shifted (-1) for each word of low bits, int16 `[32, words]`: the first half and the second share them.

    The kernel loads what it could compute, a row for each token of a tile: only loads in the loop may stay in the layout of an operand."""
    width = max(triton.next_power_of_2(dim // codec.per), 16)
    return ((torch.arange(width, device=device) >= dim // 16) * -1).to(torch.int16).repeat(32, 1)
