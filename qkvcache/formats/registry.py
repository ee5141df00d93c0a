"""`REGISTRY`: every format by its name. To add one: write its file, list it here and in `tests/matrix.py`."""

from __future__ import annotations

from .base import Format, hint
from .fp8 import FP8
from .hadaquant import SPLITS, HadaQuant
from .identity import Identity
from .int4 import Int4
from .int8 import Int8
from .nvfp4 import NVFP4
from .turboquant import PRESETS, TurboQuant

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
)

REGISTRY: dict[str, Format] = {format.name: format for format in _FORMATS}
"""Every format under its name: what a cache takes as `format=`, and the command line too."""


def named(name: str) -> Format:
    """The registered format of this name. Raises ValueError for an unknown one."""
    if name not in REGISTRY:
        raise ValueError(f"format={name!r} is unknown: {hint(name, REGISTRY)}")
    return REGISTRY[name]
