"""Bits to bytes and back.

Kernels read 16-bit words (little-endian) and mask all of a word's channels out of it at once. The order of channels is given by word:

8 bits    word j holds channels 2j, 2j + 1: byte i is channel i
4 bits    word j holds channels 4j to 4j + 3, lowest nibble first. Where scales span groups of channels (`to_planes`), word j holds j,
          j + D/4, j + D/2 and j + 3D/4 instead: then 16 neighbouring words have one scale for each nibble
2 bits    word j holds channels 8j to 8j + 7, lowest first
3 bits    low bits: word j holds bits of channels 8j to 8j + 7, two each, as codes of 2 bits are
          high bits: word j of the D/16 belongs to words j and j + D/16 of the plane above, nibble e to
          channels 2e and 2e + 1: bits 2 and 3 for the first of these words, 0 and 1 for the second Planes
          keep every read aligned, where a stream of 3-bit codes would straddle words.
halves    codes of 4 bits in two planes, so that the upper two bits can be read alone: they are a coarser code
          high bits: word j holds bits of channels 8j to 8j + 7, as codes of 2 bits are
          low bits: the same, with the channels of each nibble swapped: nibble e holds channel 2e + 1, then channel 2e. Then one select of
          bits from both planes makes nibbles that are the codes of odd channels, another the codes of even channels with halves exchanged

Reading goes through `lookup`: a table for 12 or 16 bits at a time holds the dequantized values of two or four channels, so that one
gather yields many channels. On a CPU this is twice as fast as shifting, masking and interleaving.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .base import Buffer, Codes

PLANES = {2: (("codes", 4),), 3: (("low", 4), ("high", 8)), 4: (("codes", 2),), 8: (("codes", 1),)}
"""Bits of a code to the buffers it is kept in: name, and channels a byte."""


HALVES = ("low", 4), ("high", 4)
"""The same for codes of 4 bits in halves."""


def code_buffers(bits: int, head_dim: int, halves: bool = False) -> tuple[Buffer, ...]:
    """The buffers for codes of `bits`, uint8, one entry for each token and head; `halves`: of 4 bits, in two planes."""
    return tuple(Buffer(name, torch.uint8, head_dim // per_byte) for name, per_byte in (HALVES if halves else PLANES[bits]))


def plane_names(bits: int, halves: bool = False) -> tuple[str, str]:
    """The names of these buffers in a `PackedLayout`: codes or low bits, and high bits."""
    return ("low", "high") if bits == 3 or halves else ("codes", "")


def pack(codes: Tensor, bits: int, halves: bool = False) -> Codes:
    """uint8 codes below `2**bits` `[..., D]` to the buffers of `code_buffers`."""
    if halves:
        return {"low": _pack_bits((codes & 3).unflatten(-1, (-1, 2)).flip(-1).flatten(-2), 2), "high": _pack_bits(codes >> 2, 2)}
    if bits == 3:
        return dict(zip(("low", "high"), pack3(codes), strict=True))
    return {"codes": codes if bits == 8 else pack4(codes) if bits == 4 else _pack_bits(codes, bits)}


def lookup(packed: Codes, bits: int, levels: tuple[float, ...], halves: bool = False) -> Tensor:
    """`levels[code]` for the buffers of `code_buffers`, `[..., D]`: int8 if levels are integers, which halves the time, else fp32."""
    if bits == 4 and not halves and levels == tuple(range(16)):  # each code is its level, in a byte of its own
        words = packed["codes"].short()
        return words.bitwise_or_(words * 16).bitwise_and_(0x0F0F).view(torch.int8)
    if halves:
        index = torch.add(packed["low"].short(), packed["high"], alpha=256).view(torch.uint16)  # torch shifts bits slowly
    elif bits == 3:
        index = packed["low"].long() | _high_bits(packed["high"]).long() << 8
    else:
        index = packed["codes"] if bits == 2 else packed["codes"].view(torch.uint16)
    dtype = torch.int8 if isinstance(levels[0], int) else torch.float32  # named, since equal tuples share a table
    return gather(index, _table(levels, bits, index.device, halves, dtype))


def rank(x: Tensor, thresholds: tuple[float, ...]) -> Tensor:
    """How many of the ascending `thresholds` each entry reaches, as uint8. Three times as fast as torch.bucketize on a CPU."""
    reached = torch.zeros_like(x, dtype=torch.uint8)
    for threshold in thresholds:
        reached += x >= threshold
    return reached


def pack4(codes: Tensor) -> Tensor:
    """uint8 codes below 16 `[..., D]` to bytes `[..., D / 2]`."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def to_planes(codes: Tensor) -> Tensor:
    """Channels `[..., D]` in the order j, j + D/4, j + D/2, j + 3D/4 for each j."""
    return codes.unflatten(-1, (4, -1)).mT.flatten(-2)


