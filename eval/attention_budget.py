"""Reading few tokens of all against keeping few: facts that are asked for later, and divergence; rows in
eval/results/attention_budget.jsonl, those of the same model replaced.

    python eval/attention_budget.py                                        the embedded model: minutes on one core
    python eval/attention_budget.py --model smollm2 --tokens 4096 --policies snapkv keydiff --minutes 12
    python eval/attention_budget.py --step 64 --policies --formats         64 tokens a step, as in a second turn
    python eval/attention_budget.py --show | --markdown | --plot           from the rows of all models

A context is read once, densely, and given to each cache. Then the cache reads questions about it with their answers:
a question in steps of at most 16 tokens, then one token a step, or all in steps of `--step` tokens, which share a
choice of what they read. An answer is recalled if each of its tokens is the most probable one. The divergence is that
of 64 tokens that follow a text. A share of the context is what attention reads beside the exact tokens (the first 4
and the last 64), or what a policy keeps beside as many tokens. Numbers are means over the questions of a context, so
that errors are those of the means of contexts. `eval/bench_attention_budget.py` measures the speed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from error_bars import percent
from harness import (
    Table,
    at_least,
    described,
    fraction,
    in_time,
    name_of,
    parser_of,
    picture,
    present,
    read_rows,
    refused,
    replace_rows,
    shows,
)
from palette import format_color, line_styles, policy_color
from recall_bench import DENSE, Bench, Cell, Estimate, counted, divergence, lost, mean, merge, relative_recall, shard_of, shown
from recall_tasks import TASKS
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, policies

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WHAT = "recall with an attention budget"
READ = "read"
"""In place of a policy: a cache that keeps every token, and reads those that are chosen."""
EXACT = 68
"""Tokens that a cache without a policy keeps exact by default."""
FORMAT, OTHERS, COMPARED = "turboquant_4bit_nc", ("int8", "identity"), 0.125
"""The format of all shares; those that are measured with all tokens and with one share."""


class Readers(Bench):
    """Caches that read few tokens, beside policies that keep few."""

    def cache(self, policy: str, format: str, size: int, total: int) -> Cache:
        if policy != READ:
            return super().cache(policy, format, size + EXACT, total)
        if size >= total:
            return CompressedCache(self.model.config, format=format)
        return CompressedCache(self.model.config, format=format, attention_budget=size)


def what_of(args: argparse.Namespace) -> str:
    return f"{WHAT}, {name_of(args.model)}" + (f", {args.step} tokens a step" if args.step > 1 else "")


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    caches = [(DENSE, 1.0, "identity"), *((READ, share, FORMAT) for share in (1.0, *args.shares))]
    caches += [(READ, share, format) for format in args.formats for share in (1.0, COMPARED) if (format, share) != ("identity", 1.0)]
    caches += [(policy, share, FORMAT) for policy in args.policies for share in args.shares]
    shard, shards = args.shard
    for context in range(shard, args.contexts, shards):
        for task in args.tasks:
            for policy, share, format in caches:
                yield Cell(policy, share, task, args.tokens, format, context)


def measure(args: argparse.Namespace) -> None:
    """Writes the rows after each context of a task."""
    bench, rows, before, begin = Readers(args), {}, None, time.perf_counter()
    same, what = described(args) | {"dtype": str(bench.model.dtype), "step": args.step}, what_of(args)
    for cell in in_time(cells(args), args.minutes):
        if before not in (None, (cell.task, cell.context)):
            replace_rows(args.out, what, [same | row for row in rows.values()])
        before = cell.task, cell.context
        row = rows.setdefault(tuple(cell.row.values()), cell.row | {"contexts": {}})
        row["contexts"].setdefault(cell.task, {})[str(cell.context)] = bench.measure(cell)
        print(f"{time.perf_counter() - begin:.0f} s: {cell}", file=sys.stderr, flush=True)
    replace_rows(args.out, what, [same | row for row in rows.values()])


def name(row: dict) -> str:
    if row["policy"] == READ:
        return f"all kept, `{row['format']}`"
    policy = policies.resolve(row["policy"].removesuffix("_heads")).name
    return f"`{policy}`{', budgets by head' * row['policy'].endswith('_heads')}, `{row['format']}`"


def by_model(rows: list[dict]) -> Iterator[tuple[dict, list[dict]]]:
    """The dense row of each model, and its other rows."""
    for what in dict.fromkeys(row["what"] for row in rows):
        of = [row for row in rows if row["what"] == what]
        yield next(row for row in of if row["policy"] == DENSE), [row for row in of if row["policy"] != DENSE]


def measured(row: dict, dense: dict) -> tuple[Estimate | None, Estimate | None, Estimate | None]:
    """Recall relative to the dense run, nats a token by which answers are less likely, and divergence."""
    tasks = counted(dense)
    return relative_recall(row, dense, tasks), lost(row, dense, tasks), divergence(row)


def tables(rows: list[dict]) -> Iterator[Table]:
    for dense, others in by_model(rows):
        shares = sorted({row["budget"] for row in others})
        cells: dict[str, dict] = {}
        for row in others:
            cells.setdefault(name(row), {})[row["budget"]] = measured(row, dense)
        lines = []
        for cache, of in cells.items():
            recalls = [", ".join(filter(None, (shown(of[x][0], percent), shown(of[x][1])))) if x in of else "" for x in shares]
            lines.append([cache, *recalls, *(shown(of[x][2]) if x in of else "" for x in shares)])
        heads = ["all" if share == 1 else f"1/{1 / share:.0f}" for share in shares]
        facts = {task: [x["recall"] for x in dense["contexts"][task].values()] for task in counted(dense)}
        recalled = ", ".join(f"{task} {shown(mean(each), percent)}" for task, each in facts.items())
        contexts = " and ".join(map(str, sorted({len(found) for found in dense["contexts"].values()})))
        caption = (
            f"{dense['model']}, {contexts} contexts of {dense['tokens']:,} tokens a task, {step_of(dense)}. The share of tokens that a "
            "step reads beside the exact ones, or that are kept: recall relative to the dense run's "
            f"({recalled}), nats a token by which answers are less likely, and KL divergence of 64 tokens that follow a text, nats."
        )
        title = f"**{dense['model']}**" if dense.get("step", 1) == 1 else f"**{dense['model']}, {step_of(dense)}**"
        yield Table(["", *heads, *(f"KL {head}" for head in heads)], lines, title, caption, (" --- ", " ---: "))


def step_of(row: dict) -> str:
    return f"{row['step']} tokens a step" if row.get("step", 1) > 1 else "one token a step"


def marked(row: dict) -> dict:
    """Policies are dashed, formats of one share are points."""
    if row["policy"] != READ:
        return {"linestyle": "--", "marker": "s"}
    return {} if row["format"] == FORMAT else {"linestyle": "none", "marker": "D"}


def draw_speed(axes: Axes, rows: list[dict]) -> None:
    """The time of a layer's attention against the tokens that it reads: chosen ones, or those that eviction has left."""
    for way, key, style in (("all kept", "whole_us", "-o"), ("evicted", "read_us", "--s")):
        of = sorted((row["budget"], row[key]) for row in rows if key in row)
        axes.plot(*zip(*of, strict=True), style, color="black" if key == "read_us" else format_color(FORMAT), label=way) if of else None
    for key, what in (("all_us", "all tokens, 4 bits"), ("sdpa_us", "all tokens, bf16")):
        axes.axhline(rows[0][key], linestyle=":", color="gray")
        axes.annotate(what, (0.99, rows[0][key]), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.set(title=f"{rows[0]['device']}, {rows[0]['rows']} x {rows[0]['tokens']:,}", ylabel="attention of a layer, µs (lower is better)")
    axes.set(xlabel="tokens read in a step, or kept", yscale="log")
    axes.set_xticks(ticks := sorted({row["budget"] for row in rows}), [f"{tick:,}" for tick in ticks])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 0.2))


