"""The rooms of the package (`CONTRIBUTING.md`): what deleting one takes with it.

python eval/rooms.py                   the table: lines of each room, lines elsewhere that name it, files that join it to another room
python eval/rooms.py --delete evict    deletes rooms in copies, one at a time, and there runs ruff and pytest's collection
python eval/rooms.py --tests           deletes two rooms, which the date draws, and runs the short suite of the core in the copies
"""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "qkvcache"
WIDTH = 110
CORE = ("formats", "kernels", "storage", "attention", "layers", "caches", "autocast", "releases", "rooms", "__init__")
ROOMS = {
    "evict": r"[Ee]vict|polic(y|ies)\b|Policy",
    "select": r"attention_budget|AttentionBudget|offload_pages|select_blocks|fetch_blocks|Selection|BlockCache",
    "latents": r"latent|[Ii]ndexe[rd]",
    "hybrid": r"[Hh]ybrid|recurrent",
    "prefix": r"[Pp]refix\b|PrefixStore",
    "batching": r"\bbatching|Batching",
    "planning": r"\bplanning|\brecommend\b",
    "evaluation": r"\bevaluation\b|\bcalibrate\(|profile_heads",
}
"""Rooms, and what names them elsewhere."""
FOLDERS = {"evict": ("evict", "policies")}
"""The folder and the files of a room, if it has more than a folder of its name."""


@functools.cache
def modules() -> dict[str, Path]:
    """Files of the package by the names of their modules."""
    names = {path.relative_to(ROOT).with_suffix(""): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in names.items()}


def room_of(module: str) -> str:
    """The part of the package that a module is in: a room, of which `commands` has a file, or the first folder or file of its path."""
    parts = module.split(".")[1:] or ["__init__"]
    first = parts[parts[0] == "commands" and len(parts) > 1]
    return next((room for room in ROOMS if first in FOLDERS.get(room, (room,))), first)


def imported(path: Path, package: list[str], run: bool) -> set[str]:
    """Modules of the package that a file imports. `run`: only those that importing the file imports, not within functions or for types."""
    found = set()
    for node in _statements(ast.parse(path.read_text()), run):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("qkvcache")}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            if module.split(".")[0] == "qkvcache":
                found |= {_home(module, alias.name) for alias in node.names}
    return found


def _home(module: str, name: str) -> str:
    """The module that `from module import name` loads."""
    inner = f"{module}.{name}"
    if module == "qkvcache" and (home := public_names().get(name)):
        return f"qkvcache.{home}"
    of_room = module == "qkvcache" and room_of(inner) in ROOMS  # which may not be there
    return inner if inner in modules() or of_room else module


@functools.cache
def public_names() -> dict[str, str]:
    """The modules of the public names of `qkvcache`, which it imports on first use."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES"]
    return {name: home for home, names in ast.literal_eval(assigned[0].value).items() for name in names}


def _statements(tree: ast.AST, run: bool) -> Iterable[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if run and (for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            continue
        yield node
        yield from _statements(node, run)


@functools.cache
def graph(run: bool) -> dict[str, set[str]]:
    """The modules of the package that each module imports."""
    found = {}
    for module, path in modules().items():
        package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        found[module] = imported(path, package, run) & modules().keys() - {module}
    return found


def broken(room: str) -> set[str]:
    """Modules outside of a room that cannot be imported without it."""
    gone = {module for module in modules() if room_of(module) == room}
    while more := {module for module, found in graph(True).items() if found & gone} - gone:
        gone |= more
    return {module for module in gone if room_of(module) != room}


def lines(module: str) -> int:
    """The lines of a module of at most `WIDTH` columns; longer ones count as often as they would be broken."""
    return sum(max(1, math.ceil(len(line) / WIDTH)) for line in modules()[module].read_text().splitlines())


def core_lines() -> int:
    return sum(lines(module) for module in modules() if room_of(module) in CORE)


def names_of(room: str) -> dict[str, int]:
    """The number of lines that name a room, by module outside of it."""
    pattern = re.compile(ROOMS[room])
    elsewhere = [module for module in modules() if room_of(module) != room]
    counts = {module: sum(bool(pattern.search(line)) for line in modules()[module].read_text().splitlines()) for module in elsewhere}
    return {module: count for module, count in counts.items() if count}


def table() -> list[tuple[str, int, int, int, str]]:
    """For each room, its lines, the lines elsewhere that name it, the files of these lines, and the modules that are deleted with it."""
    rows = []
    for room in ROOMS:
        own, named = sum(lines(module) for module in modules() if room_of(module) == room), names_of(room)
        rows.append((room, own, sum(named.values()), len(named), ", ".join(sorted(broken(room)))))
    return rows


def device_functions() -> dict[str, int]:
    """The number of parameters of the functions in Triton's language."""
    found = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(by) for by in node.decorator_list):
                found[f"{module}.{node.name}"] = len(node.args.args)
    return found


