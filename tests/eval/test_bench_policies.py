"""The bench of policies runs, writes a row for each policy, and records what fails in its row."""

import importlib
import json


def test_a_row_for_each_policy(tmp_path, capsys):
    bench_policies = importlib.import_module("bench_policies")
    out = tmp_path / "rows.jsonl"
    options = ["--quick", "--context", "64", "--steps", "2", "--layers", "1", "--out", str(out)]
    bench_policies.main([*options, "--policies", "keydiff", "kvzip", "snapkv_critical", "snapkv_adakv", "snapkv_heads"])
    bench_policies.main([*options, "--budget", "2", "--policies", "tova"])
    *rows, failed = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["policy"] for row in rows] == ["keydiff", "kvzip", "snapkv_critical", "snapkv_adakv", "snapkv_heads"]
    assert all(row["prompt_ms"] > 0 and row["none_prompt_ms"] > 0 and row["step_ratio"] > 0 and "command" in row for row in rows)
    assert all(row["step_time"] == "clock" for row in rows)  # without a GPU
    assert "prompts of 64 tokens" in capsys.readouterr().out
    bench_policies.main([*options, "--plan"])
    assert "16 policies" in capsys.readouterr().out and len(out.read_text().splitlines()) == 6
    assert failed["policy"] == "tova" and "budget=2" in failed["error"]
