"""What options of the studies may be: types for argparse, which puts the option's name before what they say, and those of every study."""

from __future__ import annotations

import lzma
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import typer
from rows import read_rows, replace_rows
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qkvcache import demo, models
from qkvcache.options import device_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TEXTS = {"pydoc": demo.text}
"""The language reference that every Python brings."""
T = TypeVar("T")


def at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if (value := int(text)) < least:
            raise ArgumentTypeError(f"{value}: must be {least} or more")
        return value

    return whole_number


def fraction(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise ArgumentTypeError(f"{text}: must be a share above 0, at most 1")
    return value


def add_model(parser: ArgumentParser, results: Path, text: str = "pydoc") -> None:
    """What is measured, on what, where the rows go, and for how long."""
    parser.add_argument("--model", default="demo", help="'demo' (embedded), 'smollm2', a folder or a model on the Hub")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the model: what rounds is then the cache")
    parser.add_argument("--text", type=Path, default=text, help="'pydoc', the language reference of Python; or a file, .xz too")
    parser.add_argument("--out", type=Path, default=results, help="where the rows go")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after so many, nothing more is started")


def refused(args: Namespace) -> str | None:
    """Why nothing can be measured, if so. What only shows rows does not ask: they may be of another machine."""
    try:
        models.folder(args.model)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        return f"argument --model: {error}"
    if str(args.text) not in TEXTS and not args.text.is_file():
        return f"argument --text: {str(args.text)!r} is no file"
    try:
        device_of(args.device)
    except typer.BadParameter as error:
        return f"argument --device: {error.message}"
    return None


def load(args: Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    """The model, its tokenizer, and the text as its tokens."""
    model, tokenizer = models.load(args.model, DTYPES[args.dtype], args.device)
    if str(args.text) in TEXTS:
        text = TEXTS[str(args.text)]()
    else:
        with (lzma.open if args.text.suffix == ".xz" else open)(args.text, "rt", encoding="utf-8") as file:
            text = " ".join(file.read().split())
    return model, tokenizer, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def described(args: Namespace) -> dict:
    """What rows say of the model, of the text and of where they were measured."""
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    return {"model": name_of(args.model), "text": args.text.name, "device": device}


def name_of(model: str) -> str:
    return Path(model).name


def in_time(tasks: Iterable[T], minutes: float, begin: float) -> Iterator[T]:
    """`tasks`, until `minutes` have passed since `begin` (of `time.perf_counter`)."""
    for task in tasks:
        if time.perf_counter() - begin > 60 * minutes:
            return
        yield task


def stored_or_measured(
    parser: ArgumentParser,
    args: Namespace,
    what: str,
    measure: Callable[[Namespace], Iterable[dict]],
    shows: tuple[str, ...],
    refused: Callable[[Namespace], str | None] = refused,
) -> list[dict]:
    """Rows of the study `what`: those in `args.out`, if one of the options `shows` asks for them; else measured, each written at once."""
    if any(getattr(args, option) for option in shows):
        if not (rows := [row for row in read_rows(args.out) if row["what"] == what]):
            *first, last = (f"--{option}" for option in shows)
            parser.error(f"{args.out} has no rows of {args.model}: run without {', '.join(first)} and {last} first")
        return rows
    if wrong := refused(args):
        parser.error(wrong)
    rows = []
    for row in measure(args):
        rows.append(row)
        replace_rows(args.out, what, rows)
    if not rows:
        sys.exit(f"--minutes {args.minutes:g}: over before the first cache was measured")
    print(f"{rows[-1]['seconds']:.0f} s", file=sys.stderr)
    return rows
