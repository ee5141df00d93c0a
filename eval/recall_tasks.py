"""Tasks of `recall_bench.py`: a context that a cache compresses, and questions about it whose answers are looked up there.

    multikey    the facts of some of many names in a text                           (RULER, arXiv 2404.06654)
    key_value   the values of some keys in a long list of pairs                     (Lost in the Middle, arXiv 2307.03172)
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


@dataclass(frozen=True)
class Question:
    """`ids` are read after the context, and then `answer`. `free`: any answer is as good as `answer`."""

    ids: list[int]
    answer: list[int]
    free: bool = False


@dataclass(frozen=True)
class Example:
    context: list[int]
    questions: list[Question]


@dataclass(frozen=True)
class Style:
    """How a model is used to being told and asked: a fact, a line of a list."""

    statement: str
    asked: str
    line: str
    asked_line: str


STYLES = {
    "number": Style(
        "What is the code word of {key}? The code word of {key} is {word}. Remember: the code word of {key} is {word}.",
        "\n\nWhat is the code word of {key}? The code word of {key} is",
        "{key}: {word}\n",
        "\nFrom the list:\n{key}:",
    ),
    "code_word": Style(
        "The code word of {key} is {word}.",
        "\n\nWhat is the code word of {key}? The code word of {key} is",
        "{key} = {word};\n",
        "\n{key} ->",
    ),
}
"""The forms of a fact and its question, named as in `qkvcache.evaluation.recall.FORMS`. The embedded model was trained on the second."""


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
        return Question(self.encode(text), self.encode(answer))

    def fact(self, key: str, word: str) -> tuple[str, Question]:
        """The statement of a fact, and the question about it."""
        return self.style.statement.format(key=key, word=word), self.question(self.style.asked.format(key=key), f" {word}")


def multikey(writer: Writer, rng: random.Random, tokens: int) -> Example:
    keys = rng.sample(KEYS, min(max(tokens // 250, 8), len(KEYS)))
    made = [writer.fact(key, number(rng)) for key in keys]
    return Example(writer.planted(rng, tokens, [(rng.random(), sentence) for sentence, _ in made]), [q for _, q in made[:8]])


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


def text(writer: Writer, rng: random.Random, tokens: int) -> Example:
    found = writer.passage(rng, tokens + 65)
    return Example(found[:tokens], [Question(found[tokens : tokens + 1], found[tokens + 1 :], free=True)])


TASKS: dict[str, Callable[[Writer, random.Random, int], Example]] = {"multikey": multikey, "key_value": key_value, "text": text}


def example(task: str, writer: Writer, tokens: int, index: int) -> Example:
    """The example `index` of a task, always the same one, of about `tokens` tokens."""
    return TASKS[task](writer, random.Random(f"{task} {tokens} {index}"), tokens)
