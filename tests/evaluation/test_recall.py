"""Recall cases: the fact is where it should be, and is the only answer."""

import random
import re

import pytest

from qkvcache.evaluation.recall import FORMS, KEYS, code_word, plant, recall_case
from tests.seeds import SEED

FILLER = "one two three four five six seven eight nine ten " * 40


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_sentence_is_planted_at_its_depth(depth):
    text = plant(FILLER, "HERE.", depth)
    assert text.replace(" HERE.", "", 1) == FILLER
    assert text.index("HERE.") / len(FILLER) == pytest.approx(depth, abs=0.02)


def test_one_fact_answers_the_question():
    case = recall_case(random.Random(SEED + 1), FILLER, 0.5, distractors=5)
    key = case.question.split("code word of ")[1].split("?")[0]
    facts = [part.split(".")[0] for part in case.context.split("The code word of ")[1:]]
    assert len(facts) == 6
    assert [fact for fact in facts if fact.startswith(f"{key} ")] == [f"{key} is{case.answer}"]
    assert case.prompt.endswith(case.question)


def test_cases_are_reproducible_and_spread():
    first, again = ([recall_case(rng, FILLER, i / 4) for i in range(5)] for rng in (random.Random(3), random.Random(3)))
    assert first == again
    depths = [case.context.index("The code word") / len(case.context) for case in first]
    assert depths == sorted(depths) and depths[0] < 0.05 and depths[-1] > 0.95


def test_code_words_are_not_words_of_the_text():
    rng = random.Random(SEED)
    words = {code_word(rng) for _ in range(200)}
    assert len(words) > 190
    assert not words & {key.lower() for key in KEYS}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_facts_of_every_form_stand_whole(form):
    """At any depth; none is planted inside of another."""
    for seed in range(60):
        case = recall_case(random.Random(SEED + seed), "one two three four five six", seed / 59, distractors=5, key="Anna", form=form)
        assert len(re.findall(form.fact, case.context)) == 6
        assert form.needle.format(key="Anna", word=case.answer.strip()) in case.context
        assert case.question == form.question.format(key="Anna")
