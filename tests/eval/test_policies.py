"""The study of policies, made small: tasks whose answers stand in the context, cells, rows of a shard, tables, pictures."""

import importlib
import json
import math
import random

import pytest
import torch
from harness import read_rows

from qkvcache import demo, policies


@pytest.fixture
def study():
    return importlib.import_module("policies")


@pytest.fixture
def tasks(study):
    return importlib.import_module("policies_tasks")


@pytest.fixture
def tables(study):
    return importlib.import_module("policies_tables")


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
            assert all(decode(question.answer[a:b]).strip() in context for a, b in question.parts)
            assert bool(question.parts) == (task != "text")
        if task == "copy":
            first = made.questions[0]
            assert decode(first.ids[-16:] + first.answer) in context
        if task == "words":
            words = context.replace(",", "").split()
            assert max(set(words), key=words.count) == decode(made.questions[0].answer).strip()


def test_steps_of_a_chain_lead_from_the_last_name_to_the_number(tasks, writer):
    made = tasks.variables(writer, random.Random(1), 900)
    text = [writer.tokenizer.decode(question.ids) for question in made.questions]
    answers = [writer.tokenizer.decode(question.answer).strip() for question in made.questions]
    for begin in range(0, 12, 3):
        assert f"of {answers[begin]} is the same" in text[begin + 1]
        assert f"of {answers[begin + 1]}?" in text[begin + 2] and answers[begin + 2].isdigit()


@pytest.mark.slow
def test_one_step_measures_what_the_model_says_of_the_whole(study, tasks, loaded):
    """A budget that holds everything: rows of different lengths, questions seen or not, are those of a plain forward."""
    model, tokenizer = loaded
    bench = study.Bench(parsed(study, "--tasks multikey --tokens 500"))
    made = tasks.example("multikey", bench.writer, 500, 0)
    for seen in (False, True):
        found = bench.measure(study.Cell("h2o", 1.5, "multikey", 500, seen, "identity", 0))
        right, likelihood = [], []
        for question in made.questions[: study.SEEN_QUESTIONS if seen else None]:
            ids = torch.tensor([made.context + question.ids + question.answer])
            with torch.no_grad():
                log_probs = model(ids).logits[0, -len(question.answer) - 1 : -1].log_softmax(-1)
            of = log_probs.gather(-1, ids[0, -len(question.answer) :, None])
            right.append(float((log_probs.argmax(-1) == ids[0, -len(question.answer) :])[int(seen) :].all()))
            likelihood.append(of[int(seen) :].mean().item())  # a seen question predicts the first token before anything is evicted
        assert found["recall"] == pytest.approx(sum(right) / len(right), abs=1e-3)
        assert found["ll"] == pytest.approx(sum(likelihood) / len(likelihood), rel=5e-3, abs=1e-4)


def test_the_order_of_cells_gives_a_balanced_table_early(study):
    args = parsed(study, "--tokens 500 900 --budgets 0.5 0.25 --policies h2o random --tasks needle text --contexts 4 --shard 1/2")
    found = list(study.cells(args))
    assert {cell.context for cell in found} == {1, 3}
    first = [(cell.policy, cell.task) for cell in found[:6]]
    assert first == [(policy, task) for policy in ("dense", "h2o", "random") for task in ("needle", "text")]
    assert len(set(found)) == len(found)
    assert not any(cell.seen and cell.task == "text" for cell in found)
    assert {(cell.tokens, cell.seen, cell.format) for cell in found} == {
        (500, False, "identity"), (500, False, "turboquant_4bit_nc"), (500, True, "identity"), (900, False, "identity"),
        (900, True, "identity"),
    }  # fmt: skip


def test_every_policy_of_the_registry_is_measured(study):
    assert set(study.VARIANTS) >= set(policies.REGISTRY)
    profile = policies.HeadProfile((((1.0, 0.0), (1.0, 0.0)), ((1.0, 1.0), (0.0, 0.0))))
    for name in study.VARIANTS:
        budgets = study.policy_of(name, 200, 400, lambda: profile).budgets
        assert sum(budget.tokens for budget in budgets) == 200 * len(budgets) and len(budgets) == (2 if ", heads" in name else 1)


SMALL = "--tokens 500 --budgets 0.5 --policies keydiff --tasks multikey text --contexts 2"


def parsed(study, text):
    return study.parser().parse_args(text.split())


