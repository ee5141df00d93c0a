"""Many new tokens over a past of 32,768 tokens, beside DynamicCache and the best dense attention; rows in eval/results/turns.jsonl.

    python eval/bench_turns.py [--sections turns attention prefix] [--minutes 5]     measure on a GPU, print the tables, write the rows
    python eval/bench_turns.py --markdown        the tables of the documentation, from the rows: needs no GPU
    python eval/bench_turns.py --plot            turns.png, from the rows

turns      a Llama of 8 layers of the 8B shape in bf16 holds the past and reads new tokens at once, `model(ids, past_key_values=cache)`.
           Milliseconds by the clock, the best of four turns; the first turn, with all that it compiles, and the longest of the others are
           in the rows too. 32 new tokens are a chunk of `qkvcache eval`. Peak memory is what is allocated beside the weights and the cache.
attention  one layer's attention of new tokens over the past and themselves, GPU time, beside the best bf16 attention of torch: flash, cuDNN
           and memory-efficient attention, each with the heads of a group as rows or told of the groups, without a mask, over as many
           tokens. Over a compressed past, where cuDNN attends in time (`kernels/cudnn_plans.py`), it does so from the second call on.
prefix     time to the first token of a prompt of 32,768 stored tokens and 256 others: with a `PrefixStore`, and computed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from arguments import at_least
from generate_runs import LLAMA
from palette import format_color
from rows import read_rows, replace_rows
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, PrefixStore
from qkvcache.attention.route import on_codes
from qkvcache.kernels import attend_on_codes, cudnn_plans
from qkvcache.kernels.attend_chunked import attend_chunked

RESULTS = Path(__file__).parent / "results" / "turns.jsonl"
SECTIONS = ("turns", "attention", "prefix")
PAST, LAYERS, TURNS = 32768, 8, 4
NEW = {8: (16, 32, 64, 128, 512), 1: (16, 32, 128, 512, 1024, 2048)}
"""New tokens of a turn, by rows."""
QUERIES = (8, 16, 32, 64, 128, 512, 2048, 8192)
"""New tokens of one layer's attention."""
DENSE, SDPA = "DynamicCache", "best SDPA"
FORMATS = ("int8", "fp8", "turboquant_4bit_nc")
CACHES = (DENSE, "int8", "turboquant_4bit_nc", "int8, max_length")
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FILL = 2**27
"""Elements that fill a layer at once."""
AFTER = 256
"""Tokens after a stored prefix."""


def llama() -> LlamaConfig:
    return LlamaConfig(**LLAMA | {"num_hidden_layers": LAYERS}, bos_token_id=None, eos_token_id=None)


def made(name: str, config: LlamaConfig, queries: int) -> Cache:
    if name == DENSE:
        return DynamicCache(config=config)
    format, _, preallocated = name.partition(", ")
    return CompressedCache(config, format=format, max_length=PAST + (TURNS + 2) * queries if preallocated else None)


