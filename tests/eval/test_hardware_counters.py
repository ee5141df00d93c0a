"""Hardware counters: what ncu is asked, what it runs, and what its page of raw numbers is read as."""

import contextlib
import os
import sys

import bench_peers
import hardware_counters as counters
import pytest
from harness import read_rows

STALLED = [name.join(counters.STALLS) for name in ("wait", "selected", "long_scoreboard")]
HEADERS = ["ID", "Kernel Name", *counters.COUNTERS.values(), *STALLED, "smsp__average_warps_issue_stalled_wait_not_issued.ratio"]
UNITS = ["", "", "ms", *[""] * (len(HEADERS) - 3)]
LAUNCH = ["attend_kernel", "1.25", "64.5", "75", "61", "57", "15", "25", "168", "1,234,567", "1.5", "0.5", "2", "9"]

NCU = """#!{python}
import os, sys
if "-i" in sys.argv:
    if not os.path.exists({page!r}):
        sys.exit(1)
    print("==PROF== a note")
    print(open({page!r}).read())
else:
    print(*sys.argv[1:], sep="\\n", file=open({page!r} + ".asked", "w"))
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A stand-in for ncu, which keeps what it was asked and prints the page."""
    page, program = tmp_path / "page.csv", tmp_path / "ncu"
    program.write_text(NCU.format(python=sys.executable, page=str(page)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(counters.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(counters, "device_name", lambda device: "a GPU")
    return page


def quoted(*lines):
    return "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)


def test_counters_of_each_case_have_a_row_and_a_line(page, tmp_path, capsys):
    cases, out = ["decode:int8:8x32768", "latents:int8:1x32768:16heads"], ["--out", str(tmp_path / "rows.jsonl")]
    page.write_text(quoted(HEADERS, UNITS, ["0", *LAUNCH], ["1", "attend_latents_kernel", *LAUNCH[1:]]))
    counters.main(["--cases", *cases, *out])
    asked = (tmp_path / "page.csv.asked").read_text().split()
    assert asked[-3:] == ["--cases", *cases] and "--call" in asked and "off" in asked
    first, second = read_rows(tmp_path / "rows.jsonl")
    assert (first["us"], first["instructions"], first["kernel"], first["what"]) == (1250, 1234567, "attend_kernel", "decode")
    assert first["stalls_percent"] == {"long_scoreboard": 50, "wait": 37.5, "selected": 12.5}
    assert (second["case"], second["name"], second["kernel"]) == ("1x32768, 16 heads", "int8", "attend_latents_kernel")
    capsys.readouterr()
    counters.main(["--markdown", *out])
    said = "| 1,250 | 64 % | 75 % | 61 % | 57 % | 15 % | 4.0 | `long_scoreboard` 50 %, `wait` 38 % |"
    assert said in capsys.readouterr().out


def test_kernels_that_are_missing_give_no_rows(page, tmp_path):
    page.write_text(quoted(HEADERS, UNITS, ["0", *LAUNCH]))
    with pytest.raises(SystemExit, match="1 kernels were profiled in 2 cases"):
        counters.main(["--cases", "decode:int8:8x32768", "new:int8:1x32768+64", "--out", str(tmp_path / "rows.jsonl")])
    assert not read_rows(tmp_path / "rows.jsonl")


def test_a_failure_of_ncu_has_a_message(page, tmp_path):
    with pytest.raises(SystemExit, match="ncu ended with status 1"):
        counters.main(["--cases", "decode:int8:8x32768", "--out", str(tmp_path / "rows.jsonl")])


def test_without_ncu_it_says_where_it_comes_from(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit):
        counters.main([])
    assert "Nsight Compute" in capsys.readouterr().err


def test_the_third_call_of_each_case_is_profiled(monkeypatch):
    calls, profiled = [], []

    @contextlib.contextmanager
    def profile():
        before = len(calls)
        yield
        profiled.append((before, len(calls)))

    monkeypatch.setattr(counters, "KNOWN", {"a": (bench_peers.TINY["decode"][0], "int8")})
    monkeypatch.setattr(counters, "attention", lambda case, name, tiny: (lambda: calls.append((str(case), name)), 0))
    monkeypatch.setattr(counters.torch.cuda.profiler, "profile", profile)
    counters.call(["a", "a"])
    assert profiled == [(2, 3), (5, 6)] and set(calls) == {("2x300", "int8")}


def test_every_default_is_a_case():
    assert set(counters.DEFAULT) <= counters.KNOWN.keys()
