"""`offload_pages` beside everything on the GPU; rows in eval/results/offload_pages.jsonl.

    python eval/bench_offload_pages.py [--sections step long]  measures on a GPU, prints the tables, writes the rows
    python eval/bench_offload_pages.py --layers 8 --budgets 4096   a part of the layers
    python eval/bench_offload_pages.py --markdown                  the tables of the documentation, from the rows: needs no GPU

step  a step of the 8B shape, 8 x 32,768: replays of a CUDA graph of it, and eager steps. Random weights choose by chance, so that
      each step chooses the same blocks, and a tenth of the slots lose theirs before it; in `random_ms`, they choose.
long  the same of 1 x 1,000,000 tokens, beside everything on the GPU at 131,072. `--memory-gib 32`, with weights in bf16, leaves the
      cache what 24 GiB leave beside weights in 8 bits.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from unittest import mock

import torch
from bench_kernels import bf16
from gpu import device, fill, let_go, milliseconds, random_llama
from harness import Table, device_name, note, parser_of, run_or_show
from transformers import PreTrainedModel

from qkvcache import CompressedCache
from qkvcache.releases import passing
from qkvcache.select import triton_fetch_blocks, triton_select_blocks
from qkvcache.select.block_cache import BlockCache

FORMAT = "turboquant_4bit_nc"
ROWS, TOKENS, HEADS, KV_HEADS, DIM = 8, 32768, 32, 8, 128
MISSING = 0.1
LONG, WHOLE, ROOM = 1_000_000, 131_072, 100


def forget(cache: BlockCache, share: float) -> None:
    """Empties a share of the slots, so that as many of the chosen blocks are missing."""
    blocks = cache.blocks
    blocks.masked_fill_(torch.rand(blocks.shape, device=blocks.device) < share, -1)


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
    torch.cuda.set_per_process_memory_fraction(args.memory_gib * 2**30 / torch.cuda.mem_get_info()[1])
    model = random_llama(num_hidden_layers=args.layers)
    cases = [("step", where, budget, ROWS, TOKENS) for budget in args.budgets for where in ("GPU", "host")]
    cases += [("long", "GPU", 0, 1, WHOLE), ("long", "host", 4096, 1, LONG)]
    for section, where, budget, rows, tokens in cases:
        if section in args.sections:
            row = {"section": section, "device": device_name(device()), "layers": args.layers, "rows": rows, "tokens": tokens}
            row |= {"budget": budget, "where": where} | step(model, where, budget, rows, tokens)
            note(args.out, "offload pages", row, "device", "section", "layers", "rows", "tokens", "budget", "where")


def tables(rows: list[dict]) -> Iterator[Table]:
    lines, base = [], {}
    for row in rows:
        name = f"step, {row['layers']} layers, {row['rows']} x {row['tokens']:,}"
        group = row["section"], row["section"] != "long" and row["budget"]
        ratio = row["ms"] / base.setdefault(group, row["ms"])
        budget = f"{row['budget']:,}" if row["budget"] else "all"
        lines.append([name, budget, row["where"], f"{row['bytes']:.0f}", f"{row['ms']:.2f} ms", f"{ratio:.2f}"])
    yield Table(["", "tokens read", "pages", "bytes a token and head", "time", "times"], lines, f"{rows[0]['device']}:")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "offload_pages")
    parser.add_argument("--sections", nargs="+", default=["step", "long"], choices=["step", "long"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--budgets", type=int, nargs="+", default=[4096, 2048])
    parser.add_argument("--memory-gib", type=float, default=79)
    run_or_show(parser, parser.parse_args(arguments), run, "offload pages", tables)


if __name__ == "__main__":
    main()
