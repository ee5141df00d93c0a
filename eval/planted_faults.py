"""Which tests find faults that are planted in a copy of the package, one at a time.

    python eval/planted_faults.py                   plants all of them and writes rows; --only NAME for some
    python eval/planted_faults.py --markdown        prints the table of the rows

The faults are in tests/planted_faults.toml. For each, the tests that are named with it run until the first fails, of the short suite, which
`make test` runs. A fault whose text is no longer in the package, or tests that fail without it, are an error.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "results" / "planted_faults.jsonl"
COPIED = ("qkvcache", "tests", "eval", "custom_generate", "pyproject.toml")
PASSED, FAILED, INTERRUPTED, NOT_OURS = 0, 1, 2, -1
"""Exit statuses of pytest; and of tests of another package."""
ENDED = "the process ended"
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in `file` of the package; `tests`: arguments of pytest, separated by spaces."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = [Fault(**fault) for fault in tomllib.loads((ROOT / "tests" / "planted_faults.toml").read_text())["fault"]]


def planted(fault: Fault, root: Path) -> tuple[Path, str]:
    """The file of the package under `root` and its text with the fault. Raises ValueError if the text to change is not there once."""
    path = root / "qkvcache" / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name!r}: {fault.old!r} is {text.count(fault.old)} times in qkvcache/{fault.file}, not once")
    return path, text.replace(fault.old, fault.new)


class First:
    """The first test that fails."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def _run(root: Path, tests: str, answer: Connection) -> None:
    """Runs tests of the copy under `root`, in a process of its own, and sends how they ended."""
    os.chdir(root)
    sys.path.insert(0, str(root))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1), os.dup2(nowhere, 2)
    first = First()
    status = pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", *shlex.split(tests)], [first])
    found = getattr(sys.modules.get("qkvcache"), "__file__", None) or root  # none, where pytest has found no test
    answer.send((int(status), first.name) if Path(found).is_relative_to(root) else (NOT_OURS, "another qkvcache was imported"))


def run(root: Path, tests: str) -> tuple[int, str]:
    """The exit status of pytest for tests of the copy under `root`, and the first test that failed."""
    receive, send = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_run, args=(root, tests, send))  # which need not import torch and transformers again
    child.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        return FAILED, ENDED
    finally:
        child.join()


@functools.cache
def copy_of(process: int) -> Path:
    """What a process plants faults in."""
    root = Path(tempfile.mkdtemp(prefix="planted")).resolve()
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, root / name)
    return root


def attempt(fault: Fault) -> dict:
    """The row of a fault. Raises ValueError for a fault that cannot be planted, or by tests that cannot run."""
    root = copy_of(os.getpid())
    path, text = planted(fault, root)
    before, begin = path.read_text(), time.time()
    path.write_text(text)
    status, failed = run(root, fault.tests)
    path.write_text(before)
    if status not in (PASSED, FAILED, INTERRUPTED):
        raise ValueError(f"{fault.name!r}: pytest ended with status {status} in {fault.tests}")
    print(f"{time.time() - begin:5.0f} s  {fault.name}: {failed or 'NOT FOUND'}", flush=True)
    return {"fault": fault.name, "file": fault.file, "found": status != PASSED, "by": failed}


def check(rows: list[dict]) -> None:
    """Raises ValueError if a test that found a fault fails without it."""
    names = dict.fromkeys(row["by"] for row in rows if row["found"] and row["by"] != ENDED)
    status, failed = run(copy_of(os.getpid()), shlex.join(names)) if names else (PASSED, "")
    if status != PASSED:
        raise ValueError(f"{failed or names} fails without a fault (status {status})")


def table(rows: list[dict]) -> str:
    """In markdown: each fault, and the test that finds it."""
    lines = [f"Of {len(rows)} faults the short suite finds {sum(row['found'] for row in rows)}.", ""]
    lines += ["| fault | in | found by |", "|---|---|---|"]
    files = {fault.name: fault.file for fault in FAULTS}  # which may have moved since
    for row in rows:
        by = "`{}`".format(re.sub(r".*::|\[.*", "", row["by"])) if row["found"] else "none"
        lines.append(f"| {row['fault']} | `{files.get(row['fault'], row['file'])}` | {by} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="faults whose names begin so; rows of others stay")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--markdown", action="store_true", help="print the table, without running tests")
    args = parser.parse_args(arguments)
    if args.markdown:
        print(table([json.loads(line) for line in RESULTS.read_text().splitlines()]))
        return 0
    for fault in FAULTS:
        planted(fault, ROOT)
    chosen = [fault for fault in FAULTS if args.only is None or fault.name.startswith(tuple(args.only))]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in ("torch", "transformers", "transformers.models.auto.modeling_auto", "hypothesis", "triton"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    with ProcessPoolExecutor(args.processes, FORK) as pool:
        rows = list(pool.map(attempt, chosen))
        pool.submit(check, rows).result()
    from harness import read_rows, replace_rows  # which imports the package, as no process above may

    replace_rows(RESULTS, "planted_faults", rows, "fault")
    print(table(read_rows(RESULTS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