def fill(cache: Cache, config: LlamaConfig, rows: int, layers: int = LAYERS) -> None:
    """As a prompt would."""
    heads, dim = config.num_key_value_heads, config.head_dim
    tokens = min(PAST, FILL // (rows * heads * dim))
    key, value = (torch.randn(rows, heads, tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for layer in range(layers):
        for _ in range(PAST // tokens):
            cache.update(key, value, layer)


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def by_the_clock(call: Callable[[], object]) -> float:
    """Milliseconds until the GPU has done it."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def turn(model: PreTrainedModel, name: str, rows: int, queries: int) -> dict:
    config = model.config
    cache = made(name, config, queries)
    fill(cache, config, rows)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(TURNS):
        ids = torch.randint(config.vocab_size, (rows, queries), device="cuda")
        times.append(by_the_clock(lambda ids=ids: model(ids, past_key_values=cache, logits_to_keep=1)))
    peak = torch.cuda.max_memory_allocated() - before
    first, *others = times
    found = {"ms": min(times), "first_ms": first, "longest_ms": max(others), "peak_bytes": peak}
    return {"cache": name, "rows": rows, "new": queries} | found


def on_the_gpu(call: Callable[[], object]) -> float:
    """Microseconds between two events around calls that are queued without waiting: of a few, the least."""
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)  # the host queues the calls meanwhile
        begin.record()
        for _ in range(4):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 4)
    return min(times)


def dense_attention(rows: int, queries: int, key: Tensor, value: Tensor, heads: int) -> dict:
    """The fastest of torch's, of any backend and grouping; `key` and `value` `[B, H, T, D]`."""
    groups = heads // key.shape[1]
    query = torch.randn(rows, heads, queries, key.shape[3], device="cuda", dtype=key.dtype)
    found = {}
    for name, backend in BACKENDS.items():
        for grouping, shaped, options in (
            ("heads as rows", query.view(rows, key.shape[1], groups * queries, -1), {}),
            ("enable_gqa", query, {"enable_gqa": True}),
        ):
            try:
                with sdpa_kernel(backend):
                    call = lambda q=shaped, o=options: F.scaled_dot_product_attention(q, key, value, **o)  # noqa: E731
                    found[f"{name}, {grouping}"] = on_the_gpu(call)
            except RuntimeError:
                continue  # this backend does not serve this grouping
    best = min(found, key=found.__getitem__)
    return {"cache": SDPA, "backend": best, "rows": rows, "new": queries, "us": found[best]}


def compressed_attention(format: str, rows: int, queries: int, config: LlamaConfig) -> dict:
    cache = CompressedCache(config, format=format)
    fill(cache, config, rows, layers=1)
    heads, dim = config.num_key_value_heads, config.head_dim
    key, value = (torch.randn(rows, heads, queries, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(rows, config.num_attention_heads, queries, dim, device="cuda", dtype=torch.bfloat16)
    inputs = cache.update(key, value, 0)[0].attention_inputs
    with mock.patch.object(cudnn_plans, "PLAN_FLOPS", 1):
        us = on_the_gpu(lambda: attend_on_codes(query, inputs, causal=True) if on_codes(query, inputs) else attend_chunked(query, inputs))
    return {"cache": format, "rows": rows, "new": queries, "us": us}


def attention(rows: int, config: LlamaConfig) -> Iterator[dict]:
    for queries in QUERIES:
        shape = rows, config.num_key_value_heads, PAST + queries, config.head_dim
        key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        yield dense_attention(rows, queries, key, value, config.num_attention_heads)
    del key, value
    for format in FORMATS:
        for queries in QUERIES:
            free()
            yield compressed_attention(format, rows, queries, config)


def prefix(model: PreTrainedModel, format: str) -> dict:
    ids = torch.randint(model.config.vocab_size, (1, PAST + AFTER), device="cuda")

    def first_token(cache: Cache, ids: Tensor) -> None:
        model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax().item()

    def computed() -> None:
        first_token(CompressedCache(model.config, format=format), ids)

    store = PrefixStore(model, max_bytes=2**40, format=format)
    cache = CompressedCache(model.config, format=format)
    first_token(cache, ids[:, :PAST])
    store.store(ids[:, :PAST], cache)
    del cache

    def fetched() -> None:
        found = store.fetch(ids)
        first_token(found.cache, ids[:, found.length :])

    times = {name: min(by_the_clock(call) for _ in range(3)) for name, call in (("computed_ms", computed), ("fetched_ms", fetched))}
    return {"cache": format, "rows": 1, "new": AFTER} | times


@torch.no_grad()
def measure(sections: list[str], minutes: float) -> Iterator[dict]:
    """Rows of the sections. What fails has a row that says so."""
    end = time.perf_counter() + 60 * minutes
    config = llama()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    same = {"past": PAST, "layers": LAYERS, "device": torch.cuda.get_device_name()}
    cases: list[tuple[dict, Callable[[], Iterator[dict]]]] = []
    if "turns" in sections:
        for rows, sizes in NEW.items():
            for name in CACHES:
                for queries in sizes:
                    at = {"what": "turns", "cache": name, "rows": rows, "new": queries}
                    cases.append((at, lambda at=at: iter([turn(model, at["cache"], at["rows"], at["new"])])))
    if "attention" in sections:
        for rows in NEW:
            cases.append(({"what": "attention", "rows": rows}, lambda rows=rows: attention(rows, config)))
    if "prefix" in sections:
        for format in CACHES[1:3]:
            cases.append(({"what": "prefix", "cache": format}, lambda format=format: iter([prefix(model, format)])))
    for at, call in cases:
        if time.perf_counter() > end:
            return
        free()
        try:
            for row in call():
                yield {"what": at["what"]} | row | same
        except RuntimeError as error:
            yield at | {"failed": f"{type(error).__name__}: {str(error)[:300]}"} | same


def markdown(rows: list[dict]) -> str:
    """Tables for each device."""
    rows = [row for row in rows if "failed" not in row]
    devices = dict.fromkeys(row["device"] for row in rows)
    return "\n\n".join(f"{device}:\n\n{tables([row for row in rows if row['device'] == device])}" for device in devices)


def tables(rows: list[dict]) -> str:
    """A table for each section, from its rows on one device."""
    return "\n\n".join(filter(None, (turns_table(rows), attention_table(rows), prefix_table(rows))))


def turns_table(rows: list[dict]) -> str:
    lines = ["| past | cache | new tokens: ms, times as fast, peak MiB |", "|---|---|---|"]
    turns = [row for row in rows if row["what"] == "turns"]
    for count in NEW:
        for name in CACHES:
            cells = [
                f"{row['new']:,}: {row['ms']:.0f}, {ratio:.1f}x, {row['peak_bytes'] / 2**20:,.0f}"
                for row, ratio in with_ratio(turns, DENSE, "ms")
                if (row["rows"], row["cache"]) == (count, name)
            ]
            if cells:
                lines.append(f"| {count} x {PAST:,} | `{name}` | {'; '.join(cells)} |")
    return "\n".join(lines) if turns else ""


def attention_table(rows: list[dict]) -> str:
    found = [row for row in rows if row["what"] == "attention"]
    lines = [f"| past | attention | {' | '.join(f'{n:,}' for n in QUERIES)} |", "|---|---|" + "---:|" * len(QUERIES)]
    for count in NEW:
        for name in (SDPA, *FORMATS):
            of = {
                row["new"]: (row["us"], ratio)
                for row, ratio in with_ratio(found, SDPA, "us")
                if (row["rows"], row["cache"]) == (count, name)
            }
            cells = [f"{of[n][0]:,.0f} us" + (f", {of[n][1]:.2f}x" if name != SDPA else "") if n in of else "" for n in QUERIES]
            if of:
                lines.append(f"| {count} x {PAST:,} | {name if name == SDPA else f'`{name}`'} | {' | '.join(cells)} |")
    return "\n".join(lines) if found else ""


def prefix_table(rows: list[dict]) -> str:
    found = [row for row in rows if row["what"] == "prefix"]
    lines = [
        f"| cache | {PAST + AFTER:,} tokens computed, ms | {PAST:,} fetched, {AFTER} computed, ms | times sooner |",
        "|---|---:|---:|---:|",
    ]
    for row in found:
        sooner = row["computed_ms"] / row["fetched_ms"]
        lines.append(f"| `{row['cache']}` | {row['computed_ms']:,.0f} | {row['fetched_ms']:,.0f} | {sooner:.1f} |")
    return "\n".join(lines) if found else ""


def with_ratio(rows: list[dict], base: str, unit: str) -> Iterator[tuple[dict, float]]:
    """Rows with how many times as fast as `base` each is, at the same past and new tokens."""
    dense = {(row["device"], row["rows"], row["new"]): row[unit] for row in rows if row["cache"] == base}
    for row in rows:
        if (at := (row["device"], row["rows"], row["new"])) in dense:
            yield row, dense[at] / row[unit]


def plot(rows: list[dict], path: Path) -> None:
    """Times as fast as DynamicCache (whole turns) and as the best dense attention (one layer), against the number of new tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(NEW), figsize=(11, 7), sharex="col", squeeze=False)
    rows = [row for row in rows if "failed" not in row]
    for i, (what, base, unit, title) in enumerate(
        (
            ("turns", DENSE, "ms", "whole turn, times as fast as DynamicCache"),
            ("attention", SDPA, "us", "attention, times as fast as the best dense"),
        )
    ):
        for j, count in enumerate(NEW):
            axis = axes[i][j]
            found = list(with_ratio([row for row in rows if (row["what"], row["rows"]) == (what, count)], base, unit))
            device = found[0][0]["device"] if found else ""  # the first one that has rows
            for name in dict.fromkeys(row["cache"] for row, _ in found):
                points = sorted((row["new"], ratio) for row, ratio in found if (row["cache"], row["device"]) == (name, device))
                if name != base and points:
                    style = ":" if "max_length" in name else "-"
                    axis.plot(*zip(*points, strict=True), marker="o", color=format_color(name), linestyle=style, label=name)
            axis.axhline(1, color="gray", linewidth=1)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_title(f"{count} x {PAST:,} tokens, {device}:\n{title}", fontsize=9)
            axis.set_ylabel("times as fast (higher is better)")
            if i:
                axis.set_xlabel("new tokens")
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--minutes", type=at_least(1), default=5, help="nothing new is begun after so many")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    if args.plot:
        plot(read_rows(args.out), RESULTS.with_suffix(".png"))
        return
    if not args.markdown:
        if not torch.cuda.is_available():
            parser.error("measuring needs a GPU; --markdown and --plot do not")
        rows: list[dict] = []
        for row in measure(args.sections, args.minutes):
            rows.append(row)
            of = [{key: x for key, x in one.items() if key != "what"} for one in rows if one["what"] == row["what"]]
            replace_rows(args.out, row["what"], of)
            print(row, file=sys.stderr, flush=True)
    print(markdown(read_rows(args.out)))


if __name__ == "__main__":
    main()
