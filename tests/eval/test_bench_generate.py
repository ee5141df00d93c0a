"""The benchmark of `generate` on a tiny model: every row is there, a run that resumes adds none, tables come from the rows."""

import bench_generate as bench
import pytest
from harness import read_rows


@pytest.mark.slow
def test_rows_and_tables(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    options = ["--tiny", "--all", "--steps", "2", "--sections", "prefill", "eviction", "decode", "--cases", "1x8192"]
    options += ["--caches", "DynamicCache", "StaticCache", "H2O"]
    bench.main([*options, "--out", str(file)])
    rows = read_rows(file)
    found = {(row["section"], row["cache"], row["how"]): row for row in rows if "failed" not in row}
    assert found.keys() >= {("prefill", "StaticCache", "chunks"), ("eviction", "H2O", "whole"), ("decode", "DynamicCache", "random")}
    row = found["decode", "DynamicCache", "random"]
    assert row["steps"] == 2 and row["ms"] > 0 and row["cache_bytes"] > 0 and row["context"] == 64
    assert found["eviction", "H2O", "whole"]["prefill_s"] > 0
    assert "StaticCache, compiled" in capsys.readouterr().out
    bench.main([*options, "--resume", "--minutes", "0", "--out", str(file)])
    assert [row for row in read_rows(file) if "failed" not in row] == [row for row in rows if "failed" not in row]
    assert bench.fitting(lambda: 1) == 1
    assert bench.outcome(lambda: 1 / 0)["failed"].startswith("ZeroDivisionError")
