"""A decode step on storage that counts on the device, in plain torch: it needs no number from the host, so that it can be compiled and
replayed as a CUDA graph. The kernels are tested against it, and it runs where a codec has no kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from .attend import Options, attend
from .segments import DROPPED, ROOM, AttentionInputs, Exact, KeysOrValues, Packed, Pair, StorageTensors


def _only_chunk(buffers: StorageTensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Planes of keys and of values. Raises NotImplementedError for storage that grows."""
    if buffers.grows:
        raise NotImplementedError(
            "compiled steps of a cache that grows have one token, a format with kernels, and attention other than eager: pass max_length, "
            "or leave out compile"
        )
    return buffers.region.chunks[0]


def _slots(buffers: StorageTensors) -> int:
    """Slots of the quantized region."""
    return next(iter(buffers.region.chunks[0][0].values())).shape[2]


def step(buffers: StorageTensors, x: Pair) -> None:
    """Stores new tokens, keys and values `[B, H, T, D]`, `T` at most the slots of the ring. A step that does not fit is dropped and counted
    in `state`."""
    chunk = _only_chunk(buffers)
    sinks, ring = buffers.sinks[0].shape[2], buffers.residual[0].shape[2]
    tokens, device = x[0].shape[2], buffers.state.device
    seq_length, quantized = buffers.lengths[0].long()
    fits = seq_length + tokens <= buffers.state[ROOM]
    i = torch.arange(tokens, device=device)
    exact = seq_length - seq_length.clamp_max(sinks) - quantized
    rank = i - (sinks - seq_length).clamp(0, tokens)  # among those that enter the ring; less than 0: a sink
    slot = (quantized + exact + rank) % ring
    leaves = (rank + exact >= ring) & fits
    into = torch.where(leaves, quantized + exact + rank - ring, _slots(buffers) - 1)  # the last slot is spare
    place = torch.arange(sinks, device=device) - seq_length
    opening = ((place >= 0) & (place < tokens) & fits)[:, None]
    for codec, codes, first, residual, new in zip(buffers.codecs, chunk, buffers.sinks, buffers.residual, x, strict=True):
        old = residual.index_select(2, slot)
        # Where tokens share a scale, it must come from the tokens that are quantized: the last one is, if any is.
        for name, new_codes in codec.quantize(torch.where(leaves[:, None], old, old[:, :, -1:]), codes).items():
            codes[name].index_copy_(2, into, new_codes)
        residual.index_copy_(2, slot, torch.where(((rank >= 0) & fits)[:, None], new, old))
        if sinks:
            first.copy_(torch.where(opening, new.index_select(2, place.clamp(0, tokens - 1)), first))
    buffers.lengths.add_(torch.stack([tokens * fits, leaves.sum()]).int())
    buffers.state[DROPPED].add_((tokens * ~fits).int())


def store_exact(buffers: StorageTensors, exact: Pair, sinks: tuple[int, int], begin: int, slot: int, lengths: tuple[int, int]) -> None:
    """Copies exact tokens, keys and values `[B, H, T, D]` each, into the storage and sets its counts on the device.

    Args:
        sinks: the range of the `T` tokens that are new sinks: the first, and the one after the last.
        begin: the first token that is copied into the ring; all later ones are, too. The ring has room for them.
        slot: the slot of the ring for token `begin`.
        lengths: tokens and quantized tokens of each row afterwards, the same for all rows.
    """
    for x, first, ring in zip(exact, buffers.sinks, buffers.residual, strict=True):
        if sinks[0] < sinks[1]:
            first[:, :, sinks[0] : sinks[1]] = x[:, :, sinks[0] : sinks[1]]
        middle = min(begin + ring.shape[2] - slot, x.shape[2])  # the first token that is at the beginning of the ring
        ring[:, :, slot : slot + middle - begin] = x[:, :, begin:middle]
        if middle < x.shape[2]:
            ring[:, :, : x.shape[2] - middle] = x[:, :, middle:]
    for column, length in enumerate(lengths):
        buffers.lengths[:, column].fill_(length)


def slotted(buffers: StorageTensors) -> tuple[KeysOrValues, KeysOrValues]:
    """Keys and values of all slots, also of those without a token, in the order of `columns`."""
    sides = []
    for codec, codes, first, ring in zip(buffers.codecs, _only_chunk(buffers), buffers.sinks, buffers.residual, strict=True):
        tokens = first.shape[2] + _slots(buffers) + ring.shape[2]
        row = (Exact(first), Packed(codec, codes, _slots(buffers), ring.shape[3]), Exact(ring))
        sides.append(KeysOrValues.of(row, (*ring.shape[:2], tokens, ring.shape[3]), ring.dtype, ring.device))
    return sides[0], sides[1]


def columns(buffers: StorageTensors) -> Tensor:
    """The token in each slot of the sinks, the region and the ring, int64 `[S + C + R]`; -1: none. On the device."""
    device, ring = buffers.state.device, buffers.residual[0].shape[2]
    seq_length, quantized = buffers.lengths[0]
    first = torch.arange(buffers.sinks[0].shape[2], device=device)
    slot = torch.arange(_slots(buffers), device=device)
    start = seq_length.clamp_max(first.shape[0])  # sinks
    at = torch.arange(ring, device=device)
    number = quantized + (at - quantized) % ring  # of the tokens after the sinks
    inside = number < seq_length - start
    return torch.cat(
        [
            torch.where(first < seq_length, first, -1),
            torch.where(slot < quantized, slot + start, -1),
            torch.where(inside, number + start, -1),
        ]
    )


def attend_on_slots(query: Tensor, buffers: StorageTensors, mask: Tensor | None, **options: Unpack[Options]) -> Tensor:
    """`attend` for one query of each row over all slots, masking those without a token: slower, but counted on the device."""
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


def unfold(buffers: StorageTensors, new: Pair | None, dense: Callable[[KeysOrValues], Tensor] = KeysOrValues.dense) -> Pair:
    """Keys and values of all tokens at their columns, `[B, H, columns, D]` each, followed by `new` `[B, H, T, D]`, which are not stored
    yet. Columns without a token are zero. `dense` dequantizes."""
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
