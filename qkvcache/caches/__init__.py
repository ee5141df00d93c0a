"""Caches to pass as `cache`."""

from .base import CompressedCache, Memory
from .named import (
    CombinedCache,
    H2OCache,
    HadaQuantCache,
    NVFP4Cache,
    QuantizedPerTokenCache,
    SinkCache,
    SlidingWindowCache,
    TurboQuantCache,
)
from .warmup import warmup

__all__ = [
    "CombinedCache",
    "CompressedCache",
    "H2OCache",
    "HadaQuantCache",
    "Memory",
    "NVFP4Cache",
    "QuantizedPerTokenCache",
    "SinkCache",
    "SlidingWindowCache",
    "TurboQuantCache",
    "warmup",
]
