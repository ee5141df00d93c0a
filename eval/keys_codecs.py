"""Codecs that keys.py tries: they hand back what a reader would see, and store nothing.

Rounded      Lloyd-Max under a Hadamard rotation around a mean, as `formats.HadaQuant`, with a factor on the scale
Directions   the same, and beside it coefficients of a few orthonormal directions of each head in 8-bit floats; codes are of the rest
Halves       channels, or directions, in two halves by their energy, each with bits, rotation and scale of its own

`queries` are second moments of the queries of a first step, `[B, H, D, D]` for the KV heads, and a `basis` is what `principal` makes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qkvcache.formats import Codec, Codes, QuantizedValues
from qkvcache.formats.base import Buffer
from qkvcache.formats.centered import Centered
from qkvcache.formats.codebooks import grid_levels, midpoints
from qkvcache.formats.rotated import Rotated
from qkvcache.formats.rotation import Hadamard

SIGN = 0.7978845608
"""The level of 1 bit."""
FLOAT8 = torch.float8_e4m3fn


def round_levels(x: Tensor, bits: int, factor: float = 1.0) -> Tensor:
    """`[..., D]` as `formats.Rotated` hands it back; of 0 bits zeros. The scale keeps the length, times `factor`."""
    if not bits:
        return torch.zeros_like(x)
    norm = x.norm(dim=-1, keepdim=True)
    y = Hadamard().apply(x) * (x.shape[-1] ** 0.5 / (norm + 1e-8))
    bounds, levels = ((0.0,), (-SIGN, SIGN)) if bits == 1 else (midpoints(bits), grid_levels(bits))
    found = torch.tensor(levels, device=x.device)[torch.bucketize(y, torch.tensor(bounds, device=x.device), right=True)]
    return Hadamard().undo(found * (norm / found.norm(dim=-1, keepdim=True) * factor).half().float())


def mean_of(x: Tensor) -> Tensor:
    """That `Centered` keeps, `[B, H, 1, D]`."""
    return Centered(Rotated(2, None)).calibrate(x)["center"]


@dataclass(frozen=True, eq=False)
class Simulated(Codec):
    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return ()

    def calibrate(self, x: Tensor, is_valid: Tensor | None = None) -> Codes:
        return {"mean": mean_of(x)}

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        return {"x": statistics["mean"] + self.around(x - statistics["mean"], statistics)}

    def around(self, x: Tensor, statistics: Codes) -> Tensor:
        """What is handed back of `x`, from which the mean is taken."""
        raise NotImplementedError

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return QuantizedValues(codes["x"])


@dataclass(frozen=True, eq=False)
class Rounded(Simulated):
    bits: int
    factor: float = 1.0

    def around(self, x: Tensor, statistics: Codes) -> Tensor:
        return round_levels(x, self.bits, self.factor)


@dataclass(frozen=True, eq=False)
class Directions(Simulated):
    """The first `count` directions of `basis` `[B, H, D, D]`."""

    bits: int
    count: int
    basis: Tensor

    def calibrate(self, x: Tensor, is_valid: Tensor | None = None) -> Codes:
        statistics, basis = super().calibrate(x), self.basis[..., : self.count]
        size = ((x - statistics["mean"]) @ basis).square().mean(2, keepdim=True).sqrt()
        return statistics | {"basis": basis, "size": size.clamp_min(1e-20)}

    def around(self, x: Tensor, statistics: Codes) -> Tensor:
        basis, size = statistics["basis"], statistics["size"]
        part = ((x @ basis / size).clamp(-448, 448).to(FLOAT8).float() * size) @ basis.mT
        rest = round_levels(x - x @ basis @ basis.mT, self.bits)
        return part + rest - rest @ basis @ basis.mT


@dataclass(frozen=True, eq=False)
class Halves(Simulated):
    """`upper` bits for the half of most energy, `lower` for the other: of the directions of `basis` `[B, H, D, D]` in their order, or of
    channels in pairs, as RoPE has them, by their energy. With `queries`, channels go by the energy of query times key and are weighed by
    `(E q^2 / E k^2) ^ power`."""

    upper: int
    lower: int
    basis: Tensor | None = None
    queries: Tensor | None = None
    power: float = 0.0

    def calibrate(self, x: Tensor, is_valid: Tensor | None = None) -> Codes:
        statistics = super().calibrate(x)
        if self.basis is not None:
            return statistics | {"to": self.basis}
        dim, energy = x.shape[3], paired((x - statistics["mean"]).square().mean(2))
        asked = torch.ones_like(energy) if self.queries is None else paired(self.queries.diagonal(dim1=-2, dim2=-1))
        weights = (asked / energy.clamp_min(1e-20)) ** self.power
        order = (energy * asked).sort(dim=-1, descending=True, stable=True).indices
        basis = torch.eye(dim, device=x.device).expand(*order.shape, dim).gather(-2, order.unsqueeze(-1).expand(*order.shape, dim)).mT
        return statistics | {"to": basis * weights.unsqueeze(-1), "back": (basis / weights.unsqueeze(-1)).mT}

    def around(self, x: Tensor, statistics: Codes) -> Tensor:
        to = statistics["to"]
        halves = (x @ to).tensor_split(2, -1)
        return torch.cat([round_levels(half, b) for half, b in zip(halves, (self.upper, self.lower), strict=True)], -1) @ statistics.get(
            "back", to.mT
        )


def moments(x: Tensor) -> Tensor:
    """Second moments `[B, H, D, D]` of `[B, H, T, D]`."""
    return x.mT @ x / x.shape[2]


def paired(energy: Tensor) -> Tensor:
    """`[..., D]` with the mean of the two channels that RoPE turns into each other."""
    return energy.unflatten(-1, (2, -1)).mean(-2).repeat(*[1] * (energy.dim() - 1), 2)


def principal(keys: Tensor, queries: Tensor | None = None, count: int = 4) -> Tensor:
    """Orthonormal directions of second moments `[B, H, D, D]`, as columns, those of most energy first: of keys; or of keys and queries, so
    that outside of the first `count` the energy of keys times that of queries is small: each of the two weighs by what the last choice left
    of it."""
    if queries is None:
        return _sorted_eigenvectors(keys)
    both = [m.double() / m.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].double().clamp_min(1e-30) for m in (keys, queries)]
    left = [torch.ones_like(both[0][..., :1, :1])] * 2
    for _ in range(3):
        basis = _sorted_eigenvectors(both[0] / left[0] + both[1] / left[1])
        part = basis[..., :count].double()
        left = [(1 - (part * (m @ part)).sum((-2, -1))[..., None, None]).clamp_min(1e-3) for m in both]
    return basis


def _sorted_eigenvectors(matrix: Tensor) -> Tensor:
    return torch.linalg.eigh(matrix.double().cpu()).eigenvectors.flip(-1).float().to(matrix.device)  # a GPU takes them one by one
