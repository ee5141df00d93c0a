"""What attention reads: one side (keys or values) of a layer as a row of segments, exact or packed, in token order.

The two halves of attention in plain torch: `qk` (q . k) and `pv` (p . v). Packed segments are blocks of a bounded number of tokens,
and only one block at a time exists in floating point. This is the reference that fused kernels are tested against, and what CPU users run.

Shapes: `q` `[B, H, R, D]` with `R` = query heads of the group times queries, in fp32; scores and probabilities `[B, H, R, T]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..formats.base import Codec, Codes, PackedLayout, QuantizedValues, affine

Pair = tuple[Tensor, Tensor]
"""Of keys and of values."""


@dataclass(frozen=True)
class Exact:
    """Tokens in the model's dtype, `x` `[B, H, T, D]`."""

    x: Tensor

    @property
    def tokens(self) -> int:
        return self.x.shape[2]


@dataclass(frozen=True)
class Packed:
    """A block of `tokens` tokens as `codec` stores them."""

    codec: Codec
    codes: Codes
    tokens: int
    head_dim: int

    def levels(self) -> QuantizedValues:
        """QuantizedValues with at most one scale and offset a token: finer ones are multiplied out."""
        levels, scale, offset, center = self.codec.unpack(self.codes, self.head_dim)
        if any(factor is not None and factor.shape[-1] > 1 for factor in (scale, offset)):
            return QuantizedValues(affine(levels, scale, offset), center=center)
        return QuantizedValues(levels, scale, offset, center)


Segment = Exact | Packed


