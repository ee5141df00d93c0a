"""The study of reading few tokens, made small: steps, rows, table and picture."""

import importlib

import pytest
import torch
from harness import read_rows
from recall_tasks import example


@pytest.fixture
def study():
    return importlib.import_module("attention_budget")


@pytest.mark.slow
def test_small_steps_measure_what_one_step_does(study):
    bench = study.Readers(study.parser().parse_args(["--tokens", "500"]))
    lengths, forward = [], bench.model.forward
    prompt = bench.prompt("multikey", 500, 0)
    bench.model.forward = lambda ids, **options: lengths.append(ids.shape[1]) or forward(ids, **options)
    found = bench.answers(prompt, bench.cache("dense", "identity", 500, 500))
    assert max(lengths) <= 16 and lengths[-1] == 1
    for question, ll in zip(example("multikey", bench.writer, 500, 0).questions, found["ll"], strict=True):
        ids = torch.tensor([prompt.ids[0].tolist() + question.ids + question.answer])
        with torch.no_grad():
            log_probs = forward(ids).logits[0, -len(question.answer) - 1 : -1].log_softmax(-1)
        assert ll == pytest.approx(log_probs.gather(-1, ids[0, -len(question.answer) :, None]).mean().item(), rel=5e-3, abs=1e-4)


@pytest.mark.slow
def test_rows_become_a_table_and_a_picture(study, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    options = ["--tokens", "500", "--shares", "0.125", "--policies", "keydiff", "--formats", "--tasks", "multikey"]
    options += ["--contexts", "1"]
    study.main([*options, "--out", str(file)])
    rows = {(row["policy"], row["budget"]): row["contexts"]["multikey"]["0"] for row in read_rows(file)}
    assert rows.keys() == {("dense", 1.0), ("read", 1.0), ("read", 0.125), ("keydiff", 0.125)}
    assert rows["read", 0.125]["ll"] > rows["keydiff", 0.125]["ll"] and rows["read", 0.125] != rows["read", 1.0]
    capsys.readouterr()
    study.main(["--markdown", "--out", str(file)])
    table = capsys.readouterr().out
    assert "| all kept, `turboquant_4bit_nc` |" in table
    study.main(["--plot", "--out", str(file)])
    assert (tmp_path / "rows.png").stat().st_size > 10_000
