"""KV caches for Hugging Face transformers that stay compressed while attention reads them."""

from . import formats, policies
from .attention import attach, detach
from .batching import continuous_batching
from .caches import (
    CombinedCache,
    CompressedCache,
    H2OCache,
    HadaQuantCache,
    NVFP4Cache,
    QuantizedPerTokenCache,
    SinkCache,
    SlidingWindowCache,
    TurboQuantCache,
    warmup,
)
from .evaluation.calibrate import calibrate
from .evaluation.profile_heads import profile_heads
from .planning import plan, recommend
from .prefix import PrefixStore

__all__ = [
    "CombinedCache",
    "CompressedCache",
    "H2OCache",
    "HadaQuantCache",
    "NVFP4Cache",
    "PrefixStore",
    "QuantizedPerTokenCache",
    "SinkCache",
    "SlidingWindowCache",
    "TurboQuantCache",
    "attach",
    "calibrate",
    "continuous_batching",
    "detach",
    "formats",
    "plan",
    "policies",
    "profile_heads",
    "recommend",
    "warmup",
]
__version__ = "0.2.0"
