"""A second turn: many new tokens over a compressed past, beside DynamicCache; rows in eval/results/turns.jsonl.

    python eval/bench_turns.py [--minutes 5]     measure on a GPU, print the table, write the rows
    python eval/bench_turns.py --markdown        the table of eval/README.md, from the rows: needs no GPU

A Llama of 8 layers of the 8B shape in bf16 holds 32,768 tokens of each of 8 or 1 rows, random keys and values, and reads so many more at
once, `model(ids, past_key_values=cache)`, four times. Milliseconds by the clock, the best of them; the first turn is in the rows too, with
all that it compiles. Peak memory is what is allocated beside the weights and the cache.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from arguments import at_least
from generate_runs import LLAMA
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.cache_utils import Cache

from qkvcache import CompressedCache
from qkvcache.evaluation.rows import read_rows, replace_rows

RESULTS = Path(__file__).parent / "results" / "turns.jsonl"
PAST, LAYERS, TURNS = 32768, 8, 4
NEW = {8: (16, 64, 128, 512), 1: (16, 128, 512, 1024, 2048)}
"""New tokens, by rows."""
DENSE = "DynamicCache"
CACHES = (DENSE, "int8", "turboquant_4bit_nc", "int8, max_length")
FILL = 2**27
"""Elements that fill a layer at once."""


def made(name: str, config: LlamaConfig, queries: int) -> Cache:
    if name == DENSE:
        return DynamicCache(config=config)
    format, _, preallocated = name.partition(", ")
    return CompressedCache(config, format=format, max_length=PAST + (TURNS + 2) * queries if preallocated else None)


def fill(cache: Cache, config: LlamaConfig, rows: int) -> None:
    """As a prompt would."""
    heads, dim = config.num_key_value_heads, config.head_dim
    tokens = min(PAST, FILL // (rows * heads * dim))
    key, value = (torch.randn(rows, heads, tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for layer in range(LAYERS):
        for _ in range(PAST // tokens):
            cache.update(key, value, layer)


@torch.no_grad()
def measure(minutes: float) -> Iterator[dict]:
    end = time.perf_counter() + 60 * minutes
    config = LlamaConfig(**LLAMA | {"num_hidden_layers": LAYERS}, bos_token_id=None, eos_token_id=None)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for rows, sizes in NEW.items():
        for name in CACHES:
            for queries in sizes:
                if time.perf_counter() > end:
                    return
                gc.collect()
                torch.cuda.empty_cache()
                cache, times = made(name, config, queries), []
                fill(cache, config, rows)
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
                for _ in range(TURNS):
                    ids = torch.randint(config.vocab_size, (rows, queries), device="cuda")
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    model(ids, past_key_values=cache, logits_to_keep=1)
                    torch.cuda.synchronize()
                    times.append(1e3 * (time.perf_counter() - begin))
                peak = torch.cuda.max_memory_allocated() - held
                yield {
                    "cache": name, "rows": rows, "past": PAST, "new": queries, "layers": LAYERS, "ms": min(times), "first_ms": times[0],
                    "peak_bytes": peak, "device": torch.cuda.get_device_name(),
                }  # fmt: skip
                del cache


def markdown(rows: list[dict]) -> str:
    lines = ["| past | cache | new tokens: ms, times as fast, peak MiB |", "|---|---|---|"]
    dense = {(row["rows"], row["new"]): row["ms"] for row in rows if row["cache"] == DENSE}
    for count in NEW:
        for name in CACHES:
            cells = [
                f"{row['new']:,}: {row['ms']:.0f}, {dense[count, row['new']] / row['ms']:.1f}x, {row['peak_bytes'] / 2**20:,.0f}"
                for row in rows
                if (row["rows"], row["cache"]) == (count, name)
            ]
            if cells:
                lines.append(f"| {count} x {PAST:,} | `{name}` | {'; '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=at_least(1), default=5, help="no new cache is begun after so many")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    if not args.markdown:
        if not torch.cuda.is_available():
            parser.error("measuring needs a GPU; --markdown does not")
        rows = []
        for row in measure(args.minutes):
            rows.append(row)
            replace_rows(args.out, "turns", rows)
            print(row, file=sys.stderr, flush=True)
    print(markdown([row for row in read_rows(args.out) if row["what"] == "turns"]))


if __name__ == "__main__":
    main()
