"""A server under load, with few requests, and under attack: its answers are as they should be, and the server is as before."""

import pytest

from . import attack, load

pytest.importorskip("uvicorn")


@pytest.mark.slow
def test_every_request_has_its_own_answer_and_leaves_nothing(capfd):
    counts = load.run(40, 8)
    kinds = [counts[kind] for kind in ("whole", "stream", "several", "stopped", "leaves", "refused", "no key", "silent")]
    assert sum(kinds) == 40 and all(kinds[:3])
    assert counts["counted finished"] > 15 and "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_server_stands_its_attack():
    found = {name: counts for name, _, _, counts in attack.run()}
    assert set(attack.ATTACKS) < set(found)
    statuses = {kind for name in attack.ATTACKS for kind in found[name] if kind.isdigit()}
    assert statuses == {"200", "400", "401", "404", "413", "429"}
    assert set(found["A1 templates"]) == {"400"} and set(found["A10 without a key"]) == {"401"}
    assert found["A4 administrators"]["answers right"] == 8 and found["A7 a greedy client"]["another client 200"]
    assert found["A7 a greedy client"]["429"] > 50 and found["A8 half-open connections"]["descriptors left"] < 30
    ended = found["A20 two signals"]
    assert ended["ends with an error"] == 4 and ended["exit 0"] and not ended["tracebacks"]
