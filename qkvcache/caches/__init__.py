"""Caches to pass as `cache`."""

from .base import CompressedCache, Memory
from .named import (
    HadaQuantCache,
    NVFP4Cache,
    QuantizedPerTokenCache,
    TurboQuantCache,
)
from .warmup import warmup

__all__ = [
    "CompressedCache",
    "HadaQuantCache",
    "Memory",
    "NVFP4Cache",
    "QuantizedPerTokenCache",
    "TurboQuantCache",
    "warmup",
]
