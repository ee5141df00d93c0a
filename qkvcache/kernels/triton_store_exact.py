"""Storing several exact tokens in the sinks and the residual, and their counts, in one launch: what `counted.store_exact` computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .segments import Buffers, Pair
from .triton_quantize import contiguous

TILE = 16
"""Tokens of a program."""


def store_exact(buffers: Buffers, exact: Pair, sinks: tuple[int, int], begin: int, slot: int, lengths: tuple[int, int]) -> None:
    """As `counted.store_exact`."""
    arguments: list[object] = []
    constants: list[int] = []
    batch, heads, tokens, _ = exact[0].shape
    for x, first, ring in zip(contiguous(exact), buffers.sinks, buffers.residual, strict=True):
        arguments += [(x, *x.stride()[:3]), (first, *first.stride()[:2]), (ring, *ring.stride()[:2])]
        constants += [x.shape[3]]
    grid = (-(-max(sinks[1] - sinks[0] + tokens - begin, 1) // TILE), batch * heads, 2)
    with torch.cuda.device_of(buffers.state):
        _store_exact_kernel[grid](
            *arguments, buffers.state, *sinks, begin, slot, buffers.residual[0].shape[2], tokens, heads, *lengths, *constants, TILE,
            num_warps=4,
        )  # fmt: skip


@triton.jit
def _store(x, sinks, ring, b, h, token, live, sink, place, D: tl.constexpr):
    """Copies vectors [N, D] of tokens `token` of `x` into slot `token` of `sinks` where `sink`, else into slot `place` of `ring`; those
    that are not `live` nowhere. `token`, `live`, `sink`, `place`: [N]."""
    x, xb, xh, xt = x
    sinks, fb, fh = sinks
    ring, rb, rh = ring
    c = tl.arange(0, triton.next_power_of_2(D))[None, :]
    inside = live[:, None] & (c < D)
    new = tl.load(x + (b * xb + h * xh + token.to(tl.int64) * xt)[:, None] + c, mask=inside, other=0.0)
    tl.store(sinks + (b * fb + h * fh + token * D)[:, None] + c, new, mask=inside & sink[:, None])
    tl.store(ring + (b * rb + h * rh + place * D)[:, None] + c, new, mask=inside & ~sink[:, None])


@triton.jit(do_not_specialize=["sink_begin", "sink_end", "begin", "slot", "ring_slots", "tokens", "heads", "seq_length", "quantized"])
def _store_exact_kernel(
    key, k_sinks, k_ring, value, v_sinks, v_ring, state, sink_begin, sink_end, begin, slot, ring_slots, tokens, heads, seq_length,
    quantized, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N tokens, B * H, 2): keys, values. Tensors come with their strides, in elements.

    key        [B, H, tokens, D] model dtype, channels contiguous: over the first three dimensions
    k_sinks    [B, H, S, D] model dtype, tokens contiguous: over rows and heads        k_ring   [B, H, ring_slots, D] likewise
    value, v_sinks, v_ring   the same of values, [.., DV]
    state      int32 [4 + 2 B]: `segments.Buffers`
    sink_begin, sink_end   which tokens are new sinks        begin, slot   the first token for the ring, and its slot
    seq_length, quantized  counts of tokens that all rows have afterwards
    """
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    i = tl.program_id(0) * N + tl.arange(0, N)
    rank = i - (sink_end - sink_begin)  # among those for the ring; less than 0: a sink
    token = tl.where(rank < 0, sink_begin + i, begin + rank)
    live = token < tokens
    place = (slot + tl.maximum(rank, 0)) % ring_slots
    if tl.program_id(2) == 0:
        _store(key, k_sinks, k_ring, b, h, token, live, rank < 0, place, D)
        if (h == 0) & (tl.program_id(0) == 0):
            tl.store(state + 4 + 2 * b, seq_length)
            tl.store(state + 5 + 2 * b, quantized)
    else:
        _store(value, v_sinks, v_ring, b, h, token, live, rank < 0, place, DV)
