"""The inputs of attention: the keys or the values of a layer as a sequence of segments, exact or packed, in token order.

The two halves of attention in plain torch: `qk` (q . k) and `pv` (p . v). Packed segments are blocks of a bounded number of tokens,
and only one block at a time exists in floating point. This is the reference that fused kernels are tested against, and what CPU users run.

Shapes: `q` `[B, H, R, D]` with `R` = query heads of the group times queries, in fp32; scores and probabilities `[B, H, R, T]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy
import torch
from torch import Tensor

from ..formats.base import Codec, Codes, PackedLayout, QuantizedValues, affine

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


@dataclass(frozen=True)
class Exact:
    """Tokens in the model's dtype, `x` `[B, H, T, D]`."""

    x: Tensor

    @property
    def tokens(self) -> int:
        return self.x.shape[2]


@dataclass(frozen=True)
class Packed:
    """A block of `tokens` tokens as `codec` stores them: planes `[B, H or 1, tokens or 1, width]`."""

    codec: Codec
    codes: Codes
    tokens: int
    head_dim: int

    def levels(self) -> QuantizedValues:
        """Quantized values with at most one scale and offset for each token: finer ones are multiplied out."""
        levels, scale, offset, center = self.codec.unpack(self.codes, self.head_dim)
        if any(factor is not None and factor.shape[-1] > 1 for factor in (scale, offset)):
            return QuantizedValues(affine(levels, scale, offset), center=center)
        return QuantizedValues(levels, scale, offset, center)


Segment = Exact | Packed


