"""The study of quality, made small: rows, the front of what is smallest and closest, tables and pictures."""

import error_bars as bars
import pytest
import quality
import quality_pictures as pictures
from harness import read_rows

from qkvcache import demo, policies
from qkvcache.formats import REGISTRY


@pytest.mark.slow
def test_rows_tables_and_pictures(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    small = "--context 300 --passages 2 --read-on 4 --cases 2 --formats int8 turboquant_3bit_nc --policies keydiff --budgets 0.3"
    quality.main([*small.split(), "--facts-in", "200", "--out", str(file)])
    rows = read_rows(file)
    names = ["DynamicCache", *["int8"] * 2, *["turboquant_3bit_nc"] * 2]
    names += ["turboquant_4bit_nc + keydiff 30%"]
    assert [pictures.name_of(row) for row in rows] == names
    dense, int8, alone, *_ = rows
    assert dense["kl"] == pytest.approx(0, abs=1e-6) and dense["ratio"] == 1 and dense["recall_unseen"] == 1
    assert int8["ratio"] < alone["ratio"] and int8["kl"] < 0.01 and rows[-1]["ratio"] > 3
    assert int8["recall"] == dense["recall"] == {"200": [2, 2]} and len(int8["kls"]) == 2
    assert all(
        row["dtype"] == "torch.float32" and row["bytes_per_token"] <= 1.2 * dense["bytes_per_token"] == 6144 for row in rows
    )  # 16 bit
    assert all(row["text"] == "pydoc" and row["device"] == "cpu" and row["model"] == "demo" for row in rows)
    capsys.readouterr()
    quality.main(["--markdown", "--out", str(file)])
    said = capsys.readouterr().out
    assert "| turboquant_3bit_nc" in said and "recall in 200: unseen / seen" in said
    quality.main(["--plot", "--out", str(file)])
    assert (tmp_path / "rows_demo.png").stat().st_size > 10_000
    with pytest.raises(SystemExit):
        quality.main(["--show", "--model", "another", "--out", str(file)])


def test_nothing_is_measured_without_time_and_older_rows_stay(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"what": "quality_demo"}\n')
    with pytest.raises(SystemExit, match="over before"):
        small = "--context 200 --passages 1 --read-on 2 --cases 1 --minutes 0 --policies h2o"
        quality.main([*small.split(), "--out", str(file)])
    assert read_rows(file) == [{"what": "quality_demo"}]


@pytest.mark.parametrize(
    ("arguments", "formats", "evicting"),
    [
        ("--formats int8,fp8", ["int8", "fp8"], []),
        ("--policies keydiff", [], ["keydiff"]),
        ("--formats int8 --policies keydiff", ["int8"], ["keydiff"]),
        ("--context 600", None, None),
        ("--formats", [], None),
        ("--policies", None, []),
    ],
)
def test_what_was_asked_for_is_measured(arguments, formats, evicting, monkeypatch):
    seen = []

    def measure(parser, args, *others):
        assert quality._refused(args) is None  # every budget is large enough
        seen.extend(row for row, _ in quality.caches(demo.load()[0].config, args))
        raise SystemExit

    monkeypatch.setattr(quality, "stored_or_measured", measure)
    with pytest.raises(SystemExit):
        quality.main(arguments.split())
    plain, evicted = (
        {row[what] for row in seen if bool(row["policy"]) is kind} - {None} for what, kind in (("format", False), ("policy", True))
    )
    assert plain == set(REGISTRY if formats is None else formats)
    assert evicted == set(policies.REGISTRY if evicting is None else evicting)


def test_few_facts_are_said_to_decide_nothing():
    assert "16 facts decide nothing: a share of them has an error of up to 12 %" in pictures.too_few(16) and not pictures.too_few(96)


def test_digits_that_the_error_does_not_bear_are_left_out():
    assert bars.with_error(0.0085234, 0.00041) == ".0085 ± .0004"
    assert bars.with_error(0.0085234, 0.00014) == ".00852 ± .00014"
    assert bars.with_error(1.0234, 0.031) == "1.02 ± .03" and bars.with_error(188.2, 21.0) == "188 ± 21"
    assert bars.with_error(-0.0004, 0.002) == "-.000 ± .002" and bars.with_error(1e-9, 1e-9) == "0"
    assert bars.with_error(0.01234, float("nan")) == ".012"
    assert bars.recalled(16, 16) == "100 ± 4 %" and bars.recalled(8, 16) == "50 ± 12 %"
    mean, error = bars.paired([1.0, 2.0, 3.0], [0.5, 1.5, 2.5])
    assert (mean, error) == (0.5, 0)  # though each alone varies
    assert bars.paired([1.0, 3.0], [0.0, 0.0])[1] == pytest.approx(1.0)


REFUSED = [
    ("--read-on 1", "--read-on: 1: must be 2 or more"),
    ("--passages 0", "--passages: 0: must be 1 or more"),
    ("--cases 0", "--cases: 0: must be 1 or more"),
    ("--context -5", "--context: -5: must be 100 or more"),
    ("--budgets 0.2 0", "--budgets: 0: must be a share"),
    ("--budgets 1.5", "--budgets: 1.5: must be a share"),
    ("--budgets nan", "--budgets: nan: must be a share"),
    ("--budgets 0.001 --policies snapkv", "--budgets: 0.001 of 2000 tokens is too little for"),
    ("--text nowhere.txt", "--text: 'nowhere.txt' is no file"),
    ("--model ./nowhere", "--model: './nowhere' does not exist"),
    ("--model /nowhere/at/all", "--model: '/nowhere/at/all' does not exist"),
    ("--device cuda:99", "--device: device='cuda:99' is not on this machine"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED)
def test_what_cannot_be_measured_is_refused_by_its_option(arguments, says, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        quality.main([*arguments.split(), "--out", str(tmp_path / "rows.jsonl")])
    assert stopped.value.code == 2 and f"argument {says}" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_a_name_on_the_hub_is_left_to_the_hub(monkeypatch):
    def load(args):
        raise OSError(f"asked for {args.model}")

    monkeypatch.setattr(quality, "load", load)
    with pytest.raises(OSError, match="asked for owner/name-1.5B"):
        quality.main(["--model", "owner/name-1.5B"])


def test_the_front_is_what_nothing_beats():
    points = [(100, 0.0), (50, 0.2), (50, 0.1), (60, 0.1), (20, 0.5), (30, 0.6)]
    rows = [{"bytes_per_token": size, "kl": kl} for size, kl in points]
    assert pictures.front(rows) == {0, 2, 4}
