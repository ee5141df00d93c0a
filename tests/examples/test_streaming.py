"""The streaming example, made small."""

from harness import read_rows

from tests.examples.load import load


def test_memory_is_constant_and_perplexity_flat(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = load("streaming").main(f"--model demo --tokens 1500 --window 124 --every 500 --rows {file}".split())
    assert [row["seen"] for row in rows] == [500, 1000, 1500] * 3
    assert {row["stored"] for row in rows} == {128}
    for name in {row["cache"] for row in rows}:
        found = [row for row in rows if row["cache"] == name]
        assert len({row["bytes"] for row in found}) == 1
        assert max(row["perplexity"] for row in found) < 100
    assert len(read_rows(file)) == 9
