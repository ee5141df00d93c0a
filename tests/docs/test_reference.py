"""Every public name has its line in the reference, once, and a docstring."""

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

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


NAMES = [f"{module}.{name}" for module in PUBLIC for name in importlib.import_module(module).__all__ if name not in MODULES]
SHOWN = {id(found(line)): line for line in LINES}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_its_line(name):
    assert id(found(name)) in SHOWN, f"add `::: {name}` to a page under docs/reference"


@pytest.mark.parametrize("name", LINES)
def test_every_line_names_something_once(name):
    assert LINES[name] == 1
    thing = found(name)
    assert not callable(thing) or (getattr(thing, "__doc__", None) or "").strip(), f"{name} has no docstring"
