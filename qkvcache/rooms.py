"""The rooms: features that know the core, register with it, and can be deleted (`tests/test_rooms.py`).

The core imports no room. A line of `ROOMS` names a folder; `room.py` in it holds what it registers, under these names:

    KINDS      kinds of layers (`layers/kinds.py`)
    MAKERS     classes that make the layers of a cache, by the option that asks for them (`caches/makers.py`)
    REFUSALS   combinations of options and models that the room does not serve (`caches/refusals.py`)
    OPTIONS    functions that check and read an option, by its name
    SAVED      classes of options that `CompressedCache.save` writes by name
    CHOICES    functions that say which cache serves a workload (`planning/recommend.py`), by the workload
"""

from __future__ import annotations

import functools
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOMS = (
    "hybrid",
    "latents",
    "evict",
    "select",
)
FEATURES = {"saving": "prefix", "convert": "prefix"}
"""Modules of rooms in which a method of caches is, which imports them when it is called: `save` and `load`; `from_cache`."""


@functools.cache
def _there() -> tuple[ModuleType, ...]:
    """The rooms that are there, imported on first use."""
    return tuple(import_module(f".{name}.room", __package__) for name in ROOMS if (Path(__file__).parent / name / "room.py").exists())


def registered(name: str) -> list[Any]:
    """What all rooms register under `name`."""
    return [x for room in _there() for x in getattr(room, name, ())]


def option(name: str, value: Any) -> Any:
    """The option `name` as the room that has it reads it; None for None. Raises what the room raises;
    NotImplementedError without the room."""
    if value is None:
        return None
    found = dict(registered("OPTIONS"))
    if name not in found:
        raise NotImplementedError(f"{name}={value!r}: this installation of qkvcache comes without it")
    return found[name](value)


def feature(name: str) -> ModuleType:
    """A module of `FEATURES`. Raises NotImplementedError without its room."""
    if not (Path(__file__).parent / FEATURES[name]).exists():
        raise NotImplementedError(f"{name}: this installation of qkvcache comes without {FEATURES[name]!r}")
    return import_module(f".{FEATURES[name]}.{name}", __package__)
