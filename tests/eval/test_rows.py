"""Rows of results: a study that is measured again replaces its own, and no others."""

from rows import read_rows, replace_rows


def test_rows_of_an_earlier_run_are_replaced(tmp_path):
    file = tmp_path / "results" / "rows.jsonl"
    assert read_rows(file) == []
    replace_rows(file, "one", [{"x": 1}, {"x": 2}])
    replace_rows(file, "two", [{"x": 3}])
    replace_rows(file, "one", [{"x": 4}])
    rows = read_rows(file)
    assert [(row["what"], row["x"]) for row in rows] == [("two", 3), ("one", 4)]
    assert all(row.keys() >= {"date", "commit", "torch", "transformers", "command"} for row in rows)
