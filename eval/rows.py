"""Rows of results: one JSON object a line, each with the command and versions that reproduce it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from qkvcache.evaluation.provenance import provenance


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
