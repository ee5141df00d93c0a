"""What every test of a format does: encode, and decode."""

from __future__ import annotations

from torch import Tensor

from qkvcache.formats import Codec, Codes


def encode(codec: Codec, x: Tensor) -> Codes:
    """All buffers of one block, those kept once among them."""
    statistics = codec.calibrate(x)
    return codec.quantize(x, statistics) | statistics


def roundtrip(codec: Codec, x: Tensor) -> Tensor:
    return codec.dequantize(encode(codec, x), x.shape[-1])


def error(codec: Codec, x: Tensor) -> float:
    """RMS of the difference over RMS of `x`."""
    return ((roundtrip(codec, x) - x).norm() / x.norm()).item()
