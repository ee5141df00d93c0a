"""`qkvcache plan` and `qkvcache recommend`: what they print, and what they say to wrong input."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from qkvcache import demo, formats, plan, recommend
from qkvcache.planning.recommend import RECOMMENDED
from qkvcache.policies import H2O
from tests.command import refuses, run

CONFIG = AutoConfig.from_pretrained(demo.MODEL_PATH)
MEMORY = ("--gpu-memory", "1GiB", "--weights-memory", "24MB")


def test_plan_lists_six_rows_of_80_columns_or_every_format():
    rows = json.loads(run("plan", "demo", "--context", "4000", "--format", "all", *MEMORY, "--json").stdout)
    assert len(rows) == len(formats.REGISTRY) and rows[0]["format"] is None
    for row in rows[::5]:
        expected = plan(CONFIG, format=row["format"], context=4000, gpu_memory=2**30, weights_memory=24e6)
        assert row == json.loads(json.dumps(expected.as_json()))
    arguments = ("plan", "demo", "--context", "900000", "--gpu-memory", "800TB", "--weights-memory", "24MB")
    lines = run(*arguments, columns=80).stdout.splitlines()
    assert lines[0] == "Fits: every cache, for one request."
    table = lines[4:10]
    assert [line.split()[0] for line in table] == ["dense", *RECOMMENDED] and "What fits into 1 x 800,000 GB" in lines[10]
    assert [len(line.split()) for line in table] == [7, 6, 6, 6, 6, 6] and max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    tight = run("plan", "demo", "--context", "4000", "--batch", "60", *MEMORY).stdout
    assert tight.startswith("Fits: int8, turboquant_k8v4, ") and "dense" not in tight.splitlines()[0]
    assert run("plan", "demo", "--context", "4000", "--batch", "9000", *MEMORY).stdout.startswith(
        "Does not fit: no cache holds 9,000 requests."
    )


def test_several_gpus_are_one_word():
    several, apart = (run("plan", "demo", "--context", "4000", *words, "--json").stdout for words in (
        ("--gpu-memory", "2x1GB"), ("--gpu-memory", "1GB", "--tensor-parallel", "2"),
    ))  # fmt: skip
    assert several == apart and json.loads(several)[0]["tensor_parallel"] == 2


def test_plan_of_one_format_says_where_the_bytes_are(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    arguments = ("plan", str(tmp_path / "config.json"), "--context", "3000", "--format", "fp8", "--policy", "h2o", "--budget", "0.5")
    text = run(*arguments, "--residual-length", "8").stdout
    assert "bookkeeping" in text and "fp8 + H2O 50%" in text
    (row,) = json.loads(run(*arguments, "--residual-length", "8", "--dtype", "float32", "--json").stdout)
    expected = plan(CONFIG.__class__.from_pretrained(tmp_path), format="fp8", policy=H2O(budget=0.5), context=3000, residual_length=8)
    assert row["codes"] == expected.request.codes and row["exact"] == 2 * expected.request.exact


@pytest.mark.parametrize(("policy", "name"), [("sink_window", "SinkWindow 104"), ("keydiff", "KeyDiff 100")])
def test_policies_by_name(policy, name):
    (row,) = json.loads(
        run("plan", "demo", "--context", "3000", "--format", "int8", "--policy", policy, "--budget", "100", "--json").stdout
    )
    assert row["policy"] == name


def test_recommend():
    found = json.loads(run("recommend", "demo", "--context", "40000", "--workload", "continue", "--json").stdout)
    expected = recommend(CONFIG, context=40_000, workload="continue")
    assert found["call"] == expected.call and found["plan"]["bytes_per_request"] == expected.plan.bytes_per_request
    text = run("recommend", "demo", "--context", "40000", "--chat").stdout
    for part in ("    TurboQuantCache(config)\n", "- Keep one cache over the turns, and share what all chats begin with in a PrefixStore."):
        assert part in text, part
    assert run("recommend", "demo", "--context", "40000", *MEMORY).stdout.startswith("Fits: one request, ")
    assert run("recommend", "demo", "--context", "40000", "--batch", "9999", *MEMORY).stdout.startswith("Does not fit: 9,999 requests, ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan", "demo"), "--context"),
        (("plan", str(Path(__file__).parent), "--context", "10"), "has no config"),
        *[
            ((command, path, "--context", "10"), f"'{path}' does not exist")
            for command in ("plan", "recommend")
            for path in ("no/such/folder", "./no_folder", "no_folder.json")
        ],
        (("plan", "demo", "--context", "10", "--format", "int9"), "int9"),
        (("plan", "demo", "--context", "10", "--format", "int8", "--max-length", "9"), "does not fit in max_length=9"),
        (("plan", "demo", "--context", "10", "--gpu-memory", "much"), "'much': expected a size such as 80GB"),
        (("plan", "demo", "--context", "10", "--gpu-memory", "1KB"), "leaves nothing"),
        (("plan", "demo", "--context", "10", "--gpu-memory", "8x80GB", "--tensor-parallel", "4"), "one number of GPUs"),
        (("plan", "demo", "--context", "10", "--gpu-memory", "8x80XB"), "'80XB': expected a size"),
        (("plan", "demo", "--context", "10", "--tensor-parallel", "3"), "KV heads"),
        (("plan", "demo", "--context", "10", "--dtype", "int8"), "bfloat16, float16, float32"),
        (("plan", "demo", "--context", "10", "--policy", "h20"), "did you mean 'h2o'?"),
        (("plan", "demo", "--context", "10", "--policy", "sink_window", "--budget", "0.5"), "window"),
        (("plan", "demo", "--context", "10", "--budget", "9"), "--policy h2o"),
        (("plan", "demo", "--context", "10", "--policy", "h2o", "--budget", "0"), "budget=0: must be 1 or more tokens"),
        (("plan", "demo", "--context", "10", "--policy", "h2o", "--budget", "-5"), "budget=-5: must be 1 or more tokens"),
        (("plan", "demo", "--context", "10", "--policy", "h2o", "--budget", "1.5"), "1.5: expected a whole number of tokens"),
        (("plan", "demo", "--context", "10", "--policy", "h2o", "--budget", "nan"), "nan: expected a whole number of tokens"),
        (("recommend", "demo", "--context", "10", "--workload", "chat"), "'facts', 'question' or 'continue'; chat=True (--chat)"),
        (("recommend", "demo", "--context", "10", "--streaming", "--chat"), "choose one"),
    ],
)
def test_wrong_input_is_explained(arguments, says):
    refuses(says, *arguments)
