"""The benchmark of decoding on a CPU runs, and writes what its table shows."""

import bench_cpu_decode as bench
from harness import read_rows


def test_decoding_is_compared_with_dynamic_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "REGISTRY", ["int8"])
    out = tmp_path / "rows.jsonl"
    bench.main(["--tokens", "600", "--rounds", "1", "--steps", "1", "--dtypes", "float32", "--threads", "1", "--out", str(out)])
    rows = {row["cache"]: row for row in read_rows(out)}
    assert rows["DynamicCache"]["of_dynamic"] == 1 and rows["int8"]["ms_per_token"] > 0
    assert rows["int8"]["bytes_per_token"] < rows["DynamicCache"]["bytes_per_token"]
    assert "float32, 1 thread" in capsys.readouterr().out
