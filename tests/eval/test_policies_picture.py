"""The picture of policies: what the table of the same rows says, of policies that the library has."""

import importlib

from qkvcache import policies

drawn = importlib.import_module("policies_picture")


def test_recall_is_what_the_table_says():
    found = drawn.measured()
    (dense,) = found["dense"].values()
    assert drawn.recalled(dense, dense) == 1
    assert round(drawn.recalled(found["kvzip"][0.25], dense), 2) == 0.94 and round(drawn.recalled(found["snapkv"][0.5], dense), 2) == 0.37
    assert round(drawn.divergence(found["kvzip"][0.25]), 3) == 0.014


def test_few_policies_of_the_library_are_drawn(tmp_path):
    assert len(drawn.SHOWN) <= 8 and {name.split(",")[0] for name in drawn.SHOWN} <= set(policies.REGISTRY)
    drawn.main(["--out", str(tmp_path / "picture.png")])
    assert (tmp_path / "picture.png").stat().st_size > 10_000
