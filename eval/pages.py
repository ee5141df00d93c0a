"""The tables of README, CONTRIBUTING and of the site, written again from the rows: nothing is measured.

    python eval/pages.py            fills every table
    python eval/pages.py --check    says which tables differ from the rows; exit status 1 if one does

A table stands between two comments, the first of which says what prints it: a script of this folder with its options, or `qkvcache` with a
command.

    <!-- table: eval/quality.py --model smollm2 --markdown -->
    <!-- end -->
"""

from __future__ import annotations

import argparse
import importlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

EVAL = Path(__file__).resolve().parent
ROOT = EVAL.parent
TABLE = re.compile(r"(?P<begin><!-- table: (?P<command>[^\n]*?) -->\n)(?P<text>.*?)(?P<end><!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def tables(text: str) -> Iterator[re.Match]:
    """Those of a page; what stands in its code blocks is an example."""
    hidden = [match.span() for match in re.finditer(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)]
    for match in TABLE.finditer(text):
        if not any(begin <= match.start() < end for begin, end in hidden):
            yield match


def printed(command: str) -> str:
    """What the command prints."""
    name, *options = shlex.split(command)
    out = io.StringIO()
    with redirect_stdout(out):
        importlib.import_module(Path(name).stem).main(options)  # this folder is on the path
    return "\n" + out.getvalue().strip() + "\n\n"


def filled(text: str) -> str:
    """A page with its tables printed again."""
    found, at = [], 0
    for match in tables(text):
        found += [text[at : match.end("begin")], printed(match["command"])]
        at = match.start("end")
    return "".join([*found, text[at:]])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(arguments)
    different = 0
    for page in pages():
        text = page.read_text()
        if (made := filled(text)) != text:
            different += 1
            print(page.relative_to(ROOT))
            if not args.check:
                page.write_text(made)
    return 1 if args.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
