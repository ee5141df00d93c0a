"""Every public name has its line in the reference, once, and a docstring."""

import importlib
import re
from collections import Counter
from pathlib import Path

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
LINES = Counter(name for page in REFERENCE.glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE))
PUBLIC = ["qkvcache"]
PUBLIC += [f"qkvcache.{part}" for part in ("formats", "policies", "caches", "planning", "prefix", "attention", "batching")]
MODULES = {"formats", "policies", "demo", "models"}  # pages of their own


def found(path: str) -> object:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(found(module), name)


def test_every_public_name_has_its_line():
    names = [f"{module}.{name}" for module in PUBLIC for name in importlib.import_module(module).__all__ if name not in MODULES]
    shown = {id(found(line)) for line in LINES}
    for name in names:
        assert id(found(name)) in shown, f"add `::: {name}` to a page under docs/reference"


def test_every_line_names_something_once():
    for name, count in LINES.items():
        assert count == 1, name
        thing = found(name)
        assert not callable(thing) or (getattr(thing, "__doc__", None) or "").strip(), f"{name} has no docstring"
