"""The benchmark of continuous batching runs on a CPU, and its rows are shown and drawn."""

import importlib
import json
import math

import pytest

from tests.releases import BATCHING

if not BATCHING:
    pytest.skip("continuous batching needs transformers 5.24", allow_module_level=True)


@pytest.fixture
def bench():
    return importlib.import_module("bench_batching")


@pytest.mark.slow
def test_it_measures_shows_and_draws(bench, tmp_path, capsys):
    out = tmp_path / "batching.jsonl"
    bench.main(["--tiny", "--device", "cpu", "--seconds", "0.5", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["cache"] for row in rows] == ["stock", "identity", "turboquant_4bit_nc"]
    for row in rows:
        assert "failed" not in row, row
        assert row["answered"] > 3 and row["sent"] >= row["answered"] + 3 and row["preempted"] == 0
        assert row["requests_s"] > 0 and row["prompt_s"] > row["written_s"] > 0
        assert 0 < row["ttft_median"] <= row["ttft_p95"] < row["seconds"] and not math.isnan(row["tpot_median"])
        assert row["pool_bytes"] < 1.3 * 0.002 * 2**30
    stock, exact, four = (row["pool_tokens"] for row in rows)
    assert four > 3 * exact > 2 * stock
    capsys.readouterr()
    bench.main(["--markdown", "--out", str(out)])
    assert capsys.readouterr().out.count("| 3 | ") == 3
    bench.main(["--plot", "--out", str(out)])
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_loads_are_the_same_for_every_cache(bench):
    cells = [bench.Cell(cache, 5, 2, (16, 1024), (2, 64), None) for cache in ("stock", "int8")]
    loads = [[bench.Load(cell, 64).request() for _ in range(1)] for cell in cells]
    assert loads[0] == loads[1]
    begun = [bench.Load(cells[0], 64).request(begun=begun) for begun in (False, True)]
    assert begun[0][1] > begun[1][1] > 0 and sum(len(prompt) + answer for prompt, answer in begun) == 2 * (len(begun[0][0]) + begun[0][1])
    load = bench.Load(cells[0], 64)
    lengths = sorted(load.lengths((16, 1024), 400).round())
    assert lengths[0] >= 16 and lengths[-1] <= 1024 and 100 < lengths[200] < 165


def test_a_cell_that_fails_is_noted_and_the_others_are_measured(bench, tmp_path, monkeypatch):
    out, stock = tmp_path / "batching.jsonl", bench.serve

    def serve(manager, load, *args):
        if load.cell.cache == "stock":
            raise RuntimeError("out of luck")
        return stock(manager, load, *args)

    monkeypatch.setattr(bench, "serve", serve)
    bench.main(["--tiny", "--device", "cpu", "--seconds", "0.5", "--caches", "stock", "identity", "--out", str(out)])
    failed, measured = (json.loads(line) for line in out.read_text().splitlines())
    assert failed["failed"] == "RuntimeError: out of luck" and measured["answered"]
