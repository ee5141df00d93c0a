"""The benchmarks of a CPU run, and write what their tables show: decoding, and host time without a GPU."""

import importlib
import json
from pathlib import Path

import pytest
from harness import read_rows

from tests.processes import Program

SCRIPT = Path(__file__).parents[2] / "eval" / "bench_host.py"


def test_a_step_is_timed_without_launches(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "host.jsonl"
    Program(SCRIPT, ["--formats", "int8", "--steps", "5", "--rounds", "2", "--out", out]).result()
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["format"] == "int8" and row["update_us"] > 0 and row["step_us"] > 0


def test_decoding_is_compared_with_dynamic_cache(tmp_path, monkeypatch, capsys):
    bench = importlib.import_module("bench_cpu_decode")
    monkeypatch.setattr(bench, "REGISTRY", ["int8"])
    out = tmp_path / "rows.jsonl"
    bench.main(["--tokens", "600", "--rounds", "1", "--steps", "1", "--dtypes", "float32", "--threads", "1", "--out", str(out)])
    rows = {row["cache"]: row for row in read_rows(out)}
    assert rows["DynamicCache"]["of_dynamic"] == 1 and rows["int8"]["ms_per_token"] > 0
    assert rows["int8"]["bytes_per_token"] < rows["DynamicCache"]["bytes_per_token"]
    assert "float32, 1 thread" in capsys.readouterr().out