def from_planes(x: Tensor) -> Tensor:
    """Undoes `to_planes`."""
    return x.unflatten(-1, (-1, 4)).mT.flatten(-2)


def pack3(codes: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes below 8 `[..., D]` to the low plane `[..., D / 4]` and the high plane `[..., D / 8]`."""
    low = _pack_bits(codes & 3, 2)
    pairs = _pack_bits(codes >> 2, 1).unflatten(-1, (2, -1))  # byte j: the high bits of word j of the low plane, in two halves
    return low, _spread(pairs[..., 0, :], pairs[..., 1, :])


def _spread(first: Tensor, second: Tensor) -> Tensor:
    """Bytes of high bits for words j and j + D/16 `[..., D / 16]` each, to the high plane's bytes `[..., D / 8]`."""
    first, second = first.int(), second.int()
    words = sum((first >> 2 * e & 3) << 4 * e + 2 | (second >> 2 * e & 3) << 4 * e for e in range(4))
    return words.to(torch.uint16).view(torch.uint8)  # type: ignore[union-attr]


def _high_bits(high: Tensor) -> Tensor:
    """The high plane `[..., D / 8]` to the high bits of four channels, the first in the lowest bit, for each byte of the low plane."""
    return torch.cat([(high >> 2 & 3) | (high >> 4 & 12), (high & 3) | (high >> 2 & 12)], dim=-1)


def _pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below `2**bits` `[..., N]` to bytes `[..., N * bits / 8]`, the first in the lowest bits."""
    per_byte = 8 // bits
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    return (codes.unflatten(-1, (-1, per_byte)) << shifts).sum(-1, dtype=torch.uint8)


def gather(index: Tensor, table: Tensor) -> Tensor:
    """The rows of `table`, which `as_rows` made, that `index` `[..., N]` names, end to end: fp32 or int8 `[..., N * width]`."""
    # An entry of the table is one number, so that each gather moves up to sixteen bytes. Token by token, since torch then shares
    # the work among threads, which it does not when it picks from one dimension.
    tokens = index.long().reshape(index.shape[:-1].numel(), index.shape[-1])
    entries = torch.gather(table.expand(tokens.shape[0], -1), 1, tokens)
    values = torch.view_as_real(entries).flatten(1) if entries.is_complex() else entries
    values = values.view(torch.float32 if entries.is_complex() else torch.int8)
    return values.view(*index.shape[:-1], values.shape[1])


@functools.lru_cache(maxsize=64)
def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """`values` in fp32, copied to `device` once."""
    return torch.tensor(values, device=device, dtype=torch.float32)


def as_rows(values: Tensor) -> Tensor:
    """fp32 or int8 `[N, 2 or 4]` to one complex number or integer an entry."""
    kinds = (torch.complex64, torch.complex128) if values.is_floating_point() else (torch.int16, torch.int32)
    return values.contiguous().view(kinds[values.shape[-1] // 4]).flatten()


@functools.lru_cache(maxsize=64)
def _table(levels: tuple[float, ...], bits: int, device: torch.device, halves: bool, dtype: torch.dtype) -> Tensor:
    """`levels` in `dtype` of all indices that hold as many codes of `bits` as a gather reads, as rows for it.
    Those of 3 bits, or in `halves`, hold low bits of four channels, then their high bits."""
    channels = 2 if bits == 8 else 4
    index, values = torch.arange(2 ** (bits * channels), device=device), constants(levels, device).to(dtype)
    if halves:
        codes = [(index >> 2 * (i ^ 1) & 3) | (index >> 8 + 2 * i & 3) << 2 for i in range(channels)]
    elif bits == 3:
        codes = [(index >> 2 * i & 3) | (index >> 8 + i & 1) << 2 for i in range(channels)]
    else:
        codes = [index >> bits * i & 2**bits - 1 for i in range(channels)]
    return as_rows(torch.stack([values[code] for code in codes], dim=-1))
