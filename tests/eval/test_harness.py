"""The harness: rows are replaced by their keys, tables are one in markdown and on the terminal, and time ends a study."""

import time

import harness
import pytest
from harness import Table, in_time, outcome, parser_of, pivot, read_rows, replace_rows, run_or_show


def test_rows_of_an_earlier_run_are_replaced(tmp_path):
    file = tmp_path / "results" / "rows.jsonl"
    assert read_rows(file) == []
    replace_rows(file, "one", [{"x": 1}, {"x": 2}])
    replace_rows(file, "two", [{"x": 3}])
    replace_rows(file, "one", [{"x": 4}])
    rows = read_rows(file)
    assert [(row["what"], row["x"]) for row in rows] == [("two", 3), ("one", 4)]
    assert all(row.keys() >= {"date", "commit", "torch", "transformers", "command"} for row in rows)


def test_with_keys_only_rows_of_the_same_case_are_replaced(tmp_path):
    file = tmp_path / "rows.jsonl"
    replace_rows(file, "one", [{"case": 1, "x": 1}, {"case": 2, "x": 2}], "case")
    replace_rows(file, "one", [{"case": 2, "x": 3}], "case")
    assert [(row["case"], row["x"]) for row in read_rows(file, "one")] == [(1, 1), (2, 3)]


def test_a_pivot_has_a_cell_for_each_line_and_column():
    rows = [{"a": "x", "b": "1", "c": 5}, {"a": "y", "b": "2", "c": 6}]
    table = pivot(rows, lambda row: row["a"], lambda row: row["b"], lambda row: str(row["c"]))
    assert table.headers == ["", "1", "2"] and table.lines == [["x", "5", ""], ["y", "", "6"]]
    shown = Table(table.headers, table.lines, "title", "caption", (" --- ", " ---: ")).markdown()
    assert shown == "title\n\n|  | 1 | 2 |\n| --- | ---: | ---: |\n| x | 5 |  |\n| y |  | 6 |\n\ncaption"
    assert table.rich().row_count == 2


def test_nothing_starts_that_would_end_too_late(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    done = []
    for task in in_time(range(9), minutes=1):
        done.append(task)
        clock[0] += 25
    assert done == [0, 1] and "no time left for 2" in capsys.readouterr().err


def test_a_failure_is_a_row_and_out_of_time_is_none():
    assert outcome(lambda: {"x": 1}) == {"x": 1}
    assert outcome(lambda: {"x": 1 / 0}) == {"failed": "ZeroDivisionError: division by zero"}


def test_a_benchmark_measures_or_shows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(harness.torch.cuda, "is_available", lambda: False)

    def run(*options: str, gpu: bool = True, plot=None) -> str:
        parser = parser_of("", "none")
        args = parser.parse_args(["--out", str(tmp_path / "rows.jsonl"), *options])
        measure = lambda args: replace_rows(args.out, "mine", [{"x": 3}])  # noqa: E731
        run_or_show(parser, args, measure, "mine", lambda rows: [Table(["x"], [[str(row["x"])] for row in rows])], plot, gpu)
        return capsys.readouterr().out

    for options, says in (((), "measuring needs a GPU"), (("--show",), "has no rows: measure first")):
        with pytest.raises(SystemExit):
            run(*options)
        assert says in capsys.readouterr().err
    assert "3" in run(gpu=False) and run("--markdown") == "| x |\n|---|\n| 3 |\n"
    with pytest.raises(SystemExit):
        run("--plot")
    assert "there is no picture" in capsys.readouterr().err
    drawn = []
    run("--plot", plot=lambda rows, path: drawn.append((len(rows), path.name)))
    assert drawn == [(1, "rows.png")]
