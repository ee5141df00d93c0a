"""Progress of long work: a bar on a terminal, elsewhere a line at intervals, nothing before the first."""

import time

import pytest
import torch

from qkvcache import progress


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.05)


def test_a_line_at_intervals_without_a_terminal(capsys):
    for _ in progress.track([1, 2], "reading", 2):
        time.sleep(0.08)
    with progress.progress("loading"):
        time.sleep(0.08)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert not out and lines[0].startswith("reading: 0%, 0 s") and any(line.startswith("reading: 50%, ") for line in lines)
    assert lines[-1].startswith("loading: 0 s")
    time.sleep(0.08)
    assert not capsys.readouterr().err  # it ends with its context


def test_short_work_and_hidden_work_print_nothing(capsys):
    assert list(progress.track("ab", "reading", 2)) == ["a", "b"]
    for _ in progress.track([1, 2], "reading", 2, shown=False):
        time.sleep(0.08)
    assert capsys.readouterr() == ("", "")


def test_reading_shows_the_share_of_layers(capsys):
    class Slow(torch.nn.Identity):
        def forward(self, x):
            time.sleep(0.08)
            return x

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Slow() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()
    with progress.reading(model, "reading twice", 2):
        model(model(torch.zeros(1)))
    assert "reading twice: 50%, " in capsys.readouterr().err
    assert not any(layer._forward_hooks for layer in model.layers)


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    with progress.progress("measuring") as steps:
        steps(1, 4)
    assert "measuring" in (shown := capsys.readouterr().err) and "25%" in shown and " of 4" not in shown
