"""Recall of a context: tasks whose answers stand in it, and numbers relative to the dense run."""

import importlib
import json
import math
from types import SimpleNamespace

import pytest
from harness import read_rows

from qkvcache import demo, policies


@pytest.fixture
def bench():
    return importlib.import_module("recall_bench")


@pytest.fixture
def tasks():
    return importlib.import_module("recall_tasks")


@pytest.fixture(scope="module")
def loaded():
    return demo.load()


@pytest.fixture
def writer(tasks, loaded):
    tokenizer = loaded[1]
    return tasks.Writer(tokenizer, demo.text_ids(tokenizer), tasks.STYLES["number"])


def test_answers_stand_in_the_context(tasks, writer):
    decode = writer.tokenizer.decode
    for task in tasks.TASKS:
        made = tasks.example(task, writer, 900, 3)
        assert made == tasks.example(task, writer, 900, 3) != tasks.example(task, writer, 900, 4)
        assert 850 < len(made.context) < 950
        context = decode(made.context)
        for question in made.questions:
            assert question.free == (task == "text") and (question.free or decode(question.answer).strip() in context)


def test_every_policy_of_the_registry_is_measured(bench):
    profile = policies.HeadProfile((((1.0, 0.0), (1.0, 0.0)), ((1.0, 1.0), (0.0, 0.0))))
    made = SimpleNamespace(profile=lambda: profile)
    for name in (*policies.REGISTRY, "h2o_heads"):
        budgets = bench.Bench.policy(made, name, 200, 400).budgets
        assert sum(budget.tokens for budget in budgets) == 200 * len(budgets) and len(budgets) == (2 if "_heads" in name else 1)


def test_rows_of_shards_become_one(bench, tmp_path):
    parts = [tmp_path / f"{shard}.jsonl" for shard in range(2)]
    same = {"what": "study", "policy": "h2o", "budget": 0.5, "tokens": 500, "format": "identity"}
    for shard, part in enumerate(parts):
        part.write_text(json.dumps(same | {"contexts": {"needle": {str(shard): {"recall": shard}}}}) + "\n")
    bench.merge(merged := tmp_path / "merged.jsonl", "study", parts)
    assert read_rows(merged) == [same | {"contexts": {"needle": {"0": {"recall": 0}, "1": {"recall": 1}}}}]


def rows_of(policy, budget, recalls, kl=0.1, **more):
    contexts = {
        "needle": {str(i): {"recall": x, "ll": -1 + x} for i, x in enumerate(recalls)},
        "words": {str(i): {"recall": 0.1, "ll": -3.0} for i in range(len(recalls))},
        "text": {str(i): {"kl": kl + 0.1 * i} for i in range(len(recalls))},
    }
    same = {"what": "policies_recall_demo", "model": "demo", "tokens": 500, "format": "identity"}
    return same | {"policy": policy, "budget": budget, "contexts": contexts} | more


def test_recall_is_relative_to_the_dense_run_with_its_error(bench):
    dense, half = rows_of("dense", 1.0, [1.0, 0.5, 0.75]), rows_of("h2o", 0.5, [0.5, 0.25, 0.75])
    assert bench.counted(dense) == ["needle"]
    value, error = bench.relative_recall(half, dense, ["needle"])
    residuals = [0.5 - 2 / 3 * 1.0, 0.25 - 2 / 3 * 0.5, 0.75 - 2 / 3 * 0.75]
    assert value == pytest.approx(2 / 3)
    assert error == pytest.approx(math.sqrt(sum(x * x for x in residuals) / 2 / 3) / 0.75)
    assert bench.lost(half, dense, ["needle"])[0] == pytest.approx(0.25)
    assert bench.divergence(half)[0] == pytest.approx(0.2)
    del half["contexts"]["needle"]["0"]  # what one row lacks is compared in neither
    assert bench.relative_recall(half, dense, ["needle"])[0] == pytest.approx(1.0 / 1.25)
