"""What the exact zones buy: KL, perplexity and recall on the embedded model against `num_sink_tokens` and `residual_length`.

    python eval/zones.py [--save]

The defaults of CompressedCache were chosen by this table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from qkvcache import CompressedCache, demo
from qkvcache.evaluation.quality import Passages, RecallSet, divergence, recall

RESULTS = Path(__file__).parent / "results" / "zones.jsonl"
FORMATS = ("turboquant_4bit_nc", "turboquant_3bit_nc")
ZONES = ((0, 0), (4, 0), (0, 64), (4, 16), (4, 32), (4, 64), (4, 128), (4, 256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--continuation", type=int, default=96)
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--save", action="store_true", help=f"append the rows to {RESULTS.name}")
    args = parser.parse_args()

    model, tokenizer = demo.load(torch.bfloat16)
    ids = demo.text_ids(tokenizer)
    length = args.context + args.continuation
    passages = Passages.read(model, torch.tensor(ids[: args.passages * length]).view(args.passages, length), args.context)
    cases = RecallSet.make(model, tokenizer, ids, args.context, args.cases)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    versions = {"commit": commit, "torch": torch.__version__, "transformers": transformers.__version__}
    table = Table(title=f"{args.context:,} tokens, {args.passages} x {args.continuation - 1} read on, {args.cases} recalls")
    for header in ("format", "num_sink_tokens", "residual_length", "bytes/token", "KL", "perplexity", "recall"):
        table.add_column(header, justify="left" if header == "format" else "right")
    for format in FORMATS:
        for first, recent in ZONES:

            def factory(format=format, first=first, recent=recent):
                return CompressedCache(model.config, format=format, num_sink_tokens=first, residual_length=recent)

            quality, right = divergence(model, passages, factory), recall(model, tokenizer, cases, factory)
            change = quality.perplexity / passages.perplexity - 1
            table.add_row(
                format, str(first), str(recent), f"{quality.bytes_per_token:,.0f}", f"{quality.kl:.4f}", f"{change:+.2%}", f"{right:.0%}"
            )
            if args.save:
                row = {
                    "what": "zones",
                    "date": time.strftime("%Y-%m-%d"),
                    "format": format,
                    "num_sink_tokens": first,
                    "residual_length": recent,
                }
                row |= {"kl": quality.kl, "perplexity_change": change, "recall": right, "bytes_per_token": quality.bytes_per_token}
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row | versions | {"command": "eval/zones.py --save"}) + "\n")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
