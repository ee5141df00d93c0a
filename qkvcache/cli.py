"""The `qkvcache` command."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .evaluation.commands import register as register_evaluation
from .options import device_of, dtype_of, model_of
from .planning.commands import register as register_planning
from .prefix.commands import app as prefix_app

app = typer.Typer(
    help="KV caches for Hugging Face transformers that stay compressed while attention reads them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(prefix_app, name="prefix")
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")]


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="'demo', 'smollm2', a model's folder, a .gguf file, or its name on the Hub.")] = "demo",
    json_output: JsonOption = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="What the model computes in: bfloat16, float16 or float32.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Chooses the code word and the texts.")] = 0,
) -> None:
    """Run one prompt through every cache, on the embedded model by default, and show what each costs and keeps."""
    import transformers

    from .demo import show

    model_of(model, "--model")  # refused here, under the option's name
    computes_in, on = dtype_of(dtype), device_of(device)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console()
    try:
        rows = show.run(model, computes_in, on, None if json_output else console, seed)
    except (ValueError, NotImplementedError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if json_output:
        print(json.dumps(show.as_json(rows), indent=1))
    else:
        show.show(rows, console, model)


@app.command()
def formats(
    head_dim: Annotated[int, typer.Option(help="Channels of one head.")] = 128,
    kv_heads: Annotated[int, typer.Option(help="KV heads of a layer.")] = 8,
    json_output: JsonOption = False,
) -> None:
    """List the storage formats and what a token takes in each."""
    from .formats import REGISTRY

    if head_dim < 1 or kv_heads < 1:
        raise typer.BadParameter(f"--head-dim {head_dim} --kv-heads {kv_heads}: both must be at least 1")
    rows = []
    for name, format in REGISTRY.items():
        refusal = format.refuses(head_dim)
        size = None if refusal else format.bytes_per_token(head_dim, kv_heads) / kv_heads
        rows.append({"format": name, "bytes": size, "ratio": size and 4 * head_dim / size, "refuses": refusal})
    if json_output:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title=f"bytes a token and head, keys and values, head_dim {head_dim}, {kv_heads} KV heads")
    table.add_column("format")
    table.add_column("bytes", justify="right")
    table.add_column("than 16 bit", justify="right")
    for row in rows:
        cells = (f"{row['bytes']:g}", f"{row['ratio']:.2f}x smaller") if row["bytes"] else ("-", str(row["refuses"]))
        table.add_row(str(row["format"]), *cells)
    Console().print(table)


register_planning(app)
register_evaluation(app)

if __name__ == "__main__":
    app()
