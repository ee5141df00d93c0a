"""Keys and values in the model's dtype: the baseline of comparisons and the format of exact tests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Buffer, Codec, Codes, Format, PackedLayout, QuantizedValues


@dataclass(frozen=True)
class AsIs(Codec):
    """Vectors in the model's dtype: one buffer of D channels."""

    @property
    def packed_layout(self) -> PackedLayout:
        return PackedLayout("half", planes=("codes", "", ""))

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (Buffer("codes", None, head_dim),)

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        return {"codes": x}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return QuantizedValues(codes["codes"].float())


@dataclass(frozen=True)
class Identity(Format):
    """Keys and values in the model's dtype, without compression."""

    @property
    def name(self) -> str:
        return "identity"

    def codecs(self) -> tuple[Codec, Codec]:
        return AsIs(), AsIs()
