"""The notebooks run, are committed with their outputs, begin with what the reader will see, and show nothing of the machine that ran
them."""

import json
import logging
from pathlib import Path

import pytest

from qkvcache import demo, formats, models
from tests.matrix import slowly

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_committed(path):
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert outputs and not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs), "make notebooks"
    assert "At the end" in "".join(cells[0]["source"])
    assert path.stat().st_size < 300_000


def run(path: Path, monkeypatch) -> dict:
    """Names after the cells of a notebook, which run in this process: a kernel takes longer to start than most of them to run."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(logging.root.manager, "disable", logging.root.manager.disable)
    names: dict = {"__name__": path.stem}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
    return names


def shallow(*args):
    model, tokenizer = models.load("demo", *args)
    model.config.num_hidden_layers, model.model.layers = 2, model.model.layers[:2]
    return model, tokenizer


SLOW = ("eviction", "formats_compared", "lm_eval")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW)) for path in NOTEBOOKS if path.stem != "prefix_store"],
)
def test_cells_run(path, monkeypatch):
    """With fewer formats, where all are compared, and on two layers of the embedded model, which then says little of use."""
    if path.stem != "formats_compared":  # which compares layers
        monkeypatch.setattr(demo, "load", shallow)
    chosen = slowly(formats.REGISTRY, ["int8", "nvfp4", "turboquant_3bit_nc"])
    monkeypatch.setattr(formats, "REGISTRY", {name: formats.REGISTRY[name] for name in chosen})
    run(path, monkeypatch)


def test_the_notebook_of_the_prefix_store(capsys, monkeypatch):
    names = run(next(path for path in NOTEBOOKS if path.stem == "prefix_store"), monkeypatch)
    assert names["none"] == 0 and names["reused"] > 1500
    assert (names["match"].kind, names["match"].length) == ("exact", names["first"].shape[1] - 1)
    assert names["half"].length == 699 and names["out"].shape[0] == 4
    assert names["restarted"].source == "disk" and names["restarted"].length == names["match"].length
    assert "miss miss" in capsys.readouterr().out
    assert type(names["found"].cache).__name__ == "DynamicCache"
