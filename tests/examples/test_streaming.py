"""The streaming example, made small."""

import importlib.util
from pathlib import Path

import pytest

from qkvcache.harness.rows import read_rows

PATH = Path(__file__).parents[2] / "examples" / "streaming.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("streaming", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_memory_is_constant_and_perplexity_flat(example, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = example.main(f"--tokens 3000 --window 124 --every 1000 --rows {file}".split())
    assert [row["seen"] for row in rows] == [1000, 2000, 3000] * 3
    assert {row["stored"] for row in rows} == {128}
    for name in {row["cache"] for row in rows}:
        found = [row for row in rows if row["cache"] == name]
        assert len({row["bytes"] for row in found}) == 1
        assert max(row["perplexity"] for row in found) < 100
    assert len(read_rows(file)) == 9
