"""Storage formats of keys and values: plain torch, one file for each format. `base.py` defines what a format is.

To add one: write its file, list it in `registry.py` and in `tests/matrix.py`.
"""

from __future__ import annotations

from .base import Buffer, Codec, Codes, Format, PackedLayout, QuantizedValues
from .by_layer import FormatByLayer, FormatLike, resolve
from .fp8 import FP8
from .hadaquant import HadaQuant
from .identity import Identity
from .int4 import Int4
from .int8 import Int8
from .nvfp4 import NVFP4
from .registry import REGISTRY
from .turboquant import TurboQuant

__all__ = [
    "FP8",
    "NVFP4",
    "REGISTRY",
    "Buffer",
    "Codec",
    "Codes",
    "Format",
    "FormatByLayer",
    "FormatLike",
    "HadaQuant",
    "Identity",
    "Int4",
    "Int8",
    "PackedLayout",
    "QuantizedValues",
    "TurboQuant",
    "resolve",
]
