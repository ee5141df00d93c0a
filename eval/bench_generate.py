"""`generate` on one GPU with a Llama of eight billion random weights: our caches beside DynamicCache, StaticCache and QuantizedCache.

    python eval/bench_generate.py [--sections prefill largest eviction decode budget profile]  measure; rows in eval/results/generate.jsonl
    python eval/bench_generate.py --all --resume                           every case, from where --minutes ended the last run
    python eval/bench_generate.py --show | --plot                          tables | generate.png, from the rows; no GPU

prefill   seconds to the first token, the prompt read at once or in chunks of 8,192; peak memory.
largest   the longest context of one request, and the largest batch of 32,768 tokens, with which an eager decode step still fits.
eviction  H2O with a budget of 4,096 after a prompt of 131,072 tokens that was really read, beside a full cache of 4,096 tokens.
decode    milliseconds a token, peak memory, what the cache holds.
budget    decode in 4 bits with an attention budget of 4,096 tokens, beside all tokens.
profile   GPU time of a step by kind of kernel: of eviction, and of decode in the cases `MAIN` and `SMALL`.

Latency is what a streaming user sees: the time between two calls of the streamer of `model.generate`, each with a token that has
reached the host; the mean of `--steps`, a multiple of the 32 tokens that our growing caches encode together. Before them, a few steps
compile, tune and record CUDA graphs: `compile_s`. *compiled*: the cache has `max_length` (StaticCache: `max_cache_len`), a multiple of
128, so that `generate` compiles and replays the step by itself, with its defaults. *eager*: the cache grows, and nothing is compiled.

Decode starts from a cache that was filled with random keys and values through `cache.update`. `generate` then gets one token and a mask
of the whole length, which tells it that all but that token is cached. Every configuration starts without compiled code. Peaks are
torch's, less the weights; `--memory-gib` caps them, so that larger cards tell what a card of 80 GB holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from generate_runs import BUDGET, H2O, KINDS, QUANTO, READS, Bench, Run, fitting, free
from gpu import device, gpu
from harness import Table, device_name, in_time, note, outcome, parser_of, picture, pivot, read_rows, run_or_show
from palette import UNCENTERED

GIB = 2**30
SECTIONS = ("prefill", "largest", "eviction", "decode", "budget", "profile")
FORMATS = ("identity", "int8", "turboquant_4bit_nc", "fp8", "int4", "nvfp4")
FOUR = "turboquant_4bit_nc"
MAIN, SMALL, WIDEST = (8, 32768), (1, 8192), (8, 131072)
CASES = (MAIN, SMALL, (1, 32768), (8, 8192), (1, 131072), (8, 131072))
EAGER = {SMALL: ("DynamicCache", FOUR, QUANTO), MAIN: ("DynamicCache", FOUR)}
# Compiling takes most of the time.
COMPILED = {MAIN: ("StaticCache", FOUR, "int8", "hadaquant_k3v3", "identity"), SMALL: ("StaticCache", FOUR)}


def runs(sections: list[str], every: bool) -> Iterator[Run]:
    """What is measured, what the table of the documentation needs; `every`: the rest as well."""
    if "eviction" in sections:
        yield Run("eviction", "identity", "compiled", 1, BUDGET)
        yield Run("eviction", H2O, "compiled", 1, 131072, "chunks")
    if "prefill" in sections:
        kinds = (("DynamicCache", "eager"), (FOUR, "eager"), (FOUR, "compiled"))
        yield from (Run("prefill", *kind, 1, 32768, how) for how in ("whole", "chunks") for kind in kinds)
    if "largest" in sections:
        for name in ("DynamicCache", FOUR):
            yield Run("largest", name, "eager", 1, 0, "context")
            yield Run("largest", name, "eager", 0, 32768, "batch")
    if {"decode", "profile"} & set(sections):
        for case in (MAIN, SMALL):
            yield from (Run("decode", name, "eager", *case) for name in EAGER[case])
            yield from (Run("decode", name, "compiled", *case) for name in COMPILED[case])
    if "budget" in sections:
        yield from (Run("decode", name, "compiled", *case) for case in (WIDEST, MAIN) for name in (FOUR, f"{FOUR}{READS}{BUDGET}"))
    if not every:
        return
    if "eviction" in sections:
        yield Run("eviction", H2O, "eager", 1, 131072, "whole")
    if "prefill" in sections:
        kinds = [("StaticCache", "compiled"), ("identity", "compiled"), *((name, "eager") for name in ("identity", "int8", "nvfp4"))]
        for context in (32768, 8192):
            yield from (Run("prefill", *kind, 1, context, how) for kind in kinds for how in ("whole", "chunks"))
    if "decode" in sections:
        for case in CASES:
            yield from (Run("decode", name, "eager", *case) for name in ("DynamicCache", "identity") if name not in EAGER.get(case, ()))
            more = [name for name in ("StaticCache", *FORMATS) if name not in COMPILED.get(case, ())]
            yield from (Run("decode", name, "compiled", *case) for name in more)


def measure(args: argparse.Namespace) -> None:
    bench = Bench(args.tiny, args.memory_gib, args.steps)
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None
    same = {"device": device_name(device()), "memory_gib": round(bench.memory / GIB, 1), "triton": triton}
    same |= {"layers": bench.model.config.num_hidden_layers, "run": time.strftime("%Y-%m-%d %H:%M:%S")}
    kept = [row for row in read_rows(args.out) if args.resume and row.get("failed", "does not fit") == "does not fit"]
    done = {row["what"] for row in kept}

    def what(run: Run) -> str:
        return f"generate: {run}, {same['device']}"

    def profiled(run: Run) -> bool:
        main = run.section == "decode" and (run.batch, run.context * bench.scale) in (MAIN, SMALL)
        return "profile" in args.sections and (run.section == "eviction" or main)

    def wanted(run: Run) -> bool:
        chosen = run.section != "decode" or not args.cases or f"{run.batch}x{run.context * bench.scale}" in args.cases
        whole = what(run) in done and (not profiled(run) or what(replace(run, section="profile")) in done)
        return chosen and not whole and (not args.caches or run.cache in args.caches)

    scaled = (replace(run, context=run.context // bench.scale) for run in runs(args.sections, args.all))
    for run in in_time(filter(wanted, scaled), args.minutes):
        free(bench.model)
        if (held := gpu("memory_allocated") - bench.weights) > 2**28:
            print(f"{held / GIB:.1f} GiB of what ran before are still held", file=sys.stderr)
        row = outcome(lambda run=run: fitting(lambda: bench.measure(run, profiled(run))) or {"failed": "does not fit"})
        kernels = row.pop("profile", None)
        note(args.out, what(run), asdict(run) | row | same)
        if kernels:
            whole = replace(run, section="profile")
            note(args.out, what(whole), asdict(whole) | kernels | same)


def label(row: dict) -> str:
    return f"{row['cache']}, {row['mode']}"


def case(row: dict) -> str:
    return f"{row['batch']}x{row['context']:,}"


def decode(rows: list[dict]) -> Table:
    """Milliseconds a token, and times as fast as transformers' caches of the same case, starred where those are of another run."""

    def times(row: dict, base: tuple[str, str]) -> str:
        for other in rows:
            if (other["cache"], other["mode"]) == base and "ms" in other and case(other) == case(row):
                return f"{other['ms'] / row['ms']:.2f}" + "*" * (other["run"] != row["run"])
        return "-"

    def cell(row: dict) -> str:
        bases = (("StaticCache", "compiled"), ("DynamicCache", "eager"))
        return row.get("failed", "").split(":")[0] or " / ".join([f"{row['ms']:.2f}", *(times(row, base) for base in bases)])

    found = pivot(sorted(rows, key=lambda row: (row["batch"], row["context"])), label, case, cell)
    return Table(found.headers, sorted(found.lines, key=lambda line: (not line[0][0].isupper(), line[0])))


