"""Which tokens to keep: every policy on generated tasks; rows in eval/results/policies.jsonl, those of the same study and model replaced.

    python eval/policies.py --tokens 1000                      the embedded model: minutes on two cores
    python eval/policies.py --model smollm2 --device cuda --dtype bfloat16 --shard 0/12 --out 0.jsonl --minutes 2
    python eval/policies.py --merge *.jsonl                    rows of several processes, on --shard 0/12, 1/12 and so on, become one
    python eval/policies.py --show | --markdown | --plot       from the rows of --model

The cache holds a context and is cut down to the budget; then it reads questions about it, each by itself, with their answers, in one step,
so that nothing is evicted any more. An answer is recalled if each of its tokens is the most probable one. The question is unseen, or seen:
it then ends the prompt that is cut down, and the first token of the answer, which does not depend on the cache, is not measured.

Contexts are read once, densely, and given to each cache with what its policy observes. Numbers are means over the questions of a context,
so that errors are those of the means of contexts. Early rows already make a table: all policies and tasks of one budget come before the
next budget. Processes of a shard have contexts of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from harness import (
    at_least,
    described,
    fraction,
    in_time,
    load,
    name_of,
    parser_of,
    present,
    read_rows,
    refused,
    replace_rows,
    shows,
    write_rows,
)
from policies_tables import DENSE, plot, recall_tables
from policies_tasks import STYLES, TASKS, Question, Writer, example
from recording import Recorded, record
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, policies, profile_heads
from qkvcache.evaluation.quality import compare
from qkvcache.formats import REGISTRY as FORMATS
from qkvcache.policies import Policy

RECENT = 32
"""Newest tokens that variants of policies protect, in place of half of the budget."""
SEEN_QUESTIONS = 2
"""Questions of a context that are seen: each takes a reading of its own."""
WRITE_EVERY = 3.0
"""Seconds between two writings of the rows."""


def variants() -> dict[str, dict]:
    """Options beside the defaults, by the name of a row: a registry name, and what differs."""
    found: dict[str, dict] = {name: {} for name in policies.REGISTRY}
    for name in ("h2o", "snapkv", "tova", "keydiff", "knorm"):
        found[f"{name}, recent {RECENT}"] = {"recent": RECENT}
    for name in ("snapkv", "expected_attention"):
        found[f"{name}, adakv"] = {"alpha_safeguard": 0.2}
    found["kvzip, normalized"] = {"kvzip_plus_normalization": True}
    found["kvzip, each head"] = {"alpha_safeguard": None}
    for name in ("h2o", "snapkv", "tova", "keydiff", "expected_attention", "knorm", "random"):
        found[f"{name}, heads"] = {"heads": True, "recent": RECENT}
    found["kvzip, layerwise"] = {"layerwise": True}
    return found


VARIANTS = variants()


def policy_of(name: str, size: int, total: int, profile: Callable[[], policies.HeadProfile]) -> Policy:
    """The policy of a row's name that keeps `size` of `total` tokens."""
    base, options = name.split(",")[0], dict(VARIANTS[name])
    if options.pop("heads", False):
        return type(policies.resolve(base))(budget=profile().budget(size, share=size / total), **options)
    return policies.named(base, budget=size - 4 if base == "sink_window" else size, **options)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt that was read once, `ids` `[1, T]`, and the questions after it; the dense run's `log_probs` where any answer will do."""

    ids: Tensor
    prefilled: Recorded
    questions: list[Question]
    log_probs: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of a table. `policy` may be DENSE."""

    policy: str
    budget: float
    task: str
    tokens: int
    seen: bool
    format: str
    context: int

    @property
    def row(self) -> dict:
        """What names the row that this cell belongs to."""
        return {name: getattr(self, name) for name in ("policy", "budget", "tokens", "seen", "format")}


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.model, self.tokenizer, self.text = load(args)
        self.writer = Writer(self.tokenizer, self.text, STYLES["code_word" if args.model == "demo" else "number"])

    def tensor(self, ids: list) -> Tensor:
        return torch.tensor(ids, device=self.model.device)

    @functools.lru_cache(maxsize=len(TASKS))  # noqa: B019  (one bench a process; a prompt takes half a gigabyte)
    def prompts(self, task: str, tokens: int, seen: bool, context: int) -> list[Prompt]:
        made = example(task, self.writer, tokens, context)
        if not seen:
            return [self._read(made.context, made.questions)]
        after = [(asked.ids, rest) for asked in made.questions if (rest := after_first(asked)).parts]
        return [self._read(made.context + ids, [rest]) for ids, rest in after[:SEEN_QUESTIONS]]

    def _read(self, ids: list[int], questions: list[Question]) -> Prompt:
        prompt = self.tensor([ids])
        read = Prompt(prompt, record(self.model, prompt)[0], questions)
        if any(question.parts for question in questions):
            return read
        return dataclasses.replace(read, log_probs=self._log_probs(read, DynamicCache(config=self.model.config)))

    @torch.no_grad()
    def _log_probs(self, prompt: Prompt, cache: Cache) -> Tensor:
        """Before each token of the answers, `[N, L, V]` with the answers at the left of each row."""
        prompt.prefilled.fill(cache, self.model, prompt.ids, self.tokenizer)
        cache.batch_repeat_interleave(len(prompt.questions))
        rows = [question.ids + question.answer[:-1] for question in prompt.questions]
        longest, answer = max(map(len, rows)), max(len(question.answer) for question in prompt.questions)
        logits = self.model(self.tensor([row + [0] * (longest - len(row)) for row in rows]), past_key_values=cache).logits
        begin = self.tensor([len(question.ids) - 1 for question in prompt.questions])
        at = (begin[:, None] + torch.arange(answer, device=begin.device)).clamp_max(longest - 1)
        return logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1])).float().log_softmax(-1)

    def answers(self, prompt: Prompt, cache: Cache) -> dict[str, list[float]]:
        """Of each question: the share of its parts that is recalled, and the mean log-likelihood of their tokens; or, without parts, the
        KL divergence from the dense run."""
        found: dict[str, list[float]] = {}
        log_probs = self._log_probs(prompt, cache)
        if prompt.log_probs is not None:
            return {"kl": compare(log_probs, prompt.log_probs)[0].double().mean(1).tolist()}
        for question, of in zip(prompt.questions, log_probs, strict=True):
            right, likelihood = looked_up(of[: len(question.answer)], self.tensor(question.answer), question.parts)
            found.setdefault("recall", []).append(sum(right) / len(right))
            found.setdefault("ll", []).append(sum(likelihood) / len(likelihood))
        return found

    @functools.cache  # noqa: B019
    def profile(self) -> policies.HeadProfile:
        """Of the model, on a text that no task is made of."""
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = "\n\n".join(path.read_text(errors="ignore") for path in paths if path.stat().st_size > 2000)
        ids = self.tokenizer(text[: 2**20], add_special_tokens=False, verbose=False)["input_ids"]
        return profile_heads(self.model, ids, tokenizer=self.tokenizer)

    def cache(self, policy: str, format: str, size: int, total: int) -> Cache:
        if policy == DENSE:
            return DynamicCache(config=self.model.config)
        return CompressedCache(self.model.config, format=format, policy=policy_of(policy, size, total, self.profile))

    def measure(self, cell: Cell) -> dict[str, float]:
        """Means over the questions of a context."""
        found: dict[str, list[float]] = {}
        for prompt in self.prompts(cell.task, cell.tokens, cell.seen, cell.context):
            total = prompt.ids.shape[1]
            cache = self.cache(cell.policy, cell.format, int(cell.budget * total), total)
            for name, values in self.answers(prompt, cache).items():
                found.setdefault(name, []).extend(values)
        return {name: significant(sum(values) / len(values)) for name, values in found.items()}


def after_first(question: Question) -> Question:
    """The answer after its first token, which a prompt that ends with the question predicts before anything is evicted."""
    parts = [(max(a, 1) - 1, b - 1) for a, b in question.parts if b > 1]
    return Question(question.answer[:1], question.answer[1:], parts)


def looked_up(log_probs: Tensor, answer: Tensor, parts: list[tuple[int, int]]) -> tuple[list[bool], list[float]]:
    """Whether each part of `answer` `[L]` is the most probable, token for token, and the mean log-likelihood of its tokens, of `log_probs`
    `[L, V]`."""
    right, likelihood = log_probs.argmax(-1) == answer, log_probs.gather(-1, answer[:, None])[:, 0]
    return [bool(right[a:b].all()) for a, b in parts], [likelihood[a:b].mean().item() for a, b in parts]


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """In stages, each of which is a table: first of the shortest contexts, unseen and exact."""
    first, *longer = args.tokens
    exact, *formats = args.formats
    asked = [mode == "seen" for mode in args.questions]
    stages = [(first, asked[0], exact), *((first, asked[0], format) for format in formats), *((first, seen, exact) for seen in asked[1:])]
    stages += [(tokens, seen, exact) for tokens in longer for seen in asked]
    shard, shards = args.shard
    for context in range(shard, args.contexts, shards):
        for tokens, seen, format in stages:
            tasks = [task for task in args.tasks if not (seen and task == "text")]
            named = args.policies if format == exact else args.best or args.policies
            for budget in args.budgets:
                for policy in (*([DENSE] if budget == args.budgets[0] and format == exact else []), *named):
                    for task in tasks:
                        yield Cell(policy, 1.0 if policy == DENSE else budget, task, tokens, seen, format, context)


def recall(bench: Bench) -> Iterator[list[dict]]:
    """All rows so far, after each cell. Of a cell that fails, the row has the error."""
    rows: dict[tuple, dict] = {}
    for cell in in_time(cells(bench.args), bench.args.minutes):
        row = rows.setdefault(tuple(cell.row.values()), cell.row | {"contexts": {}, "errors": []})
        try:
            row["contexts"].setdefault(cell.task, {})[str(cell.context)] = bench.measure(cell)
        except Exception as error:  # a policy that fails must not end the study
            row["errors"].append(failed(f"{cell.task} {cell.context}", error))
        yield list(rows.values())


def failed(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {error}"[:300]


def significant(x: float) -> float:
    return float(f"{x:.4g}")


def what(model: str) -> str:
    return f"policies_recall_{name_of(model)}"


def shard_of(text: str) -> tuple[int, int]:
    shard, _, shards = text.partition("/")
    if not 0 <= int(shard) < int(shards):
        raise argparse.ArgumentTypeError(f"{text}: must be I/N, from 0/N to N-1/N")
    return int(shard), int(shards)


def parser() -> argparse.ArgumentParser:
    found = parser_of(__doc__, "policies", model="demo")
    found.add_argument("--policies", nargs="*", default=list(VARIANTS), choices=[[], *VARIANTS], metavar="POLICY")
    found.add_argument("--best", nargs="*", default=[], choices=[[], *VARIANTS], metavar="POLICY", help="those of formats but the first")
    found.add_argument("--budgets", nargs="+", type=fraction, default=[0.5, 0.25, 0.1, 0.75], help="shares of the prompt that are kept")
    found.add_argument("--formats", nargs="+", default=["identity", "turboquant_4bit_nc"], choices=FORMATS, metavar="A,B")
    found.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, metavar="TASK", help=" ".join(TASKS))
    found.add_argument("--tokens", nargs="+", type=at_least(500), default=[4000, 8000], help="tokens of contexts")
    found.add_argument("--questions", nargs="+", default=["unseen", "seen"], choices=["unseen", "seen"])
    found.add_argument("--contexts", type=at_least(1), default=48, help="of each task, shared among the processes of a shard")
    found.add_argument("--shard", type=shard_of, default=(0, 1), metavar="I/N", help="the part of the work that is done here")
    found.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="adds the rows of these files to --out")
    return found


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    if args.merge:
        merge(args.out, what(args.model), args.merge)
    elif not shows(args):
        if wrong := refused(args):
            parser().error(wrong)
        measure(args)
    rows = read_rows(args.out, what(args.model))
    if not rows:
        parser().error(f"{args.out} has no rows of {args.model}: measure first")
    picture = args.out.with_name(f"{args.out.stem}_{name_of(args.model)}.png")
    present(args, list(recall_tables(rows)), lambda: plot(rows, picture))


def measure(args: argparse.Namespace) -> None:
    """Writes the rows while they grow, every few seconds and at the end, however it comes."""
    bench = Bench(args)
    same = described(args) | {"dtype": str(bench.model.dtype)}
    rows: list[dict] = []
    written = time.perf_counter()
    try:
        for rows in recall(bench):  # noqa: B007
            if time.perf_counter() - written > WRITE_EVERY:
                replace_rows(args.out, what(args.model), [same | row for row in rows])
                written = time.perf_counter()
    finally:
        replace_rows(args.out, what(args.model), [same | row for row in rows])


def merge(out: Path, what: str, files: list[Path]) -> None:
    """Adds the rows of `what` in `files` to those in `out`; contexts of the same row become one row."""
    rows: dict[tuple, dict] = {}
    for file in (out, *files):
        for row in read_rows(file):
            if row["what"] == what:
                key = tuple(row.get(name) for name in ("policy", "budget", "tokens", "seen", "format"))
                same = rows.setdefault(key, row)
                if same is not row:
                    for task, contexts in row.get("contexts", {}).items():
                        same["contexts"].setdefault(task, {}).update(contexts)
                    same["errors"] = sorted({*same["errors"], *row["errors"]})
    write_rows(out, what, list(rows.values()))


if __name__ == "__main__":
    main()
