"""`generate` on one GPU with a Llama of eight billion random weights: our caches beside DynamicCache, StaticCache and QuantizedCache.

    python eval/bench_generate.py [--sections prefill largest eviction decode profile]    measure; rows in eval/results/generate.jsonl
    python eval/bench_generate.py --all --resume                                         every case, from where --minutes ended the last run
    python eval/bench_generate.py --show | --plot                                         tables | generate.png, from the rows; no GPU

prefill   seconds to the first token, the prompt read at once or in chunks of 8,192; peak memory.
largest   the longest context of one request, and the largest batch of 32,768 tokens, with which an eager decode step still fits.
eviction  H2O with a budget of 4,096 after a prompt of 131,072 tokens that was really read, beside a full cache of 4,096 tokens.
decode    milliseconds a token, peak memory, what the cache holds.
profile   GPU time of a step by kind of kernel: of eviction, and of decode in the cases `MAIN` and `SMALL`.

Latency is what a streaming user sees: the time between two calls of the streamer of `model.generate`, each with a token that has reached
the host; the mean of `--steps`, a multiple of the 32 tokens that our growing caches encode together. Before them, a few steps compile, tune
and record CUDA graphs: `compile_s`. *compiled*: the cache has `max_length` (StaticCache: `max_cache_len`), a multiple of 128, so that
`generate` compiles and replays the step by itself, with its defaults. *eager*: the cache grows, and nothing is compiled.

Decode starts from a cache that was filled with random keys and values through `cache.update`. `generate` then gets one token and a mask of
the whole length, which tells it that all but that token is cached. Every configuration starts without compiled code. Peaks are torch's,
less the weights; `--memory-gib` caps them, so that larger cards tell what a card of 80 GB holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from generate_runs import BUDGET, H2O, QUANTO, Bench, Run, fitting, free, gpu
from generate_tables import plot, show
from rows import read_rows, replace_rows

RESULTS = Path(__file__).parent / "results" / "generate.jsonl"
SECTIONS = ("prefill", "largest", "eviction", "decode", "profile")
FORMATS = ("identity", "int8", "turboquant_4bit_nc", "fp8", "int4", "nvfp4")
FOUR = "turboquant_4bit_nc"
MAIN, SMALL = (8, 32768), (1, 8192)
CASES = (MAIN, SMALL, (1, 32768), (8, 8192), (1, 131072), (8, 131072))
EAGER = {SMALL: ("DynamicCache", FOUR, QUANTO), MAIN: ("DynamicCache", FOUR)}
COMPILED = {MAIN: ("StaticCache", FOUR, "int8", "identity"), SMALL: ("StaticCache", FOUR)}  # compiling takes most of the time


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
            yield from (Run("decode", name, "compiled", *case) for name in ("StaticCache", *FORMATS) if name not in COMPILED.get(case, ()))


def outcome(call: Callable) -> dict:
    try:
        return fitting(call) or {"failed": "does not fit"}
    except Exception as failure:  # whatever it is, the others are measured
        return {"failed": f"{type(failure).__name__}: {str(failure)[:300]}"}


def measure(args: argparse.Namespace) -> None:
    begin, bench = time.perf_counter(), Bench(args.tiny, args.memory_gib, args.steps)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None
    same = {"device": device, "memory_gib": round(bench.memory / 2**30, 1), "layers": bench.model.config.num_hidden_layers}
    same |= {"triton": triton, "run": time.strftime("%Y-%m-%d %H:%M:%S")}
    kept = [row for row in read_rows(args.out) if args.resume and row.get("failed", "does not fit") == "does not fit"]
    done, late, longest = {row["what"] for row in kept}, [], 0.0

    def what(run: Run) -> str:
        return f"generate: {run}, {device}"

    def note(run: Run, row: dict) -> None:
        replace_rows(args.out, what(run), [asdict(run) | row | same])
        short = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items() if key != "kernels"}
        print(f"{time.perf_counter() - begin:4.0f} s  {run}: {short}", file=sys.stderr, flush=True)

    for run in runs(args.sections, args.all):
        case = run.batch, run.context
        chosen = run.section != "decode" or not args.cases or "{}x{}".format(*case) in args.cases
        run = replace(run, context=run.context // bench.scale)
        profile = replace(run, section="profile")
        profiled = "profile" in args.sections and (run.section == "eviction" or (run.section == "decode" and case in (MAIN, SMALL)))
        whole = what(run) in done and (not profiled or what(profile) in done)
        if not chosen or whole or (args.caches and run.cache not in args.caches):
            continue
        started = time.perf_counter()
        if started - begin + longest > 60 * args.minutes:
            late.append(run)
            continue
        free(bench.model)
        if (held := gpu("memory_allocated") - bench.weights) > 2**28:
            print(f"{held / 2**30:.1f} GiB of what ran before are still held", file=sys.stderr)
        row = outcome(lambda run=run, profiled=profiled: bench.measure(run, profiled))
        kernels = row.pop("profile", None)
        note(run, row)
        if kernels:
            note(profile, kernels)
        longest = max(longest, time.perf_counter() - started)
    for run in late:
        print(f"no time left for {run}: run again with --resume", file=sys.stderr)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION", help=" ".join(SECTIONS))
    parser.add_argument("--caches", nargs="+", metavar="NAME", help="of these alone, e.g. StaticCache int8")
    parser.add_argument("--cases", nargs="+", metavar="BxT", help="of decode, these alone, e.g. 8x32768")
    parser.add_argument(
        "--minutes", type=float, default=8, help="start nothing that, if it took as long as the longest so far, would go on after this"
    )
    parser.add_argument("--all", action="store_true", help="every case and cache: half an hour or more")
    parser.add_argument("--resume", action="store_true", help="leave out what has rows")
    parser.add_argument("--steps", type=int, default=64, help="decode steps that are timed")
    parser.add_argument("--memory-gib", type=float, default=78, help="torch takes no more than this")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and contexts, to try the script")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the rows; those of the same configuration and device are replaced")
    parser.add_argument("--show", action="store_true", help="the tables, from the rows")
    parser.add_argument("--plot", action="store_true", help="the png, from the rows")
    args = parser.parse_args(argv)
    if not (args.show or args.plot):
        if not torch.cuda.is_available() and not args.tiny:
            parser.error("measuring needs a GPU; --show, --plot and --tiny do not")
        measure(args)
    rows = [row for row in read_rows(args.out) if row["what"].startswith("generate")]
    if args.show or not args.plot:
        show(rows)
    if args.plot:
        plot(rows, args.out)


if __name__ == "__main__":
    main()
