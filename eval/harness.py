"""Tools that the scripts of this folder share: options, rows, tables and pictures.

A script measures rows, writes each as soon as it is there, and shows them; `--show`, `--markdown` and `--plot` show the rows that are
there, without measuring and without a GPU.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
import time
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table as RichTable
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qkvcache import demo, models
from qkvcache.evaluation.provenance import provenance
from qkvcache.options import device_of

RESULTS = Path(__file__).parent / "results"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
T = TypeVar("T")


def read_rows(path: Path, what: str | None = None) -> list[dict]:
    """The rows of a file, or those of the study `what`; none if it does not exist."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []
    return [row for row in rows if what in (None, row["what"])]


def write_rows(path: Path, what: str, rows: list[dict], *keys: str) -> None:
    """Replaces the rows of the study `what` in a file by `rows`, or, with `keys`, those that agree with a new one in these fields.

    A process that is killed leaves the file as it was before or is after.
    """

    def place(row: dict) -> tuple:
        return tuple(str(row.get(key)) for key in keys)

    places = {place(row) for row in rows}
    others = [row for row in read_rows(path) if row["what"] != what or (keys and place(row) not in places)]
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text("".join(json.dumps(row) + "\n" for row in others + [{"what": what} | row for row in rows]))
    aside.replace(path)


def replace_rows(path: Path, what: str, rows: list[dict], *keys: str) -> None:
    """`write_rows` with the provenance of this process."""
    write_rows(path, what, [row | provenance() for row in rows], *keys)


