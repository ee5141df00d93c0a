"""Tasks of `recall_bench.py`: a context that a cache compresses, and questions about it whose answers are looked up there.

    needle      one fact of its kind among others, in a text                        (RULER, arXiv 2404.06654)
    multikey    the facts of some of many names, all of one kind, in a text         (RULER)
    variables   names that lead to a number in two steps, each of which is asked for     (RULER's variable tracking)
    words       the name that fills a third of a long list                              (RULER's common words)
    key_value   the values of some keys in a long list of pairs                     (Lost in the Middle, arXiv 2307.03172)
    copy        passages of a text, word for word, from their first words on
    text        what follows in the text: nothing is right or wrong

Questions repeat the words of the context up to the answer, which even a small model goes on with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from qkvcache.evaluation.long_context import fill, insert
from qkvcache.evaluation.recall import KEYS, number, syllables

PIECE = 8
"""Tokens of a passage that count as one answer."""


@dataclass(frozen=True)
class Question:
    """`ids` are read after the context, and then `answer`, each of whose `parts` (begin, end) is looked up by itself. Without parts, any
    answer is as good as `answer`."""

    ids: list[int]
    answer: list[int]
    parts: list[tuple[int, int]]


@dataclass(frozen=True)
class Example:
    context: list[int]
    questions: list[Question]


@dataclass(frozen=True)
class Style:
    """How a model is used to being told and asked: a fact, a line of a list, a passage to copy."""

    statement: str
    asked: str
    line: str
    asked_line: str
    before_copy: str


STYLES = {
    "number": Style(
        "What is the {kind} of {key}? The {kind} of {key} is {word}. Remember: the {kind} of {key} is {word}.",
        "\n\nWhat is the {kind} of {key}? The {kind} of {key} is", "{key}: {word}\n", "\nFrom the list:\n{key}:",
        "\n\nThe same once more:\n\n",
    ),
    "code_word": Style(
        "The {kind} of {key} is {word}.", "\n\nWhat is the {kind} of {key}? The {kind} of {key} is", "{key} = {word};\n", "\n{key} ->",
        "\nAgain: ",
    ),
}  # fmt: skip
"""By the names of `qkvcache.evaluation.recall.FORMS`: the embedded model was trained on the second."""
KINDS = ("code word", "pass key", "door number", "phone number")


class Writer:
    """Makes examples for a tokenizer, with the tokens `text` as filler."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: list[int], style: Style):
        self.tokenizer, self.text, self.style = tokenizer, text, style

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def passage(self, rng: random.Random, tokens: int) -> list[int]:
        at = rng.randrange(len(self.text) - tokens)
        return self.text[at : at + tokens]

    def planted(self, rng: random.Random, tokens: int, sentences: list[tuple[float, str]]) -> list[int]:
        """A text of about `tokens` tokens with each sentence at a share of its words."""
        filler = self.passage(rng, tokens - sum(self.count(f" {sentence}") for _, sentence in sentences))
        return self.encode(insert(str(self.tokenizer.decode(filler)), sentences))

    def question(self, text: str, answer: str) -> Question:
        ids = self.encode(answer)
        return Question(self.encode(text), ids, [(0, len(ids))])

    def fact(self, kind: str, key: str, word: str) -> tuple[str, Question]:
        """The statement of a fact, and the question about it."""
        asked = self.style.asked.format(kind=kind, key=key)
        return self.style.statement.format(kind=kind, key=key, word=word), self.question(asked, f" {word}")


def needle(writer: Writer, rng: random.Random, tokens: int) -> Example:
    made = [writer.fact(kind, key, number(rng)) for kind, key in zip(KINDS, rng.sample(KEYS, len(KINDS)), strict=True)]
    places = [(i + rng.random()) / len(made) for i in range(len(made))]
    rng.shuffle(places)
    return Example(
        writer.planted(rng, tokens, [(place, sentence) for place, (sentence, _) in zip(places, made, strict=True)]), [q for _, q in made]
    )


def multikey(writer: Writer, rng: random.Random, tokens: int) -> Example:
    keys = rng.sample(KEYS, min(max(tokens // 250, 8), len(KEYS)))
    made = [writer.fact(KINDS[0], key, number(rng)) for key in keys]
    return Example(writer.planted(rng, tokens, [(rng.random(), sentence) for sentence, _ in made]), [q for _, q in made[:8]])


def variables(writer: Writer, rng: random.Random, tokens: int) -> Example:
    chains, sentences, questions = 4, [], []
    names = rng.sample(KEYS, 3 * chains)
    same = "The {kind} of {a} is the same as the {kind} of"
    for kind, a, b, c in zip(KINDS, names[::3], names[1::3], names[2::3], strict=True):
        value = number(rng)
        fact, last = writer.fact(kind, a, value)
        steps = [(same.format(kind=kind, a=x), y) for x, y in ((c, b), (b, a))]
        told = [fact, *(f"{step} {name}. Remember: {step} {name}." for step, name in reversed(steps))]
        sentences += zip(sorted(rng.random() for _ in told), told, strict=True)
        questions += [*(writer.question(f"\n\n{step}", f" {name}") for step, name in steps), last]
    return Example(writer.planted(rng, tokens, sentences), questions)


def words(writer: Writer, rng: random.Random, tokens: int) -> Example:
    often, *rare = rng.sample(KEYS[:15], 15)

    def listed() -> Iterator[str]:
        while True:
            yield f" {often if rng.random() < 0.3 else rng.choice(rare)},"

    question = writer.question('\n\nThe name that comes most often in this list is "', often)
    return Example(writer.encode("A list of names:" + "".join(fill(listed(), tokens - 10, writer.count))), [question])


def key_value(writer: Writer, rng: random.Random, tokens: int) -> Example:
    pairs: list[tuple[str, str]] = []

    def lines() -> Iterator[str]:
        while True:
            pairs.append((syllables(rng), number(rng)))
            key, word = pairs[-1]
            yield writer.style.line.format(key=key, word=word)

    made = fill(lines(), tokens - 10, writer.count)
    asked = [pairs[int((i + rng.random()) * len(made) / 8)] for i in range(8)]
    questions = [writer.question(writer.style.asked_line.format(key=key), f" {word}") for key, word in asked]
    return Example(writer.encode("A list:\n" + "".join(made)), questions)


def copy(writer: Writer, rng: random.Random, tokens: int) -> Example:
    begin, length = 16, 6 * PIECE
    context = writer.passage(rng, tokens)
    questions = []
    for i in range(4):
        at = int((i + 0.8 * rng.random()) * (tokens - begin - length) / 4)
        answer = context[at + begin : at + begin + length]
        parts = [(piece, piece + PIECE) for piece in range(0, length, PIECE)]
        questions.append(Question(writer.encode(writer.style.before_copy) + context[at : at + begin], answer, parts))
    return Example(context, questions)


def text(writer: Writer, rng: random.Random, tokens: int) -> Example:
    found = writer.passage(rng, tokens + 65)
    return Example(found[:tokens], [Question(found[tokens : tokens + 1], found[tokens + 1 :], [])])


TASKS: dict[str, Callable[[Writer, random.Random, int], Example]] = {
    "needle": needle, "multikey": multikey, "variables": variables, "words": words, "key_value": key_value, "copy": copy, "text": text
}  # fmt: skip


def example(task: str, writer: Writer, tokens: int, index: int) -> Example:
    """The example `index` of a task, always the same one, of about `tokens` tokens."""
    return TASKS[task](writer, random.Random(f"{task} {tokens} {index}"), tokens)
