"""The commands of `qkvcache`: a file for each room that has some, which is deleted with it. Heavy modules are imported within a command, so
that `--help` is fast."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import typer

OF_ROOMS = {"planning": None, "evaluation": None, "prefix": "prefix", "batching": None}
"""The name under which the commands of a room stand; None: beside the others."""


def found() -> Iterator[tuple[typer.Typer, str | None]]:
    """Yields the commands of each room that is there."""
    for room, name in OF_ROOMS.items():
        if (Path(__file__).parent / f"{room}.py").exists():
            yield import_module(f".{room}", __package__).app, name
