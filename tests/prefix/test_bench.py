"""The benchmark script, on a model as small as can be."""

import importlib

from rows import read_rows

TINY = "--layers 2 --hidden 64 --intermediate 96 --heads 4 --kv-heads 2 --head-dim 32 --vocabulary 100 --dtype float32 --device cpu"


def test_the_script_measures_and_checks(tmp_path):
    script = importlib.import_module("bench_prefix")
    rows = script.main(f"{TINY} --tokens 400 --repeats 1 --rows {tmp_path / 'rows.jsonl'} --directory {tmp_path}".split())
    assert [row["format"] for row in rows] == ["int8", "turboquant_4bit_nc"]
    for row in rows:
        assert row["same"] and all(row[name] > 0 for name in row if name.endswith(("_ms", "_share")))
        assert row["bytes"] < row["dense_bytes"] / 2 and row["bytes"] < row["disk_bytes"] < row["bytes"] + 10_000
    saved = read_rows(tmp_path / "rows.jsonl")
    assert len(saved) == 2 and {"commit", "torch", "machine"} <= saved[0].keys()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
