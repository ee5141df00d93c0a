"""Tokens written to pages and read from them in the model's dtype, in plain torch: the reference of the kernels beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...formats.base import Codec, Codes, affine
from ..paged_inputs import DROPPED, LENGTH, ROOM, SINKS, TOKENS, PagedInputs, paged_side
from ..pages import Pages, put_where
from ..segments import Pair

GATHER_TILE = 64
"""Tokens of a tile of `gather_rows`."""


def quantize_into(pages: Pages, x: Pair, slots: Tensor | int, zones: Sequence[tuple[Pair, Tensor]] = ()) -> None:
    """Quantizes keys and values `[B, H, T, D]` into `slots`, int64 `[B, 1 or H, T]` (1: the same for all heads): `entry
    * PAGE + offset`, or negative for tokens that are not stored. An int: as the tokens from this number on of each row,
    whose heads share pages. Also copies them into `zones`: keys and values `[F, H, R, D]` in the model's dtype, with the slot of each
    token, `row * R + slot`, int64 `[B, T]`, or negative."""
    if isinstance(slots, int):
        slots = pages.slots(torch.arange(slots, slots + x[0].shape[2], device=x[0].device))
    for side, (codec, new, statistics) in enumerate(zip(pages.codecs, x, pages.statistics, strict=True)):
        pages.put(side, slots, codec.quantize(new, statistics))
        for zone, at in zones:
            place = zone[side].transpose(1, 2)
            row, slot = at.flatten().div(place.shape[1], rounding_mode="floor"), at.flatten() % place.shape[1]
            put_where(place, row >= 0, (row, slot), new.transpose(1, 2).flatten(0, 1))


def calibrate(pages: Pages, begun: Tensor, x: Pair, is_valid: Tensor | None) -> None:
    """Computes the statistics of the rows that have none, those that have not `begun`, bool `[B]`, from keys and values `[B, H, T, D]`. A
    row begins with its first tokens that are valid: `is_valid`, bool `[B, T]`; None: all are."""
    for codec, statistics, new in zip(pages.codecs, pages.statistics, x, strict=True):
        if statistics:
            for name, value in codec.calibrate(new, is_valid).items():
                statistics[name].copy_(torch.where(begun[:, None, None, None], statistics[name], value))
    begun |= torch.ones_like(begun) if is_valid is None else is_valid.any(-1)


def step(inputs: PagedInputs, x: Pair) -> None:
    """Stores new tokens, keys and values `[B, H, T, D]`, with counts on the device: the first as sinks, the
    others in the ring. Tokens that leave the ring are quantized. A step that does not fit is dropped and
    counted in `control`. All rows have as many tokens."""
    rows, control, ring = inputs.rows, inputs.control, inputs.ring[0].shape[2]
    if rows is None or control is None:
        raise ValueError("the inputs have no counts on the device")
    tokens, sinks = x[0].shape[2], inputs.sinks[0].shape[2]
    seen, quantized = rows[0, TOKENS].long(), rows[0, LENGTH].long()
    new_tokens = tokens * (seen + tokens <= control[ROOM])
    opening = torch.minimum((sinks - seen).clamp_min(0), new_tokens)
    entering, end = new_tokens - opening, seen - seen.clamp_max(sinks)  # of the ring, the number of its next token
    i = torch.arange(ring + tokens, device=rows.device)
    number = end - ring + i  # of the last tokens before these, then of these
    leaves = (number >= quantized)[:tokens] & (i[:tokens] < entering)
    into = torch.where(leaves, number[:tokens], 0)
    slots = torch.where(leaves, inputs.pages.slots(into), -1) if inputs.pages.table.shape[1] else None
    fresh, kept = (opening + i[:tokens]).clamp_max(tokens - 1), entering + i[:ring]
    place = torch.arange(sinks, device=rows.device) - seen
    opens = ((place >= 0) & (place < opening))[:, None]
    sides = zip(inputs.pages.codecs, inputs.pages.statistics, inputs.sinks, inputs.ring, x, strict=True)
    for side, (codec, statistics, first, residual, new) in enumerate(sides):
        held = torch.cat([residual.index_select(2, number[:ring] % ring), new.index_select(2, fresh)], dim=2)
        if slots is not None:
            inputs.pages.put(side, slots, codec.quantize(held[:, :, :tokens], statistics))
        residual.index_copy_(2, number[kept] % ring, held.index_select(2, kept))
        if sinks:
            first.copy_(torch.where(opens, new.index_select(2, place.clamp(0, tokens - 1)), first))
    seen, quantized = seen + new_tokens, quantized + leaves.sum()
    first = seen.clamp_max(sinks)
    rows[:, SINKS:] = torch.stack([first, quantized % ring, seen - first - quantized, quantized, seen]).int()
    control[DROPPED].add_((tokens - new_tokens).int())


def unfold(inputs: PagedInputs, columns: int, new: Pair) -> Pair:
    """Keys and values of all tokens at their columns, `[B, H, columns, D]` each, followed by `new` `[B, H, T,
    D]`, which are not stored yet. Columns without a token are zero. All rows have as many tokens."""
    out = []
    for side in (0, 1):
        held, places = paged_side(inputs, side)
        at = inputs.columns(places)[0, 0]
        at = torch.cat([at, at.amax() + 1 + torch.arange(new[side].shape[2], device=at.device)])
        at = torch.where((at >= 0) & (at < columns), at, columns)
        whole = new[side].new_zeros(*held.shape[:2], columns + 1, held.shape[3])
        out.append(whole.index_copy_(2, at, torch.cat([held.dense(), new[side]], dim=2))[:, :, :columns])
    return out[0], out[1]


def dequantize_pages(pages: Pages, out: Pair, begin: int = 0) -> None:
    """Writes keys and values `begin` to `begin + T` of each row into `out` `[B, H, T, D]`, rotated as they are stored, and zeros beyond a
    row's length. Rotating the queries and the outputs of attention costs less than rotating tokens back."""
    for side, x in enumerate(out):
        codes, exists = pages.gather(side, x.shape[2], begin)
        x.copy_(dequantized(pages.codecs[side], codes, x, stored=True).masked_fill(~exists[..., None], 0))


