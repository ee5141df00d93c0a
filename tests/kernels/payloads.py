"""Payloads as a layer hands them to attention: exact zones around slabs of codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkvcache.formats import Format
from qkvcache.kernels import Body, Exact, Packed, Payload, Side, slab_table
from qkvcache.layers.slots import Slots


def build(format: Format, key: Tensor, value: Tensor, first: int, recent: int, cuts: Sequence[int] = ()) -> Payload:
    """Keys `[B, H, T, D]` and values, all but the first and the recent tokens packed.

    `cuts` are token counts of the body after which a new piece is appended, and with it a slab if the last one is full. Slots without a
    token hold nan, or codes that show.
    """
    slots = (Slots(format.key, key.shape[3]), Slots(format.value, value.shape[3]))
    begin, end = first, key.shape[2] - recent
    edges = [begin, *(begin + cut for cut in cuts), end]
    for low, high in zip(edges, edges[1:], strict=False):
        for side, x in zip(slots, (key, value), strict=True):
            if high > low:
                side.reserve(high - low, x)
                _poison(side)
                side.append(x[:, :, low:high])
    body = None
    if end > begin:
        slabs = tuple((k | slots[0].once, v | slots[1].once) for k, v in zip(slots[0].slabs, slots[1].slabs, strict=True))
        body = Body(format.key, format.value, slabs, end - begin, slab_table(slabs))
    sides = []
    for side, x in zip(slots, (key, value), strict=True):
        packed = [Packed(side.codec, codes, count, x.shape[3]) for codes, count in side.blocks(256)]
        segments = (Exact(x[:, :, :begin]), *packed, Exact(x[:, :, end:]))
        sides.append(Side.of(segments, x.shape, x.dtype, x.device))
    return Payload(sides[0], sides[1], body, (key[:, :, :begin], value[:, :, :begin], key[:, :, end:], value[:, :, end:]))


def _poison(side: Slots) -> None:
    """All bits set in what is free."""
    start = 0
    for slab in side.slabs:
        for plane in slab.values():
            free = torch.arange(start, start + plane.shape[2], device=plane.device) >= side.length
            plane.view(torch.uint8)[:, :, free] = 0xFF
        start += plane.shape[2]
