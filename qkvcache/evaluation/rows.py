"""Rows of results: one JSON object a line, each with the command and versions that reproduce it."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers


def provenance() -> dict[str, str]:
    """Date, commit, versions and the running command; absolute paths are reduced to their last part."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    command = " ".join(Path(word).name if Path(word).is_absolute() else word for word in sys.argv)
    return {"date": time.strftime("%Y-%m-%d"), "commit": _commit()} | versions | {"command": command}


@functools.cache
def _commit() -> str:
    return subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()


def read_rows(path: Path) -> list[dict]:
    """All rows of a file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def replace_rows(path: Path, what: str, rows: list[dict]) -> None:
    """Replaces the rows of the study `what` in a file by `rows`, with the provenance of this process."""
    write_rows(path, what, [row | provenance() for row in rows])


def write_rows(path: Path, what: str, rows: list[dict]) -> None:
    """Replaces the rows of the study `what` in a file by `rows`; a process that is killed leaves the file as it was before or is after."""
    others = [row for row in read_rows(path) if row["what"] != what]
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text("".join(json.dumps(row) + "\n" for row in others + [{"what": what} | row for row in rows]))
    aside.replace(path)
