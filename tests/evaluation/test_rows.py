"""Rows of results: a study that is measured again replaces its own, and no others."""

import sys

from qkvcache.evaluation.rows import provenance, read_rows, replace_rows


def test_rows_of_an_earlier_run_are_replaced(tmp_path):
    file = tmp_path / "results" / "rows.jsonl"
    assert read_rows(file) == []
    replace_rows(file, "one", [{"x": 1}, {"x": 2}])
    replace_rows(file, "two", [{"x": 3}])
    replace_rows(file, "one", [{"x": 4}])
    rows = read_rows(file)
    assert [(row["what"], row["x"]) for row in rows] == [("two", 3), ("one", 4)]
    assert all(row.keys() >= {"date", "commit", "torch", "transformers", "command"} for row in rows)


def test_a_row_names_no_place_of_its_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval/study.py", "--out", str(tmp_path / "rows.jsonl"), "--share", "0.5"])
    assert provenance()["command"] == "eval/study.py --out rows.jsonl --share 0.5"
