"""Options that several commands share, and how their values are read. Wrong values raise typer.BadParameter with the option's name."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperCommand

if TYPE_CHECKING:
    import torch

UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
MODEL = "'demo', 'smollm2', 'qwen2.5-coder-1.5b', a model's folder, a .gguf file, or its name on the Hub."
Budget = Annotated[float | None, typer.Option(help="Tokens that are retained: a number from 1 on, or a share such as 0.5.")]
AttentionBudget = Annotated[
    float | None, typer.Option(help="Tokens that each query reads of those that are kept: a number from 1 on, or a share such as 0.125.")
]
OffloadPages = Annotated[bool, typer.Option("--offload-pages", help="With an attention budget, quantized tokens lie in host memory.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. Default: a GPU if there is one.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")]


class WithFormats(TyperCommand):
    """A command whose `--formats a,b` may be written `--formats a b` too, as scripts take lists."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--formats" in args:
            from .formats import REGISTRY

            begin = args.index("--formats") + 1
            names = list(takewhile(REGISTRY.__contains__, args[begin:]))
            args = [*args[:begin], *filter(None, [",".join(names)]), *args[begin + len(names) :]]
        return super().parse_args(ctx, args)


def table(headers: Iterable[str], left: Container[str] = (), **options: Any) -> Table:
    """An empty table whose columns are aligned right, those in `left` to the left."""
    columns = (Column(header, justify="left" if header in left else "right", no_wrap=True) for header in headers)
    return Table(*columns, box=None, pad_edge=False, collapse_padding=True, caption_style="dim", **options)


def output(found: Any, json_output: bool, *shown: Any) -> None:
    """Prints `found` as JSON, or what is `shown` for it: tables and texts."""
    if json_output:
        print(json.dumps(found, indent=1))
    else:
        Console().print(*shown)


def examples(*commands: str) -> str:
    """The end of a command's `--help`, for `epilog=`: whole commands that begin with "qkvcache", one a line. Each command has one."""
    return "\n\n".join(["Examples:" if len(commands) > 1 else "Example:", *(f"  {command}" for command in commands)]).replace("[", r"\[")


@contextmanager
def refusals() -> Iterator[None]:
    """Turns the errors of the library into typer.BadParameter."""
    try:
        yield
    except (ImportError, ValueError, TypeError, NotImplementedError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def quiet() -> None:
    """Silences what transformers reports while it loads a model."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def model_of(name: str, option: str = "MODEL") -> str:
    """The path or name that transformers loads for `name` (`models.folder`)."""
    from .models import folder

    try:
        return folder(name)
    except (OSError, ImportError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def dtype_of(name: str) -> torch.dtype:
    import torch

    allowed = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in allowed:
        raise typer.BadParameter(f"{name!r}: expected one of {', '.join(allowed)}", param_hint="--dtype")
    return allowed[name]


def device_of(name: str | None) -> torch.device:
    """None: a GPU if there is one, else the CPU."""
    import torch

    from .models import usable

    try:
        return usable(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error


def budget_of(value: float | None, option: str = "--budget") -> int | float | None:
    """A whole number of tokens, or a share between 0 and 1."""
    if value is None or 0 < value < 1:
        return value
    if not value.is_integer():
        raise typer.BadParameter(f"{value:g}: expected a whole number of tokens, or a share between 0 and 1", param_hint=option)
    return int(value)


def counts_of(text: str, option: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        return [int(count) for count in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: expected whole numbers with commas between them", param_hint=option) from error


def bytes_of(text: str | None, option: str) -> float | None:
    """`80GB` as bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]i?b)?\s*", text, re.IGNORECASE)
    if not match:
        raise typer.BadParameter(f"{text!r}: expected a size such as 80GB, 74.5GiB or 80e9", param_hint=option)
    return float(match[1]) * UNITS[(match[2] or "").upper()]
