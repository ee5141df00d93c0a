"""KV caches for Hugging Face transformers that stay compressed while attention reads them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import formats
    from .batching import continuous_batching
    from .caches import CompressedCache, HadaQuantCache, NVFP4Cache, QuantizedPerTokenCache, TurboQuantCache
    from .caches.attach import attach, detach
    from .caches.warmup import warmup
    from .evaluation.calibrate import calibrate
    from .evaluation.profile_heads import profile_heads
    from .evict import policies
    from .evict.caches import CombinedCache, H2OCache, SinkCache, SlidingWindowCache
    from .planning.plan import plan
    from .planning.recommend import recommend
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
__version__ = "0.4.0"

_PARTS = {"attention", "batching", "caches", "demo", "evaluation", "formats", "kernels", "layers", "models"}
_PARTS |= {"evict", "hybrid", "latents", "planning", "policies", "prefix", "select", "storage"}
_NAMES = {
    "batching": ("continuous_batching",),
    "caches.attach": ("attach", "detach"),
    "evaluation.calibrate": ("calibrate",),
    "evaluation.profile_heads": ("profile_heads",),
    "evict.caches": ("CombinedCache", "H2OCache", "SinkCache", "SlidingWindowCache"),
    "planning": ("plan", "recommend"),
    "prefix": ("PrefixStore",),
}
"""Names that are not of `caches`, by their modules."""


def __getattr__(name: str) -> Any:
    """Imports a name's module on first use, since torch and transformers take seconds."""
    if name in _PARTS:
        return import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _NAMES.items() if name in names), "caches")
    found = globals()[name] = getattr(import_module(f".{home}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