def plot(rows: list[dict], path: Path) -> None:
    """Recall and divergence against the share of tokens, a line a cache: one row of axes a model; and the time of attention."""
    every = list(by_model([row for row in rows if row.get("step", 1) == 1]))
    timed = [row for row in read_rows(path.with_suffix(".jsonl")) if row["what"] == "attention budget" and not row.get("shortest")]
    height = len(every) + bool(timed)
    with picture(path, height, 2, dpi=90, figsize=(11, 4.2 * height), layout="constrained") as (figure, grid):
        drawn = {}
        for axes, tokens in zip(grid[-1], (131072, 32768), strict=True) if timed else ():
            of = [row for row in timed if row["tokens"] == tokens and row["rows"] == 8 and row.get("queries", 1) == 1]
            draw_speed(axes, [row for row in of if row["format"].startswith(FORMAT)])
        for (dense, others), pair in zip(every, grid[: len(every)], strict=True):
            lines: dict[str, list[dict]] = {}
            for row in others:
                lines.setdefault(name(row).replace("`", ""), []).append(row)
            colors = {
                line: format_color(of[0]["format"]) if of[0]["policy"] == READ else policy_color(of[0]["policy"].removesuffix("_heads"))
                for line, of in lines.items()
            }
            styles = line_styles(lines, colors.__getitem__)
            for axes, at, scale in zip(pair, (0, 2), (100, 1), strict=True):
                for line, of in lines.items():
                    values = [(100 * row["budget"], value) for row in of if (value := measured(row, dense)[at])]
                    if values := sorted(values):
                        x, y = [share for share, _ in values], [scale * value[0] for _, value in values]
                        errors = [scale * value[1] for _, value in values]
                        drawn[line] = axes.errorbar(x, y, errors, markersize=5, elinewidth=0.8, **styles[line] | marked(of[0]))
                axes.set_xscale("log", base=2)
                axes.set_xticks(ticks := sorted({100 * row["budget"] for row in others}), [f"{tick:.3g}" for tick in ticks])
                axes.set(xlabel=f"tokens read in a step, or kept, % of {dense['tokens']:,}")
                axes.grid(alpha=0.3)
            pair[0].set(title=dense["model"], ylabel="recall, % of the dense run's (higher is better)", ylim=(-3, None))
            pair[1].set(title=dense["model"], ylabel="KL divergence, nats (lower is better)", yscale="log")
        figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=3, fontsize=9)


