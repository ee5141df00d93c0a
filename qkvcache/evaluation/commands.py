"""`qkvcache bench` and `qkvcache eval`."""

from __future__ import annotations

import inspect
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..options import budget_of, device_of, dtype_of, model_of
from .spec import DENSE, CacheSpec

USUAL = "int8,fp8,nvfp4,turboquant_k8v4,turboquant_4bit_nc,turboquant_3bit_nc"


def bench(
    model: Annotated[str, typer.Argument(help="'demo', 'smollm2', a model's folder, a .gguf file, or its name on the Hub.")] = "demo",
    formats: Annotated[str, typer.Option(help="With commas, as `qkvcache formats` lists them, or 'all'.")] = USUAL,
    policy: Annotated[
        str | None, typer.Option(help="What evicts tokens, in every cache but the dense one: h2o, keydiff and others.")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Tokens that the policy keeps: a number from 1 on, or a share such as 0.5.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.", min=2)] = 2000,
    batch: Annotated[int, typer.Option(help="Prompts that run together.", min=1)] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens that are generated.", min=8)] = 32,
    preallocate: Annotated[bool, typer.Option("--preallocate", help="Take storage at once, so that a GPU runs compiled steps.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. Default: a GPU if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="What the model computes in: bfloat16, float16 or float32.")] = "bfloat16",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Measure how fast your model decodes with each format, and what it takes, beside a DynamicCache.

    qkvcache bench meta-llama/Llama-3.1-8B --tokens 32000 --device cuda --preallocate
    """
    import torch
    import transformers

    from ..demo import text
    from ..formats import REGISTRY
    from ..models import load
    from .speed import measure

    path, computes_in, on, size = model_of(model), dtype_of(dtype), device_of(device), budget_of(budget)
    names = [name for name in REGISTRY if name != "identity"] if formats == "all" else formats.split(",")
    longest = tokens + new_tokens if preallocate else None
    try:
        specs = [CacheSpec(cache=name, policy=policy, budget=size, max_length=longest) for name in names]
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        network, tokenizer = load(path, computes_in, on)
        ids = tokenizer(text(), verbose=False)["input_ids"]
        prompt = torch.tensor((ids * (tokens // len(ids) + 1))[:tokens], device=network.device).expand(batch, -1).contiguous()
        for spec in specs:
            spec.make(network.config)
        rows = []
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("decoding", total=1 + len(specs))
            for row in measure(network, prompt, [CacheSpec(cache=DENSE), *specs], new_tokens):
                rows.append({"model": model, "device": str(network.device), "dtype": dtype} | row)
                progress.advance(task)
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    for row in rows:
        row["ratio"] = rows[0]["bytes_per_token"] / row["bytes_per_token"]
        row["speedup"] = rows[0]["decode_ms"] / row["decode_ms"]
    if json_output:
        print(json.dumps(rows, indent=1))
    else:
        Console().print(_table(rows))


def _table(rows: list[dict]) -> Table:
    first = rows[0]
    peak = "peak_bytes" in first  # on a GPU
    found = Table(
        title=f"{first['model']} on {first['device']} in {first['dtype']}, {first['batch']} x {first['tokens']:,} tokens",
        box=None,
        pad_edge=False,
        collapse_padding=True,
        caption_style="dim",
        caption="ms a step: median; faster, smaller: than the DynamicCache"
        + ("; MB peak: all that was allocated beside the weights." if peak else "."),
    )
    headers = ["cache", "ms a step", "faster", "tokens/s", "prompt ms", "bytes/token", "smaller"] + ["MB peak"] * peak
    for header in headers:
        found.add_column(header, justify="left" if header == "cache" else "right", no_wrap=True)
    for row in rows:
        cells = [
            row["cache"], f"{row['decode_ms']:.1f}", f"{row['speedup']:.2f}x", f"{row['tokens_per_second']:,.0f}",
            f"{row['prompt_ms']:,.0f}", f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.2f}x",
        ]  # fmt: skip
        found.add_row(*cells, *([f"{row['peak_bytes'] / 1e6:,.0f}"] if peak else []))
    return found


def evaluate(context: typer.Context) -> None:
    """Run lm-eval with every score going through a cache; all that follows is lm-eval's own.

    qkvcache eval run --model qkvcache --model_args pretrained=MODEL,cache=turboquant_4bit_nc --tasks hellaswag,qkvcache_needle
    """
    from .__main__ import main

    try:
        if {"-h", "--help"} & {*context.args}:
            from .model import CacheLM

            print(f"{inspect.getdoc(CacheLM)}\n")
        main(context.args)
    except (ImportError, ValueError, TypeError, NotImplementedError, OSError) as error:  # `python -m qkvcache.evaluation` shows where
        raise typer.BadParameter(str(error)) from error


def register(app: typer.Typer) -> None:
    """Adds both commands to the command line."""
    app.command()(bench)
    passed_on = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command("eval", context_settings=passed_on, add_help_option=False)(evaluate)
