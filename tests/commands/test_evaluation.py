"""`qkvcache bench` and `qkvcache eval`."""

import json
import sys

import pytest

from qkvcache.evaluation import __main__ as shim
from tests.command import refuses, run


def test_bench_measures_each_cache_beside_the_dense_one():
    options = ("--tokens", "200", "--new-tokens", "8", "--device", "cpu", "--dtype", "float32", "--batch", "2")
    dense, int8, fp8 = json.loads(run("bench", "--formats", "int8", "fp8", "demo", *options, "--json").stdout)
    assert (dense["cache"], int8["cache"], fp8["cache"]) == ("dynamic", "int8", "fp8")
    assert dense["bytes_per_token"] == 5 * 2 * 2 * 128 * 4 and dense["ratio"] == dense["speedup"] == 1
    assert int8["ratio"] == fp8["ratio"] > 1.4
    for row in (dense, int8):
        assert row["tokens_per_second"] == pytest.approx(2e3 / row["decode_ms"]) and row["prompt_ms"] > row["decode_ms"] > 0
    evicting = run("bench", "demo", "--formats", "int8", "--policy", "h2o", "--budget", "60", "--preallocate", *options)
    for part in ("int8 + h2o 60", "ms a step", "demo on cpu in float32, 2 x 200 tokens"):
        assert part in evicting.stdout, evicting.output
    assert "MB peak" not in evicting.stdout  # which only a GPU tells


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--formats", "int9"), "int9"),
        (("--dtype", "int8"), "bfloat16, float16, float32"),
        (("--budget", "9"), "budget without a policy"),
        (("--policy", "h3o"), "h3o"),
        (("--policy", "h2o", "--budget", "0.5", "--preallocate"), "a share has no fixed size"),
        (("--tokens", "1"), "--tokens"),
    ],
)
def test_wrong_input_is_explained(arguments, says):
    refuses(says, "bench", "demo", *arguments)
    assert "'no/such/folder' does not exist" in run("bench", "no/such/folder").output


def test_eval_hands_everything_to_lm_eval(monkeypatch):
    given = []
    monkeypatch.setattr(shim, "main", given.append)
    assert run("eval", "run", "--model", "qkvcache", "--help").exit_code == 0
    assert given == [["run", "--model", "qkvcache", "--help"]]


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)
    refuses("pip install 'qkvcache[eval]'", "eval", "run", "--tasks", "hellaswag")
