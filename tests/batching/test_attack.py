"""The attack on a server: nothing of it is answered otherwise than it should be, and the server is as before."""

import pytest

from . import attack

pytest.importorskip("uvicorn")


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
