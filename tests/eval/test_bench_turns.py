"""The table of second turns is made of the rows; measuring says that it needs a GPU."""

import bench_turns as bench
from harness import RESULTS, read_rows


def test_the_table_shows_every_row(capsys):
    bench.main(["--markdown"])
    out = capsys.readouterr().out
    rows = [row for row in read_rows(RESULTS / "turns.jsonl") if row["what"] == "turns"]
    assert len(rows) > 30 and out.count("x, ") == len(rows)


def test_every_section_has_a_table_and_a_line(tmp_path):
    same = {"rows": 1, "past": bench.PAST, "layers": bench.LAYERS, "device": "a GPU"}
    rows = [
        {"what": "turns", "cache": bench.DENSE, "new": 16, "ms": 60.0, "peak_bytes": 2**30} | same,
        {"what": "turns", "cache": "int8", "new": 16, "ms": 20.0, "peak_bytes": 2**20} | same,
        {"what": "attention", "cache": bench.SDPA, "backend": "cudnn, heads as rows", "new": 8, "us": 90.0} | same,
        {"what": "attention", "cache": "fp8", "new": 8, "us": 60.0} | same,
        {"what": "prefix", "cache": "int8", "new": bench.AFTER, "computed_ms": 600.0, "fetched_ms": 30.0} | same,
        {"what": "prefix", "cache": "turboquant_4bit_nc", "failed": "RuntimeError: out of memory"} | same,
    ]
    out = "\n\n".join(table.markdown() for table in bench.tables([*rows, rows[1] | {"device": "another"}]))
    assert out.startswith("a GPU:") and "another:" in out and out.count("3.0x") == 1  # nothing to compare with on the other
    assert "16: 20, 3.0x, 1" in out and "60 us, 1.50x" in out and "| 600 | 30 | 20.0 |" in out and "turboquant" not in out
    bench.plot(rows, tmp_path / "turns.png")
    assert (tmp_path / "turns.png").stat().st_size > 10_000
