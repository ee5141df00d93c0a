"""The benchmark of latents runs in its tiny form."""

import importlib

import pytest
from harness import read_rows
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

pytestmark = pytest.mark.skipif(not hasattr(DeepseekV3Attention, "expand_kv"), reason="this transformers caches no latents")


@pytest.fixture
def bench():
    return importlib.import_module("bench_latents")


def test_every_section_writes_rows_and_a_table(bench, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    bench.main(["--tiny", "--out", str(out)])
    rows = read_rows(out)
    assert {row["what"] for row in rows} == set(bench.SECTIONS) and not [row for row in rows if "failed" in row]
    shown = capsys.readouterr().out
    assert "times as fast" in shown
