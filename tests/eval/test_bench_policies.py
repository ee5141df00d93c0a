"""The bench of policies runs, writes a row for each policy, and records what fails in its row."""

import importlib

from harness import read_rows


def test_a_row_for_each_policy(tmp_path, capsys):
    bench_policies = importlib.import_module("bench_policies")
    out = tmp_path / "rows.jsonl"
    options = ["--tiny", "--context", "64", "--steps", "2", "--layers", "1", "--out", str(out)]
    names = ["keydiff", "kvzip", "snapkv_adakv", "snapkv_heads"]
    bench_policies.main([*options, "--policies", *names])
    bench_policies.main([*options, "--budget", "2", "--policies", "tova"])
    *rows, failed = read_rows(out)
    assert [row["policy"] for row in rows] == names
    assert all(row["prompt_ms"] > 0 and row["none_prompt_ms"] > 0 and row["step_ratio"] > 0 and "command" in row for row in rows)
    assert all(row["step_time"] == "clock" for row in rows)  # without a GPU
    assert failed["policy"] == "tova" and "budget=2" in failed["failed"]
    capsys.readouterr()
    bench_policies.main(["--markdown", "--out", str(out)])
    assert "| snapkv_heads |" in capsys.readouterr().out
