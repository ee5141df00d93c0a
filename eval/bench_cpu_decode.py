"""Decode time per token on the CPU: every format beside DynamicCache and transformers' own QuantizedCache, in one run.

    python eval/bench_cpu_decode.py [--tokens 2048] [--rounds 5] [--threads N]

Each cache holds the same prefilled text on the embedded model; rounds go through all caches in turn, so that a machine that changes its
pace changes it for all. Rows have the median milliseconds per token, and the ratios to DynamicCache and to quanto's 4 bits of the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
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

DYNAMIC, QUANTO = "DynamicCache", "QuantizedCache quanto 4-bit"
SHOWN = ("identity", "int8", "fp8", "nvfp4", "turboquant_4bit_nc")


def caches(config) -> dict[str, Callable[[], Cache]]:
    found: dict[str, Callable[[], Cache]] = {DYNAMIC: lambda: DynamicCache(config=config)}
    if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto"):
        found[QUANTO] = lambda: QuantizedCache("quanto", config, nbits=4)
    found["QuantizedCache fp8"] = lambda: QuantizedCache("fp8", config)
    return found | {name: lambda name=name: CompressedCache(config, format=name) for name in REGISTRY}


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    model, tokenizer = demo.load(DTYPES[args.dtype])
    ids = torch.tensor(demo.text_ids(tokenizer)[: args.tokens])[None]

    def decode_ms(cache: Cache, token: torch.Tensor, steps: int) -> float:
        return milliseconds(lambda: [model(token, past_key_values=cache) for _ in range(steps)]) / steps

    ready, times = {}, {}
    for name, factory in caches(model.config).items():
        cache = factory()
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        decode_ms(cache, token, 3)
        ready[name], times[name] = (cache, token, held_bytes(cache) / cache.get_seq_length()), []
    for number in range(args.rounds):
        print(f"round {number + 1}", file=sys.stderr, flush=True)
        for name, (cache, token, _) in ready.items():
            times[name].append(decode_ms(cache, token, args.steps))
    median = {name: statistics.median(values) for name, values in times.items()}
    same = {"tokens": args.tokens, "dtype": args.dtype, "machine": platform.processor() or platform.machine(), "threads": args.threads}
    rows = [
        {
            "cache": name, "ms_per_token": round(ms, 3), "of_dynamic": round(ms / median[DYNAMIC], 3),
            "of_quanto4": round(ms / median[QUANTO], 3) if QUANTO in median else None, "bytes_per_token": ready[name][2],
        } for name, ms in median.items()
    ]  # fmt: skip
    replace_rows(args.out, "cpu_decode", [same | row for row in rows])


def tables(rows: list[dict]) -> Iterator[Table]:
    found = {row["cache"].removesuffix("_uncentered"): row for row in rows}  # the last of each
    shown = [DYNAMIC, *(name for name in found if name.startswith("Quantized")), *SHOWN]
    lines = [
        [f"`{name}`", f"{row['ms_per_token']:.1f}", f"{row['of_dynamic']:.2f}", f"{row['of_quanto4']:.2f}" if row["of_quanto4"] else ""]
        for name in shown if (row := found.get(name))
    ]  # fmt: skip
    yield Table(["cache", "ms a token", "times `DynamicCache`'s", "times quanto's, 4 bits"], lines, rule=(" --- ",))


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "cpu_decode")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="steps a cache takes in each round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    run_or_show(parser, parser.parse_args(arguments), measure, "cpu_decode", tables, gpu=False)


if __name__ == "__main__":
    main()
