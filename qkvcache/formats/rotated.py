"""Directions on the levels that suit a normal distribution, which is what a rotation makes of any vector; lengths in fp16.

n = |x|, y = sqrt(D) H x / (n + 1e-8), H without signs
codes = what the quantizer makes of y                        its planes, b * D / 8 bytes
scale = n / |levels|, fp16; so that a vector keeps its length ("norm correction")       2 bytes
x     = H levels * scale
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .base import Buffer, Codec, Codes, PackedLayout, QuantizedValues, check_option
from .codebooks import GRID, grid_levels, midpoints
from .packing import code_buffers, lookup, pack, rank, refuses
from .rotation import Hadamard, exact_dtype, number_of


class Quantizer(ABC):
    """How vectors whose channels are about N(0, 1) become codes of `bits` a channel. Subclasses are frozen dataclasses without state."""

    bits: int
    kind: ClassVar[str]
    """Of `PackedLayout`, without the bits."""

    @abstractmethod
    def buffers(self, head_dim: int) -> tuple[Buffer, ...]: ...

    @abstractmethod
    def quantize(self, x: Tensor) -> Codes:
        """`x` fp32 `[..., D]` to a tensor for each buffer; each vector from itself alone."""

    @abstractmethod
    def levels(self, codes: Codes) -> Tensor:
        """Codes to fp32 `[..., D]`."""

    @abstractmethod
    def refuses(self, head_dim: int) -> str | None:
        """Why vectors of `head_dim` cannot be held, or None."""


@dataclass(frozen=True)
class LloydMax(Quantizer):
    """Each channel on its own, to the level that is nearest by the exact midpoints; a midpoint goes up."""

    bits: Literal[2, 3, 4]
    kind: ClassVar[str] = "lut"

    def __post_init__(self) -> None:
        check_option("bits", self.bits, GRID)

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return code_buffers(self.bits, head_dim)

    def quantize(self, x: Tensor) -> Codes:
        return pack(rank(x, midpoints(self.bits)), self.bits)

    def levels(self, codes: Codes) -> Tensor:
        return lookup(codes, self.bits, grid_levels(self.bits))

    def refuses(self, head_dim: int) -> str | None:
        return refuses(self.bits, head_dim)


@dataclass(frozen=True)
class Rotated(Codec):
    """A quantizer under a rotation, with one scale a token and head."""

    quantizer: Quantizer
    rotation: Hadamard | None = Hadamard()

    @property
    def packed_layout(self) -> PackedLayout:
        codes, *high = (buffer.name for buffer in self.quantizer.buffers(16))
        planes = (codes, high[0] if high else "", "scale")
        return PackedLayout(f"{self.quantizer.kind}{self.quantizer.bits}", "fp16", planes=planes, rotation=number_of(self.rotation))

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (*self.quantizer.buffers(head_dim), Buffer("scale", torch.float16, 1, "scales"))

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        norm = _norm(x)
        codes = self.quantizer.quantize(self.rotate(x).float() * (x.shape[-1] ** 0.5 / (norm + 1e-8)))
        return codes | {"scale": (norm / _norm(self.quantizer.levels(codes))).half()}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return QuantizedValues(self.quantizer.levels(codes), codes["scale"].float())

    def refuses(self, head_dim: int) -> str | None:
        return self.quantizer.refuses(head_dim)


def _norm(x: Tensor) -> Tensor:
    """Exact, so that it does not depend on how many tokens are encoded at once."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact_dtype(x.device)).float()
