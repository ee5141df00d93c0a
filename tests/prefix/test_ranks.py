"""Tensor parallelism: two gloo processes, each with one of two KV heads and a store of its own in one directory."""

import json
from pathlib import Path

import pytest

from tests.matrix import model
from tests.processes import ranks


@pytest.mark.slow
def test_ranks_go_on_from_the_same_token(tmp_path):
    model("llama").save_pretrained(tmp_path / "model")
    folder = tmp_path / "entries"
    for program in ranks(Path(__file__).with_name("tensor_parallel.py"), [tmp_path / "model", folder], 2):
        program.result()
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first[:2] == second[:2]
    # nothing, the first prompt, all but one after a restart, nothing once one rank has lost its file, and the shorter of two entries
    assert first[0] == [0, 40, 59, 0, 30]
    assert second[2] == 1