SHOWN = {
    "profile": [f"{kind}_ms" for kind in (*KINDS, "rest", "busy", "idle")],
    "prefill": ["prefill_s", "peak_bytes", "cache_bytes"],
    "largest": ["found"],
    "eviction": ["prefill_s", "ms", "cache_bytes", "peak_bytes", "prefill_peak_bytes"],
    "decode": ["tokens_s", "cache_bytes", "peak_bytes", "compile_s", "graph_breaks", "cudagraph_skips"],
}
"""Figures of the rows of each section, in the order of a run's."""


def tables(rows: list[dict]) -> Iterator[Table]:
    for on in dict.fromkeys(row["device"] for row in rows):
        found = {section: [row for row in rows if (row["device"], row["section"]) == (on, section)] for section in SHOWN}
        title = "Decode: ms a token / times as fast as StaticCache compiled / as DynamicCache eager (* of another run)"
        yield replace(decode(found["decode"]), title=f"{title}; {on}")
        for section, names in SHOWN.items():
            lines = [
                [label(row), case(row), row["how"], *(f"{row[name]:,.4g}" if name in row else "" for name in names), row.get("failed", "")]
                for row in found[section]
            ]
            yield Table(["cache", "case", "how", *names, "failed"], lines, f"{section}; {on}")


