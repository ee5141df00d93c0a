"""`qkvcache prefix`: what a prefix store costs, and the entries in a directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..options import MODEL, JsonOption, counts_of, device_of, dtype_of, examples, model_of, output, refusals, table
from ..progress import track

app = typer.Typer(help="Stored beginnings of prompts.", no_args_is_help=True, epilog=examples("qkvcache prefix ls FOLDER"))
CONTEXTS = "512,1024,2048,4096,8192,16384,32768,65536"


@app.command(epilog=examples("qkvcache prefix bench --model meta-llama/Llama-3.1-8B --format turboquant_4bit_nc --contexts 4096,32768"))
def bench(
    model: Annotated[str, typer.Option(help=f"{MODEL} Only its config is read.")] = "demo",
    format: Annotated[str, typer.Option(help="Storage format; `qkvcache formats` lists them.")] = "int8",
    dtype: Annotated[str, typer.Option(help="The model's dtype: bfloat16, float16 or float32.")] = "bfloat16",
    contexts: Annotated[str, typer.Option(help="Numbers of tokens, with commas.")] = CONTEXTS,
    device: Annotated[str, typer.Option(help="Device of the caches: cpu, cuda.")] = "cpu",
    json_output: JsonOption = False,
) -> None:
    """Measure bytes and latency of storing and fetching prefixes of a model's shapes."""
    from transformers import AutoConfig

    from ..prefix.bench import measure

    path, counts, stored_in, on = model_of(model, "--model"), counts_of(contexts, "--contexts"), dtype_of(dtype), device_of(device)
    with refusals():
        config = AutoConfig.from_pretrained(path)
        named = {"model": model, "format": format, "dtype": dtype, "device": device}
        measured = track(measure(config, format, counts, stored_in, on), "storing and fetching", len(counts))
        rows = [named | row for row in measured]
    headers = ("tokens", "MB", "smaller", "store", "fetch", "half", "us/token")
    grid = table(headers, title=f"{model} in {dtype} on {device}, stored as {format}; milliseconds, and microseconds a token")
    for row in rows:
        times = (f"{row[name]:.1f}" for name in ("store_ms", "fetch_ms", "fetch_half_ms"))
        sizes = (f"{row['tokens']:,}", f"{row['bytes'] / 1e6:.1f}", f"{row['ratio']:.2f}x")
        grid.add_row(*sizes, *times, f"{1000 * row['fetch_ms'] / row['tokens']:.2f}")
    output(rows, json_output, grid)


@app.command(epilog=examples("qkvcache prefix ls prefixes", "qkvcache prefix ls prefixes --verify"))
def ls(
    directory: Annotated[Path, typer.Argument(help="The directory of a PrefixStore.", exists=True, file_okay=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Read all of each entry and check it against its digests.")] = False,
    json_output: JsonOption = False,
) -> None:
    """List the entries and pages in a directory, the most recently used first; with --verify, exit with 1 if one is damaged."""
    from ..prefix import disk

    files = sorted(disk.files(directory), key=lambda entry: entry.stat().st_mtime, reverse=True)
    found = track(files, "reading", len(files), shown=verify)
    rows = [_row(Path(entry.path), verify) for entry in found]
    bad = sum(bool(row["problem"]) for row in rows)
    title = f"{len(rows)} files, {bad} damaged or no entries, {sum(row['bytes'] for row in rows):,} bytes in {directory}"
    grid = Table(title=title, box=None)
    right = {"justify": "right", "no_wrap": True}
    shown: dict[str, dict[str, Any]] = {"file": {}, "model": {}, "tokens": right, "bytes": right}
    shown |= {"last used": {"no_wrap": True}, "stored from": {"min_width": 18}}
    for header, options in shown.items():
        grid.add_column(header, overflow="fold", **options)
    for row in rows:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["used"]))
        says = row["problem"] or row["cache"]
        grid.add_row(row["file"], row["model"], f"{row['tokens']:,}", f"{row['bytes']:,}", used, says)
    output(rows, json_output, grid)
    if verify and bad:
        raise typer.Exit(1)


def _row(path: Path, contents: bool) -> dict:
    """The row of a file. `contents`: whether all of it is read and checked."""
    from ..prefix import disk

    stat, empty = path.stat(), {"model": "", "tokens": 0, "cache": "", "cuts": None, "problem": ""}
    row = {"file": path.name, "bytes": stat.st_size, "used": stat.st_mtime} | empty
    try:
        file = disk.read_header(path)
        row |= {"model": file.model, "tokens": file.tokens, "cache": file.text, "cuts": file.cuts}
        if contents:
            file.checked()
    except (disk.Damaged, OSError) as error:
        row["problem"] = str(error)
    return row
