"""Attention with a budget, beside attention over all tokens and bf16 SDPA; rows in eval/results/attention_budget.jsonl.

    python eval/bench_attention_budget.py              measures on a GPU, prints the table, writes the rows: under 3 minutes
    python eval/bench_attention_budget.py --markdown   the table of the documentation, from the rows: needs no GPU

*steps*: rows of one length; *batches*: requests of continuous batching, of different lengths; *turns*: several new
tokens. Attention of one layer, 32 query heads and 8 KV heads of 128 channels,
in GPU time by replays of a CUDA graph: *scores* the kernel that weighs blocks, *choice* the one that chooses them,
*whole* both and attention over what they choose. `eval/bench_generate.py --sections budget` measures steps of a whole model.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch
from bench_kernels import KNOWN, bf16, code_bytes, payloads, sdpa_us
from gpu import device, graph_us, let_go
from harness import Table, device_name, grouped, in_time, note, parser_of, run_or_show

from qkvcache.kernels import PagedInputs, Work, attend_pages, split_rows
from qkvcache.kernels import paged_inputs as columns_of
from qkvcache.select import budget as budgets
from qkvcache.select.arguments import AttentionBudget
from qkvcache.select.budget import Budget
from qkvcache.select.select_blocks import over_blocks
from qkvcache.storage.paged import PAGE

SECTIONS = "steps", "batches", "turns"
CASES = ((8, 131072), (8, 32768), (1, 131072), (1, 32768))
BATCHES = ((32, 2048, 131072), (64, 1024, 32768))
"""Requests of continuous batching: how many, and the tokens of the shortest and of the longest; their logarithms are evenly spaced."""
FORMATS = ("turboquant_4bit_nc", "int8_halves", "identity")
BUDGETS = (4096, 2048)
HEADS, KV_HEADS, DIM = 32, 8, 128
SINKS, RING = 4, 65
"""Exact tokens of a request."""


def requests(name: str, rows: int, shortest: int, longest: int) -> list[PagedInputs]:
    """Requests of a batch, with sinks and rings of their own: the same twice, since they exceed the L2 cache."""
    lengths = [round(shortest * (longest / shortest) ** (i / max(rows - 1, 1))) for i in range(rows)]
    counts = [-(-length // PAGE) for length in lengths]
    one = payloads(name, 1, KV_HEADS, sum(counts) * PAGE, DIM)[0].paged
    table = one.pages.table.new_zeros(rows, max(counts))
    for i, part in enumerate(one.pages.table[0, : sum(counts)].split(counts)):
        table[i, : len(part)] = part
    columns = torch.zeros(rows, len(columns_of.COLUMNS), dtype=torch.int32, device=table.device)
    columns[:, columns_of.BEGIN] = columns[:, columns_of.SINKS] = SINKS
    columns[:, columns_of.SINK_ROW] = columns[:, columns_of.RING_ROW] = torch.arange(rows, device=table.device)
    columns[:, columns_of.RING_TOKENS], columns[:, columns_of.LENGTH] = RING, torch.tensor(lengths, device=table.device)
    zones = [(bf16(rows, KV_HEADS, n, DIM), bf16(rows, KV_HEADS, n, DIM)) for n in (SINKS, RING)]
    own = replace(one.pages, table=table, lengths=columns[:, columns_of.LENGTH])
    return [PagedInputs(own, *zones, columns, longest, Work(splits=split_rows(own.lengths, longest, own.codecs, KV_HEADS, DIM)))] * 2


def chain(name: str, rows: int, tokens: int, budget: int, shortest: int | None, queries: int) -> dict[str, float]:
    """Microseconds of attention over all tokens and with a budget; of one query, of the parts of attention with a budget, too."""
    from qkvcache.select import triton_select_blocks

    query, zones = bf16(rows, HEADS, queries, DIM), (4, 96) if queries == 1 else (SINKS, RING - 1 + queries)
    if shortest is None:
        sets = [one.paged for one in payloads(name, rows, KV_HEADS, tokens, DIM, zones)]
    else:
        sets = requests(name, rows, shortest, tokens)
    few = [one.twin(select=AttentionBudget(budget).select) for one in sets]

    def attention_us(sets: list[PagedInputs]) -> float:
        return graph_us([functools.partial(attend_pages, query, one, causal=queries > 1) for one in sets])

    found = {"all_us": attention_us(sets)}
    if queries > 1:
        return found | {"whole_us": attention_us(few)}
    choose, limit = triton_select_blocks.select_blocks, Budget(budget)
    found["read_us"] = attention_us([over_blocks(one, choose(query, one, limit)) for one in sets])
    found["choice_us"] = graph_us([functools.partial(choose, query, one, limit) for one in few])
    with mock.patch.object(triton_select_blocks, "_choosing", mock.MagicMock()):
        found["scores_us"] = graph_us([functools.partial(choose, query, one, limit) for one in few])
    found["choice_us"] -= found["scores_us"]
    with mock.patch.object(budgets, "LEAST_SKIPPED", 0):
        return found | {"whole_us": attention_us(few)}


def run(args: Namespace) -> None:
    alike = [(rows, tokens, None, 1, name, budget) for rows, tokens in CASES for name in FORMATS for budget in BUDGETS]
    batches = [(rows, longest, shortest, 1, FORMATS[0], budget) for rows, shortest, longest in BATCHES for budget in BUDGETS]
    turns = [(8, tokens, None, queries, FORMATS[0], BUDGETS[0]) for tokens in (131072, 32768) for queries in (16, 64, 256)]
    of = {"steps": alike, "batches": batches, "turns": turns}
    cases = [case for section in SECTIONS if section in args.sections for case in of[section]]
    for rows, tokens, shortest, queries, name, budget in in_time(cases, args.minutes):
        if code_bytes(name, rows, KV_HEADS, tokens, DIM) > 2**33 and shortest is None:
            continue
        let_go()
        row = {"rows": rows, "tokens": tokens, "format": name, "budget": budget} | ({"shortest": shortest} if shortest else {})
        row |= {"queries": queries} if queries > 1 else {}
        row |= chain(name, rows, tokens, budget, shortest, queries)
        let_go()
        if shortest is None:
            row["sdpa_us"], row["sdpa"] = sdpa_us(rows, HEADS, KV_HEADS, tokens, DIM, queries)
        row |= {"bytes_per_token": KNOWN[name].bytes_per_token(DIM), "device": device_name(device())}
        note(args.out, "attention budget", row, "device", "rows", "tokens", "shortest", "queries", "format", "budget")


def tables(rows: list[dict]) -> Iterator[Table]:
    for (name,), found in grouped(rows, "device"):
        heads = ["tokens", "format", "read", "bf16, us", "all tokens", "scores", "choice", "whole", "times as fast as all", "as bf16"]
        lines = []
        for row in found:
            us = [f"{row[key]:.0f}" if key in row else "" for key in ("sdpa_us", "all_us", "scores_us", "choice_us", "whole_us")]
            gains = [f"{row[key] / row['whole_us']:.2f}" if key in row else "" for key in ("all_us", "sdpa_us")]
            each = f"{row['shortest']:,} to {row['tokens']:,}" if row.get("shortest") else f"{row['tokens']:,}"
            new = f", {row['queries']} new" if row.get("queries", 1) > 1 else ""
            lines.append([f"{row['rows']} x {each}{new}", f"`{row['format']}`", f"{row['budget']:,}", *us, *gains])
        yield Table(heads, lines, f"{name}:")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "attention_budget", float("inf"))
    parser.add_argument("--sections", nargs="+", default=SECTIONS, choices=SECTIONS, help="what is measured")
    run_or_show(parser, parser.parse_args(arguments), run, "attention budget", tables)


if __name__ == "__main__":
    main()
