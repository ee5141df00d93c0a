"""Many new tokens over a past of 32,768 tokens, beside DynamicCache and the best dense attention; rows in eval/results/turns.jsonl.

    python eval/bench_turns.py [--sections turns attention prefix] [--minutes 5]     measure on a GPU, print the tables, write the rows
    python eval/bench_turns.py --markdown        the tables of the documentation, from the rows: needs no GPU
    python eval/bench_turns.py --plot            turns.png, from the rows

turns      a Llama of 8 layers of the 8B shape in bf16 holds the past and reads new tokens at once, `model(ids, cache=cache)`.
           Milliseconds by the clock, the best of four turns; the first turn, with all that it compiles, and the longest of the others are
           in the rows too. 32 new tokens are a chunk of `qkvcache eval`. Peak memory is what is allocated beside the weights and the cache.
attention  one layer's attention of new tokens over the past and themselves, GPU time, beside the best bf16 attention of torch: flash and
           cuDNN, each with the heads of a group as rows or told of the groups, without a mask, over as many tokens.
prefix     time to the first token of a prompt of 32,768 stored tokens and 256 others: with a `PrefixStore`, and computed.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from bench_kernels import sdpa_us
from gpu import bf16, fill, let_go, milliseconds, queued_us, random_llama
from harness import Table, grouped, in_time, note, outcome, parser_of, picture, run_or_show
from palette import format_color
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, PrefixStore
from qkvcache.attention.route import path_of
from qkvcache.kernels import attend_on_codes
from qkvcache.kernels.attend.chunked import attend_chunked, outruns_tiles
from qkvcache.releases import passing

SECTIONS = ("turns", "attention", "prefix")
PAST, LAYERS, TURNS = 32768, 8, 4
NEW = {8: (16, 32, 64, 128, 512), 1: (16, 32, 128, 512, 1024, 2048)}
"""New tokens of a turn, by rows."""
QUERIES = (8, 16, 32, 64, 128, 512, 2048, 8192)
"""New tokens of one layer's attention."""
DENSE, SDPA = "DynamicCache", "best SDPA"
FORMATS = ("int8", "fp8", "turboquant_4bit_nc")
CACHES = (DENSE, "int8", "turboquant_4bit_nc", "int8, max_length")
AFTER = 256
"""Tokens after a stored prefix."""


def made(name: str, config: LlamaConfig, queries: int) -> Cache:
    if name == DENSE:
        return DynamicCache(config=config)
    format, _, preallocated = name.partition(", ")
    return CompressedCache(config, format=format, max_length=PAST + (TURNS + 2) * queries if preallocated else None)


def turn(model: PreTrainedModel, name: str, rows: int, queries: int) -> dict:
    config = model.config
    cache = made(name, config, queries)
    fill(cache, config, rows, PAST)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(TURNS):
        ids = torch.randint(config.vocab_size, (rows, queries), device="cuda")
        times.append(milliseconds(lambda ids=ids: model(ids, **passing(cache), logits_to_keep=1)))
    peak = torch.cuda.max_memory_allocated() - before
    first, *others = times
    return {"ms": min(times), "first_ms": first, "longest_ms": max(others), "peak_bytes": peak}


def causal_step(format: str, rows: int, queries: int, config: LlamaConfig, past: int = PAST) -> Callable[[], Tensor]:
    """The attention of new tokens over a past and themselves, on the path that a cache takes."""
    cache = CompressedCache(config, format=format)
    fill(cache, config, rows, past, layers=1)
    key, value = (bf16(rows, config.num_key_value_heads, queries, config.head_dim) for _ in "kv")
    query = bf16(rows, config.num_attention_heads, queries, config.head_dim)
    inputs = cache.update(key, value, 0)[0].attention_inputs

    def attend() -> Tensor:
        in_chunks = path_of("sdpa", query, inputs) == "chunks" or outruns_tiles(query, key.shape[1])
        return attend_chunked(query, inputs)[0] if in_chunks else attend_on_codes(query, inputs, causal=True)

    return attend


def attention(model: PreTrainedModel, name: str, rows: int, queries: int) -> dict:
    if name == SDPA:
        config = model.config
        sizes = rows, config.num_attention_heads, config.num_key_value_heads, PAST + queries, config.head_dim, queries
        return dict(zip(("us", "backend"), sdpa_us(*sizes), strict=True))
    return {"us": queued_us(causal_step(name, rows, queries, model.config))}


def prefix(model: PreTrainedModel, format: str, rows: int, queries: int) -> dict:
    ids = torch.randint(model.config.vocab_size, (rows, PAST + queries), device="cuda")

    def first_token(cache: Cache, ids: Tensor) -> None:
        model(ids, **passing(cache), logits_to_keep=1).logits.argmax().item()

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

    return {name: min(milliseconds(call) for _ in range(3)) for name, call in (("computed_ms", computed), ("fetched_ms", fetched))}


