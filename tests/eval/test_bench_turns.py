"""The table of second turns is made of the rows; measuring says that it needs a GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

EVAL = Path(__file__).parents[2] / "eval"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(EVAL))
    spec = importlib.util.spec_from_file_location("bench_turns", EVAL / "bench_turns.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_table_shows_every_row(bench, capsys):
    bench.main(["--markdown"])
    out = capsys.readouterr().out
    rows = [row for row in bench.read_rows(bench.RESULTS) if row["what"] == "turns"]
    assert len(rows) > 30 and out.count("x, ") == len(rows)
    assert out in (EVAL / "README.md").read_text() + "\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_measuring_needs_a_gpu(bench, capsys, tmp_path):
    with pytest.raises(SystemExit):
        bench.main(["--out", str(tmp_path / "rows.jsonl")])
    assert "needs a GPU" in capsys.readouterr().err
