"""The benchmark script, on a model as small as can be."""

import bench_prefix as script
from harness import read_rows


def test_the_script_measures_and_checks(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    script.main(["--tiny", "--tokens", "400", "--repeats", "1", "--out", str(out), "--directory", str(tmp_path)])
    rows = read_rows(out)
    assert [row["format"] for row in rows] == ["int8", "turboquant_4bit_nc"]
    for row in rows:
        assert row["same"] and all(row[name] > 0 for name in row if name.endswith(("_ms", "_share")))
        assert row["bytes"] < row["dense_bytes"] / 1.5 and row["bytes"] < row["disk_bytes"] < row["bytes"] + 10_000
        assert {"commit", "torch", "machine"} <= row.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    capsys.readouterr()
    script.main(["--markdown", "--out", str(out)])
    assert capsys.readouterr().out.count("| yes |") == 2


def test_a_hybrid_resumes_at_ends_and_checkpoints(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    script.main(["--section", "hybrids", "--tiny", "--tokens", "256", "--out", str(out)])
    found = {(row["scenario"], row["way"]): row for row in read_rows(out)}
    reused = {case: row["reused"] for case, row in found.items()}
    assert all(not any(reused[scenario, script.DENSE]) for scenario in ("chat", "agent"))
    assert reused["chat", script.ENDS] == [0, 255, 0] and reused["chat", script.STORE] == [0, 255, 128]
    assert reused["agent", script.STORE] == [0, 95, 127, 159, 191, 223]
    script.main(["--section", "hybrids", "--markdown", "--out", str(out)])
    assert "| the last of them | 256 | 223 |" in capsys.readouterr().out