@dataclass(eq=False)
class KeysOrValues:
    """The keys or the values of one attention call, of shape `[B, H, T, D]`. `build` makes the segments at first use: kernels do not need
    them."""

    build: Callable[[], tuple[Segment, ...]]
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(segments: Sequence[Segment], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> KeysOrValues:
        """The keys or the values in these segments; segments without tokens are dropped."""
        kept = tuple(segment for segment in segments if segment.tokens)
        return KeysOrValues(partial(tuple, kept), tuple(shape), dtype, device)  # type: ignore[arg-type]  # deepcopy does not copy what a lambda refers to

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return self.build()

    def dense(self) -> Tensor:
        """All tokens in the model's dtype, `[B, H, T, D]`."""
        parts = [s.x if isinstance(s, Exact) else s.codec.dequantize(s.codes, s.head_dim, self.dtype) for s in self.segments]
        return torch.cat(parts, dim=2)


CODECS: list[Codec] = []
"""Codecs in use. They are few; equal ones share one index for the life of the process."""


@functools.cache
def number(codec: Codec) -> int:
    """The index of `codec` in `CODECS`: operators of torch cannot take a codec."""
    if codec not in CODECS:
        CODECS.append(codec)
    return CODECS.index(codec)


@functools.cache
def names(codec: Codec, head_dim: int, tokens: str) -> tuple[str, ...]:
    """Its buffers that are kept for "each" token, or "once"."""
    return tuple(buffer.name for buffer in codec.buffers(head_dim) if buffer.tokens == tokens)


@dataclass(eq=False)
class QuantizedRegion:
    """The quantized tokens of a layer as they are stored, and as the fused kernel reads them: chunks of planes `[B, H, slots, width]`, with
    the buffers that are kept once.

    table   int64 `[rows, 8]`, a row for each chunk (there may be more rows): the chunk's first token, its slots, and the distances of its
            `planes` from those of the first chunk, in elements
    tokens  quantized tokens; an upper bound where `StorageTensors` count them on the device
    """

    key: Codec
    value: Codec
    chunks: tuple[tuple[Codes, Codes], ...]
    tokens: int
    table: Tensor
    numbers: tuple[int, int] = field(init=False)
    launches: dict[str, Any] = field(default_factory=dict)
    """Arguments that kernels reuse from step to step. They do not depend on `tokens`, and `holding` shares them."""

    def __post_init__(self) -> None:
        self.numbers = number(self.key), number(self.value)

    def holding(self, tokens: int) -> QuantizedRegion:
        """This region, with `tokens` tokens."""
        return replace(self, tokens=tokens)

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return self.key, self.value

    @cached_property
    def shared(self) -> tuple[bool, bool]:
        """Whether all heads share one scale, for keys and for values."""
        return self._one(1)

    @cached_property
    def statistics(self) -> tuple[bool, bool]:
        """Whether all tokens share one scale, for keys and for values."""
        return self._one(2)

    def _one(self, dim: int) -> tuple[bool, bool]:
        key, value = ([plane.shape[dim] for plane in planes if plane.numel()] for planes in (self.planes[:3], self.planes[3:]))
        return min(key) == 1 < max(key), min(value) == 1 < max(value)

    @cached_property
    def planes(self) -> list[Tensor]:
        """The planes of the first chunk, keys before values: codes or low bits, high bits, scales. Missing ones are empty tensors."""
        return [plane for codec, codes in zip(self.codecs, self.chunks[0], strict=True) for plane in planes_of(codec, codes)]


@functools.cache
def layout_of(codec: Codec) -> PackedLayout | None:
    """The layout that kernels read and write; None if they cannot."""
    return codec.packed_layout


def planes_of(codec: Codec, codes: Codes) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, high bits and scales; missing ones are empty tensors. Codes of less than 16 bits are viewed as words of 16."""
    none = next(iter(codes.values())).new_empty(0)
    if (layout := layout_of(codec)) is None:
        return none, none, none
    main, high, scales = (codes[name] if name else none for name in layout.planes)
    return main if main.itemsize > 1 else main.view(torch.int16), high.view(torch.int16), scales


def chunk_table(chunks: Sequence[tuple[Codes, Codes]], codecs: tuple[Codec, Codec], rows: int = 0) -> Tensor:
    """`QuantizedRegion.table` of these chunks, int64 `[rows or chunks, 8]`, in host memory."""
    table, start = numpy.zeros((max(rows, len(chunks)), 8), numpy.int64), 0  # torch takes ten times as long to read lists
    first: list[Tensor] = []
    for row, chunk in zip(table, chunks, strict=False):
        row[:2] = start, next(iter(chunk[0].values())).shape[2]
        if len(chunks) > 1:
            planes = [plane for codec, codes in zip(codecs, chunk, strict=True) for plane in planes_of(codec, codes)]
            first = first or planes
            row[2:] = [(x.data_ptr() - y.data_ptr()) // x.itemsize for x, y in zip(planes, first, strict=True)]
        start += row[1]
    return torch.from_numpy(table)


def join_tokens(parts: Sequence[Tensor]) -> Tensor:
    """`parts` `[B, H, T, width]` in a row; where one alone has tokens, it."""
    parts = [x for x in parts if x.shape[2]]
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def packed(codec: Codec, chunks: Sequence[Codes], left: int, head_dim: int, limit: int = 2**62) -> Iterator[Packed]:
    """The first `left` tokens of `chunks`, which include the buffers kept once, as views of at most `limit` tokens."""
    once = names(codec, head_dim, "once")
    for chunk in chunks:
        used = min(left, next(x.shape[2] for name, x in chunk.items() if name not in once))
        for at in range(0, used, limit):
            stop = min(at + limit, used)
            yield Packed(codec, {n: x if n in once else x[:, :, at:stop] for n, x in chunk.items()}, stop - at, head_dim)
        left -= used


CONTROL = 4
TICKET, DROPPED, ROOM, CHUNKS = range(CONTROL)


@dataclass(eq=False)
class StorageTensors:
    """The tensors of a storage whose counts are on the device; pairs are keys and values.

    sinks      `[B, H, S, D]`   the first `S` tokens, in the model's dtype
    residual   `[B, H, R, D]`   a ring of the last tokens, in the model's dtype: token `n` after the sinks is in slot `n % R` until it is
                                in slot `n` of the region
    region                      quantized tokens, in token order
    state      int32 `[4 + 2 B]`  programs of the launch that have finished, tokens dropped because the storage was full, its capacity in
                                tokens, its chunks; then `lengths` `[B, 2]`: tokens of a row, and how many of them are quantized
    columns    bound on the tokens of a row until the host changes it; masks have as many columns
    """

    sinks: Pair
    residual: Pair
    region: QuantizedRegion
    state: Tensor
    columns: int
    arguments: tuple[list[Tensor], list[Tensor], list[int], int] = field(init=False)
    """Arguments of torch operators: exact tokens and state; the table and the first chunk; indices of the codecs; columns."""
    launch: Any = field(init=False, default=None)
    """Arguments that kernels reuse from step to step."""

    def __post_init__(self) -> None:
        planes = [plane for codes in self.region.chunks[0] for plane in codes.values()]
        exact = [*self.sinks, *self.residual, self.state]
        self.arguments = exact, [self.region.table, *planes], list(self.region.numbers), self.columns

    @staticmethod
    def of(exact: Sequence[Tensor], quantized: Sequence[Tensor], numbers: Sequence[int], columns: int) -> StorageTensors:
        """The inverse of `arguments`, with the first chunk alone: kernels find the others through the table."""
        key, value = CODECS[numbers[0]], CODECS[numbers[1]]
        k_sinks, v_sinks, k_residual, v_residual, state = exact
        table, *planes = quantized
        left = iter(planes)
        chunk = tuple(
            {b.name: next(left) for kind in ("each", "once") for b in codec.buffers(x.shape[3]) if b.tokens == kind}
            for codec, x in ((key, k_residual), (value, v_residual))
        )
        region = QuantizedRegion(key, value, (chunk,), columns, table)  # type: ignore[arg-type]
        return StorageTensors((k_sinks, v_sinks), (k_residual, v_residual), region, state, columns)

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return self.region.codecs

    @property
    def lengths(self) -> Tensor:
        return self.state[CONTROL:].view(-1, 2)

    @property
    def grows(self) -> bool:
        """Whether there may be more than one chunk."""
        return self.region.table.shape[0] > 1


@dataclass(eq=False)  # frozen ones take four times as long to make, at every step
class AttentionInputs:
    """The keys and values of one layer for one step, which are not changed.

    key, value  what the torch reference reads
    region      the same for the fused kernel: the quantized tokens, if there are any,
    exact       and keys and values of the sinks, then of the residual, `[B, H, T, D]` each, any of them without tokens
    buffers     the storage of `region` and `exact`, where it counts its tokens on the device
    joined      keys and values `[B, H, T, D]` of sinks and residual in one tensor each, where they are contiguous in memory
    paged       `PagedInputs` in place of `region` and `exact`, where each head has pages of its own, with a slot for each of these; of
                `key` and `value`, the quantized tokens are as many as the longest head has. It leaves out slots without a token; attention
                over `key` and `value` needs a mask for each head then
    """

    key: KeysOrValues
    value: KeysOrValues
    region: QuantizedRegion | None = None
    exact: tuple[Tensor, ...] = ()
    buffers: StorageTensors | None = None
    joined: Pair | None = None
    paged: Any = None

    @property
    def arguments(self) -> tuple[list[Tensor], Tensor | None, list[int], int, list[Tensor]]:
        """Arguments of torch operators: planes of all chunks, table, indices of the codecs, quantized tokens; exact tokens."""
        if (region := self.region) is None:
            return [], None, [], 0, list(self.exact)
        planes = [plane for chunk in region.chunks for codes in chunk for plane in codes.values()]
        return planes, region.table, list(region.numbers), region.tokens, list(self.exact)


def qk(q: Tensor, side: KeysOrValues) -> Tensor:
    """Scores of queries against all keys: `q` `[B, H, R, D]` to `[B, H, R, T]`, in the dtype of `q`."""
    rotated: dict[Codec, Tensor] = {}
    parts = []
    for segment in side.segments:
        if isinstance(segment, Exact):
            parts.append(q @ segment.x.to(q.dtype).mT)
            continue
        if segment.codec not in rotated:
            rotated[segment.codec] = segment.codec.rotate(q)
        q_rotated = rotated[segment.codec]
        levels, scale, offset, center = segment.levels()
        part = q_rotated @ levels.mT
        if scale is not None:
            part *= scale.mT
        if offset is not None:
            part += q_rotated.sum(-1, keepdim=True) * offset.mT
        if center is not None:
            part += q_rotated @ center.mT
        parts.append(part)
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def pv(p: Tensor, side: KeysOrValues) -> Tensor:
    """Weighted sums of values: `p` `[B, H, R, T]` to `[B, H, R, D]`, in the dtype of `p`. Packed values are summed rotated, and rotated
    back once."""
    sums: dict[Codec | None, Tensor] = {}
    start = 0
    for segment in side.segments:
        part = p[..., start : start + segment.tokens]
        start += segment.tokens
        if isinstance(segment, Exact):
            codec, out = None, part @ segment.x.to(p.dtype)
        else:
            codec = segment.codec
            levels, scale, offset, center = segment.levels()
            out = (part if scale is None else part * scale.mT) @ levels
            if offset is not None:
                out += part @ offset.expand(*part.shape[:2], segment.tokens, 1)
            if center is not None:
                out += part.sum(-1, keepdim=True) * center
        sums[codec] = sums[codec] + out if codec in sums else out
    return torch.stack([out if codec is None else codec.unrotate(out) for codec, out in sums.items()]).sum(0)
