"""An endless stream in constant memory: SmolLM2-135M, trained on 8,192 positions, reads 6,000 tokens through 512.

    python examples/streaming.py --plot examples/streaming.png --rows eval/results/streaming_smollm2.jsonl
    python examples/streaming.py --model demo --tokens 200000 --window 1020 --every 10000 --rows eval/results/streaming.jsonl

Three caches of the same size: sinks read as if they stood right before the window, sinks at their own positions, and no sinks at all. The
text is repeated where it ends. SmolLM2 reads on worse without its attention sinks; the embedded model has none.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig

from qkvcache import CompressedCache, SinkCache, SlidingWindowCache, demo, models
from qkvcache.evaluation.provenance import provenance
from qkvcache.evaluation.quality import stream

CHUNK = 250


def caches(config: PreTrainedConfig, window: int, sinks: int) -> dict[str, Callable[[], CompressedCache]]:
    return {
        'sinks, positions="cache"': lambda: SinkCache(config, window_length=window, num_sink_tokens=sinks, positions="cache"),
        'sinks, positions="original"': lambda: SinkCache(config, window_length=window, num_sink_tokens=sinks, positions="original"),
        "window without sinks": lambda: SlidingWindowCache(config, window_length=window + sinks),
    }


def read(model, cache: CompressedCache, ids: torch.Tensor, part: int) -> Iterator[dict]:
    """After every `part` tokens: their perplexity, and what the cache holds by then."""
    begin, losses, done = time.perf_counter(), [], 0
    for loss in stream(model, cache, ids, CHUNK):
        losses.append(loss)
        seen = cache.get_seq_length()
        if seen >= done + part or seen >= ids.shape[1] - 1:
            perplexity = math.exp(torch.cat(losses, dim=1).mean())
            held = {"stored": cache.stored_length(), "bytes": cache.nbytes, "ratio": cache.memory().ratio}
            yield {"seen": seen, "perplexity": perplexity} | held | {"seconds": time.perf_counter() - begin}
            losses, done = [], seen


def show(rows: list[dict]) -> None:
    table = Table(title="perplexity of the tokens up to here")
    table.add_column("tokens seen", justify="right")
    names = list(dict.fromkeys(row["cache"] for row in rows))
    for name in names:
        table.add_column(name, justify="right")
    found = {(row["cache"], row["seen"]): row for row in rows}
    for seen in dict.fromkeys(row["seen"] for row in rows):
        table.add_row(f"{seen:,}", *(f"{found[name, seen]['perplexity']:.1f}" for name in names))
    sizes = {name: sorted({row["bytes"] for row in rows if row["cache"] == name}) for name in names}
    table.add_row("bytes held", *(f"{sizes[name][-1]:,}" for name in names), style="bold")
    Console(width=120).print(table)


def plot(rows: list[dict], positions: int, path: Path) -> None:
    """`positions`: the trained ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(2, 1))
    for name, style in zip(dict.fromkeys(row["cache"] for row in rows), ("-", "--", "-"), strict=True):
        found = [row for row in rows if row["cache"] == name]
        seen = [row["seen"] for row in found]
        above.plot(seen, [row["perplexity"] for row in found], style, label=name)
    dense = [row["bytes"] * row["ratio"] / 1e6 for row in found]
    below.plot(seen, dense, color="gray", linestyle=":", label="a DynamicCache")
    below.plot(seen, [row["bytes"] / 1e6 for row in found], label="each of the three caches above")
    if positions < seen[-1]:
        above.axvline(positions, color="gray", linewidth=1, label=f"the trained context, {positions:,} tokens")
    above.set(yscale="log", ylabel="perplexity (lower is better)", title=f"An endless stream in constant memory, {rows[0]['model']}")
    above.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5)))
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_locator(ticker.NullLocator())
    below.set(yscale="log", ylabel="MB held", xlabel="tokens seen")
    below.xaxis.set_major_formatter("{x:,.0f}")
    below.yaxis.set_major_formatter("{x:g}")
    below.yaxis.set_minor_formatter(ticker.NullFormatter())
    above.legend(fontsize=8)
    below.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(path)


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--window", type=int, default=508)
    parser.add_argument("--num-sink-tokens", type=int, default=4)
    parser.add_argument("--every", type=int, default=500, help="tokens that a perplexity is of")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draws a picture; needs matplotlib")
    parser.add_argument("--rows", type=Path, metavar="JSONL", help="saves the rows")
    args = parser.parse_args(arguments)

    model, tokenizer = models.load(args.model)
    text = torch.tensor(demo.text_ids(tokenizer))
    ids = text.repeat(-(-(args.tokens + 1) // len(text)))[None, : args.tokens + 1]
    rows = []
    for name, factory in caches(model.config, args.window, args.num_sink_tokens).items():
        for row in read(model, factory(), ids, args.every):
            rows.append({"model": args.model, "cache": name, "window": args.window, "sinks": args.num_sink_tokens, "chunk": CHUNK} | row)
            print(f"{name}: {row['seen']:,} seen, {row['stored']:,} held, perplexity {row['perplexity']:.1f}", flush=True)
    show(rows)
    if args.rows:
        args.rows.write_text("".join(json.dumps({"what": "streaming"} | row | provenance()) + "\n" for row in rows))
    if args.plot:
        plot(rows, model.config.max_position_embeddings, args.plot)
    return rows


if __name__ == "__main__":
    main()
