"""Bits to bytes and back.

Four bits: byte `i` holds channels `2i` (low nibble) and `2i + 1`. Three bits: a plane of the low two bits, four channels a byte, lowest
bits first, and a plane of the high bit, eight channels a byte; planes keep every read aligned where a stream of 3-bit codes straddles
words.
Eight bits: byte `i` is channel `i`.

Reading goes through `lookup`: a table indexed by 12 or 16 bits at a time holds the dequantized values of two or four channels, so that one
gather yields many channels. On a CPU this is twice as fast as shifting, masking and interleaving.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .base import Buffer, Codes

PLANES = {3: (("low", 4), ("high", 8)), 4: (("codes", 2),), 8: (("codes", 1),)}
"""Bits of a code to the buffers it is kept in: name, and channels a byte."""

_MULTIPLE = {3: 8, 4: 4, 8: 2}  # of channels that one gather, or one byte of a plane, yields


def code_buffers(bits: int, head_dim: int) -> tuple[Buffer, ...]:
    return tuple(Buffer(name, torch.uint8, head_dim // per_byte) for name, per_byte in PLANES[bits])


def refuses(bits: int, head_dim: int) -> str | None:
    """Why vectors of `head_dim` cannot be kept as codes of `bits`, or None."""
    if head_dim % _MULTIPLE[bits]:
        return f"{bits}-bit codes are read {_MULTIPLE[bits]} channels at a time, and it is no multiple of that; use 'int8'"
    return None


def pack(codes: Tensor, bits: int) -> Codes:
    """uint8 codes below `2**bits` `[..., D]` to the buffers of `code_buffers`."""
    planes = pack3(codes) if bits == 3 else (pack4(codes),) if bits == 4 else (codes,)
    return {name: plane for (name, _), plane in zip(PLANES[bits], planes, strict=True)}


def lookup(packed: Codes, bits: int, levels: tuple[float, ...]) -> Tensor:
    """`levels[code]` for the buffers of `code_buffers`, as fp32 `[..., D]`."""
    if bits == 3:
        return lookup3(packed["low"], packed["high"], levels)
    return (lookup4 if bits == 4 else lookup8)(packed["codes"], levels)


def rank(x: Tensor, thresholds: tuple[float, ...]) -> Tensor:
    """How many of the ascending `thresholds` each entry reaches, as uint8. Three times as fast as torch.bucketize on a CPU."""
    reached = torch.zeros_like(x, dtype=torch.uint8)
    for threshold in thresholds:
        reached += x >= threshold
    return reached


def pack4(codes: Tensor) -> Tensor:
    """uint8 codes below 16 `[..., D]` to bytes `[..., D / 2]`."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack4(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def pack3(codes: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes below 8 `[..., D]` to the low plane `[..., D / 4]` and the high plane `[..., D / 8]`."""
    low, high = codes & 3, codes >> 2
    return _pack_bits(low, 2), _pack_bits(high, 1)


def unpack3(low: Tensor, high: Tensor) -> Tensor:
    return _unpack_bits(low, 2) | _unpack_bits(high, 1) << 2


def _pack_bits(codes: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    return (codes.unflatten(-1, (-1, per_byte)) << shifts).sum(-1, dtype=torch.uint8)


def _unpack_bits(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts & 2**bits - 1).flatten(-2)


def lookup4(packed: Tensor, levels: tuple[float, ...]) -> Tensor:
    """`levels[code]` of packed 4-bit codes: bytes `[..., D / 2]` to fp32 `[..., D]`."""
    return _gather(packed.view(torch.uint16).long(), _table(levels, (4, 4, 4, 4), packed.device))


def lookup3(low: Tensor, high: Tensor, levels: tuple[float, ...]) -> Tensor:
    """`levels[code]` of 3-bit planes, as fp32 `[..., D]`."""
    nibbles = unpack4(high).long()  # the high bits of four channels
    return _gather(low.long() | nibbles << 8, _table3(levels, low.device))


def lookup8(codes: Tensor, levels: tuple[float, ...]) -> Tensor:
    """`levels[byte]`: bytes `[..., D]`, an even number of them, to fp32 `[..., D]`."""
    return _gather(codes.view(torch.uint16).long(), _table(levels, (8, 8), codes.device))


def _gather(index: Tensor, table: Tensor) -> Tensor:
    # An entry of the table is one complex number, so that each gather moves eight or sixteen bytes. Token by token, since torch then shares
    # the work among threads, which it does not when it picks from one dimension.
    tokens = index.reshape(index.shape[:-1].numel(), index.shape[-1])
    entries = torch.gather(table.expand(tokens.shape[0], -1), 1, tokens)
    values = torch.view_as_real(entries).flatten(1).view(torch.float32)
    return values.view(*index.shape[:-1], values.shape[1])


@functools.lru_cache(maxsize=64)
def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """`values` in fp32, copied to `device` once."""
    return torch.tensor(values, device=device, dtype=torch.float32)


def _as_rows(values: Tensor) -> Tensor:
    """fp32 `[N, 2 or 4]` to one complex64 or complex128 an entry."""
    return values.contiguous().view(torch.complex64 if values.shape[-1] == 2 else torch.complex128).flatten()


@functools.lru_cache(maxsize=64)
def _table(levels: tuple[float, ...], fields: tuple[int, ...], device: torch.device) -> Tensor:
    index = torch.arange(2 ** sum(fields), device=device)
    columns, at = [], 0
    values = constants(levels, device)
    for bits in fields:
        columns.append(values[index >> at & 2**bits - 1])
        at += bits
    return _as_rows(torch.stack(columns, dim=-1))


@functools.lru_cache(maxsize=64)
def _table3(levels: tuple[float, ...], device: torch.device) -> Tensor:
    index = torch.arange(2**12, device=device)
    values = constants(levels, device)
    return _as_rows(torch.stack([values[(index >> 2 * i & 3) | (index >> 8 + i & 1) << 2] for i in range(4)], dim=-1))
