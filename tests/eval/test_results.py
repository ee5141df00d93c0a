"""The rows in eval/results are shown and drawn, those of older runs too."""

import importlib
import shutil
from pathlib import Path

import pytest

from tests.matrix import slowly

EVAL = Path(__file__).parents[2] / "eval"
SHOWN = {
    "quality": ["hadaquant_k4v4 ", "--markdown"],
    "quality --model smollm2": ["nvfp4_mse ", "--markdown"],
    "quality --model smollm2 --out quality_policies.jsonl": ["turboquant_4bit_nc + snapkv 50%", "--markdown"],
}


@pytest.mark.parametrize("command", slowly(SHOWN, [*SHOWN][:1]))
def test_rows_are_shown_and_drawn(command, tmp_path, capsys):
    name, *options = command.split()
    study = importlib.import_module(name)
    file = options.pop() if "--out" in options else f"{name}.jsonl"
    copy = shutil.copy(EVAL / "results" / file, tmp_path)
    said, show = SHOWN[command]
    arguments = [*[option for option in options if option != "--out"], "--out", str(copy)]
    study.main([*arguments, show])
    assert said in capsys.readouterr().out
    study.main([*arguments, "--plot"])
    (drawn,) = tmp_path.glob("*.png")
    assert drawn.stat().st_size > 10_000
