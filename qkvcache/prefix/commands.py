"""`qkvcache prefix`: what a prefix store costs, and the entries in a directory."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..options import counts_of, device_of, dtype_of, model_of

app = typer.Typer(help="Stored beginnings of prompts.", no_args_is_help=True)
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")]
Directory = Annotated[Path, typer.Argument(help="The directory of a PrefixStore.", exists=True, file_okay=False)]
CONTEXTS = "512,1024,2048,4096,8192,16384,32768,65536"


@app.command()
def bench(
    model: Annotated[
        str, typer.Option(help="'demo', 'smollm2', a model's folder, a .gguf file, or its name on the Hub: its config is read.")
    ] = "demo",
    format: Annotated[str, typer.Option(help="How tokens are stored; `qkvcache formats` lists them.")] = "int8",
    dtype: Annotated[str, typer.Option(help="The model's dtype: bfloat16, float16 or float32.")] = "bfloat16",
    contexts: Annotated[str, typer.Option(help="Numbers of tokens, with commas.")] = CONTEXTS,
    device: Annotated[str, typer.Option(help="Where the caches live: cpu, cuda.")] = "cpu",
    directory: Annotated[Path | None, typer.Option(help="Where files are written; a temporary one by default.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Measure bytes, error and latency of storing and fetching prefixes of a model's shapes."""
    from transformers import AutoConfig

    from .bench import measure

    path, counts, stored_in, on = model_of(model, "--model"), counts_of(contexts, "--contexts"), dtype_of(dtype), device_of(device)
    try:
        config = AutoConfig.from_pretrained(path)
        console = Console()
        rows = []
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            for row in measure(config, format, counts, Path(folder), stored_in, str(on)):
                rows.append({"model": model, "format": format, "dtype": dtype, "device": device} | row)
                if console.is_terminal and not json_output:
                    console.print(f"{row['tokens']:,} of {max(counts):,} tokens …", end="\r", style="dim")
    except (ValueError, NotImplementedError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if json_output:
        print(json.dumps(rows, indent=1))
        return
    table = Table(
        title=f"{model} in {dtype} on {device}, stored as {format}; milliseconds, and microseconds a token",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    for header in ("tokens", "MB", "smaller", "error", "store", "fetch", "half", "us/token", "write", "read", "half"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        times = (f"{row[name]:.1f}" for name in ("store_ms", "fetch_ms", "fetch_half_ms"))
        files = (f"{row[name]:.1f}" for name in ("write_ms", "read_ms", "read_half_ms"))
        sizes = (f"{row['tokens']:,}", f"{row['bytes'] / 1e6:.1f}", f"{row['ratio']:.2f}x", f"{row['error']:.4f}")
        table.add_row(*sizes, *times, f"{1000 * row['fetch_ms'] / row['tokens']:.2f}", *files)
    console.print(table)


@app.command()
def ls(directory: Directory, json_output: JsonOption = False) -> None:
    """List the entries in a directory, those used last first."""
    from .entry import in_short

    rows = sorted(_entries(directory), key=lambda row: row["used"], reverse=True)
    if json_output:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title=f"{len(rows)} files, {sum(row['bytes'] for row in rows):,} bytes in {directory}", box=None)
    for header in ("entry", "model", "tokens", "bytes", "last used", "stored from"):
        table.add_column(header, justify="right" if header in ("tokens", "bytes") else "left", overflow="fold")
    for row in rows:
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["used"]))
        says = row["problem"] or in_short(row["cache"])
        table.add_row(row["entry"][:12], row["model"], f"{row['tokens']:,}", f"{row['bytes']:,}", used, says)
    Console().print(table)


@app.command()
def rm(
    directory: Directory,
    entries: Annotated[list[str] | None, typer.Argument(help="How the entries' names begin, as `ls` shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every entry, and what killed processes left.")] = False,
) -> None:
    """Remove entries. Files that are no entries stay."""
    from . import disk

    if bool(entries) == everything:
        raise typer.BadParameter("name the entries to remove, or pass --all")
    found = [path for entry in disk.files(directory) if disk.parts(entry.name) and (path := Path(entry.path))]
    chosen = set(found)
    if not everything:
        chosen = set()
        for name in entries or ():
            hits = {path for path in found if disk.label(path.name).startswith(name)}
            if not hits:
                raise typer.BadParameter(f"no entry begins with {name!r}")
            chosen |= hits
    size = sum(path.stat().st_size for path in chosen)
    for path in chosen:
        path.unlink(missing_ok=True)
    disk.trim(directory, 2**63)
    print(f"removed {len(chosen)} entries, {size:,} bytes")


@app.command()
def verify(directory: Directory, json_output: JsonOption = False) -> None:
    """Read every entry and check it against its digests; exit with 1 if one is damaged."""
    rows = _entries(directory, contents=True)
    if json_output:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(f"{row['entry'][:12]}  {row['tokens']:>9,} tokens  {row['problem'] or 'whole'}")
    bad = sum(bool(row["problem"]) for row in rows)
    if not json_output:
        print(f"{len(rows)} files, {bad} damaged or no entries")
    if bad:
        raise typer.Exit(1)


def _entries(directory: Path, contents: bool = False) -> list[dict]:
    """A row for each file; `contents`: with all of it read and checked."""
    from . import disk

    rows = []
    for entry in sorted(disk.files(directory), key=lambda entry: entry.name):
        path = Path(entry.path)
        name = disk.label(path.name) if disk.parts(path.name) else path.name
        row = {"entry": name, "file": path.name, "model": "", "tokens": 0, "bytes": path.stat().st_size, "used": path.stat().st_mtime}
        row |= {"cache": "", "whole": False, "error": 0.0, "problem": ""}
        try:
            file = disk.read_header(path)
            row |= {
                "model": file.model,
                "tokens": file.tokens,
                "cache": file.text,
                "whole": file.whole,
                "error": max(file.errors, default=0.0),
            }
            if contents:
                for _ in disk.read(file):
                    pass
        except (disk.Damaged, FileNotFoundError) as error:
            row["problem"] = str(error)
        rows.append(row)
    return rows