@dataclass(frozen=True, eq=False)
class KeysOrValues:
    """The keys or the values that one attention call sees: `[B, H, T, D]` in effect. `build` makes the segments when they are asked for:
    kernels do without them."""

    build: Callable[[], tuple[Segment, ...]]
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(segments: Sequence[Segment], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> KeysOrValues:
        """A side of these segments, those without tokens left out."""
        kept = tuple(segment for segment in segments if segment.tokens)
        return KeysOrValues(partial(tuple, kept), tuple(shape), dtype, device)  # type: ignore[arg-type]  # deepcopy does not copy what a lambda refers to

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return self.build()

    def dense(self) -> Tensor:
        """All tokens in the model's dtype."""
        parts = [s.x if isinstance(s, Exact) else s.codec.dequantize(s.codes, s.head_dim, self.dtype) for s in self.segments]
        return torch.cat(parts, dim=2)


CODECS: list[Codec] = []
"""Codecs in use. They are few, and equal ones have one place for the life of the process."""


def number(codec: Codec) -> int:
    """Where `codec` is in `CODECS`: operators of torch take numbers."""
    if codec not in CODECS:
        CODECS.append(codec)
    return CODECS.index(codec)


@dataclass(eq=False)
class QuantizedRegion:
    """The quantized tokens of a layer as they are stored, which is how the fused kernel reads them: chunks of planes
    `[B, H, slots, width]`, the buffers kept once among them.

    `table` int64 `[rows, 8]`, a row for each chunk (there may be more rows): the chunk's first token, its slots, and how far the `planes`
    are from those of the first chunk, in elements. `tokens` sizes the launch; where `Buffers` count on the device, these say how many there
    are.
    """

    key: Codec
    value: Codec
    chunks: tuple[tuple[Codes, Codes], ...]
    tokens: int
    table: Tensor
    numbers: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = number(self.key), number(self.value)

    @cached_property
    def shared(self) -> tuple[bool, bool]:
        """Whether all heads have one scale: of keys, of values."""
        return self._one(1)

    @cached_property
    def statistics(self) -> tuple[bool, bool]:
        """Whether all tokens have one scale."""
        return self._one(2)

    def _one(self, dim: int) -> tuple[bool, bool]:
        key, value = ([plane.shape[dim] for plane in planes if plane.numel()] for planes in (self.planes[:3], self.planes[3:]))
        return min(key) == 1 < max(key), min(value) == 1 < max(value)

    @cached_property
    def planes(self) -> list[Tensor]:
        """Of the first chunk, keys before values: codes or low bits, high bits, scales; what is missing is an empty tensor."""
        return [plane for codec, codes in zip((self.key, self.value), self.chunks[0], strict=True) for plane in planes_of(codec, codes)]


@functools.cache
def layout_of(codec: Codec) -> PackedLayout | None:
    """What kernels know of `codec`."""
    return codec.packed_layout


def planes_of(codec: Codec, codes: Codes) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, high bits and scales; what a codec has not is an empty tensor. Codes of less than 16 bits are read as words of 16."""
    none = next(iter(codes.values())).new_empty(0)
    if (layout := layout_of(codec)) is None:
        return none, none, none
    main, high, scales = (codes[name] if name else none for name in layout.planes)
    return main if main.itemsize > 1 else main.view(torch.int16), high.view(torch.int16), scales


def chunk_table(chunks: Sequence[tuple[Codes, Codes]], codecs: tuple[Codec, Codec]) -> Tensor:
    """`QuantizedRegion.table` of these chunks, in host memory."""
    rows, start = [], 0
    first = [plane for codec, codes in zip(codecs, chunks[0], strict=True) for plane in planes_of(codec, codes)]
    for chunk in chunks:
        planes = [plane for codec, codes in zip(codecs, chunk, strict=True) for plane in planes_of(codec, codes)]
        slots = next(iter(chunk[0].values())).shape[2]
        distances = [(x.data_ptr() - y.data_ptr()) // x.itemsize for x, y in zip(planes, first, strict=True)]
        rows.append([start, slots, *distances])
        start += slots
    return torch.tensor(rows, dtype=torch.int64)


CONTROL = 4
TICKET, DROPPED, ROOM, CHUNKS = range(CONTROL)


@dataclass(eq=False)
class Buffers:
    """The tensors of a storage whose counts are on the device; pairs are keys and values.

    sinks      `[B, H, S, D]`   the first `S` tokens, in the model's dtype
    residual   `[B, H, R, D]`   a ring of the last tokens, in the model's dtype: token `n` after the sinks is in slot `n % R` until it is
                                in slot `n` of the body
    body                        quantized tokens, in token order
    state      int32 `[4 + 2 B]`  a ticket of kernels, tokens that came when the storage was full, tokens that the storage has room for,
                                chunks; then `lengths` `[B, 2]`: tokens that a row has seen, and how many of them are quantized

    `columns`: tokens that there may be before the host is asked again; masks have as many columns.
    """

    sinks: Pair
    residual: Pair
    region: QuantizedRegion
    state: Tensor
    columns: int
    arguments: tuple[list[Tensor], list[Tensor], list[int], int] = field(init=False)
    """As operators of torch take it: exact tokens and state; the table and the first chunk; numbers of the codecs; columns."""
    launch: Any = field(init=False, default=None)
    """What kernels keep from step to step."""

    def __post_init__(self) -> None:
        planes = [plane for codes in self.region.chunks[0] for plane in codes.values()]
        exact = [*self.sinks, *self.residual, self.state]
        self.arguments = exact, [self.region.table, *planes], list(self.region.numbers), self.columns

    @staticmethod
    def of(exact: Sequence[Tensor], quantized: Sequence[Tensor], numbers: Sequence[int], columns: int) -> Buffers:
        """Those that these `arguments` were of, with the first chunk alone: kernels find the others by the table."""
        key, value = CODECS[numbers[0]], CODECS[numbers[1]]
        k_sinks, v_sinks, k_residual, v_residual, state = exact
        table, *planes = quantized
        left = iter(planes)
        chunk = tuple(
            {b.name: next(left) for kind in ("each", "once") for b in codec.buffers(x.shape[3]) if b.tokens == kind}
            for codec, x in ((key, k_residual), (value, v_residual))
        )
        region = QuantizedRegion(key, value, (chunk,), columns, table)  # type: ignore[arg-type]
        return Buffers((k_sinks, v_sinks), (k_residual, v_residual), region, state, columns)

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return self.region.key, self.region.value

    @property
    def lengths(self) -> Tensor:
        return self.state[CONTROL:].view(-1, 2)

    @property
    def grows(self) -> bool:
        """Whether there may be more chunks than one."""
        return self.region.table.shape[0] > 1


@dataclass(frozen=True)
class AttentionInputs:
    """Keys and values of one layer for one step.

    `key` and `value` are what the torch reference reads. `region` and `exact` are the same for the fused kernel: the quantized tokens, if
    there are any, and the exact keys and values of the sinks and the residual, `[B, H, T, D]` each, any of them without tokens. With
    `buffers` these are what `region` and `exact` are of, and the device knows how much of them is used. `joined`: the exact keys and the
    exact values `[B, H, T, D]` of sinks and residual in one tensor each, where they lie so.

    `paged` (`PagedInputs`) is there in place of `region` and `exact` where each head has pages of its own. It leaves out columns without a
    token; attention over `key` and `value` needs a mask for each head then.
    """

    key: KeysOrValues
    value: KeysOrValues
    region: QuantizedRegion | None = None
    exact: tuple[Tensor, ...] = ()
    buffers: Buffers | None = None
    joined: Pair | None = None
    paged: Any = None

    @property
    def arguments(self) -> tuple[list[Tensor], Tensor | None, list[int], int, list[Tensor]]:
        """As operators of torch take it: planes of all chunks, table, numbers of the codecs and tokens of the body; exact tokens."""
        if (region := self.region) is None:
            return [], None, [], 0, list(self.exact)
        planes = [plane for chunk in region.chunks for codes in chunk for plane in codes.values()]
        return planes, region.table, list(region.numbers), region.tokens, list(self.exact)


def qk(q: Tensor, side: KeysOrValues) -> Tensor:
    """`q . k` for every token: `[B, H, R, D]` -> `[B, H, R, T]`."""
    rotated: dict[Codec, Tensor] = {}
    parts = []
    for segment in side.segments:
        if isinstance(segment, Exact):
            parts.append(q @ segment.x.to(q.dtype).mT)
            continue
        if segment.codec not in rotated:
            rotated[segment.codec] = segment.codec.rotate(q)
        turned = rotated[segment.codec]
        levels, scale, offset, center = segment.levels()
        part = turned @ levels.mT
        if scale is not None:
            part *= scale.mT
        if offset is not None:
            part += turned.sum(-1, keepdim=True) * offset.mT
        if center is not None:
            part += turned @ center.mT
        parts.append(part)
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def pv(p: Tensor, side: KeysOrValues) -> Tensor:
    """`p . v`: `[B, H, R, T]` -> `[B, H, R, D]`. Packed values are summed rotated, and turned back once."""
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
