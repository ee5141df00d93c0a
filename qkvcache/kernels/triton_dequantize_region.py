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
from .triton_dequantize import high_width_of, known, load_tile, padded, scales_of, width_of
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
        arguments += [x, *x.stride()[:3], main, high, scales, scales.stride(0), center, *center.stride()[:2]]
        constants += [replace(layout, rotation=0), main.itemsize == 1, dim, padded(dim)]
    grid = (triton.cdiv(tokens, TILE), batch * heads, 2)
    with torch.cuda.device_of(keys):
        _dequantize_region_kernel[grid](
            *arguments, region.table, len(region.chunks), begin, tokens, heads, *constants, TILE, num_warps=4
        )  # fmt: skip


@triton.jit(do_not_specialize=["chunks", "begin", "tokens", "heads"])
def _dequantize_region_kernel(
    k_out, kb, kh, kt, k_codes, k_high, k_scales, k_once, k_center, k_eb, k_eh,
    v_out, vb, vh, vt, v_codes, v_high, v_scales, v_once, v_center, v_eb, v_eh,
    table, chunks, begin, tokens, heads,
    K: tl.constexpr, K_BYTES: tl.constexpr, DK: tl.constexpr, PK: tl.constexpr,
    V: tl.constexpr, V_BYTES: tl.constexpr, DV: tl.constexpr, PV: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Dequantizes `tokens` tokens from `begin` on. Grid (tiles of N tokens, B * H, 2): keys, values. Strides are in elements.

    k_out, v_out        [B, H, tokens, D] fp16, bf16 or fp32, channels contiguous: kb, kh, kt and vb, vh, vt
    k_codes, v_codes    [B, H, slots, width] of the first chunk, contiguous; K_BYTES, V_BYTES: whether its elements are bytes
    k_high, v_high      likewise, read if a layout has high bits
    k_scales, v_scales  likewise; [B, 1, slots, 1] if heads share them, [B, 1, 1, 1] if one is kept for all tokens: k_once, v_once over B
    k_center, v_center  fp32 [B, H, 1, D]: k_eb, k_eh and v_eb, v_eh over B, H; read if a layout is centered
    table               int64 [chunks, 8]: first token, slots, distances of the planes from those of the first chunk, keys before values
    heads               H                      K, V   layouts, without their rotation; DK, DV channels, padded to PK, PV
    """
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    t0 = tl.program_id(0) * N
    if tl.program_id(2) == 0:
        _tile(
            k_out, kb, kh, kt, k_codes, k_high, k_scales, k_once, k_center, k_eb, k_eh, table + 2, table, chunks, begin, tokens, heads,
            b, h, t0, K, K_BYTES, DK, PK, N,
        )  # fmt: skip
    else:
        _tile(
            v_out, vb, vh, vt, v_codes, v_high, v_scales, v_once, v_center, v_eb, v_eh, table + 5, table, chunks, begin, tokens, heads,
            b, h, t0, V, V_BYTES, DV, PV, N,
        )  # fmt: skip


@triton.jit
def _tile(
    out, ob, oh, ot, codes, high, scales, once, center, eb, eh, distances, table, chunks, begin, tokens, heads, b, h, t0,
    L: tl.constexpr, BYTES: tl.constexpr, D: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A program of `_dequantize_region_kernel`, for keys or for values: the N tokens from `t0` on of head `h` of row `b`. `distances`:
    `table` from the column of the first plane on."""
    WIDTH: tl.constexpr = width_of(L, D)
    HIGH: tl.constexpr = high_width_of(L, D)
    COUNT: tl.constexpr = scales_of(L, D)
    i = tl.arange(0, N)
    c = tl.arange(0, P)
    t = t0 + i
    at = b * ob + h * oh + t.to(tl.int64)[:, None] * ot + c[None, :]
    for chunk in range(chunks):
        start = tl.load(table + chunk * 8)
        capacity = tl.load(table + chunk * 8 + 1)
        if (start < begin + t0 + N) & (start + capacity > begin + t0):
            slot = begin + t - start
            live = (t < tokens) & (slot >= 0) & (slot < capacity)
            main = codes + tl.load(distances + chunk * 8) * (2 if BYTES else 1)  # counted in words of 16 bits
            bits = high.to(tl.pointer_type(tl.int16)) + tl.load(distances + chunk * 8 + 1) if L.high else high
            factors = scales + tl.load(distances + chunk * 8 + 2)
            y = load_tile(
                live, b, b, h, slot, out, main, heads * capacity * WIDTH, capacity * WIDTH, bits, heads * capacity * HIGH, capacity * HIGH,
                factors, once if L.span == "once" else capacity if L.span == "shared" else heads * capacity * COUNT,
                0 if L.span == "shared" else capacity * COUNT, center, eb, eh, L, D, P, 1, N,
            )  # fmt: skip
            inside = live[:, None] if D == P else live[:, None] & (c < D)[None, :]
            tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
