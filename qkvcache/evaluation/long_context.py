"""Generated long-context tasks of any length, for any tokenizer, reproducible by a seed.

    needle           one code word in a text                          (as the embedded model was trained on)
    needle_multikey  the code word of one name among many             (RULER, arXiv 2404.06654)
    coreference      "the second poem about rivers" in a long chat    (in the manner of MRCR, arXiv 2409.12640)
    variables        names that lead to a value through assignments   (RULER's variable tracking)
    key_value        one value of a long list of pairs                (Lost in the Middle, arXiv 2307.03172)
    aggregation      the words that come most often                   (RULER's common words)

A `Case` keeps context and question apart, so that the context can be compressed before the question is known.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from ..demo import text_ids
from .recall import KEYS, NEEDLE, QUESTION, code_word

COUNT = Callable[[str], int]
"""A function that counts the tokens of a text."""
TextOf = Callable[[random.Random, int], str]
"""A function that returns running text of the given number of tokens."""


@dataclass(frozen=True)
class Case:
    """A case: `context` is compressed, `question` follows it, and each of `answers` is searched for in the model's
    output."""

    context: str
    question: str
    answers: tuple[str, ...]

    @property
    def prompt(self) -> str:
        return self.context + self.question


def needle(rng: random.Random, tokens: int, count: COUNT, text: TextOf, depth: float, names: int = 1) -> Case:
    """A code word at `depth` of the text, and the code words of `names - 1` other names anywhere."""
    keys = rng.sample(KEYS, names)
    facts = [NEEDLE.format(key=key, word=code_word(rng)) for key in keys]
    filler = text(rng, max(tokens - sum(map(count, facts)) - 20, 1))
    context = insert(filler, list(zip([depth, *(rng.random() for _ in keys[1:])], facts, strict=True)))
    return Case(context, f"\n\n{QUESTION.format(key=keys[0])}", (facts[0].split()[-1].rstrip("."),))


def needle_multikey(rng: random.Random, tokens: int, count: COUNT, text: TextOf, depth: float) -> Case:
    """A code word among the code words of many other names, one for every 100 tokens."""
    return needle(rng, tokens, count, text, depth, names=min(max(tokens // 100, 2), len(KEYS)))


def coreference(rng: random.Random, tokens: int, count: COUNT, text: TextOf, depth: float) -> Case:
    """A chat with several requests for the same kind of text; the last turn asks for one of the answers again, word for word."""
    kinds, topics = ("poem", "riddle", "story", "letter"), ("rivers", "trains", "owls", "bread", "clocks", "snow")
    ordinals = ("first", "second", "third", "fourth")
    same = rng.choice(kinds), rng.choice(topics)
    wanted = rng.randrange(len(ordinals))

    def turn(kind: str, topic: str) -> str:
        return f"User: Write a {kind} about {topic}.\nAssistant: {_lines(rng)}\n\n"

    def others() -> Iterator[str]:
        while True:
            if (found := (rng.choice(kinds), rng.choice(topics))) != same:
                yield turn(*found)

    asked = [turn(*same) for _ in ordinals]
    mark = code_word(rng)
    question = f"User: Write {mark} and then repeat the {ordinals[wanted]} {same[0]} about {same[1]}, word for word.\nAssistant: {mark}"
    turns = fill(others(), tokens - sum(map(count, asked)) - count(question), count)
    answer = asked[wanted].split("Assistant: ")[1].strip()
    places = sorted(rng.random() for _ in ordinals)
    for place, one in reversed(list(zip(places, asked, strict=True))):
        turns.insert(round(place * len(turns)), one)
    return Case("".join(turns), question, (answer,))


def variables(rng: random.Random, tokens: int, count: COUNT, text: TextOf, depth: float) -> Case:
    """Chains of assignments in a text: the question asks for every name with the value of the first of one chain."""
    chains, links = 3, 4
    values = rng.sample(range(10_000, 100_000), chains)
    names = [code_word(rng).upper() for _ in range(chains * links)]
    statements = []
    for chain, value in enumerate(values):
        own = names[chain * links : (chain + 1) * links]
        statements.append([f"VAR {own[0]} = {value}."] + [f"VAR {b} = VAR {a}." for a, b in zip(own, own[1:], strict=False)])
    question = f"\n\nQuestion: Which variables hold the value {values[0]}? Name all of them. Answer: the variables"
    filler = text(rng, max(tokens - sum(count(s) for chain in statements for s in chain) - count(question), 1))
    # a variable is assigned after the one that it copies
    placed = [pair for chain in statements for pair in zip(sorted(rng.random() for _ in chain), chain, strict=True)]
    return Case(insert(filler, placed), question, tuple(names[:links]))


def key_value(rng: random.Random, tokens: int, count: COUNT, text: TextOf, depth: float) -> Case:
    """Pairs of random numbers and words; the question asks for the pair at `depth`."""

    def pairs() -> Iterator[str]:
        while True:
            yield f'"{rng.randrange(10**7):07d}": "{code_word(rng)}"\n'

    found = fill(pairs(), tokens - 40, count)
    key, value = found[min(int(depth * len(found)), len(found) - 1)].strip().replace('"', "").split(": ")
    return Case("".join(found), f'\nQuestion: Which word belongs to "{key}"? Answer: "{key}": "', (value,))


def aggregation(rng: random.Random, tokens: int, count: COUNT, text: TextOf, depth: float) -> Case:
    """A list of made-up words: three of them make up a tenth of the list each, the others are rare."""
    often, rare = [code_word(rng) for _ in range(3)], [code_word(rng) for _ in range(400)]

    def words() -> Iterator[str]:
        while True:
            yield f" {rng.choice(often if rng.random() < 0.3 else rare)}"

    question = "\n\nQuestion: Which three words come most often in this list? Answer: the three words that come most often are"
    return Case("".join(fill(words(), tokens - count(question), count)).strip(), question, tuple(often))


_ids = functools.lru_cache(maxsize=4)(text_ids)

TASKS: dict[str, Callable[[random.Random, int, COUNT, TextOf, float], Case]] = {
    "needle": needle,
    "needle_multikey": needle_multikey,
    "coreference": coreference,
    "variables": variables,
    "key_value": key_value,
    "aggregation": aggregation,
}


def cases(name: str, tokenizer, tokens: int, number: int, seed: int = 0) -> list[Case]:
    """`number` cases of a task of about `tokens` tokens, with the answers at depths from the beginning to the end.

    Raises ValueError for an unknown task, and for fewer than 200 tokens.
    """
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown: expected one of {', '.join(TASKS)}")
    if tokens < 200 or number < 1:
        raise ValueError(f"tokens={tokens}, number={number}: tasks need 200 tokens or more, and one case")
    ids = _ids(tokenizer)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(rng: random.Random, tokens: int) -> str:
        begin = rng.randrange(len(ids))
        found = (ids[begin:] + ids * (tokens // len(ids) + 1))[:tokens]
        return str(tokenizer.decode(found))

    rng = random.Random(f"{name} {seed}")
    return [TASKS[name](rng, tokens, count, text, 0.95 * i / max(number - 1, 1)) for i in range(number)]


def recalled(said: str, answers: tuple[str, ...] | list[str]) -> float:
    """Share of the answers that `said` contains."""
    return sum(answer in said for answer in answers) / len(answers)


def similarity(said: str, answer: str) -> float:
    """The similarity of the beginning of `said` to `answer`, as MRCR scores it; 1 if equal."""
    return SequenceMatcher(None, said.strip()[: len(answer)], answer, autojunk=False).ratio()


def insert(text: str, sentences: list[tuple[float, str]]) -> str:
    """`text` with each sentence inserted after its share of the words, none inside another."""
    words = text.split(" ")
    count = len(words)
    for place, sentence in sorted(sentences, key=lambda pair: pair[0], reverse=True):
        words.insert(round(place * count), sentence)
    return " ".join(words)


def fill(units: Iterator[str], tokens: int, count: COUNT) -> list[str]:
    """The first units that fit into `tokens`, at least one."""
    found = [next(units)]
    left = tokens - count(found[0])
    while (size := count(unit := next(units))) <= left:
        found.append(unit)
        left -= size
    return found


def _lines(rng: random.Random) -> str:
    """Two random lines."""
    places = ("in the morning", "behind the hill", "without a word", "under the bridge", "at the gate", "before the rain")
    doing = ("waits for", "remembers", "carries", "follows", "sings to", "forgets")
    return " ".join(f"{rng.choice(KEYS)} {rng.choice(doing)} {code_word(rng)} {rng.choice(places)}." for _ in range(2))
