"""The benchmark of agents runs on a CPU, and its rows are shown."""

import importlib
import json

import pytest

from tests.releases import BATCHING

if not BATCHING:
    pytest.skip("continuous batching needs transformers 5.24", allow_module_level=True)

bench = importlib.import_module("bench_agents")


def test_sessions_have_the_lengths_that_are_said():
    load = bench.Load(1, 100)
    lengths = sorted(load.around(5_200) for _ in range(999))
    assert 4_500 < lengths[499] < 6_000 and lengths[0] > 1_000 and lengths[-1] < 25_000
    agent = bench.Agent(bench.Load(100, 100, turns=4), begun=False)
    turns, prompts = agent.turns, [agent.history]
    for _ in range(turns - 1):
        agent.answered([7])
        prompts.append(agent.history)
    assert all(later[: len(before) + 1] == [*before, 7] for before, later in zip(prompts, prompts[1:], strict=False))
    agent.answered([7])
    assert agent.turn == 0 and agent.history[: len(prompts[0])] != prompts[0]


@pytest.mark.slow
def test_it_measures_and_shows(tmp_path, capsys):
    out = tmp_path / "agents.jsonl"
    bench.main(["--tiny", "--device", "cpu", "--seconds", "1", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert not any("failed" in row for row in rows), rows
    assert [row["cache"] for row in rows] == ["identity", "turboquant_4bit_nc", "stock"]
    assert all(row["turns_s"] > 0 and 0 <= row["reused"] < 1 and row["pool_tokens"] > 1000 for row in rows)  # whatever the machine does
    capsys.readouterr()
    bench.main(["--markdown", "--out", str(out)])
    assert capsys.readouterr().out.count("| turboquant_4bit_nc |") == 1
