"""Storing several exact tokens in the sinks and the residual, and their counts, in one launch: what `store_exact.store_exact` computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .segments import Buffers, Pair

TILE = 16
"""Tokens of a program."""


def store_exact(buffers: Buffers, exact: Pair, sinks: tuple[int, int], begin: int, slot: int, lengths: tuple[int, int]) -> None:
    """As `store_exact.store_exact`."""
    arguments: list[object] = []
    constants: list[int] = []
    batch, heads, tokens, _ = exact[0].shape
    for x, first, ring in zip(exact, buffers.sinks, buffers.residual, strict=True):
        x = x if x.stride(3) == 1 else x.contiguous()
        arguments += [x, *x.stride()[:3], first, *first.stride()[:2], ring, *ring.stride()[:2]]
        constants += [x.shape[3], triton.next_power_of_2(x.shape[3])]
    grid = (triton.cdiv(max(sinks[1] - sinks[0] + tokens - begin, 1), TILE), batch * heads, 2)
    with torch.cuda.device_of(buffers.state):
        _store_exact_kernel[grid](
            *arguments, buffers.state, *sinks, begin, slot, buffers.residual[0].shape[2], tokens, heads, *lengths, *constants, TILE,
            num_warps=4,
        )  # fmt: skip


@triton.jit
def _store(
    x, xb, xh, xt, sinks, fb, fh, ring, rb, rh, b, h, token, live, sink, place,
    D: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Copies vectors [N, D] of tokens `token` of `x` into slot `token` of `sinks` where `sink`, else into slot `place` of `ring`; those
    that are not `live` nowhere. `token`, `live`, `sink`, `place`: [N]."""
    c = tl.arange(0, P)[None, :]
    inside = live[:, None] & (c < D)
    new = tl.load(x + (b * xb + h * xh + token.to(tl.int64) * xt)[:, None] + c, mask=inside, other=0.0)
    tl.store(sinks + (b * fb + h * fh + token * D)[:, None] + c, new, mask=inside & sink[:, None])
    tl.store(ring + (b * rb + h * rh + place * D)[:, None] + c, new, mask=inside & ~sink[:, None])


@triton.jit(do_not_specialize=["sink_begin", "sink_end", "begin", "slot", "ring_slots", "tokens", "heads", "seq_length", "quantized"])
def _store_exact_kernel(
    kx, kxb, kxh, kxt, ksinks, kfb, kfh, kring, krb, krh,
    vx, vxb, vxh, vxt, vsinks, vfb, vfh, vring, vrb, vrh,
    state, sink_begin, sink_end, begin, slot, ring_slots, tokens, heads, seq_length, quantized,
    KD: tl.constexpr, KP: tl.constexpr, VD: tl.constexpr, VP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N tokens, B * H, 2): keys, values. Arguments of keys begin with k, those of values with v; strides are in elements.

    x          [B, H, tokens, D] model dtype, channels contiguous: xb, xh, xt
    sinks      [B, H, S, D] model dtype, tokens contiguous: fb, fh          ring   [B, H, ring_slots, D] likewise: rb, rh
    state      int32 [4 + 2 B]: `segments.Buffers`
    sink_begin, sink_end   which tokens are new sinks        begin, slot   the first token for the ring, and its slot
    seq_length, quantized  counts of tokens that all rows have afterwards
    P          `D`, padded to a power of two
    """
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    i = tl.program_id(0) * N + tl.arange(0, N)
    rank = i - (sink_end - sink_begin)  # among those for the ring; less than 0: a sink
    token = tl.where(rank < 0, sink_begin + i, begin + rank)
    live = token < tokens
    place = (slot + tl.maximum(rank, 0)) % ring_slots
    if tl.program_id(2) == 0:
        _store(kx, kxb, kxh, kxt, ksinks, kfb, kfh, kring, krb, krh, b, h, token, live, rank < 0, place, KD, KP)
        if (h == 0) & (tl.program_id(0) == 0):
            tl.store(state + 4 + 2 * b, seq_length)
            tl.store(state + 5 + 2 * b, quantized)
    else:
        _store(vx, vxb, vxh, vxt, vsinks, vfb, vfh, vring, vrb, vrh, b, h, token, live, rank < 0, place, VD, VP)
