"""`eval/bench_host.py` times a step without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "eval" / "bench_host.py"


def test_a_step_is_timed(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "host.jsonl"
    subprocess.run([sys.executable, SCRIPT, "--formats", "int8", "--steps", "40", "--rounds", "2", "--out", out], check=True)
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["format"] == "int8" and row["update_us"] > 0 and row["step_us"] > 0