def records() -> dict[str, int]:
    """The number of fields of the core's records, dataclasses and named tuples; what all of a class have is no field."""
    found = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())) if room_of(module) in CORE else ():
            if isinstance(node, ast.ClassDef):
                record = any("dataclass" in ast.unparse(by) for by in node.decorator_list)
                if record or any(ast.unparse(base) == "NamedTuple" for base in node.bases):
                    own = [x for x in node.body if isinstance(x, ast.AnnAssign) and "ClassVar" not in ast.unparse(x.annotation)]
                    found[f"{module}.{node.name}"] = len(own)
    return found


def delete(room: str, into: Path, names: Sequence[str] = ("qkvcache", "tests", "eval", "examples", "docs")) -> None:
    """A copy in `into` of folders of the repository without a room: without its folder, its line of registration, its tests, and the files
    that join it to others."""
    for name in names:
        shutil.copytree(ROOT / name, into / name, copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for path in ROOT.glob("*.*"):
        if path.suffix in (".toml", ".md", ".yml"):
            shutil.copy(path, into / path.name)
    for module in (module for module in modules() if room_of(module) == room):
        (into / modules()[module].relative_to(ROOT)).unlink()
    for where in ("qkvcache", "tests"):
        shutil.rmtree(into / where / room, ignore_errors=True)
    for module in broken(room):
        (into / modules()[module].relative_to(ROOT)).unlink()
    registration = into / "qkvcache" / "rooms.py"
    text = re.sub(rf'^    "{room}",\n', "", registration.read_text(), flags=re.MULTILINE)
    registration.unlink()  # which is a link
    registration.write_text(text)


@functools.cache
def gone() -> frozenset[str]:
    """The rooms that were deleted."""
    return frozenset(room for room in ROOMS if not (PACKAGE / room).exists())


@functools.cache
def needed(path: Path, helper: bool = False) -> frozenset[str]:
    """Modules of the package that a file of tests needs; of the tests of a room, too, by the names that they have in the package. It needs
    what the helpers and scripts that it imports need to be imported. `helper`: the file is one of these."""
    tests, found = path.parent, imported(path, ["tests"], run=helper)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            base = ["tests", *tests.relative_to(ROOT / "tests").parts] if node.level else []
            names = [".".join([*base, *filter(None, [module])]), *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        else:
            continue
        for name in names:
            if name.startswith("tests.") and (room := name.split(".")[1]) in ROOMS:
                found.add(f"qkvcache.{room}")
            file = ROOT.joinpath(*(name if name.startswith("tests.") else f"eval.{name}").split(".")).with_suffix(".py")
            if file.exists() and file != path and file.stem != "rooms":
                found |= needed(file, True)
    return frozenset(found)


def check(room: str, *commands: list[str]) -> bool:
    """Whether commands, run in a copy without the room, succeed."""
    with tempfile.TemporaryDirectory() as folder:
        delete(room, Path(folder))
        for command in commands:
            print(f"without {room}: {' '.join(command[2:])}", flush=True)
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                print(done.stdout[-6000:], done.stderr[-3000:])
                return False
    return True


def drawn() -> list[str]:
    """Two rooms, others each day."""
    return random.Random(datetime.date.today().toordinal()).sample(sorted(ROOMS), 2)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delete", nargs="*", choices=[*ROOMS], help="these rooms, or without a name all")
    parser.add_argument("--tests", action="store_true")
    options = parser.parse_args(arguments)
    python = [sys.executable, "-m"]
    if options.delete is not None:
        collects = [*python, "pytest", "-q", "--collect-only", "tests"]
        return int(not all([check(room, [*python, "ruff", "check", "."], collects) for room in options.delete or ROOMS]))
    if options.tests:
        suite = [*python, "pytest", "-n", "auto", "--dist", "worksteal", "-m", "not slow", *(f"tests/{part}" for part in CORE[:6])]
        return int(not all([check(room, [*python, "mypy"], suite) for room in drawn()]))
    for row in (("room", "lines", "lines elsewhere that name it", "files", "goes with it"), *table()):
        print("  ".join(f"{x!s:<12}" for x in row))
    print(f"\nThe core has {core_lines():,} lines of at most {WIDTH} columns.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
