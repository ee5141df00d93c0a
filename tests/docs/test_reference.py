"""Every public name has its line in the reference, once, and a docstring."""

import ast
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


def test_every_argument_and_error_has_its_own_line():
    for path in (Path(__file__).parents[2] / "qkvcache").rglob("*.py"):
        if path.name.startswith("triton_"):
            continue  # tables of the arguments of kernels
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or not (text := ast.get_docstring(node)):
                continue
            named = {name.arg for name in ast.walk(node) if isinstance(name, ast.arg)}
            named |= {name.target.id for name in node.body if isinstance(name, ast.AnnAssign) and isinstance(name.target, ast.Name)}
            for name in re.findall(r"\. \**(\w+): ", text):
                assert name not in named and not name.endswith("Error"), f"{path.name}, {node.name}: {name} within a line"
