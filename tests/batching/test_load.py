"""The load test, with few requests."""

import pytest

from . import load

pytest.importorskip("uvicorn")


@pytest.mark.slow
def test_every_request_has_its_own_answer_and_leaves_nothing(capfd):
    counts = load.run(40, 8)
    kinds = [counts[kind] for kind in ("whole", "stream", "several", "stopped", "leaves", "refused", "no key", "silent")]
    assert sum(kinds) == 40 and all(kinds[:3])
    assert counts["counted finished"] > 15 and "Traceback" not in capfd.readouterr().err
