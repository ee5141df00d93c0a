"""The measurements of `attention_budget.py`: a cache that holds a context reads questions about it with their answers.

A context is read once, densely, and given to each cache with what its policy observes. Numbers are means over the questions
of a context, so that errors are those of the means of contexts. Recall and likelihood are relative to the dense run.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from error_bars import with_error
from harness import load, read_rows, write_rows
from recall_tasks import STYLES, TASKS, Question, Writer, example
from recording import Recorded, record
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, policies, profile_heads
from qkvcache.evaluation.quality import compare
from qkvcache.policies import Policy
from qkvcache.releases import passing

DENSE = "dense"
LEAST = 0.3
"""The share of the answers to a task that the dense run must recall, for the task to count."""
RECENT = 32
"""Newest tokens that are protected where heads have budgets of their own."""
QUESTION_STEP = 16
"""Tokens of a question in a step."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that was read once, `ids` `[1, T]`, and the questions after it; the dense run's `log_probs` where any answer will do."""

    ids: Tensor
    prefilled: Recorded
    questions: list[Question]
    log_probs: Tensor | None = None


@dataclass(frozen=True)
class Cell:
    """One number of a table. `policy` may be DENSE."""

    policy: str
    budget: float
    task: str
    tokens: int
    format: str
    context: int

    @property
    def row(self) -> dict:
        """The name of the row that this cell belongs to."""
        return {name: getattr(self, name) for name in ("policy", "budget", "tokens", "format")}


class Bench:
    """The model of `args`; answers and texts are read in steps of `args.step` tokens."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.model, self.tokenizer, self.text = load(args)
        self.writer = Writer(self.tokenizer, self.text, STYLES["code_word" if args.model == "demo" else "number"])

    def tensor(self, ids: list) -> Tensor:
        return torch.tensor(ids, device=self.model.device)

    @functools.lru_cache(maxsize=len(TASKS))  # noqa: B019  (one bench a process; a prompt takes half a gigabyte)
    def prompt(self, task: str, tokens: int, context: int) -> Prompt:
        made = example(task, self.writer, tokens, context)
        ids = self.tensor([made.context])
        read = Prompt(ids, record(self.model, ids)[0], made.questions)
        if not any(question.free for question in made.questions):
            return read
        return replace(read, log_probs=self.log_probs(read, DynamicCache(config=self.model.config)))

    @torch.no_grad()
    def log_probs(self, prompt: Prompt, cache: Cache) -> Tensor:
        """Before each token of the answers, `[N, L, V]` with the answers at the left of each row."""
        prompt.prefilled.fill(cache, self.model, prompt.ids, self.tokenizer)
        cache.batch_repeat_interleave(len(prompt.questions))
        rows = [question.ids + question.answer[:-1] for question in prompt.questions]
        ids = self.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
        asked = [len(question.ids) - 1 for question in prompt.questions]
        begin, logits = min(asked), []
        for few in ids[:, :begin].split(max(QUESTION_STEP, self.args.step), dim=1) if begin else ():
            self.model(few, **passing(cache), logits_to_keep=1)
        for some in ids[:, begin:].split(self.args.step, dim=1):
            logits.append(self.model(some, **passing(cache)).logits)
        found = torch.cat(logits, dim=1)
        answer = torch.arange(max(len(question.answer) for question in prompt.questions), device=found.device)
        at = (self.tensor(asked)[:, None] - begin + answer).clamp_max(found.shape[1] - 1)
        return found.gather(1, at[..., None].expand(-1, -1, found.shape[-1])).float().log_softmax(-1)

    def answers(self, prompt: Prompt, cache: Cache) -> dict[str, list[float]]:
        """Returns for each question whether its answer is recalled, and the mean log-likelihood of its tokens; where any answer will do,
        the KL divergence from the dense run."""
        found: dict[str, list[float]] = {}
        log_probs = self.log_probs(prompt, cache)
        if prompt.log_probs is not None:
            return {"kl": compare(log_probs, prompt.log_probs)[0].double().mean(1).tolist()}
        for question, of in zip(prompt.questions, log_probs, strict=True):
            of, answer = of[: len(question.answer)], self.tensor(question.answer)
            found.setdefault("recall", []).append(float((of.argmax(-1) == answer).all()))
            found.setdefault("ll", []).append(of.gather(-1, answer[:, None]).mean().item())
        return found

    @functools.cache  # noqa: B019
    def profile(self) -> policies.HeadProfile:
        """The profile of the model's heads, on a text that no task is made of."""
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = "\n\n".join(path.read_text(errors="ignore") for path in paths if path.stat().st_size > 2000)
        ids = self.tokenizer(text[: 2**20], add_special_tokens=False, verbose=False)["input_ids"]
        return profile_heads(self.model, ids, tokenizer=self.tokenizer)

    def policy(self, name: str, size: int, total: int) -> Policy:
        """The policy that keeps `size` of `total` tokens; if its name ends with "_heads", each head has its part of the profile."""
        if name.endswith("_heads"):
            budget = self.profile().budget(size, share=size / total)
            return policies.named(name.removesuffix("_heads"), budget=budget, recent=RECENT)  # type: ignore[arg-type]
        return policies.named(name, budget=size - 4 if name == "sink_window" else size)

    def cache(self, policy: str, format: str, size: int, total: int) -> Cache:
        if policy == DENSE:
            return DynamicCache(config=self.model.config)
        return CompressedCache(self.model.config, format=format, policy=self.policy(policy, size, total))

    def measure(self, cell: Cell) -> dict[str, float]:
        """Means over the questions of a context."""
        prompt = self.prompt(cell.task, cell.tokens, cell.context)
        total = prompt.ids.shape[1]
        found = self.answers(prompt, self.cache(cell.policy, cell.format, int(cell.budget * total), total))
        return {name: float(f"{sum(values) / len(values):.4g}") for name, values in found.items()}


