"""The study of formats reads all at once what a cache would hand back token by token."""

import importlib
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from rows import read_rows

from qkvcache import CompressedCache, demo
from qkvcache.formats import REGISTRY
from tests.reference import assert_close
from tests.tolerance import of_model


@pytest.fixture
def study():
    return importlib.import_module("formats")


@pytest.mark.parametrize(("name", "zones"), [("hadaquant_k3v3", (0, 0)), ("turboquant_4bit_nc", (4, 16))])
def test_one_pass_is_token_by_token(name, zones, study):
    sizes = {"context": 150, "windows": 2, "read_on": 10}
    bench = study.Bench(Namespace(model="demo", device="cpu", dtype="float32", text=Path("pydoc"), **sizes))
    format = REGISTRY[name]
    bench.codecs, bench.zones = lambda layer: (format.key, format.value), zones
    together = bench._read()
    bench.model.set_attn_implementation(bench.stock)
    cache = CompressedCache(bench.model.config, format=format, num_sink_tokens=zones[0], residual_length=zones[1], max_length=256)
    with torch.no_grad():
        for i, (key, value) in enumerate(bench.past):
            cache.update(key, value, i)
        steps = [bench.model(token, past_key_values=cache).logits.log_softmax(-1) for token in bench.rest.split(1, dim=1)]
    assert_close(torch.cat(steps, 1), together, of_model(bench.model, 256))
    assert (together - bench.dense).abs().max() > 0.05


def test_rows_and_tables_of_two_models_live_together(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study, "QUALITY", ["int8", "turboquant_3bit_nc"])
    file = tmp_path / "rows.jsonl"
    small = ["quality", "--context", "120", "--windows", "2", "--read-on", "6", "--out", str(file)]
    study.main(small)
    copy = tmp_path / "other"
    copy.symlink_to(demo.MODEL_PATH)
    study.main([*small, "--model", str(copy)])
    rows = read_rows(file)
    assert [row["what"] for row in rows] == ["formats_quality_demo"] * 4 + ["formats_quality_other"] * 4
    assert all(len(row["kls"]) == 2 and row["kl_error"] >= 0 and row["perplexity_ratio"] > 0.5 for row in rows)
    assert rows[2]["kl"] > 10 * rows[0]["kl"] > 0
    capsys.readouterr()
    study.main(["--markdown", "--model", str(copy), "--out", str(file)])
    said = capsys.readouterr().out
    assert said.count("| `") == 2 and "other on cpu: 2 x 6 tokens of pydoc after 120" in said
    study.main(["--show", "--out", str(file)])
    assert "other" in capsys.readouterr().out


def test_a_mean_of_other_prompts(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study, "FROZEN", ["turboquant_4bit_nc"])
    file = tmp_path / "rows.jsonl"
    study.main(["frozen", "--context", "120", "--windows", "2", "--read-on", "6", "--out", str(file)])
    rows = {(row["source"], row["residual_length"]): row["kls"] for row in read_rows(file)}
    assert len(rows) == 8 and len({tuple(kls) for kls in rows.values()}) == 8
    assert all(0 < kl < 1 for kls in rows.values() for kl in kls)
    capsys.readouterr()
    study.main(["frozen", "--markdown", "--out", str(file)])
    assert "| demo | `turboquant_4bit_nc` | ." in capsys.readouterr().out