def dequantized(codec: Codec, codes: Codes, like: Tensor, stored: bool) -> Tensor:
    """The vectors of `codes`, `[B, H, T, D]`: rotated as they are stored, in fp32, or in the dtype of `like`."""
    if not stored:
        return codec.dequantize(codes, like.shape[3], like.dtype)
    levels, scale, offset, center = codec.unpack(codes, like.shape[3])
    vectors = affine(levels, scale, offset)
    return vectors if center is None else vectors + center


def gather_tiles(lengths: Sequence[int]) -> list[int]:
    """Tiles of rows of these lengths in tokens: for each its row, and its first token in that row."""
    return [n for row, length in enumerate(lengths) for at in range(0, length, GATHER_TILE) for n in (row, at)]


def gather_rows(inputs: PagedInputs, new: Pair, starts: tuple[Tensor, Tensor], tiles: Tensor, out: Pair) -> None:
    """Writes all tokens of rows of different lengths, one row after another, in the model's dtype: of each
    row sinks, quantized tokens, the tokens of the ring and, after these, its new tokens.

    Args:
        inputs: its heads share the pages of a row.
        new: keys and values `[1, H, N, D]`, the rows one after another.
        starts: the first token of each row in `new` and in `out`, int32 `[B + 1]` each; the last entries are the tokens of all rows.
        tiles: int32 `[M, 2]`, `gather_tiles` of the rows' tokens in `out`, for kernels.
        out: keys and values `[1, H, T, D]`.
    """
    pages, rows, (news, places) = inputs.pages, inputs.rows, (x.tolist() for x in starts)
    for b, (begin, sink_row, ring_row, sinks, start, count, length, _) in enumerate(rows.tolist()):  # type: ignore[union-attr]
        row = replace(pages, table=pages.table[b : b + 1], lengths=None)
        order = torch.arange(start, start + count, device=pages.table.device) % max(inputs.slots[2], 1)
        quantized = max(length - begin, 0)
        for side, (x, sink, ring, last) in enumerate(zip(out, inputs.sinks, inputs.ring, new, strict=True)):
            parts = [sink[sink_row, :, :sinks], ring[ring_row][:, order], last[0, :, news[b] : news[b + 1]]]
            if quantized:
                codes, _ = row.gather(side, quantized, begin)
                parts.insert(1, dequantized(pages.codecs[side], codes, x, stored=False)[0])
            x[0, :, places[b] : places[b + 1]] = torch.cat(parts, dim=1)
