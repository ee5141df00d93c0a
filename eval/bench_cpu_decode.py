"""Decode time per token on the CPU: every format beside DynamicCache and transformers' own QuantizedCache, in one run.

    python eval/bench_cpu_decode.py [--tokens 4096] [--rounds 3] [--dtypes float32 bfloat16] [--threads 1 2]

Each cache holds the same prefilled text on the embedded model; rounds go through all caches in turn, so that a machine that changes its
pace changes it for all. Rows have the median milliseconds per token, and the ratio to DynamicCache of the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import platform
import statistics
import sys
from collections.abc import Callable, Iterator

import torch
from gpu import milliseconds
from harness import DTYPES, Table, parser_of, replace_rows, run_or_show
from transformers import DynamicCache, QuantizedCache
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, demo
from qkvcache.evaluation.quality import held_bytes
from qkvcache.formats import REGISTRY
from qkvcache.releases import passing

DYNAMIC, QUANTO = "DynamicCache", "QuantizedCache quanto 4-bit"
SHOWN = ("identity", "int8", "fp8", "nvfp4", "turboquant_4bit_nc")


def caches(config) -> dict[str, Callable[[], Cache]]:
    found: dict[str, Callable[[], Cache]] = {DYNAMIC: lambda: DynamicCache(config=config)}
    if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto"):
        found[QUANTO] = lambda: QuantizedCache("quanto", config, nbits=4)
    found["QuantizedCache fp8"] = lambda: QuantizedCache("fp8", config)
    return found | {name: lambda name=name: CompressedCache(config, format=name) for name in REGISTRY}


def measure(args: argparse.Namespace) -> None:
    for dtype, threads in itertools.product(args.dtypes, args.threads):
        measure_one(args, dtype, threads)


@torch.no_grad()
def measure_one(args: argparse.Namespace, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model, tokenizer = demo.load(DTYPES[dtype])
    ids = torch.tensor(demo.text_ids(tokenizer)[: args.tokens])[None]

    def decode_ms(cache: Cache, token: torch.Tensor, steps: int) -> float:
        return milliseconds(lambda: [model(token, **passing(cache)) for _ in range(steps)]) / steps

    ready, times = {}, {}
    for name, factory in caches(model.config).items():
        cache = factory()
        token = model(ids, **passing(cache), logits_to_keep=1).logits[:, -1:].argmax(-1)
        decode_ms(cache, token, 3)
        ready[name], times[name] = (cache, token, held_bytes(cache) / cache.get_seq_length()), []
    for number in range(args.rounds):
        print(f"{dtype}, threads: {threads}, round {number + 1}", file=sys.stderr, flush=True)
        for name, (cache, token, _) in ready.items():
            times[name].append(decode_ms(cache, token, args.steps))
    median = {name: statistics.median(values) for name, values in times.items()}
    same = {"tokens": args.tokens, "dtype": dtype, "threads": threads, "machine": platform.processor() or platform.machine()}
    rows = [
        {
            "cache": name, "ms_per_token": round(ms, 3), "of_dynamic": round(ms / median[DYNAMIC], 3),
            "bytes_per_token": ready[name][2],
        } for name, ms in median.items()
    ]  # fmt: skip
    replace_rows(args.out, "cpu_decode", [same | row for row in rows], "tokens", "dtype", "threads", "cache")


def tables(rows: list[dict]) -> Iterator[Table]:
    found = {(row["dtype"], row["threads"], row["cache"]): row for row in rows}
    runs = list(dict.fromkeys(key[:2] for key in found))
    headers = ["cache", *(f"{dtype}, {'1 thread' if threads == 1 else f'{threads} threads'}" for dtype, threads in runs)]
    shown = [DYNAMIC, *dict.fromkeys(name for *_, name in found if name.startswith("Quantized")), *SHOWN]
    lines = [[f"`{name}`", *(_cell(found.get((*run, name))) for run in runs)] for name in shown]
    yield Table(headers, [line for line in lines if any(line[1:])])


def _cell(row: dict | None) -> str:
    return f"{row['ms_per_token']:.1f} ms, {row['of_dynamic']:.2f}" if row else ""


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "cpu_decode")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps a cache takes in each round")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    run_or_show(parser, parser.parse_args(arguments), measure, "cpu_decode", tables, gpu=False)


if __name__ == "__main__":
    main()
