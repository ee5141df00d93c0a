"""The harness under tensor parallelism: two gloo processes, each with one of two KV heads, score as one process does."""

from pathlib import Path

import pytest
import torch

from tests.evaluation.asked import SHORT, TOKENIZER, cached, score
from tests.matrix import model
from tests.processes import ranks


@pytest.mark.slow
def test_two_ranks_score_as_one(tmp_path):
    model("llama").save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    for program in ranks(Path(__file__).with_name("tensor_parallel.py"), [tmp_path / "model", tmp_path / "out"], 2):
        program.result()
    two = torch.load(tmp_path / "out", weights_only=False)
    one = {}
    for cache, near in (("dynamic", 1e-5), ("turboquant_4bit_nc", 1e-3)):  # sums in another order may turn a code
        lm = cached(batch_size=4, cache=cache, **({} if cache == "dynamic" else SHORT))
        one[cache] = score(lm)
        torch.testing.assert_close(two[cache], one[cache], atol=10 * near, rtol=near)
        here, there = lm.get_model_info(), two[f"{cache} info"]
        assert (here["kv_tensor_parallel"], there["kv_tensor_parallel"]) == (1, 2)
        # Each rank has counts and tables of its own, which such a short text shows.
        assert there["kv_bytes_per_token"] == pytest.approx(here["kv_bytes_per_token"], rel=0.02)
    assert (one["turboquant_4bit_nc"] - one["dynamic"]).abs().max() > 0.1
