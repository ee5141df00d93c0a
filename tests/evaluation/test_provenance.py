"""What reproduces a result."""

import sys

from qkvcache.evaluation.provenance import provenance


def test_it_names_no_place_of_its_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval/study.py", "--out", str(tmp_path / "rows.jsonl"), "--share", "0.5"])
    assert provenance()["command"] == "eval/study.py --out rows.jsonl --share 0.5"
