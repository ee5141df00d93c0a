"""What every test of a format does: encode, and decode."""

from __future__ import annotations

from torch import Tensor

from qkvcache.formats import Codec, Codes


def encode(codec: Codec, x: Tensor) -> Codes:
    """All buffers of one block, those kept once among them."""
    once = codec.fit(x)
    return codec.encode(x, once) | once


def roundtrip(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(encode(codec, x), x.shape[-1])


def error(codec: Codec, x: Tensor) -> float:
    """RMS of the difference over RMS of `x`."""
    return ((roundtrip(codec, x) - x).norm() / x.norm()).item()
