"""Dequantizing keys and values of a growing or preallocated storage in one launch: what `attend_chunked.dequantize_blocks` computes.

A program dequantizes a tile of tokens of one head, keys or values, from whichever chunks of storage hold them. Vectors stay rotated:
rotating the queries and the outputs of attention costs less than rotating every token back.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.base import PackedLayout
from .segments import QuantizedRegion
from .triton_dequantize import known, load_tile, plane_arguments, planes_of_chunk, store_vectors
from .triton_dequantize import supports as knows

TILE = 64
"""Tokens of a program."""


def supports(region: QuantizedRegion, dims: tuple[int, int]) -> bool:
    """Whether kernels read both codecs at these channels of keys and of values."""
    return knows(region.key, dims[0]) and knows(region.value, dims[1])


def dequantize_region(region: QuantizedRegion, begin: int, keys: Tensor, values: Tensor) -> None:
    """Writes tokens `begin` to `begin + T` of `region`, as they are stored: rotated, with their mean.

    Args:
        keys, values: outputs `[B, H, T, D]`, fp16, bf16 or fp32, of any strides with contiguous channels.
    """
    batch, heads, tokens = keys.shape[:3]
    arguments: list[object] = []
    constants: list[object] = []
    for codec, codes, x in zip(region.codecs, region.chunks[0], (keys, values), strict=True):
        layout = _rotated(known(codec, x, writes=False))
        arguments += [(x, *x.stride()[:3]), plane_arguments(layout, codes, x, x)]
        constants += [layout, x.shape[3]]
    grid = (-(-tokens // TILE), batch * heads, 2)
    with torch.cuda.device_of(keys):
        _dequantize_region_kernel[grid](
            *arguments, region.table, len(region.chunks), begin, tokens, heads, *constants, TILE, num_warps=4
        )  # fmt: skip


@functools.cache
def _rotated(layout: PackedLayout) -> PackedLayout:
    """For reading vectors as they are stored."""
    return replace(layout, rotation=0)


@triton.jit(do_not_specialize=["chunks", "begin", "tokens", "heads"])
def _dequantize_region_kernel(
    keys, k_planes, values, v_planes, table, chunks, begin, tokens, heads,
    K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Dequantizes `tokens` tokens from `begin` on. Grid (tiles of N tokens, B * H, 2): keys, values. Strides are in elements.

    keys      output [B, H, tokens, D] fp16, bf16 or fp32, channels contiguous, with its strides over the first three dimensions
    k_planes  `plane_arguments` of the first chunk: codes [B, H, slots, width], contiguous; high bits and scales likewise, scales
              [B, 1, slots, 1] if heads share them, [B, 1, 1, 1] if one is kept for all tokens; the mean, fp32 [B, H, 1, D]
    values, v_planes   the same of values, [.., DV]
    table     int64 [chunks, 8]: first token, slots, distances of the planes from those of the first chunk, keys before values
    heads     H                      K, V   layouts, without their rotation
    """
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    t0 = tl.program_id(0) * N
    if tl.program_id(2) == 0:
        _tile(keys, k_planes, table, chunks, begin, tokens, b, h, t0, K, D, N, 0)
    else:
        _tile(values, v_planes, table, chunks, begin, tokens, b, h, t0, V, DV, N, 1)


@triton.jit
def _tile(
    out, planes, table, chunks, begin, tokens, b, h, t0, L: tl.constexpr, D: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr
):  # fmt: skip
    """A program of `_dequantize_region_kernel`, for keys (SIDE 0) or values (1): the N tokens from `t0` on of head `h` of row `b`."""
    x, xb, xh, xt = out
    t = t0 + tl.arange(0, N)
    for chunk in range(chunks):
        start = tl.load(table + chunk * 8)
        capacity = tl.load(table + chunk * 8 + 1)
        if (start < begin + t0 + N) & (start + capacity > begin + t0):
            slot = begin + t - start
            live = (t < tokens) & (slot >= 0) & (slot < capacity)
            here = planes_of_chunk(planes, table, table + chunk * 8, L, SIDE)
            y = load_tile(live, b, b, h, slot, here, L, D, 1)
            store_vectors(x + (b * xb + h * xh + t.to(tl.int64) * xt), y, live, D)
