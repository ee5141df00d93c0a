"""Tasks on a model beside the uncompressed run: prompts, what is right, rows, and what generated programs may do."""

import json

import pytest
import sandbox
import summary
import task_prompts as prompts
import tasks
from harness import read_rows

from qkvcache import demo

PROBLEM = {
    "prompt": "def twice(x):\n",
    "entry_point": "twice",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}


@pytest.fixture(scope="module")
def tokenizer():
    return demo.load()[1]


@pytest.fixture
def writer(tokenizer, monkeypatch):
    prose = demo.text_ids(tokenizer)
    monkeypatch.setattr(prompts.Writer, "code", prose[::-1])
    return prompts.Writer(tokenizer, prose)


@pytest.mark.parametrize(("task", "tokens", "asked"), [("facts", 400, 8), ("variables", 400, 1), ("long", 1400, 1)])
def test_answers_stand_in_a_text_of_exact_length(writer, tokenizer, task, tokens, asked):
    made = getattr(writer, task)(tokens, 2)
    assert made.prompts == getattr(writer, task)(tokens, 2).prompts
    for prompt in made.prompts:
        context = tokenizer.decode(prompt.context)
        assert len(prompt.context) == tokens and len(prompt.questions) == len(prompt.expected) == asked
        assert len({len(question) for question in prompt.questions}) == 1
        assert all(word in context for expected in prompt.expected for word in expected.split())
        assert made.grade(prompt.expected, prompt.expected) == [1.0] * asked
        assert made.grade(["nothing"] * asked, prompt.expected) == [0.0] * asked


def test_a_text_that_is_too_short_is_refused(writer):
    with pytest.raises(ValueError, match="--context 200: what is planted takes .* pass a longer context"):
        writer.long(200, 1)


def test_a_function_is_judged_by_its_tests():
    expected = [json.dumps(PROBLEM)] * 4
    said = ["    return 2 * x\n\nprint(undefined)", "    return x", "    import sys; sys.exit(0)", "    return (\n2 * x\n)\nclass A:"]
    assert prompts.graded_by_running(said[:3], expected[:3]) == [1.0, 0.0, 0.0]
    assert [prompts.completion(text) for text in said[::3]] == ["    return 2 * x\n", "    return ("]


def test_functions_follow_code_and_have_one_length(writer, tokenizer, monkeypatch):
    longer = PROBLEM | {"prompt": "def twice(x):\n    '''Twice the number x, which is given.'''\n"}
    monkeypatch.setattr(prompts, "humaneval", lambda wheels: [PROBLEM, longer])
    after, alone = writer.humaneval(100, 2), writer.humaneval(0, 2)
    assert len({len(prompt.questions[0]) for prompt in after.prompts}) == 1 and len(after.prompts[0].questions[0]) > 100
    for prompt, problem in zip(alone.prompts, (PROBLEM, longer), strict=True):
        assert tokenizer.decode(prompt.questions[0]).strip() == problem["prompt"].strip() and not prompt.context


PROGRAMS = {
    "x = sum(range(10))": True,
    "import json, typing, collections, math": True,
    "raise ValueError": False,
    "raise SystemExit(0)": False,
    "import sys; sys.exit(2)": False,
    "x = [0] * 10**10": False,
    "open('made', 'w')": False,
    "import os; os.remove('anything')": False,
    "import subprocess; subprocess.run(['true'])": False,
    "import socket; socket.socket()": False,
    "import os; os.fork()": False,
}


def test_a_program_is_kept_within_limits(monkeypatch):
    monkeypatch.setattr(sandbox.random, "randrange", lambda *_: 2)  # the status that one of them exits with
    assert dict(zip(PROGRAMS, sandbox.all_end([*PROGRAMS]), strict=True)) == PROGRAMS


def test_a_program_without_end_is_stopped():
    assert not sandbox.ends("while True: pass", seconds=0.5)


def test_lost_and_won_are_of_the_same_problems():
    dense, other = (
        {"right": "110010", "share": 0.5, "answers": [1, 2, 3, 4, 5, 6]},
        {"right": "011000", "share": 2 / 6, "answers": [1, 2, 3, 0, 0, 0]},
    )
    assert tasks.against(other, dense) == (2, 1, 3)
    assert tasks.mcnemar(10, 3) == pytest.approx(0.0923, abs=1e-4) and tasks.mcnemar(0, 0) == 1
    assert tasks.right(other, dense) == "2 of 6, 33 ± 18 %; 2 / 1, p 1" and tasks.right(dense, dense) == "3 of 6, 50 ± 19 %"


