"""Planted faults: each can be planted, and rows say which test finds it."""

import planted_faults
import pytest


def test_every_fault_can_be_planted():
    """If code has changed, change `old` and `new` of its faults in tests/planted_faults.toml."""
    names = [fault.name for fault in planted_faults.FAULTS]
    assert len(names) == len(set(names)) >= 40
    for fault in planted_faults.FAULTS:
        path, text = planted_faults.planted(fault, planted_faults.ROOT)
        assert path.read_text() != text
        for tests in fault.tests.split():
            file, _, name = tests.partition("::")
            assert not name or f"def {name.partition('[')[0]}(" in (planted_faults.ROOT / file).read_text(), fault.name


def test_a_fault_whose_text_is_gone_is_an_error():
    fault = planted_faults.Fault("none", "cli.py", "no such text", "", "")
    with pytest.raises(ValueError, match="'none': 'no such text' is 0 times in qkvcache/cli.py, not once"):
        planted_faults.planted(fault, planted_faults.ROOT)


def test_the_table_counts_what_is_found():
    rows = [
        {"fault": "a", "file": "x.py", "found": True, "by": "tests/test_x.py::test_a[1]"},
        {"fault": "b", "file": "x.py", "found": False, "by": ""},
    ]
    text = planted_faults.table(rows)
    assert text.startswith("Of 2 faults the short suite finds 1.")
    assert "| a | `x.py` | `test_a` |" in text and "| b | `x.py` | none |" in text
