"""The notebooks are committed with their outputs, begin with what the reader will see, and show nothing of the machine that ran them."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_committed(path):
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert outputs and not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs), "make notebooks"
    assert "At the end" in "".join(cells[0]["source"])
    assert path.stat().st_size < 300_000
