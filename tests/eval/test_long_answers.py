"""The study of long answers, made small: prompts of one length, rows, tables, the picture."""

import importlib
import random

import pytest
import torch
from harness import read_rows
from transformers import DynamicCache

from qkvcache import CompressedCache, demo


@pytest.fixture
def study():
    return importlib.import_module("long_answers")


def test_prompts_have_one_length_and_hold_what_is_asked_for(study):
    _, tokenizer = demo.load()
    text = demo.text_ids(tokenizer)
    for kind in study.KINDS:
        made = study.prompt(kind, random.Random(1), text, tokenizer, 600, 50)
        assert len(made.ids) == 600 and bool(made.expected) == (kind != "text")
        words = tokenizer.decode(made.ids).split()
        if kind in ("list", "recite"):  # what is expected stands in the prompt, in a row; an answer may begin inside of a word
            rest = made.expected[1:-1]
            begin = next(i for i in range(len(words)) if words[i : i + 5] == rest[:5])
            assert len(rest) > 20 and words[begin : begin + len(rest)] == rest
        if kind == "count":
            assert int(made.expected[0].strip(",")) == int(words[-1].strip(",")) + 1


def test_an_outcome_counts_words_to_the_first_mistake(study):
    expected = ["1.", "Anna", "2.", "Bruno", "3.", "Clara", "4.", "David"]
    assert study.outcome(expected, "1. Anna 2. Bruno 3. Cl") == {"words": 5, "before_mistake": 5, "similarity": 1.0}
    wrong = study.outcome(expected, "1. Anna 2. Felix 3. Clara 4. David and more")
    assert wrong["words"] == 8 and wrong["before_mistake"] == 3 and wrong["similarity"] == 7 / 8


def test_divergence_along_an_answer_is_that_of_decoding_it(study):
    model, tokenizer = demo.load()
    ids = torch.tensor(demo.text_ids(tokenizer)[:360]).view(2, -1)

    def filled(cache):
        model(ids[:, :140], past_key_values=cache)
        return cache

    with torch.no_grad():
        found = study.along(model, filled(CompressedCache(format="turboquant_3bit_nc")), filled(DynamicCache()), ids[:, 140:])
        ours, dense = filled(CompressedCache(format="turboquant_3bit_nc")), filled(DynamicCache())
        one_by_one = []
        for token in ids[:, 140:].split(1, dim=1):
            p, q = (model(token, past_key_values=cache).logits[:, -1].log_softmax(-1) for cache in (ours, dense))
            one_by_one.append((q.exp() * (q - p)).sum(-1))
    assert found.shape == (2, 40)
    torch.testing.assert_close(found, torch.stack(one_by_one, 1), rtol=1e-2, atol=1e-5)
    assert found.mean() > 1e-3


def test_rows_tables_and_the_picture(study, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    small = "--context 400 --tokens 8 --prompts 4 --formats identity turboquant_3bit_nc --policies sink_window --budget 0.25"
    study.main([*small.split(), "--out", str(file)])
    dense, same, coarse, evicting = read_rows(file)
    assert [row["cache"] for row in (dense, evicting)] == ["dynamic", "turboquant_4bit_nc + sink_window 100"]
    assert [answer["first_difference"] for answer in dense["answers"] + same["answers"]] == [8] * 8
    assert [answer["kind"] for answer in coarse["answers"]] == list(study.KINDS)
    assert max(same["kls"]["0-64"]) < 1e-5 < max(coarse["kls"]["0-64"]) < max(evicting["kls"]["0-64"])
    capsys.readouterr()
    study.main(["--markdown", "--out", str(file)])
    assert "| turboquant_3bit_nc |" in capsys.readouterr().out
    study.main(["--plot", "--out", str(file)])
    assert (tmp_path / "long_answers_demo.png").stat().st_size > 10_000
