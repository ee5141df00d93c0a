"""The model's own dtype, stored as it is: the baseline of every comparison and the format of exact tests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Buffer, Codec, Codes, Format, Levels


@dataclass(frozen=True)
class AsIs(Codec):
    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (Buffer("codes", None, head_dim),)

    def encode(self, x: Tensor, once: Codes) -> Codes:
        return {"codes": x}

    def unpack(self, codes: Codes, head_dim: int) -> Levels:
        return Levels(codes["codes"].float())


@dataclass(frozen=True)
class Identity(Format):
    """Nothing is compressed."""

    @property
    def name(self) -> str:
        return "identity"

    def codecs(self) -> tuple[Codec, Codec]:
        return AsIs(), AsIs()
