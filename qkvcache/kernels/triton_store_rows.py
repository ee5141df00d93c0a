"""Copying new tokens into slots of rings and sinks in one launch: what `pages.store_rows` computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .segments import Pair
from .triton_quantize import contiguous

TILE = 16
"""Tokens of a program."""


def store_rows(x: Pair, ring: Pair, ring_slots: Tensor, sinks: Pair, sink_slots: Tensor) -> None:
    """As `pages.store_rows`."""
    heads, tokens = x[0].shape[1:3]
    arguments: list[object] = []
    constants: list[int] = []
    for side, last, first in zip(contiguous(x), ring, sinks, strict=True):
        arguments += [(side, *side.stride()[1:3]), (last, *last.stride()[:3]), (first, *first.stride()[:3])]
        constants.append(side.shape[3])
    slots = ring_slots, ring_slots.stride(0), sink_slots, sink_slots.stride(0)
    with torch.cuda.device_of(x[0]):
        _store_rows_kernel[(triton.cdiv(tokens, TILE), heads, 2)](
            *arguments, *slots, ring[0].shape[2], sinks[0].shape[2], tokens, *constants, TILE, SINKS=sinks[0].shape[2] > 0, num_warps=4
        )


@triton.jit
def _store(
    x, ring, sinks, ring_at, ring_step, sink_at, sink_step, ring_slots, sink_slots, tokens,
    D: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """A program of `_store_rows_kernel`, for keys or for values; arguments as there."""
    x, xh, xt = x
    ring, rb, rh, rt = ring
    sinks, fb, fh, ft = sinks
    t = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    h = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, triton.next_power_of_2(D))[None, :]
    live = t < tokens
    last = tl.load(ring_at + t * ring_step, mask=live, other=-1)
    stored = last >= 0
    if SINKS:
        first = tl.load(sink_at + t * sink_step, mask=live, other=-1)
        stored = stored | (first >= 0)
    new = tl.load(x + (h * xh + t * xt)[:, None] + c, mask=stored[:, None] & (c < D), other=0.0)
    place = ring + (last // ring_slots * rb + h * rh + last % ring_slots * rt)
    tl.store(place[:, None] + c, new, mask=(last >= 0)[:, None] & (c < D))
    if SINKS:
        place = sinks + (first // sink_slots * fb + h * fh + first % sink_slots * ft)
        tl.store(place[:, None] + c, new, mask=(first >= 0)[:, None] & (c < D))


@triton.jit(do_not_specialize=["ring_step", "sink_step", "ring_slots", "sink_slots", "tokens"])
def _store_rows_kernel(
    key, k_ring, k_sinks, value, v_ring, v_sinks, ring_at, ring_step, sink_at, sink_step, ring_slots, sink_slots, tokens,
    D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N tokens, H, 2): keys, values. Tensors of vectors come with their strides, in elements.

    key        [1, H, tokens, D] model dtype, channels contiguous: over heads and tokens
    k_ring     [F, H, ring_slots, D] model dtype, and k_sinks [E, H, sink_slots, D], read if SINKS: over the first three dimensions
    value, v_ring, v_sinks   the same of values, [.., DV]
    ring_at, sink_at   int64 [tokens], the slot of each token in `ring` and in `sinks`, counted over their rows; negative: none.
               ring_step, sink_step
    """
    if tl.program_id(2) == 0:
        _store(key, k_ring, k_sinks, ring_at, ring_step, sink_at, sink_step, ring_slots, sink_slots, tokens, D, N, SINKS)
    else:
        _store(value, v_ring, v_sinks, ring_at, ring_step, sink_at, sink_step, ring_slots, sink_slots, tokens, DV, N, SINKS)
