"""Concluded studies are shown and drawn from their rows."""

import importlib

import pytest

from tests.matrix import slowly

concluded = importlib.import_module("concluded")
SAID = {
    "keys": "| 2 bits, exact: rest, keys | .038 ± .003 | .047 ± .008 | .0194 ± .0014 | .048 ± .009 |",
    "calibrated": "| calibrated, 3 bits | 100 | .0070 ± .0012 |",
    "frozen": "| demo | `hadaquant_k3v3` | .024 ± .005 |",
    "long_answers": "| int8 | 1000 (766 to 1000) | 81 ± 10 % | 75 ± 11 % |",
    "peers": '| `QuantizedCache("hqq", nbits=4)` | 0 + 64 | 6,480 | 3.56x | 1 | .080 | 21 |',
    "prompt_steps": "| 8,192 after 24,576 | compiled | 141.2 | 36.5 | 93.9 | 4.5 | 1.9 | 16.0 |",
    "zones": "| `turboquant_4bit_nc_uncentered` | .094 | .091 | .0077 |",
}


@pytest.mark.parametrize("study", concluded.TABLES)
def test_tables_have_the_numbers_of_the_rows(study, capsys):
    concluded.main([study])
    assert SAID[study] in capsys.readouterr().out


@pytest.mark.parametrize("study", slowly(concluded.PICTURES, [*concluded.PICTURES][:1]))
def test_pictures_are_drawn(study, tmp_path):
    concluded.main([study, "--plot", "--folder", str(tmp_path)])
    assert (tmp_path / f"{concluded.PICTURES[study][0]}.png").stat().st_size > 10_000


def test_a_study_without_a_picture_is_refused(capsys):
    with pytest.raises(SystemExit):
        concluded.main(["keys", "--plot"])
    assert "['keys'] has no picture" in capsys.readouterr().err
