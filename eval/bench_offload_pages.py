"""`offload_pages` beside everything on the GPU; rows in eval/results/offload_pages.jsonl.

    python eval/bench_offload_pages.py [--sections hits attention step long]  measures on a GPU, prints the tables, writes the rows
    python eval/bench_offload_pages.py --layers 8 --budgets 4096   a part of the layers
    python eval/bench_offload_pages.py --markdown                  the tables of the documentation, from the rows: needs no GPU

hits       the share of chosen blocks that the step before left on the GPU, while the embedded model writes.
attention  a step's attention of one layer, 8 x 32,768, in GPU time by replays of a CUDA graph, by the share of blocks that are missing.
step       a step of the 8B shape, 8 x 32,768: replays of a CUDA graph of it, and eager steps. Random weights choose by chance, so that
           each step chooses the same blocks, and a tenth of the slots lose theirs before it; in `random_ms`, they choose.
long       the same of 1 x 1,000,000 tokens, beside everything on the GPU at 131,072. `--memory-gib 32`, with weights in bf16, leaves the
           cache what 24 GiB leave beside weights in 8 bits.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Iterator
from unittest import mock

import torch
from bench_kernels import bf16
from gpu import device, fill, graph_us, let_go, milliseconds, random_llama
from harness import Table, device_name, parser_of, replace_rows, run_or_show
from transformers import PreTrainedModel

from qkvcache import CompressedCache, demo
from qkvcache.formats import REGISTRY
from qkvcache.kernels import PagedInputs, attend_pages
from qkvcache.kernels.pages import BLOCK
from qkvcache.releases import passing
from qkvcache.select import fetch_blocks, triton_fetch_blocks, triton_select_blocks
from qkvcache.select.arguments import AttentionBudget
from qkvcache.select.block_cache import BlockCache
from qkvcache.storage import attention_inputs_of

FORMAT = "turboquant_4bit_nc"
ROWS, TOKENS, HEADS, KV_HEADS, DIM = 8, 32768, 32, 8, 128
MISSING, SHARES = 0.1, (0.0, 0.05, 0.1, 0.2, 1.0)
LONG, WHOLE, ROOM = 1_000_000, 131_072, 100


def forget(cache: BlockCache, share: float) -> None:
    """Empties a share of the slots, so that as many of the chosen blocks are missing."""
    blocks = cache.blocks
    blocks.masked_fill_(torch.rand(blocks.shape, device=blocks.device) < share, -1)


def hits(tokens: int, budget: int, steps: int) -> float:
    """The share of chosen blocks that are held, but for the first step."""
    model, tokenizer = demo.load()
    seen, place = [], fetch_blocks.place_blocks

    def placed(inputs, cache, selection):
        slots, missing = place(inputs, cache, selection)
        seen.append((int(missing.sum()), int(-(-selection.lengths // BLOCK).sum())))
        return slots, missing

    with mock.patch.object(fetch_blocks, "place_blocks", placed):
        cache = CompressedCache(model.config, format=FORMAT, attention_budget=budget, offload_pages=True)
        ids = torch.tensor([demo.text_ids(tokenizer)[:tokens]])
        model.generate(ids, **passing(cache), max_new_tokens=steps, do_sample=False)
    missing, chosen = map(sum, zip(*seen[model.config.num_hidden_layers :], strict=True))
    return 1 - missing / chosen


def attention(budget: int) -> Iterator[dict]:
    """Microseconds of a layer, and bytes of the GPU for each token and head: everything on the GPU, then by the share that is missing."""
    format, like = REGISTRY[FORMAT], torch.empty(ROWS, KV_HEADS, 0, DIM, device="cuda", dtype=torch.bfloat16)
    query = bf16(ROWS, HEADS, 1, DIM)
    first, recent = ((bf16(ROWS, KV_HEADS, n, DIM), bf16(ROWS, KV_HEADS, n, DIM)) for n in (4, 96))
    for on_host in (False, True):
        let_go()
        before = torch.cuda.memory_allocated()
        pages = AttentionBudget(budget).pages(on_host)((format.key, format.value), (like, like))
        for _ in range(TOKENS // 4096):
            pages.append((bf16(ROWS, KV_HEADS, 4096, DIM), bf16(ROWS, KV_HEADS, 4096, DIM)))
        inputs: PagedInputs = attention_inputs_of(first, pages, recent).paged
        row = {"bytes": (torch.cuda.memory_allocated() - before) / (ROWS * KV_HEADS * TOKENS)}
        if not on_host:
            yield row | {"us": graph_us([functools.partial(attend_pages, query, inputs)])}
        for share in SHARES if on_host else ():

            def step(share: float = share, inputs: PagedInputs = inputs, cache: BlockCache = pages.cache) -> None:
                forget(cache, share)
                attend_pages(query, inputs)

            emptied = graph_us([functools.partial(forget, pages.cache, share)])
            yield row | {"missing": share, "us": graph_us([step]) - emptied}
        del inputs, pages


def step(model: PreTrainedModel, where: str, budget: int, rows: int, tokens: int) -> dict:
    """Milliseconds of a step, and bytes of the GPU for each token and head at their peak, less the weights."""
    let_go()
    fetch, select, query = triton_fetch_blocks.fetch_blocks, triton_select_blocks.select_blocks, bf16(rows, HEADS, 1, DIM)

    def fetched(inputs, cache, selection):
        forget(cache, MISSING)
        return fetch(inputs, cache, selection)

    def selected(_, *args, **options):
        return select(query, *args, **options)

    ids, config, weights = torch.zeros(rows, 1, dtype=torch.long, device="cuda"), model.config, torch.cuda.memory_allocated()
    options = {"attention_budget": budget or None, "offload_pages": where == "host", "max_length": tokens + ROOM}
    cache = CompressedCache(config, format=FORMAT, **options)
    fill(cache, config, rows, tokens)
    torch.cuda.reset_peak_memory_stats()

    def eager(steps: int) -> float:
        return milliseconds(lambda: [model(ids, **passing(cache), logits_to_keep=1) for _ in range(steps)]) / steps

    with torch.inference_mode():
        eager(2)
        found = {"random_ms": eager(8)}
        with (
            mock.patch.object(triton_fetch_blocks, "fetch_blocks", fetched),
            mock.patch.object(triton_select_blocks, "select_blocks", selected),
        ):
            eager(2)
            found["eager_ms"] = eager(8)
            peak = torch.cuda.max_memory_allocated()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(ids, **passing(cache), logits_to_keep=1)
        graph.replay()
        found["ms"] = milliseconds(lambda: [graph.replay() for _ in range(20)]) / 20
    return found | {"peak_gib": peak / 2**30, "bytes": (peak - weights) / (rows * KV_HEADS * tokens * config.num_hidden_layers)}


def run(args: Namespace) -> None:
    def note(what: str, **row) -> None:
        row = {"section": what, "device": device_name(device()), "layers": args.layers} | row
        print(row, file=sys.stderr, flush=True)
        replace_rows(args.out, "offload pages", [row], "device", "section", "layers", "rows", "tokens", "budget", "where", "missing")

    if "hits" in args.sections:
        for budget in (512, 1024):
            note("hits", tokens=4000, budget=budget, hits=hits(4000, budget, 80))
    if "attention" in args.sections:
        for budget in args.budgets:
            for row in attention(budget):
                note("attention", rows=ROWS, tokens=TOKENS, budget=budget, where="host" if "missing" in row else "GPU", **row)
    if {"step", "long"} & set(args.sections):
        torch.cuda.set_per_process_memory_fraction(args.memory_gib * 2**30 / torch.cuda.mem_get_info()[1])
        model = random_llama(num_hidden_layers=args.layers)
        cases = [("step", where, budget, ROWS, TOKENS) for budget in args.budgets for where in ("GPU", "host")]
        cases += [("long", "GPU", 0, 1, WHOLE), ("long", "host", 4096, 1, LONG)]
        for section, where, budget, rows, tokens in cases:
            if section in args.sections:
                found = step(model, where, budget, rows, tokens)
                note(section, rows=rows, tokens=tokens, budget=budget, where=where, **found)


def tables(rows: list[dict]) -> Iterator[Table]:
    times = [row for row in rows if row["section"] != "hits"]
    lines, base = [], {}
    for row in times:
        name = f"attention of a layer, {row['rows']} x {row['tokens']:,}"
        if row["section"] != "attention":
            name = f"step, {row['layers']} layers, {row['rows']} x {row['tokens']:,}"
        time = row.get("us", row.get("ms"))
        base.setdefault((row["section"], row["budget"] if row["section"] != "long" else 0), time)
        where = row["where"] + (f", {row['missing']:.0%} missing" if "missing" in row else "")
        budget = f"{row['budget']:,}" if row["budget"] else "all"
        ratio = time / base[row["section"], row["budget"] if row["section"] != "long" else 0]
        lines.append([name, budget, where, f"{row['bytes']:.0f}", f"{time:.0f} us" if "us" in row else f"{time:.2f} ms", f"{ratio:.2f}"])
    if lines:
        yield Table(["", "tokens read", "pages", "bytes a token and head", "time", "times"], lines, f"{times[0]['device']}:")
    shares = [[f"{row['budget']:,} of {row['tokens']:,}", f"{row['hits']:.1%}"] for row in rows if row["section"] == "hits"]
    if shares:
        yield Table(["tokens read", "blocks that are there"], shares, "The embedded model writes 80 tokens:")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "offload_pages")
    parser.add_argument("--sections", nargs="+", default=["hits", "attention", "step", "long"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--budgets", type=int, nargs="+", default=[4096, 2048])
    parser.add_argument("--memory-gib", type=float, default=79)
    run_or_show(parser, parser.parse_args(arguments), run, "offload pages", tables)


if __name__ == "__main__":
    main()