def note(path: Path, what: str, row: dict, *keys: str) -> None:
    """`replace_rows` of a row that was just measured, and what it says on the terminal."""
    replace_rows(path, what, [row], *keys)
    short = {name: round(x, 3) if isinstance(x, float) else x for name, x in row.items() if not isinstance(x, list | dict)}
    print(f"{what}: {short}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Table:
    """`rule`: what stands below each header in markdown, the last of it below all others too."""

    headers: Sequence[str]
    lines: Iterable[Sequence[str]]
    title: str = ""
    caption: str = ""
    rule: tuple[str, ...] = ("---", "---:")

    def markdown(self) -> str:
        rules = [self.rule[min(i, len(self.rule) - 1)] for i in range(len(self.headers))]
        lines = [f"| {' | '.join(self.headers)} |", f"|{'|'.join(rules)}|", *(f"| {' | '.join(line)} |" for line in self.lines)]
        return "\n\n".join(filter(None, [self.title, "\n".join(lines), self.caption]))

    def rich(self) -> RichTable:
        found = RichTable(title=self.title.strip("*"), caption=self.caption)
        for i, header in enumerate(self.headers):
            found.add_column(header, justify="right" if i else "left")
        for line in self.lines:
            found.add_row(*line)
        return found


def grouped(rows: Iterable[dict], *keys: str) -> Iterator[tuple[tuple, list[dict]]]:
    """The values of `keys`, and the rows that have them."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(str([row[key] for key in keys]), []).append(row)
    for of in groups.values():
        yield tuple(of[0][key] for key in keys), of


def pivot(rows: Iterable[dict], line: Callable[[dict], str], column: Callable[[dict], str], cell: Callable[[dict], str]) -> Table:
    """A table with a line and a column for each value of `line` and of `column`, in the order of the rows."""
    cells = {(line(row), column(row)): cell(row) for row in rows}
    names, columns = (list(dict.fromkeys(at[side] for at in cells)) for side in (0, 1))
    return Table(["", *columns], [[name, *(cells.get((name, at), "") for at in columns)] for name in names])


@contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, *, dpi: int = 100, margins=(0, 0, 1, 1), **options) -> Iterator[tuple]:
    """A figure and its grid of axes, saved at the end; without a `layout` among the options, the axes fill what is within `margins`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(rows, columns, squeeze=False, **options)
    yield figure, grid
    if "layout" not in options:
        figure.tight_layout(rect=margins)
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
    print(path)


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse, which puts the option's name before what it says."""

    def whole_number(text: str) -> int:
        if (value := int(text)) < least:
            raise ArgumentTypeError(f"{value}: must be {least} or more")
        return value

    return whole_number


def fraction(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise ArgumentTypeError(f"{text}: must be a share above 0, at most 1")
    return value


class Parser(ArgumentParser):
    """A parser whose lists may be written with commas, as the options of `qkvcache` are, or with spaces."""

    def _get_values(self, action: Action, arg_strings: list[str]) -> Any:
        if action.nargs in ("+", "*") and action.type is not Path:
            arg_strings = [word for text in arg_strings for word in text.split(",")]
        return super()._get_values(action, arg_strings)  # type: ignore[misc]


def parser_of(doc: str | None, results: str, minutes: float | None = None, model: str | None = None) -> ArgumentParser:
    """The options of every script; with a default of `minutes` that of `in_time`, and with a default `model` those of what is measured on
    a model; `results` is the name of the rows."""
    parser = Parser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{results}.jsonl", help="the rows; those of the same case are replaced")
    if minutes is not None:
        text = "nothing is started that, if it took as long as the longest so far, would end later"
        parser.add_argument("--minutes", type=float, default=minutes, help=text)
    parser.add_argument("--show", action="store_true", help="the tables on the terminal, from the rows")
    parser.add_argument("--markdown", action="store_true", help="the tables of the pages, from the rows")
    parser.add_argument("--plot", action="store_true", help="the picture, from the rows")
    if model:
        parser.add_argument("--model", default=model, help=f"{models.known()}, a folder or a model on the Hub")
        parser.add_argument("--device", default="cpu")
        parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the model: what rounds is then the cache")
        parser.add_argument("--text", type=Path, default="pydoc", help="'pydoc', the language reference of Python; or a file, .xz too")
    return parser


def with_presets(parser: ArgumentParser, arguments: list[str] | None, **presets: dict[str, Any]) -> Namespace:
    """The options. Beside an option that names one of `presets`, its values are the defaults."""
    args = parser.parse_args(arguments)
    for name, values in presets.items():
        if getattr(args, name):
            parser.set_defaults(**values)
    return parser.parse_args(arguments)


def shows(args: Namespace) -> bool:
    """Whether rows are only shown: they may be of another machine, and nothing is measured."""
    return args.show or args.markdown or args.plot


def present(args: Namespace, tables: Iterable[Table], plot: Callable[[], object] = lambda: None) -> None:
    """The picture, the tables as markdown, or the tables on the terminal."""
    if args.plot:
        plot()
    elif args.markdown:
        print("\n\n".join(table.markdown() for table in tables))
    else:
        console = Console(width=None if sys.stdout.isatty() else 180)
        for table in tables:
            console.print(table.rich())


def run_or_show(
    parser: ArgumentParser,
    args: Namespace,
    measure: Callable[[Namespace], object],
    begins: str,
    tables: Callable[[list[dict]], Iterable[Table]],
    plot: Callable[[list[dict], Path], object] | None = None,
    gpu: bool = True,
) -> None:
    """A benchmark: measures, unless rows are only shown; then shows the rows of the studies that begin with `begins`. `gpu`: it needs one,
    unless it has `--tiny`."""
    if not shows(args):
        if gpu and not torch.cuda.is_available() and not getattr(args, "tiny", False):
            parser.error("measuring needs a GPU; --show, --markdown, --plot" + " and --tiny" * hasattr(args, "tiny") + " do not")
        measure(args)
    rows = [row for row in read_rows(args.out) if row["what"].startswith(begins)]
    if shows(args) and not rows:
        parser.error(f"{args.out} has no rows: measure first")
    if args.plot and plot is None:
        parser.error("there is no picture")
    present(args, tables(rows), lambda: plot(rows, args.out.with_suffix(".png")))


def refused(args: Namespace) -> str | None:
    """Why nothing can be measured, if so."""
    try:
        models.folder(args.model)
    except (OSError, ImportError) as error:
        return f"argument --model: {error}"
    if str(args.text) != "pydoc" and not args.text.is_file():
        return f"argument --text: {str(args.text)!r} is no file"
    try:
        device_of(args.device)
    except typer.BadParameter as error:
        return f"argument --device: {error.message}"
    return None


def load(args: Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    """The model, its tokenizer, and the text as its tokens."""
    model, tokenizer = models.load(args.model, DTYPES[args.dtype], args.device)
    if str(args.text) == "pydoc":
        text = demo.text()
    else:
        with (lzma.open if args.text.suffix == ".xz" else open)(args.text, "rt", encoding="utf-8") as file:
            text = " ".join(file.read().split())
    return model, tokenizer, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def device_name(device: str | torch.device) -> str:
    """The fields of a row that name the device."""
    return torch.cuda.get_device_name() if str(device).startswith("cuda") else str(device)


def described(args: Namespace) -> dict:
    """The fields of a row that name the model, the text and the place of measurement."""
    return {"model": name_of(args.model), "text": args.text.name, "device": device_name(args.device)}


def name_of(model: str) -> str:
    return Path(model).name


def in_time(tasks: Iterable[T], minutes: float) -> Iterator[T]:
    """`tasks`, until the next one, if it took as long as the longest so far, would end later than `minutes` after the first began."""
    begin, longest = time.perf_counter(), 0.0
    for task in tasks:
        started = time.perf_counter()
        if started - begin + longest >= 60 * minutes:
            return print(f"no time left for {task} and what follows", file=sys.stderr, flush=True)
        yield task
        longest = max(longest, time.perf_counter() - started)


def outcome(call: Callable[[], dict]) -> dict:
    """The result of `call`, or the reason of its failure, so that the other cases are still measured."""
    try:
        return call()
    except Exception as failure:
        return {"failed": f"{type(failure).__name__}: {str(failure)[:300]}"}


def stored_or_measured(
    parser: ArgumentParser, args: Namespace, what: str, measure: Callable[[Namespace], Iterable[dict]], refused: Callable = refused
) -> list[dict]:
    """Rows of the study `what`: those that are there, if they are only shown; else measured, each written at once."""
    if shows(args):
        return read_rows(args.out, what) or parser.error(f"{args.out} has no rows of {args.model}: measure first, without --show")
    if wrong := refused(args):
        parser.error(wrong)
    begin, rows = time.perf_counter(), []
    for row in measure(args):
        rows.append(row | {"seconds": time.perf_counter() - begin})
        replace_rows(args.out, what, rows)
    return rows or sys.exit(f"--minutes {args.minutes:g}: over before the first cache was measured")