def cases(sections: list[str], model: PreTrainedModel) -> Iterator[tuple[dict, Callable[[], dict]]]:
    """A row's name, and the function that measures it."""
    ways = {"turns": turn, "attention": attention, "prefix": prefix}
    of = {
        "turns": [(name, rows, new) for rows, sizes in NEW.items() for name in CACHES for new in sizes],
        "attention": [(name, rows, new) for rows in NEW for name in (SDPA, *FORMATS) for new in QUERIES],
        "prefix": [(name, 1, AFTER) for name in CACHES[1:3]],
    }
    for section in sections:
        for case in of[section]:
            yield {"what": section} | dict(zip(("cache", "rows", "new"), case, strict=True)), partial(ways[section], model, *case)


@torch.no_grad()
def measure(args: Namespace) -> None:
    """Rows of the sections. What fails has a row that says so."""
    model = random_llama(num_hidden_layers=LAYERS)
    same = {"past": PAST, "layers": LAYERS, "device": torch.cuda.get_device_name()}
    for case, call in in_time(cases(args.sections, model), args.minutes):
        let_go()
        note(args.out, case["what"], case | outcome(call) | same, "cache", "rows", "new", "device")


def tables(rows: list[dict]) -> Iterator[Table]:
    """A table for each section that has rows, of each device."""
    rows = [row for row in rows if "failed" not in row]
    made = {"turns": turns_table, "attention": attention_table, "prefix": prefix_table}
    for (device,), of in grouped(rows, "device"):
        title = f"{device}:"
        for (what,), found in grouped(sorted(of, key=lambda row: SECTIONS.index(row["what"])), "what"):
            yield made[what](found, title)
            title = ""


def turns_table(rows: list[dict], title: str) -> Table:
    lines = []
    for count in NEW:
        for name in CACHES:
            cells = [
                f"{row['new']:,}: {row['ms']:.0f}, {ratio:.1f}x, {row['peak_bytes'] / 2**20:,.0f}"
                for row, ratio in with_ratio(rows, DENSE, "ms")
                if (row["rows"], row["cache"]) == (count, name)
            ]
            if cells:
                lines.append([f"{count} x {PAST:,}", f"`{name}`", "; ".join(cells)])
    return Table(["past", "cache", "new tokens: ms, times as fast, peak MiB"], lines, title, rule=("---",))


def attention_table(rows: list[dict], title: str) -> Table:
    lines = []
    cells = {
        (row["rows"], row["cache"], row["new"]): f"{row['us']:,.0f} us" + (f", {ratio:.2f}x" if row["cache"] != SDPA else "")
        for row, ratio in with_ratio(rows, SDPA, "us")
    }
    for count in NEW:
        for name in (SDPA, *FORMATS):
            of = [cells.get((count, name, n), "") for n in QUERIES]
            if any(of):
                lines.append([f"{count} x {PAST:,}", name if name == SDPA else f"`{name}`", *of])
    return Table(["past", "attention", *(f"{n:,}" for n in QUERIES)], lines, title, rule=("---", "---", "---:"))


def prefix_table(rows: list[dict], title: str) -> Table:
    headers = ["cache", f"{PAST + AFTER:,} tokens computed, ms", f"{PAST:,} fetched, {AFTER} computed, ms", "times sooner"]
    cell = "`{cache}` | {computed_ms:,.0f} | {fetched_ms:,.0f}"
    lines = [[*cell.format(**row).split(" | "), f"{row['computed_ms'] / row['fetched_ms']:.1f}"] for row in rows]
    return Table(headers, lines, title)


def with_ratio(rows: list[dict], base: str, unit: str) -> Iterator[tuple[dict, float]]:
    """Rows with how many times as fast as `base` each is, at the same past and new tokens."""
    dense = {(row["device"], row["rows"], row["new"]): row[unit] for row in rows if row["cache"] == base}
    for row in rows:
        if (at := (row["device"], row["rows"], row["new"])) in dense:
            yield row, dense[at] / row[unit]


PANELS = (
    ("turns", DENSE, "ms", "whole turn, times as fast as DynamicCache"),
    ("attention", SDPA, "us", "attention, times as fast as the best dense"),
)


def plot(rows: list[dict], path: Path) -> None:
    """Times as fast as DynamicCache (whole turns) and as the best dense attention (one layer), against the number of new tokens."""
    rows = [row for row in rows if "failed" not in row]
    with picture(path, 2, len(NEW), figsize=(11, 7), sharex="col", dpi=110) as (_, axes):
        for line, (what, base, unit, title) in zip(axes, PANELS, strict=True):
            for axis, count in zip(line, NEW, strict=True):
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
                if what == "attention":
                    axis.set_xlabel("new tokens")
                if axis.get_legend_handles_labels()[0]:
                    axis.legend(fontsize=8)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "turns", minutes=5)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    run_or_show(parser, parser.parse_args(arguments), measure, "", tables, plot)


if __name__ == "__main__":
    main()
