"""The pages of the site: their code runs, and their commands and options exist. CPU, embedded model, no network."""

import os
import re
from pathlib import Path

import pytest
import torch
import typer

from qkvcache.cli import app

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<source>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """The line before each block of that language, and its source without the indentation of the fence."""
    text = (ROOT / page).read_text()
    found = []
    for match in FENCE.finditer(text):
        if match["language"] == language:
            source = re.sub(rf"^{match['indent']}", "", match["source"], flags=re.MULTILINE)
            found.append((text.count("\n", 0, match.start("source")), source))
    return found


PRINT = re.compile(r"^print\(.*\)(?:  |\n)# (?P<said>.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_code_runs_and_prints_what_the_page_says(page, monkeypatch, tmp_path, capsys):
    """All blocks of a page, in order, in one namespace. A comment after `print` is what it prints; `...` stands for any text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # a page may set variables
    torch.manual_seed(0)
    names = {"__name__": f"docs.{Path(page).stem}"}
    for line, source in blocks(page, "python"):
        exec(compile("\n" * line + source, ROOT / page, "exec"), names)  # errors name the line of the page
        printed = capsys.readouterr().out
        for match in PRINT.finditer(source):
            assert re.search(r".*".join(map(re.escape, match["said"].split("..."))), printed), (match["said"], printed)


def command_of(words: list[str]):
    """The command that `words` name, after "qkvcache", and the words after its name."""
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


COMMANDS = sorted(
    {
        (page, line.split("#")[0].strip())
        for page in PAGES
        for _, source in blocks(page, "bash")
        for line in source.replace("\\\n", " ").splitlines()
        if line.startswith("qkvcache ")
    }
)


@pytest.mark.parametrize("page, line", COMMANDS)
def test_commands_exist(page, line):
    command, words = command_of(line.split()[1:])
    if command.name in ("eval", "serve"):  # they pass options on
        return
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert {word for word in words if word.startswith("--")} <= known


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target for page in PAGES for _, source in blocks(page, "bash") for target in re.findall(r"^make ([\w-]+)", source, re.MULTILINE)
    }
    assert named and named <= targets


def test_numbers_point_at_rows_that_a_release_has():
    """No commit of the history is named; what cites rows of former code names them by their `what`."""
    rows = (ROOT / "eval/results/past.jsonl").read_text()
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert "git show" not in text, page
        cited = re.split(r"past\.jsonl`, ", text)[1:]
        assert page == "docs/measurements/index.md" or len(cited) == text.count("past.jsonl"), page
        for key in (re.search(r'"what": "[^`]+', part) for part in cited):
            assert key and key[0] in rows, (page, key)