def shard_of(text: str) -> tuple[int, int]:
    shard, _, shards = text.partition("/")
    if not 0 <= int(shard) < int(shards):
        raise argparse.ArgumentTypeError(f"{text}: must be I/N, from 0/N to N-1/N")
    return int(shard), int(shards)


def merge(out: Path, what: str, files: list[Path]) -> None:
    """Adds the rows of `what` in `files` to those in `out`; contexts of the same row become one row."""
    rows: dict[tuple, dict] = {}
    for file in (out, *files):
        for row in read_rows(file):
            if row["what"] == what:
                key = tuple(row.get(name) for name in ("policy", "budget", "tokens", "format"))
                same = rows.setdefault(key, row)
                if same is not row:
                    for task, contexts in row.get("contexts", {}).items():
                        same["contexts"].setdefault(task, {}).update(contexts)
    write_rows(out, what, list(rows.values()))


Estimate = tuple[float, float]
"""A number and its standard error."""


def mean(values: list[float]) -> Estimate:
    return statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


def ratio(values: list[float], others: list[float]) -> Estimate:
    """The ratio of the means of what was measured on the same contexts; the error is that of the residuals."""
    whole = statistics.mean(others)
    found = statistics.mean(values) / whole
    return found, mean([x - found * y for x, y in zip(values, others, strict=True)])[1] / whole


def overall(each: list[Estimate]) -> Estimate | None:
    """The mean of independent estimates."""
    if not each:
        return None
    return statistics.mean(value for value, _ in each), math.sqrt(sum(error**2 for _, error in each)) / len(each)


def paired(row: dict, dense: dict, task: str, measure: str) -> tuple[list[float], list[float]]:
    """A measure of a task in the contexts that both rows have."""
    ours, theirs = (each["contexts"].get(task, {}) for each in (row, dense))
    both = [context for context in ours if context in theirs and measure in ours[context] and measure in theirs[context]]
    return [ours[context][measure] for context in both], [theirs[context][measure] for context in both]


def counted(dense: dict) -> list[str]:
    """Tasks whose dense recall is large enough to be compared with."""
    return [task for task, found in dense["contexts"].items() if statistics.mean(x.get("recall", 0) for x in found.values()) >= LEAST]


def relative_recall(row: dict, dense: dict, tasks: list[str]) -> Estimate | None:
    """The mean over tasks of recall relative to the dense run."""
    pairs = [paired(row, dense, task, "recall") for task in tasks]
    return overall([ratio(*pair) for pair in pairs if any(pair[1])])


def lost(row: dict, dense: dict, tasks: list[str]) -> Estimate | None:
    """The mean over tasks of how much less likely answers are than in the dense run, nats a token."""
    pairs = [paired(row, dense, task, "ll") for task in tasks]
    return overall([mean([y - x for x, y in zip(*pair, strict=True)]) for pair in pairs if pair[0]])


def divergence(row: dict) -> Estimate | None:
    found = [x["kl"] for x in row["contexts"].get("text", {}).values() if "kl" in x]
    return mean(found) if found else None


def shown(value: Estimate | None, form: Callable[..., str] = with_error) -> str:
    if value is None:
        return ""
    return form(*value) if value[1] or form is with_error else form(value[0])
