"""The benchmark script, on a model as small as can be."""

import importlib

from harness import read_rows


def test_the_script_measures_and_checks(tmp_path, capsys):
    script, out = importlib.import_module("bench_prefix"), tmp_path / "rows.jsonl"
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
