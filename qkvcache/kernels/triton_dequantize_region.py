"""Dequantizing keys and values of a growing or preallocated storage in one launch: what `attend_chunked.dequantize_blocks` computes.

A program dequantizes a tile of tokens of one head, keys or values, from whichever chunks of storage hold them. Vectors stay rotated:
rotating the queries and the outputs of attention costs less than rotating every token back.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .segments import QuantizedRegion
from .triton_dequantize import high_width_of, known, load_tile, scales_of, store_vectors, width_of
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
    sides = zip((region.key, region.value), region.chunks[0], (keys, values), region.shared, strict=True)
    for codec, codes, x, shared in sides:
        layout, dim = known(codec, x, writes=False), x.shape[3]
        if layout.span == "shared" and not shared:  # a layer that evicts has another token in each head
            layout = replace(layout, span="each")
        main, high, scales = (codes[name] if name else x for name in layout.planes)
        center = codes["center"] if layout.centered else x
        arguments += [(x, *x.stride()[:3]), (main, high, scales, scales.stride(0), center, *center.stride()[:2])]
        constants += [replace(layout, rotation=0), main.itemsize == 1, dim]
    grid = (triton.cdiv(tokens, TILE), batch * heads, 2)
    with torch.cuda.device_of(keys):
        _dequantize_region_kernel[grid](
            *arguments, region.table, len(region.chunks), begin, tokens, heads, *constants, TILE, num_warps=4
        )  # fmt: skip


@triton.jit(do_not_specialize=["chunks", "begin", "tokens", "heads"])
def _dequantize_region_kernel(
    keys, k_planes, values, v_planes, table, chunks, begin, tokens, heads,
    K: tl.constexpr, K_BYTES: tl.constexpr, D: tl.constexpr, V: tl.constexpr, V_BYTES: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Dequantizes `tokens` tokens from `begin` on. Grid (tiles of N tokens, B * H, 2): keys, values. Strides are in elements.

    keys      output [B, H, tokens, D] fp16, bf16 or fp32, channels contiguous, with its strides over the first three dimensions
    k_planes  codes [B, H, slots, width] of the first chunk, contiguous, K_BYTES: whether its elements are bytes; high bits likewise, read
              if a layout has them; scales likewise, [B, 1, slots, 1] if heads share them, [B, 1, 1, 1] if one is kept for all tokens; their
              stride over B; the mean, fp32 [B, H, 1, D], read if a layout is centered, and its strides over B and H
    values, v_planes, V_BYTES   the same of values, [.., DV]
    table     int64 [chunks, 8]: first token, slots, distances of the planes from those of the first chunk, keys before values
    heads     H                      K, V   layouts, without their rotation
    """
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    t0 = tl.program_id(0) * N
    if tl.program_id(2) == 0:
        _tile(keys, k_planes, table + 2, table, chunks, begin, tokens, heads, b, h, t0, K, K_BYTES, D, N)
    else:
        _tile(values, v_planes, table + 5, table, chunks, begin, tokens, heads, b, h, t0, V, V_BYTES, DV, N)


@triton.jit
def _tile(
    out, planes, distances, table, chunks, begin, tokens, heads, b, h, t0,
    L: tl.constexpr, BYTES: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A program of `_dequantize_region_kernel`, for keys or for values: the N tokens from `t0` on of head `h` of row `b`. `distances`:
    `table` from the column of the first plane on."""
    x, xb, xh, xt = out
    codes, high, scales, once, center, eb, eh = planes
    WIDTH: tl.constexpr = width_of(L, D)
    HIGH: tl.constexpr = high_width_of(L, D)
    COUNT: tl.constexpr = scales_of(L, D)
    t = t0 + tl.arange(0, N)
    for chunk in range(chunks):
        start = tl.load(table + chunk * 8)
        capacity = tl.load(table + chunk * 8 + 1)
        if (start < begin + t0 + N) & (start + capacity > begin + t0):
            slot = begin + t - start
            live = (t < tokens) & (slot >= 0) & (slot < capacity)
            main = codes + tl.load(distances + chunk * 8) * (2 if BYTES else 1)  # counted in words of 16 bits
            bits = high.to(tl.pointer_type(tl.int16)) + tl.load(distances + chunk * 8 + 1) if L.high else high
            factors = scales + tl.load(distances + chunk * 8 + 2)
            here = (
                x, main, heads * capacity * WIDTH, capacity * WIDTH, bits, heads * capacity * HIGH, capacity * HIGH,
                factors, once if L.span == "once" else capacity if L.span == "shared" else heads * capacity * COUNT,
                0 if L.span == "shared" else capacity * COUNT, center, eb, eh,
            )  # fmt: skip
            y = load_tile(live, b, b, h, slot, here, L, D, 1)
            store_vectors(x + (b * xb + h * xh + t.to(tl.int64) * xt), y, live, D)
