"""How one block of keys or values is stored: plain torch, one file a format. `base.py` says what a format is.

To add one: write its file, list it below and in `tests/matrix.py`.
"""

from __future__ import annotations

from .base import Buffer, Codec, Codes, Format, Levels, hint
from .fp8 import FP8
from .hadaquant import SPLITS, HadaQuant
from .identity import Identity
from .int4 import Int4
from .int8 import Int8
from .nvfp4 import NVFP4
from .turboquant import PRESETS, TurboQuant

__all__ = [
    "FP8",
    "NVFP4",
    "REGISTRY",
    "Buffer",
    "Codec",
    "Codes",
    "Format",
    "HadaQuant",
    "Identity",
    "Int4",
    "Int8",
    "Levels",
    "TurboQuant",
    "resolve",
]

_FORMATS: tuple[Format, ...] = (
    Identity(),
    Int8(),
    Int8(scale="token"),
    Int8(symmetric=False),
    Int8(center=False),
    FP8(),
    FP8(center=False),
    FP8(scale="token"),
    FP8(scale="tensor"),
    FP8(scale="tensor", frozen=True),
    FP8("e5m2"),
    FP8("e5m2", scale="token"),
    FP8("e5m2", scale="tensor"),
    FP8("e5m2", scale="tensor", frozen=True),
    Int4(),
    Int4(center=False),
    Int4("vllm"),
    Int4("group"),
    *(NVFP4(search) for search in ("amax", "four_over_six", "mse")),
    NVFP4("amax", center=False),
    *(TurboQuant(preset, center) for preset in PRESETS for center in (True, False)),
    *(HadaQuant(*bits) for bits in SPLITS),
    *(HadaQuant(*bits, "trellis") for bits in SPLITS),
)

REGISTRY: dict[str, Format] = {format.name: format for format in _FORMATS}
"""Every format under its name: what a cache takes as `format=`, and the command line too."""


def resolve(format: str | Format) -> Format:
    """A registry name, or a Format, to the Format."""
    if isinstance(format, Format):
        return format
    if not isinstance(format, str):
        raise TypeError(f"format={format!r}: expected a name or a qkvcache.formats.Format, not {type(format).__name__}")
    if format not in REGISTRY:
        raise ValueError(f"format={format!r} is unknown: {hint(format, REGISTRY)}")
    return REGISTRY[format]
