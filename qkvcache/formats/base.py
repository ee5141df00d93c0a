"""The interface of storage formats: a codec for keys and a codec for values, each of which declares its buffers once.

A codec stores the vector of a token and head as `x = undo_rotation(levels * scale + offset + center)`.
Attention on codes uses that factorization: the query is rotated once, the output is rotated back once, and
`scale` multiplies scores and probabilities. Allocation, byte counts and planning all read `buffers`, the only
place that says how wide a token is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .rotation import Hadamard

TINY = 1e-30  # floor of a divisor: keeps an all-zero vector from dividing by zero; a scale that small times any code is still zero

Sharing = Literal["each", "shared"]

Codes = dict[str, Tensor]
"""One tensor `[B, H, T, width]` for each declared buffer (`[B, 1, T, width]` if heads share it, `T` = 1 if it is kept once)."""


@dataclass(frozen=True)
class Buffer:
    """One array of a codec: `width` elements of `dtype` (None: the model's own) for each token and head."""

    name: str
    dtype: torch.dtype | None
    width: int
    role: Literal["codes", "scales"] = "codes"
    heads: Sharing = "each"
    tokens: Literal["each", "once"] = "each"

    def nbytes(self, model_dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes for one token and head."""
        return (self.dtype or model_dtype).itemsize * self.width


AT_ONCE = {"e4m3": 2, "e5m2": 2, "int8_halves": 4, "int4": 4, "lut4": 4, "int2": 8, "int3": 16, "lut3": 16}
"""Channels that the torch operations of a codec read at a time, by `PackedLayout.kind`; others read one."""
BITS = {
    "half": 16, "int8": 8, "int8_halves": 8, "uint8": 8, "e4m3": 8, "e5m2": 8, "int4": 4, "lut4": 4, "e2m1": 4,
    "int3": 3, "lut3": 3, "int2": 2,
}  # fmt: skip
"""Bits of a code, by `PackedLayout.kind`."""
HIGH_BITS = {"int8_halves": 4, "lut4": 2, "int3": 1, "lut3": 1}
"""Bits of each code in the plane of high bits. Kinds that are not listed: 0."""


@dataclass(frozen=True)
class PackedLayout:
    """The layout of a codec's planes, as kernels read and write them. A channel is `value(code) * scale +
    zero`, plus the mean if `centered`.

    kind      half: codes are numbers in the model's dtype
              int8, uint8, e4m3, e5m2: a byte each; int8_halves: int8 + 128
              int4, int3: unsigned integers, int4 with fp32 or fp16 the upper half of int8_halves; lut4, lut3: indices of the Lloyd-Max
              levels of `codebooks.py`; int2: even steps: the upper two bits of lut4, read alone, or codes of 2 bits; e2m1: as in
              `nvfp4.py`
              `packing.py` says in which order channels lie in words
    scale     none
              fp32, fp16: one for each token
              pair: fp16 scale and zero, the least channel, for each token
              hidden: fp32 for each token, with the zero point in its low four bits
              group: fp16 for each `group` channels, for codes around 8
              block: E4M3 for each `group` channels
    group     channels that share a scale; 0 if a token has one
    planes    names of the buffers of codes, of high bits and of scales; "" where there is none
    span      the values that share a scale. each: one token of one head; shared: one token of all heads; once: all tokens
    search    how scales of `block` are chosen when quantizing: 0: amax, 1: the better of two, 2: the best of eight
    rotation  0: none, 1: Hadamard, 2: Hadamard with random signs
    centered  whether a mean, the buffer "center", is subtracted before quantizing
    writable  whether kernels may quantize, by the rule of the kind and the scale. If not, torch does
    """

    kind: str
    scale: str = "none"
    group: int = 0
    planes: tuple[str, str, str] = ("codes", "", "scale")
    span: Literal["each", "shared", "once"] = "each"
    search: int = 0
    rotation: int = 0
    centered: bool = False
    writable: bool = True

    @property
    def bits(self) -> int:
        return BITS[self.kind]

    @property
    def packed(self) -> bool:
        """Whether several codes share a byte."""
        return self.bits < 8 or self.high > 0

    @property
    def per(self) -> int:
        """Channels of a word of 16 bits."""
        return 16 // max(self.high, 2) if self.high or self.bits < 4 else 16 // self.bits

    @property
    def rotated(self) -> bool:
        return self.rotation > 0

    @property
    def high(self) -> int:
        """Bits of each code in the plane of high bits; 0: there is none. For each bit, it has half the words of the low bits."""
        return HIGH_BITS.get(self.kind, 0)

    @property
    def upper(self) -> PackedLayout | None:
        """The layout of the upper halves of codes alone; None if they have no plane of their own."""
        if self.high < 2:
            return None
        return replace(self, kind="int2" if self.high == 2 else "int4", planes=("high", "", self.planes[2]), writable=False)


class QuantizedValues(NamedTuple):
    """Unpacked codes, not rotated back. `levels` `[B, H, T, D]`, fp32 or, with a scale, int8; `scale`,
    `offset` `[B, H or 1, T or 1, 1 or D / group]`; `center`, which all tokens share, `[B, H, 1, D]`; fp32."""

    levels: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    center: Tensor | None = None


class Codec(ABC):
    """The quantization of keys or of values. Subclasses are frozen dataclasses without state.

    A token is quantized once, and independently of other tokens but for buffers that are kept once. Input may
    be fp16, bf16 or fp32. A vector with inf or nan dequantizes to values that are not finite, as do those
    that share its scale; others are not affected.
    """

    rotation: Hadamard | None = None
    """The orthonormal map under which vectors are stored, if any."""

    @property
    def packed_layout(self) -> PackedLayout | None:
        """The planes as kernels read them; None if there are no kernels for this codec, and torch operations run instead."""
        return None

    @abstractmethod
    def buffers(self, head_dim: int) -> tuple[Buffer, ...]: ...

    @abstractmethod
    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        """The buffers kept for each token, from `x` `[B, H, T, D]`. `statistics`: the result of `calibrate` for the first block."""

    @abstractmethod
    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        """The quantized values of codes of any number of tokens; `codes` includes the buffers that are kept once."""

    def calibrate(self, x: Tensor, is_valid: Tensor | None = None) -> Codes:
        """The buffers kept once, computed from the first block `[B, H, T, D]`, separately for each row. `is_valid`:
        bool `[B, T]`, False for padding, which is left out; None: no padding."""
        return {}

    def allocate_statistics(self, like: Tensor, per_head: bool = False) -> Codes:
        """The buffers kept once, for the rows, heads, channels, dtype and device of `like` `[B, H, T, D]`.
        With `per_head`, each head has a copy of buffers that heads would share."""
        found: Codes = {}
        for buffer in _declared(self, like.shape[3]):
            if buffer.tokens == "once":
                heads = like.shape[1] if per_head or buffer.heads == "each" else 1
                found[buffer.name] = like.new_zeros(like.shape[0], heads, 1, buffer.width, dtype=buffer.dtype)
        return found

    def roles(self, codes: Codes, head_dim: int) -> Iterator[tuple[str, Tensor]]:
        """Each tensor with its role, `codes` or `scales`."""
        roles = {buffer.name: buffer.role for buffer in _declared(self, head_dim)}
        yield from ((roles[name], x) for name, x in codes.items())

    def keeps(self, head_dim: int) -> bool:
        """Whether the codec has buffers that are kept once."""
        return _keeps(self, head_dim)

    def refuses(self, head_dim: int) -> str | None:
        """The reason why this codec cannot hold vectors of `head_dim`, or None."""
        layout = self.packed_layout
        if layout and head_dim % (channels := AT_ONCE.get(layout.kind, 1)):
            return f"{layout.bits}-bit codes are read {channels} channels at a time, and it is no multiple of that; use 'int8'"
        return None

    def unpack_upper(self, codes: Codes, head_dim: int) -> QuantizedValues:
        """`unpack` of the upper halves of codes where they have a plane of their own (`PackedLayout.upper`), else of all bits."""
        return self.unpack(codes, head_dim)

    def rotate(self, x: Tensor) -> Tensor:
        """The vectors `x` `[B, H, T, D]` rotated for storage, before quantization, fp32; `rotate(q) .
        rotate(k) = q . k`."""
        return x if self.rotation is None else self.rotation.apply(x)

    def unrotate(self, x: Tensor) -> Tensor:
        return x if self.rotation is None else self.rotation.undo(x)

    def dequantize(self, codes: Codes, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The vectors of `codes`, `[B, H, T, D]` in `dtype`."""
        levels, scale, offset, center = self.unpack(codes, head_dim)
        stored = affine(levels, scale, offset)
        return self.unrotate(stored if center is None else stored + center).to(dtype)


@cache
def _declared(codec: Codec, head_dim: int) -> tuple[Buffer, ...]:
    return codec.buffers(head_dim)


@cache
def _keeps(codec: Codec, head_dim: int) -> bool:
    return any(buffer.tokens == "once" for buffer in _declared(codec, head_dim))


@cache
def why_refused(codec: Codec, head_dim: int) -> str | None:
    """`Codec.refuses`, which each layer asks."""
    return codec.refuses(head_dim)


def affine(levels: Tensor, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    """`levels * scale + offset`; each entry of `scale` and `offset` belongs to an equal share of the channels."""
    for factor, combine in ((scale, Tensor.mul), (offset, Tensor.add)):
        if factor is not None:
            grouped = levels.unflatten(-1, (factor.shape[-1], -1))
            levels = combine(grouped, factor.unsqueeze(-1)).flatten(-2)
    return levels


@dataclass(frozen=True)
class Format(ABC):
    """A named pair of codecs, for `format=` of a cache. Subclasses are frozen dataclasses whose fields are the options."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def codecs(self) -> tuple[Codec, Codec]:
        """The codec for keys and the codec for values."""

    @cached_property
    def key(self) -> Codec:
        return self.codecs()[0]

    @cached_property
    def value(self) -> Codec:
        return self.codecs()[1]

    def bytes_per_token(self, head_dim: int, kv_heads: int = 1, value_dim: int | None = None) -> int:
        """Bytes of one token, keys and values together, over `kv_heads` heads. Buffers kept once are not counted."""
        sides = ((self.key, head_dim), (self.value, head_dim if value_dim is None else value_dim))
        buffers = [b for codec, dim in sides for b in codec.buffers(dim) if b.tokens == "each"]
        return sum(b.nbytes() * (kv_heads if b.heads == "each" else 1) for b in buffers)

    def in_halves(self) -> Format:
        """This format with the upper halves of the codes of keys in a plane of their own, if it has such a form."""
        return self

    def for_layers(self, count: int) -> tuple[Format, ...]:
        """The formats of `count` full-attention layers: this one for each (`FormatByLayer` has several)."""
        return (self,) * count

    def check(self, head_dim: int, value_dim: int | None = None) -> None:
        """Raises ValueError if keys of `head_dim` or values of `value_dim` cannot be held."""
        for side, codec, dim in (("keys", self.key, head_dim), ("values", self.value, head_dim if value_dim is None else value_dim)):
            if reason := why_refused(codec, dim):
                raise ValueError(f"format {self.name!r} cannot hold {side} of head_dim {dim}: {reason}")

    def refuses(self, head_dim: int) -> str | None:
        """The reason why this format cannot hold vectors of `head_dim`, or None."""
        return self.key.refuses(head_dim) or self.value.refuses(head_dim)


def check_count(name: str, value: int, least: int = 0, of: str = "tokens") -> None:
    """Raises TypeError or ValueError unless `value` is a whole number, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a number of {of}, got {value!r}")
    if value < least:
        raise ValueError(f"{name}={value}: must be {least} or more {of}")


def check_option(name: str, value: object, allowed: Iterable[object], beside: str = "") -> None:
    """Raises ValueError unless `value` is among `allowed`; `beside` names other alternatives."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected {', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}{beside}")


def hint(name: str, known: Iterable[str]) -> str:
    """A suggestion for a name that is unknown."""
    known = tuple(known)
    close = get_close_matches(name.lower(), known)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"known are {', '.join(known)}"
