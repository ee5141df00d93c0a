"""What users pass as `past_key_values`."""

from .base import CompressedCache, Memory
from .named import NVFP4Cache, QuantizedPerTokenCache, TurboQuantCache
from .warmup import warmup

__all__ = ["CompressedCache", "Memory", "NVFP4Cache", "QuantizedPerTokenCache", "TurboQuantCache", "warmup"]
