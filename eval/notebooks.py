"""Runs the notebooks of examples/ again and keeps their outputs, without what they print of this machine (warnings, progress bars).

python eval/notebooks.py [NOTEBOOK ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Removes what was written to stderr, and when cells ran."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(EXAMPLES.glob("*.ipynb")), metavar="NOTEBOOK")
    for path in parser.parse_args().notebooks:
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
        tidy(notebook)
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main()
