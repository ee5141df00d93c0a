"""Families of models do what the rows of `eval/families.py` say, and README claims no more."""

from pathlib import Path

import families
import pytest
from harness import RESULTS, read_rows

from tests.matrix import slowly

ROWS = {row["family"]: row for row in read_rows(RESULTS / "families.jsonl")}
KINDS = {
    "llama": "full attention",
    "gemma3_text": "sliding and full",
    "bloom": "ALiBi",
    "gptj": "attention code of its own",
    "diffllama": "values that change after update",
    "deepseek_v3": "latents",
    "deepseek_v32": "an indexer",
    "minimax_m3_vl_text": "sparse heads",
    "qwen3_next": "linear attention",
    "falcon_h1": "a state beside attention",
    "qwen2_5_vl": "images",
    "t5": "an encoder of text",
    "whisper (speech)": "an encoder of sound",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slowly(KINDS, ["llama", "bloom", "t5"]))  # `make families` has them all
def test_a_family_does_what_its_row_says(name):
    row, before = families.cells(name), ROWS[name]
    assert [row.get(cell) for cell in families.SHOWN] == [before[cell] for cell in families.SHOWN], row["said"]


def test_every_family_has_a_row():
    assert ROWS.keys() == {*families.CAUSAL, *families.OTHERS}


def test_readme_claims_what_the_rows_say():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert families.claim(list(ROWS.values())) in " ".join(readme.split())


def test_a_cell_that_became_worse_is_named():
    before = {"crop": "=", "int8": "codes", "turns": "refused"}
    assert families.worse({"family": "llama", "crop": "=", "int8": "dequantized"}, before) == ["llama, int8: dequantized"]
    assert families.worse({"family": "llama"}, before) == ["llama, int8: None", "llama, crop: None"]


def test_unknown_families_are_refused(capsys):
    with pytest.raises(SystemExit):
        families.main(["--only", "lama"])
    assert "argument --only: invalid choice: 'lama'" in capsys.readouterr().err