@pytest.mark.slow
def test_rows_of_shards_tables_and_pictures(study, tmp_path, capsys, monkeypatch):
    whole, parts = tmp_path / "whole.jsonl", [tmp_path / f"{shard}.jsonl" for shard in range(2)]
    options = [*SMALL.split(), "--questions", "unseen", "--formats", "identity"]
    study.main([*options, "--out", str(whole)])
    for shard, part in enumerate(parts):
        study.main([*options, "--shard", f"{shard}/2", "--out", str(part)])
    merged = tmp_path / "merged.jsonl"
    study.main(["--merge", *map(str, parts), "--out", str(merged)])

    def by_name(file):
        return {(row["what"], row["policy"], row["budget"]): row for row in read_rows(file)}

    one, other = by_name(whole), by_name(merged)
    assert one.keys() == other.keys() and len(one) == 2
    for name, row in one.items():
        assert row["errors"] == [] and row.keys() >= {"commit", "command", "dtype"}
        assert json.dumps(row["contexts"], sort_keys=True) == json.dumps(other[name]["contexts"], sort_keys=True)
    dense, keydiff = (one["policies_recall_demo", *of]["contexts"]["multikey"] for of in (("dense", 1.0), ("keydiff", 0.5)))
    assert dense.keys() == keydiff.keys() == {"0", "1"}
    assert all(dense[context]["ll"] > keydiff[context]["ll"] for context in dense)
    capsys.readouterr()
    study.main(["--markdown", "--out", str(merged)])
    text = capsys.readouterr().out
    assert "| keydiff |" in text and "500 tokens, question unseen" in text
    study.main(["--plot", "--out", str(merged)])
    assert (tmp_path / "merged_demo.png").stat().st_size > 10_000


def test_a_policy_that_fails_does_not_end_the_study(study, tmp_path, monkeypatch):
    class Broken(policies.Random):
        def priority(self, tokens):
            raise NotImplementedError("of this model nothing is known")

    monkeypatch.setattr(study, "policy_of", lambda name, size, *_: (Broken if name == "random" else policies.KeyDiff)(budget=size))
    file = tmp_path / "rows.jsonl"
    study.main(
        [
            *SMALL.split(),
            "--policies",
            "keydiff",
            "random",
            "--questions",
            "unseen",
            "--formats",
            "identity",
            "--contexts",
            "1",
            "--out",
            str(file),
        ]
    )
    rows = {row["policy"]: row for row in read_rows(file)}
    assert rows["random"]["errors"] == [f"{task} 0: NotImplementedError: of this model nothing is known" for task in ("multikey", "text")]
    assert rows["random"]["contexts"] == {} and set(rows["keydiff"]["contexts"]) == {"multikey", "text"}


def rows_of(policy, budget, recalls, kl=0.1, **more):
    contexts = {
        "needle": {str(i): {"recall": x, "ll": -1 + x} for i, x in enumerate(recalls)},
        "words": {str(i): {"recall": 0.1, "ll": -3.0} for i in range(len(recalls))},
        "text": {str(i): {"kl": kl + 0.1 * i} for i in range(len(recalls))},
    }
    same = {"what": "policies_recall_demo", "model": "demo", "tokens": 500, "seen": False, "format": "identity", "errors": []}
    return same | {"policy": policy, "budget": budget, "contexts": contexts} | more


def test_recall_is_relative_to_the_dense_run_with_its_error(tables):
    dense, half = rows_of("dense", 1.0, [1.0, 0.5, 0.75]), rows_of("h2o", 0.5, [0.5, 0.25, 0.75])
    assert tables.counted(dense) == ["needle"]
    value, error = tables.relative_recall(half, dense, ["needle"])
    residuals = [0.5 - 2 / 3 * 1.0, 0.25 - 2 / 3 * 0.5, 0.75 - 2 / 3 * 0.75]
    assert value == pytest.approx(2 / 3)
    assert error == pytest.approx(math.sqrt(sum(x * x for x in residuals) / 2 / 3) / 0.75)
    assert tables.lost(half, dense, ["needle"])[0] == pytest.approx(0.25)
    assert tables.divergence(half)[0] == pytest.approx(0.2)
    del half["contexts"]["needle"]["0"]  # what one row lacks is compared in neither
    assert tables.relative_recall(half, dense, ["needle"])[0] == pytest.approx(1.0 / 1.25)


def test_tables_say_what_they_leave_out_and_put_the_best_first(tables):
    rows = [rows_of("dense", 1.0, [1.0, 1.0]), rows_of("random", 0.5, [0.1, 0.2]), rows_of("keydiff", 0.5, [0.9, 0.8])]
    first, by_task, dense = tables.recall_tables(rows)
    assert [row[0] for row in first.lines] == ["keydiff", "random"]
    assert first.lines[0][1].startswith("85 ± 5 %") and "left out" in first.caption and "words" in first.caption
    assert by_task.headers == ["policy", "needle"] and dense.lines[0][1:] == ["100 %", "10 %"]
    assert "| keydiff | 85 ± 5 %" in first.markdown()
