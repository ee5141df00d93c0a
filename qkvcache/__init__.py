"""KV caches for Hugging Face transformers that stay compressed while attention reads them."""

from . import formats
from .attention import attach, detach
from .caches import CompressedCache, NVFP4Cache, QuantizedPerTokenCache, TurboQuantCache, warmup

__all__ = ["CompressedCache", "NVFP4Cache", "QuantizedPerTokenCache", "TurboQuantCache", "attach", "detach", "formats", "warmup"]
__version__ = "0.1.0"
