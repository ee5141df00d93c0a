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
from .codebooks import GRID, UPPER, grid_levels, grid_steps, midpoints
from .packing import code_buffers, lookup, pack, plane_names, rank
from .rotation import Hadamard, exact_dtype, number_of


@dataclass(frozen=True)
class Rotated(Codec):
    """Lloyd-Max codes of `bits` under a rotation, with one scale a token and head: each channel goes to the level that is nearest by the
    exact midpoints, and a midpoint goes up."""

    bits: Literal[2, 3, 4]
    rotation: Hadamard | None = Hadamard()

    @property
    def _halves(self) -> bool:
        return self.bits == 4

    @property
    def packed_layout(self) -> PackedLayout:
        planes = (*plane_names(self.bits, self._halves), "scale")
        return PackedLayout(f"lut{self.bits}", "fp16", planes=planes, rotation=number_of(self.rotation))

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (*code_buffers(self.bits, head_dim, self._halves), Buffer("scale", torch.float16, 1, "scales"))

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        norm = _norm(x)
        y = self.rotate(x).float() * (x.shape[-1] ** 0.5 / (norm + 1e-8))
        codes = pack(rank(y, midpoints(self.bits)), self.bits, self._halves)
        levels = lookup(codes, self.bits, grid_levels(self.bits), self._halves)
        return codes | {"scale": (norm / _norm(levels)).half()}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        step, counts = GRID[self.bits]
        return _in_steps(lookup(codes, self.bits, grid_steps(counts), self._halves), codes["scale"].float() * step)

    def unpack_upper(self, codes: Codes, head_dim: int) -> QuantizedValues:
        """`unpack` of the upper halves, to evenly spaced levels (`codebooks.UPPER`). Scores have about the error of `Rotated(2)`."""
        return _in_steps(lookup({"codes": codes["high"]}, 2, grid_steps((0, 1))), codes["scale"].float() * (UPPER * GRID[4][0]))


def _in_steps(levels: Tensor, scale: Tensor) -> QuantizedValues:
    """Levels of `grid_steps`, int8, as quantized values with steps of `scale`."""
    return QuantizedValues(levels, scale, scale / 2)


def _norm(x: Tensor) -> Tensor:
    """Exact, so that it does not depend on how many tokens are encoded at once."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact_dtype(x.device)).float()
