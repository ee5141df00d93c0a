"""Directions on the levels that suit a normal distribution, which is what a rotation makes of any vector; lengths in fp16.

n = |x|, y = sqrt(D) H x / (n + 1e-8), H without signs
codes = the Lloyd-Max levels nearest to y, of b = 2 to 4 bits           b * D / 8 bytes, 4 bits in two planes of halves
scale = n / |levels|, fp16; so that a vector keeps its length ("norm correction")       2 bytes
x     = H levels * scale
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import Buffer, Codec, Codes, PackedLayout, QuantizedValues
from .codebooks import GRID, grid_levels, grid_steps, midpoints
from .packing import code_buffers, lookup, pack, plane_names, rank
from .rotation import Hadamard, exact_dtype, number_of


@dataclass(frozen=True)
class Rotated(Codec):
    """Lloyd-Max codes of `bits` under a rotation, with one scale a token and head: each channel goes to the
    level that is nearest by the exact midpoints, and a midpoint goes up."""

    bits: Literal[2, 3, 4]
    rotation: Hadamard | None = Hadamard()

    @property
    def _halves(self) -> bool:
        return self.bits == 4

    @property
    def packed_layout(self) -> PackedLayout:
        planes = (*plane_names(self.bits, self._halves), "scale")
        return PackedLayout("int2" if self.bits == 2 else f"lut{self.bits}", "fp16", planes=planes, rotation=number_of(self.rotation))

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (*code_buffers(self.bits, head_dim, self._halves), Buffer("scale", torch.float16, 1, "scales"))

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        norm = _norm(x)
        y = self.rotate(x).float() * (x.shape[-1] ** 0.5 / (norm + 1e-8))
        codes = pack(rank(y, midpoints(self.bits)), self.bits, self._halves)
        levels = lookup(codes, self.bits, grid_levels(self.bits), self._halves)
        return codes | {"scale": (norm / _norm(levels)).half()}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return _in_steps(codes, self.bits, self._halves)

    def unpack_upper(self, codes: Codes, head_dim: int) -> QuantizedValues:
        """`unpack` of the upper halves, to the levels of 2 bits. Scores have about the error of `Rotated(2)`."""
        if not self._halves:
            return self.unpack(codes, head_dim)
        return _in_steps({"codes": codes["high"], "scale": codes["scale"]}, 2)


def _in_steps(codes: Codes, bits: int, halves: bool = False) -> QuantizedValues:
    """Codes as levels of `grid_steps`, int8, with the scale of a step."""
    step, counts = GRID[bits]
    scale = codes["scale"].float() * step
    return QuantizedValues(lookup(codes, bits, grid_steps(counts), halves), scale, scale / 2)


def _norm(x: Tensor) -> Tensor:
    """Exact, so that it does not depend on how many tokens are encoded at once."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact_dtype(x.device)).float()
