"""Decode time per token on the CPU: every format beside DynamicCache and transformers' own QuantizedCache, in one run.

    python eval/bench_cpu_decode.py [--tokens 2048] [--rounds 5] [--threads N]

Each cache holds the same prefilled text on the embedded model; rounds go through all caches in turn, so that a machine that changes its
pace changes it for all. Printed: median milliseconds per token and the ratios to DynamicCache and to quanto's 4 bits of the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, QuantizedCache
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, demo
from qkvcache.evaluation.quality import held_bytes
from qkvcache.formats import REGISTRY

RESULTS = Path(__file__).parent / "results" / "cpu_decode.jsonl"


def caches(config) -> dict[str, Callable[[], Cache]]:
    found: dict[str, Callable[[], Cache]] = {"DynamicCache": lambda: DynamicCache(config=config)}
    if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto"):
        found["QuantizedCache quanto 4-bit"] = lambda: QuantizedCache("quanto", config, nbits=4)
    found["QuantizedCache fp8"] = lambda: QuantizedCache("fp8", config)
    for name in REGISTRY:
        found[name] = lambda name=name: CompressedCache(config, format=name)
    return found


@torch.no_grad()
def decode_ms(model, cache: Cache, token: torch.Tensor, steps: int) -> float:
    """Mean milliseconds of `steps` steps."""
    begin = time.perf_counter()
    for _ in range(steps):
        model(token, past_key_values=cache)
    return (time.perf_counter() - begin) / steps * 1e3


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="steps a cache takes in each round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--save", action="store_true", help=f"append the rows to {RESULTS.name}")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model, tokenizer = demo.load(getattr(torch, args.dtype))
    ids = torch.tensor(demo.text_ids(tokenizer)[: args.tokens])[None]
    ready, bytes_held = {}, {}
    for name, factory in caches(model.config).items():
        cache = factory()
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        decode_ms(model, cache, token, 3)
        ready[name] = cache, token
        bytes_held[name] = held_bytes(cache) / cache.get_seq_length()
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(args.rounds):
        for name, (cache, token) in ready.items():
            times[name].append(decode_ms(model, cache, token, args.steps))

    median = {name: statistics.median(values) for name, values in times.items()}
    quanto = median.get("QuantizedCache quanto 4-bit")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = {"machine": platform.processor() or platform.machine(), "threads": args.threads, "commit": commit}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    table = Table(title=f"decode at {args.tokens:,} tokens, embedded model, {args.dtype}, {args.threads} threads")
    for header in ("cache", "ms/token", "x DynamicCache", "x quanto 4-bit", "bytes/token"):
        table.add_column(header, justify="left" if header == "cache" else "right")
    rows = []
    for name, ms in median.items():
        ratio = ms / median["DynamicCache"]
        against = ms / quanto if quanto else None
        table.add_row(
            name,
            f"{ms:.2f}",
            f"{ratio:.2f}",
            f"{against:.2f}" if against else "-",
            f"{bytes_held[name]:,.0f}",
        )
        row = {"what": "cpu_decode", "date": time.strftime("%Y-%m-%d"), "cache": name, "tokens": args.tokens, "dtype": args.dtype}
        row |= {"ms_per_token": round(ms, 3), "of_dynamic": round(ratio, 3), "of_quanto4": against and round(against, 3)}
        rows.append(row | machine | versions | {"command": " ".join(["eval/bench_cpu_decode.py", *sys.argv[1:]])})
    Console(width=110).print(table)
    if args.save:
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
