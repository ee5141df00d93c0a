"""The `qkvcache` command."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from . import commands
from .options import MODEL, JsonOption, WithFormats, device_of, dtype_of, examples, model_of, output, quiet, refusals

app = typer.Typer(
    epilog=examples("qkvcache demo", "qkvcache recommend demo --context 100000 --gpu-memory 80GB", "qkvcache plan --help"),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def prepare() -> None:
    """KV caches for Hugging Face transformers that stay compressed while attention reads them."""
    # Read when torch is loaded: threads that wait for others sleep. On a busy machine they would spin for most of the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@app.command(
    cls=WithFormats, epilog=examples("qkvcache demo", "qkvcache demo --model smollm2 --formats int8,turboquant_4bit_nc --device cuda")
)
def demo(
    model: Annotated[str, typer.Option(help=MODEL)] = "demo",
    formats: Annotated[
        str | None, typer.Option(help="With commas, as `qkvcache formats` lists them. Default: one each of 8, 4 and 3 bits.")
    ] = None,
    json_output: JsonOption = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="What the model computes in: bfloat16, float16 or float32.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Chooses the facts and the texts.")] = 0,
) -> None:
    """Run a prompt through a 4-bit cache, on the embedded model by default, and show what a few caches cost and keep."""
    from .demo import show
    from .formats import resolve

    model_of(model, "--model")  # refused here, under the option's name
    computes_in, on = dtype_of(dtype), device_of(device)
    names = None if formats is None else formats.split(",")
    quiet()
    with refusals():
        for name in names or ():
            resolve(name)
        rows = show.run(model, computes_in, on, None if json_output else Console(), seed, names)
    output(rows, json_output, show.table_of(rows, model))


@app.command(epilog=examples("qkvcache formats", "qkvcache formats --head-dim 64 --kv-heads 3 --json"))
def formats(
    head_dim: Annotated[int, typer.Option(help="Channels of one head.")] = 128,
    kv_heads: Annotated[int, typer.Option(help="KV heads of a layer.")] = 8,
    json_output: JsonOption = False,
) -> None:
    """List the storage formats and what a token takes in each. An asterisk marks those that `qkvcache recommend` chooses from."""
    from .formats import REGISTRY
    from .planning.recommend import RECOMMENDED

    if head_dim < 1 or kv_heads < 1:
        raise typer.BadParameter(f"--head-dim {head_dim} --kv-heads {kv_heads}: both must be at least 1")
    rows = []
    for name, format in REGISTRY.items():
        refusal = format.refuses(head_dim)
        size = None if refusal else format.bytes_per_token(head_dim, kv_heads) / kv_heads
        rows.append(
            {"format": name, "bytes": size, "ratio": size and 4 * head_dim / size, "recommended": name in RECOMMENDED, "refuses": refusal}
        )
    title = f"bytes a token and head, keys and values, head_dim {head_dim}, {kv_heads} KV heads"
    table = Table("format", *(Column(name, justify="right") for name in ("bytes", "than 16 bit")), title=title, caption="*: recommended")
    for row in rows:
        cells = (f"{row['bytes']:g}", f"{row['ratio']:.2f}x smaller") if row["bytes"] else ("-", str(row["refuses"]))
        table.add_row(f"{row['format']}{' *' * bool(row['recommended'])}", *cells)
    output(rows, json_output, table)


for part, name in commands.found():
    app.add_typer(part, name=name)

if __name__ == "__main__":
    app()
