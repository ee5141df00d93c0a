"""Generated tasks: their length, where their answers are, and that what is scored is what is asked."""

import re

import pytest

from qkvcache import demo
from qkvcache.evaluation.long_context import TASKS, cases, recalled, similarity

TOKENIZER = demo.load()[1]


@pytest.mark.parametrize("name", TASKS)
def test_cases_have_their_length_and_hold_their_answers(name):
    made = cases(name, TOKENIZER, 900, 3, seed=1)
    assert made == cases(name, TOKENIZER, 900, 3, seed=1) != cases(name, TOKENIZER, 900, 3, seed=2)
    for case in made:
        assert 0.85 * 900 < len(TOKENIZER(case.prompt)["input_ids"]) < 1.06 * 900
        for answer in case.answers:
            assert answer in case.context
        assert recalled(" and ".join(case.answers), case.answers) == 1
        assert recalled("nothing of it", case.answers) == 0


def test_depths_spread_from_beginning_to_end():
    for name in ("needle", "key_value"):
        places = [case.context.index(case.answers[0]) / len(case.context) for case in cases(name, TOKENIZER, 1500, 5)]
        assert places == sorted(places) and places[0] < 0.1 and places[-1] > 0.85


def test_needles_have_one_name_or_many():
    (one,), (many,) = (cases(name, TOKENIZER, 2000, 1) for name in ("needle", "needle_multikey"))
    facts = [re.findall(r"The code word of \w+ is \w+\.", case.context) for case in (one, many)]
    assert len(facts[0]) == 1 and len(set(facts[1])) == 20


def test_every_name_of_a_chain_and_no_other_holds_the_value():
    (case,) = cases("variables", TOKENIZER, 1500, 1)
    value = case.question.split("value ")[1].split("?")[0]
    held = {}
    for name, given in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", case.context):  # in the order of the text
        held[name] = held.get(given, given)
    assert {name for name, of in held.items() if of == value} == set(case.answers) and len(held) == 12


def test_the_repeated_request_is_the_one_that_was_counted():
    order = ("first", "second", "third", "fourth")
    for case in cases("coreference", TOKENIZER, 1500, 4):
        which, kind, topic = re.search(r"the (\w+) (\w+) about (\w+), word", case.question).groups()
        answers = re.findall(f"User: Write a {kind} about {topic}.\nAssistant: (.*)", case.context)
        assert len(answers) == 4 and answers[order.index(which)] == case.answers[0]


def test_the_words_that_come_most_often_are_asked_for():
    (case,) = cases("aggregation", TOKENIZER, 1500, 1)
    words = case.context.split()
    assert set(sorted(set(words), key=words.count)[-3:]) == set(case.answers)


def test_similarity_is_of_the_beginning():
    assert similarity(" abc def. And more.", "abc def.") == 1
    assert 0.5 < similarity("abc xef.", "abc def.") < 1
    assert similarity("", "abc") == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("noodle", 900, 1), "'noodle' is unknown"), (("needle", 100, 1), "tokens=100"), (("needle", 900, 0), "number=0")],
)
def test_wrong_input_is_explained(arguments, says):
    with pytest.raises(ValueError, match=says):
        cases(arguments[0], TOKENIZER, *arguments[1:])
