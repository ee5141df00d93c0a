"""Recall cases: plain text with an inserted fact, and a question for the fact at the end.

The embedded model was trained on the form CODE_WORD (`eval/train_demo_model.py`), which the demo and the quality tests use. Other models
recall NUMBER far better; if an uncompressed run misses facts, the recall of a cache means nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

KEYS = (  # noqa: SIM905
    "Anna Bruno Clara David Elena Felix Greta Henry Irene Jonas Karin Louis Maria Nadia Oscar Paula Quinn Rosa Simon Tilda "
    "Ulric Vera Walter Xenia Yusuf Zelda Berlin Cairo Dublin Geneva Havana Lisbon Madrid Nairobi Ottawa Prague Quito Riga "
    "Sofia Tokyo Vienna Warsaw Zurich"
).split()


def code_word(rng: random.Random) -> str:
    """A random word of two to four syllables, or five digits."""
    if rng.random() < 0.25:
        return "".join(rng.choice("0123456789") for _ in range(5))
    return syllables(rng)


def syllables(rng: random.Random) -> str:
    """A random word of two to four syllables."""
    letters = ("bdfghjklmnprstvz", "aeiou", ["", "", "n", "r", "l"])
    return "".join(rng.choice(kind) for _ in range(rng.randint(2, 4)) for kind in letters)


def number(rng: random.Random) -> str:
    """Five digits, of which the first is not 0."""
    return str(rng.randrange(10_000, 100_000))


@dataclass(frozen=True)
class Form:
    """The sentence that states a fact about `{key}`, and the question for it.

    `word` draws the answer, which follows `question`. `opening` precedes the context and `before_question` the
    question. `tokens`: the most tokens of a fact.
    """

    needle: str
    question: str
    word: Callable[[random.Random], str]
    tokens: int
    opening: str = ""
    before_question: str = "\n\n"

    @property
    def fact(self) -> str:
        """A regular expression that matches every fact of this form."""
        return re.escape(self.needle).replace(r"\{key\}", r"\w+").replace(r"\{word\}", r"\w+")


NEEDLE = "The code word of {key} is {word}."
QUESTION = "What is the code word of {key}? The code word of {key} is"
CODE_WORD = Form(NEEDLE, QUESTION, code_word, tokens=20)
NUMBER = Form(
    "What is the pass key of {key}? The pass key of {key} is {word}. Remember: the pass key of {key} is {word}.",
    "What is the pass key of {key}? The pass key of {key} is",
    number,
    tokens=40,
    opening="There are important pass keys hidden in the following text. Find and memorize them. I will quiz you about them.\n\n",
)
FORMS = {"code_word": CODE_WORD, "number": NUMBER}


@dataclass(frozen=True)
class RecallCase:
    """A recall case: `context` contains the fact, and `answer`, which begins with a space, must follow `question`."""

    context: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        return f"{self.context}\n\n{self.question}"


def plant(filler: str, sentence: str, depth: float, form: Form = CODE_WORD) -> str:
    """`filler` with `sentence` inserted at the space nearest to the share `depth` (0 to 1) of its length, outside of other facts of
    `form`."""
    start = min(int(depth * len(filler)), max(len(filler) - 1, 0))
    at = filler.find(" ", start)
    at = len(filler) if at < 0 else at
    for fact in re.finditer(form.fact, filler):
        if fact.start() < at < fact.end():
            at = fact.end()
    return f"{filler[:at]} {sentence}{filler[at:]}"


def recall_case(
    rng: random.Random, filler: str, depth: float, distractors: int = 0, key: str | None = None, form: Form = CODE_WORD
) -> RecallCase:
    """One case with the asked fact at `depth`, and `distractors` facts about other keys at random places."""
    key = key or rng.choice(KEYS)
    others = rng.sample([k for k in KEYS if k != key], distractors)
    context = plant(filler, form.needle.format(key=key, word=(word := form.word(rng))), depth, form)
    for other in others:
        context = plant(context, form.needle.format(key=other, word=form.word(rng)), rng.random(), form)
    return RecallCase(context, form.question.format(key=key), f" {word}")
