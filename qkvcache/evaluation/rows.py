"""Rows of results: one JSON object a line, each with what it takes to measure it again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers


def provenance() -> dict[str, str]:
    """Date, commit, versions and the command that is running; of paths that only its machine has, the name."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit} | versions | {"command": " ".join(map(_portable, sys.argv))}


def _portable(argument: str) -> str:
    return Path(argument).name if Path(argument).is_absolute() else argument


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def replace_rows(path: Path, what: str, rows: list[dict]) -> None:
    """Puts `rows`, all of the study `what`, in the place of its rows of an earlier run."""
    same = provenance()
    others = [row for row in read_rows(path) if row["what"] != what]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in others + [{"what": what} | row | same for row in rows]))
