"""The scripts among the examples, made small. Notebooks are run by nbmake."""

import json

import pytest
from examples.load import EXAMPLES, load
from ranks import finish, start


def test_a_chat_goes_on_in_constant_memory(capsys):
    rows = load("streaming_chat").main(["--window", "124"])
    assert "dilzon" in rows[1]["answer"]  # what it was just told
    assert "dilzon" not in rows[3]["answer"]  # what left the window
    assert rows[-1]["seen"] > 1000 and len({row["bytes"] for row in rows[2:]}) == 1
    assert all(row["computed"] < 700 for row in rows)  # the turn alone
    assert "128 held" in capsys.readouterr().out


def test_device_map(capsys):
    pytest.importorskip("accelerate")
    found = load("device_map").main(["--device-map", "auto", "--dtype", "float32"])
    assert found["answer"].strip().startswith("dilzon") and set(found["bytes"]) == {"cpu"}
    assert "MB of the cache" in capsys.readouterr().out


@pytest.mark.slow
def test_tensor_parallel():
    finish(start(EXAMPLES / "tensor_parallel.py", ["--dtype", "float32"], 2))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stored_without_output(path):
    cells = json.loads(path.read_text())["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
    assert sum(cell["cell_type"] == "markdown" for cell in cells) >= 3
