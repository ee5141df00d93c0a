"""Recall cases: a fact is planted somewhere in plain text and asked for at the end.

The embedded model was trained on cases of this form (`eval/train_demo_model.py`), the demo and the quality tests ask for them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

NEEDLE = "The code word of {key} is {word}."
FACT = NEEDLE.format(key=r"\w+", word=r"\w+").replace(".", r"\.")
QUESTION = "What is the code word of {key}? The code word of {key} is"
KEYS = (  # noqa: SIM905
    "Anna Bruno Clara David Elena Felix Greta Henry Irene Jonas Karin Louis Maria Nadia Oscar Paula Quinn Rosa Simon Tilda "
    "Ulric Vera Walter Xenia Yusuf Zelda Berlin Cairo Dublin Geneva Havana Lisbon Madrid Nairobi Ottawa Prague Quito Riga "
    "Sofia Tokyo Vienna Warsaw Zurich"
).split()


@dataclass(frozen=True)
class RecallCase:
    """`context` holds the fact, `question` ends where the model must go on with `answer` (which begins with a space)."""

    context: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        return f"{self.context}\n\n{self.question}"


def code_word(rng: random.Random) -> str:
    """A word that no text contains: two to four syllables, or five digits."""
    if rng.random() < 0.25:
        return "".join(rng.choice("0123456789") for _ in range(5))
    letters = ("bdfghjklmnprstvz", "aeiou", ["", "", "n", "r", "l"])
    return "".join(rng.choice(kind) for _ in range(rng.randint(2, 4)) for kind in letters)


def plant(filler: str, sentence: str, depth: float) -> str:
    """`filler` with `sentence` at the space nearest to the share `depth` (0 to 1) of its length, but inside of no other fact."""
    start = min(int(depth * len(filler)), max(len(filler) - 1, 0))
    at = filler.find(" ", start)
    at = len(filler) if at < 0 else at
    for fact in re.finditer(FACT, filler):
        if fact.start() < at < fact.end():
            at = fact.end()
    return f"{filler[:at]} {sentence}{filler[at:]}"


def recall_case(rng: random.Random, filler: str, depth: float, distractors: int = 0, key: str | None = None) -> RecallCase:
    """One case: the asked fact at `depth`, `distractors` facts about other keys anywhere."""
    key = key or rng.choice(KEYS)
    others = rng.sample([k for k in KEYS if k != key], distractors)
    context = plant(filler, NEEDLE.format(key=key, word=(word := code_word(rng))), depth)
    for other in others:
        context = plant(context, NEEDLE.format(key=other, word=code_word(rng)), rng.random())
    return RecallCase(context, QUESTION.format(key=key), f" {word}")


def recall_cases(count: int, filler: Callable[[random.Random], str], *, seed: int = 0, distractors: int = 0) -> list[RecallCase]:
    """`count` cases whose facts lie evenly from the beginning to the end of the text that `filler` draws."""
    rng = random.Random(seed)
    return [recall_case(rng, filler(rng), i / max(count - 1, 1), distractors) for i in range(count)]