PARTS = {"weights": "#7f8fa6", "attention": "#1f77b4", "append": "#ff7f0e", "rest": "#9467bd", "idle": "#e8e8e8"}
"""Colours of the parts of a step."""


def plot(rows: list[dict], path: Path) -> None:
    """Draws the parts of the milliseconds of a step, for each device and case."""
    held = {(row["device"], case(row), label(row)): row["cache_bytes"] / GIB for row in rows if "cache_bytes" in row}
    panels: dict[tuple[str, str], list[dict]] = {}
    for row in sorted(rows, key=lambda row: (row["device"], row["batch"], row["context"], -row.get("ms", 0))):
        if row["section"] == "profile" and "ms" in row:
            panels.setdefault((row["device"], case(row)), []).append(row)
    for at, found in panels.items():  # a format without its mean stands for it where it was measured alone
        names = [label(row) for row in found]
        panels[at] = [
            row for row, name in zip(found, names, strict=True) if UNCENTERED not in name or name.replace(UNCENTERED, "") not in names
        ]
    panels = {at: found for at, found in panels.items() if len(found) > 2}  # what was measured to be compared
    if not panels:
        return print("no rows of profile to plot")
    heights = [0.3 * len(bars) + 0.4 for bars in panels.values()]
    shape = {"figsize": (11, sum(heights) + 0.75 * len(panels)), "height_ratios": heights, "layout": "constrained"}
    with picture(path, len(panels), dpi=110, **shape) as (_, axes):
        for ((on, at), bars), axis in zip(panels.items(), axes[:, 0], strict=True):
            left = [0.0] * len(bars)
            for part, color in PARTS.items():
                widths = [row[f"{part}_ms"] for row in bars]
                axis.barh(range(len(bars)), widths, left=left, color=color, label=part if part != "idle" else "GPU waits for the host")
                left = [x + width for x, width in zip(left, widths, strict=True)]
            for y, row in enumerate(bars):
                size = held.get((on, at, label(row)))
                axis.text(left[y], y, f" {row['ms']:.1f} ms" + (f", {size:.1f} GiB" if size else ""), va="center", fontsize=8)
            axis.set_yticks(range(len(bars)), [label(row).replace(UNCENTERED, "") for row in bars], fontsize=8)
            axis.set(
                title=f"{at.replace('x', ' x ')} tokens, {on}", xlabel="milliseconds a step (left is better)", xlim=(0, max(left) * 1.15)
            )
            axis.spines[["top", "right"]].set_visible(False)
        axes[0, 0].legend(fontsize=8, loc="center right")


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "generate", minutes=8)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION", help=" ".join(SECTIONS))
    parser.add_argument("--caches", nargs="+", metavar="NAME", help="of these alone, e.g. StaticCache int8")
    parser.add_argument("--cases", nargs="+", metavar="BxT", help="of decode, these alone, e.g. 8x32768")
    parser.add_argument("--all", action="store_true", help="every case and cache: half an hour or more")
    parser.add_argument("--resume", action="store_true", help="leave out what has rows")
    parser.add_argument("--steps", type=int, default=64, help="decode steps that are timed")
    parser.add_argument("--memory-gib", type=float, default=78, help="torch takes no more than this")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and contexts, to try the script")
    run_or_show(parser, parser.parse_args(arguments), measure, "generate", tables, plot)


if __name__ == "__main__":
    main()