def test_caches_by_format_names_and_options():
    parse = tasks.Way.parse
    assert parse("dynamic").name == "`DynamicCache`"
    assert parse("int8:through=batching").name == "`int8`, continuous batching"
    assert parse("hadaquant_k2v2:residual_length=256").name == "`hadaquant_k2v2`, residual 256"
    assert parse("turboquant_4bit_nc:policy=snapkv:budget=0.5").name == "`turboquant_4bit_nc + snapkv 50%`"
    for wrong in (
        "int9",
        "int8:budget=0.5",
        "int8:through=air",
        "dynamic:through=prefix",
        "int8:policy=h2o:through=batching",
        "int8:residual",
    ):
        with pytest.raises(tasks.argparse.ArgumentTypeError, match=wrong):
            parse(wrong)


def test_rows_and_tables(writer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prompts, "humaneval", lambda wheels: [PROBLEM] * 2)
    monkeypatch.setitem(prompts.ANSWER, "humaneval", 4)
    file = tmp_path / "rows.jsonl"
    caches = ["int8", "int8:policy=kvzip:budget=0.5", "int8:through=prefix"]
    common = ["--model", "demo", "--context", "300", "--limit", "1", "--dtype", "float32", "--out", str(file), "--caches"]
    tasks.main([*common, *caches, "--run-code", "--tasks", "humaneval", "facts", "kl"])
    rows = read_rows(file)
    assert [row.get("failed") for row in rows] == [None] * 10
    by_case = {(row["task"], row["cache"]): row for row in rows}
    facts = {cache: by_case["facts", cache]["right"] for cache in ("dynamic", *caches)}
    assert facts["dynamic"] == facts["int8"] == facts["int8:through=prefix"] == "1" * 8
    assert by_case["kl", "int8"]["kl"] < 0.002 < by_case["kl", caches[1]]["kl"] and by_case["kl", caches[1]]["ratio"] > 2
    assert all(row["right"] == "0" and row["peak_bytes"] == 0 for row in rows if row["task"] == "humaneval")
    capsys.readouterr()
    monkeypatch.setattr(tasks.Bench, "measure", None)  # nothing is measured again
    tasks.main([*common, "int8", "--run-code", "--tasks", "humaneval", "facts", "kl"])
    tasks.main(["--model", "demo", "--out", str(file), "--markdown"])
    said = capsys.readouterr().out
    assert "; 0 / 0, p 1 | 100 % |" in said and "8 of 8" in said and "**Divergence after 300 tokens, " in said and " in float32 on " in said


def test_the_table_of_the_readme(monkeypatch):
    own = summary.rows
    same = {"what": "tasks", "model": summary.REAL, "dtype": "bfloat16", "count": 3, "seconds": 1.0}
    caches = {"dynamic": "110", "int8": "101"}
    rows = [
        same | {"task": task, "tokens": tokens, "cache": cache, "right": right, "share": 2 / 3, "answers": [1, 2, 3]}
        for task, tokens in summary.ASKED.values()
        for cache, right in caches.items()
    ]
    rows += [same | {"task": "kl", "tokens": 8192, "cache": cache, "kl": 0.01, "ratio": 2.0} for cache in caches]
    monkeypatch.setattr(summary, "rows", lambda name: rows if name == "tasks" else own(name))
    dense, int8 = summary.tasks().lines
    assert dense[1:5] == ["2.0x", ".010", "2 of 3, 67 ± 24 %", "2 of 3, 67 ± 24 %"]
    assert int8[:1] + int8[3:4] == ['`QuantizedPerTokenCache(config, dtype="int8")`', "2 of 3, 67 ± 24 %; 1 / 1, p 1"]
    assert int8[5].endswith("x")
    rows.clear()
    assert not summary.tasks().lines


def test_code_is_not_run_unasked(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tasks.main(["--model", "demo", "--tasks", "humaneval", "--out", str(tmp_path / "rows.jsonl")])
    assert "--tasks: humaneval runs code that the model writes: pass --run-code" in capsys.readouterr().err


@pytest.mark.gpu
def test_batching_answers_as_a_cache(tmp_path):
    file = tmp_path / "rows.jsonl"
    tasks.main(["--model", "demo", "--device", "cuda", "--tasks", "facts", "--context", "400", "--limit", "2", "--out", str(file)]
               + ["--caches", "int8:through=batching", "dynamic:through=batching"])  # fmt: skip
    assert {row["right"] for row in read_rows(file)} == {"1" * 16}
