"""A decode step on storage that counts on the device, in plain torch: without a number from the host, so that it can be compiled and
replayed as a CUDA graph. It is what the kernels are tested against, and what runs where a codec has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attend import attend
from .segments import DROPPED, ROOM, AttentionInputs, Buffers, Exact, KeysOrValues, Packed, Pair


def _only_chunk(buffers: Buffers) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    if buffers.grows:
        raise NotImplementedError(
            "compiled steps of a cache that grows have one token, a format with kernels, and attention other than eager: pass max_length, "
            "or leave out compile"
        )
    return buffers.region.chunks[0]


def _slots(buffers: Buffers) -> int:
    return next(iter(buffers.region.chunks[0][0].values())).shape[2]


def step(buffers: Buffers, x: Pair) -> None:
    """Takes up to as many tokens as the ring holds, `[B, H, T, D]`. None is taken where not all have room."""
    chunk = _only_chunk(buffers)
    sinks, ring = buffers.sinks[0].shape[2], buffers.residual[0].shape[2]
    tokens, device = x[0].shape[2], buffers.state.device
    seen, region = buffers.lengths[0].long()
    fits = seen + tokens <= buffers.state[ROOM]
    i = torch.arange(tokens, device=device)
    exact = seen - seen.clamp_max(sinks) - region
    rank = i - (sinks - seen).clamp(0, tokens)  # among those that enter the ring; less than 0: a sink
    slot = (region + exact + rank) % ring
    leaves = (rank + exact >= ring) & fits
    into = torch.where(leaves, region + exact + rank - ring, _slots(buffers) - 1)  # the last slot is spare
    place = torch.arange(sinks, device=device) - seen
    opening = ((place >= 0) & (place < tokens) & fits)[:, None]
    for codec, codes, first, residual, new in zip(buffers.codecs, chunk, buffers.sinks, buffers.residual, x, strict=True):
        old = residual.index_select(2, slot)
        # Where tokens share a scale, those that stay have no part in it: if any leaves, the last one does.
        for name, new_codes in codec.quantize(torch.where(leaves[:, None], old, old[:, :, -1:]), codes).items():
            codes[name].index_copy_(2, into, new_codes)
        residual.index_copy_(2, slot, torch.where(((rank >= 0) & fits)[:, None], new, old))
        if sinks:
            first.copy_(torch.where(opening, new.index_select(2, place.clamp(0, tokens - 1)), first))
    buffers.lengths.add_(torch.stack([tokens * fits, leaves.sum()]).int())
    buffers.state[DROPPED].add_((tokens * ~fits).int())


def slotted(buffers: Buffers) -> tuple[KeysOrValues, KeysOrValues]:
    """All slots, those without a token too, in the order of `columns`."""
    sides = []
    for codec, codes, first, ring in zip(buffers.codecs, _only_chunk(buffers), buffers.sinks, buffers.residual, strict=True):
        tokens = first.shape[2] + _slots(buffers) + ring.shape[2]
        row = (Exact(first), Packed(codec, codes, _slots(buffers), ring.shape[3]), Exact(ring))
        sides.append(KeysOrValues.of(row, (*ring.shape[:2], tokens, ring.shape[3]), ring.dtype, ring.device))
    return sides[0], sides[1]


def columns(buffers: Buffers) -> Tensor:
    """Which token is in each slot, the sinks before the body before the ring, int64 `[S + C + R]`; -1: none. On the device."""
    device, ring = buffers.state.device, buffers.residual[0].shape[2]
    seen, region = buffers.lengths[0]
    first = torch.arange(buffers.sinks[0].shape[2], device=device)
    slot = torch.arange(_slots(buffers), device=device)
    start = seen.clamp_max(first.shape[0])  # sinks
    at = torch.arange(ring, device=device)
    number = region + (at - region) % ring  # of the tokens after the sinks
    inside = number < seen - start
    return torch.cat(
        [torch.where(first < seen, first, -1), torch.where(slot < region, slot + start, -1), torch.where(inside, number + start, -1)]
    )


def attend_on_slots(query: Tensor, buffers: Buffers, mask: Tensor | None, **options: Any) -> Tensor:
    """`attend` for one query a row over all slots, those without a token hidden: slower than over the tokens, but counted on the device."""
    at = columns(buffers)
    shown = at >= 0
    if mask is None:
        mask = shown
    else:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask.expand(*mask.shape[:3], buffers.columns) if mask.shape[3] == 1 else mask
        mask = mask.index_select(3, at.clamp(0, mask.shape[3] - 1))
        mask = mask & shown if mask.dtype == torch.bool else mask.masked_fill(~shown, torch.finfo(mask.dtype).min)
    return attend(query, AttentionInputs(*slotted(buffers)), mask, **options)


def unfold(buffers: Buffers, new: Pair | None, dense: Callable[[KeysOrValues], Tensor] = KeysOrValues.dense) -> Pair:
    """All tokens at their columns, `[B, H, columns, D]` each, and then those of `new`, which are not stored yet. Columns without a token
    hold zeros. Counts on the device; `dense` dequantizes."""
    limit, known = buffers.columns, columns(buffers)
    out = []
    for side, slots in enumerate(slotted(buffers)):
        ring = buffers.residual[side]
        parts, at = [dense(slots)], known
        if new is not None:
            parts.append(new[side])
            at = torch.cat([known, buffers.lengths[0, 0] + torch.arange(new[side].shape[2], device=at.device)])
        whole = ring.new_zeros(*ring.shape[:2], limit + 1, ring.shape[3])
        at = torch.where((at >= 0) & (at < limit), at, limit)
        out.append(whole.index_copy_(2, at, torch.cat(parts, dim=2))[:, :, :limit])
    return out[0], out[1]