def parser() -> argparse.ArgumentParser:
    found = parser_of(__doc__, "attention_budget", model="demo")
    found.add_argument("--tokens", type=at_least(500), default=2000, help="tokens of contexts")
    found.add_argument("--step", type=at_least(1), default=1, help="tokens of a step in which answers and texts are read")
    found.add_argument("--shares", nargs="+", type=fraction, default=[1 / 32, 1 / 16, 1 / 8, 1 / 4])
    found.add_argument("--policies", nargs="*", default=["snapkv", "keydiff", "kvzip"], metavar="POLICY", help="beside reading few")
    found.add_argument("--formats", nargs="*", default=list(OTHERS), choices=[[], *OTHERS], help="beside the one of all shares")
    found.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, metavar="TASK", help=" ".join(TASKS))
    found.add_argument("--contexts", type=at_least(1), default=12, help="of each task")
    found.add_argument("--shard", type=shard_of, default=(0, 1), metavar="I/N", help="the contexts that are read here")
    found.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="adds the rows of these files to --out")
    return found


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    if args.merge:
        merge(args.out, what_of(args), args.merge)
    elif not shows(args):
        if wrong := refused(args):
            parser().error(wrong)
        measure(args)
    rows = [row for row in read_rows(args.out) if row["what"].startswith(WHAT)]
    if not rows:
        parser().error(f"{args.out} has no rows: measure first")
    present(args, tables(rows), lambda: plot(rows, args.out.with_suffix(".png")))


if __name__ == "__main__":
    main()
