"""`REGISTRY`: the formats to choose from, by name. Other options of a format's class are reached by the object.

To add one: write its file, list it here and in `tests/matrix.py`.
"""

from __future__ import annotations

from dataclasses import fields, replace

from .base import Format, hint
from .fp8 import FP8
from .hadaquant import HadaQuant
from .identity import Identity
from .int4 import Int4
from .int8 import Int8
from .nvfp4 import NVFP4
from .turboquant import PRESETS, TurboQuant

_FORMATS: tuple[Format, ...] = (
    Identity(), Int8(), FP8(), Int4(), Int4("vllm"), NVFP4("amax"), NVFP4(), *map(TurboQuant, PRESETS),
    HadaQuant(4, 3), HadaQuant(3, 3), HadaQuant(3, 2), HadaQuant(2, 2),
)  # fmt: skip

REGISTRY: dict[str, Format] = {format.name: format for format in _FORMATS}
"""The formats to choose from, by name: what a cache takes as `format=`, and the command line too."""

_BY_OPTIONS: tuple[Format, ...] = (
    Int8("token"), Int8(symmetric=False), Int8(halves=True), FP8(scale="token"), FP8(scale="tensor"), FP8(scale="tensor", frozen=True),
    FP8("e5m2"), FP8("e5m2", "token"), FP8("e5m2", "tensor"), FP8("e5m2", "tensor", frozen=True), Int4("group"),
    NVFP4("four_over_six"), TurboQuant(halves=True), HadaQuant(4, 4), HadaQuant(4, 2), HadaQuant(3, 4), HadaQuant(2, 4), HadaQuant(2, 3),
)  # fmt: skip
"""Formats that have names and are not registered, as some were in earlier releases, for the error that says how to reach them."""


def named(name: str) -> Format:
    """The registered format of this name. Raises ValueError for any other name."""
    if name in REGISTRY:
        return REGISTRY[name]
    for format in (*_FORMATS, *_BY_OPTIONS):
        options = {"center": False} if name.endswith("_uncentered") and hasattr(format, "center") else {}
        option = replace(format, **options)
        if option.name == name:
            changed = {f.name: value for f in fields(option) if (value := getattr(option, f.name)) != f.default}
            call = ", ".join(f"{key}={value!r}" for key, value in changed.items())
            raise ValueError(f"format={name!r} is not registered: pass the object formats.{type(option).__name__}({call})")
    raise ValueError(f"format={name!r} is unknown: {hint(name, REGISTRY)}")
