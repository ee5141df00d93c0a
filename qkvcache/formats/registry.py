"""`REGISTRY`: the formats to choose from, by name. Other options of a format's class are reached by the object.

To add one: write its file, list it here and in `tests/matrix.py`.
"""

from __future__ import annotations

from .base import Format, hint
from .fp8 import FP8
from .hadaquant import HadaQuant
from .identity import Identity
from .int4 import Int4
from .int8 import Int8
from .nvfp4 import NVFP4
from .turboquant import PRESETS, TurboQuant

_FORMATS = (
    Identity(), Int8(), FP8(), Int4(), Int4("vllm"), NVFP4("amax"), NVFP4(), *map(TurboQuant, PRESETS),
    HadaQuant(4, 3), HadaQuant(3, 3), HadaQuant(3, 2), HadaQuant(2, 2),
)  # fmt: skip

REGISTRY: dict[str, Format] = {format.name: format for format in _FORMATS}
"""The formats to choose from, by name: what a cache takes as `format=`, and the command line too."""


def named(name: str) -> Format:
    """The registered format of this name. Raises ValueError for any other name."""
    if name not in REGISTRY:
        raise ValueError(f"format={name!r} is unknown: {hint(name, REGISTRY)} Others are objects, such as formats.Int8(scale='token')")
    return REGISTRY[name]
