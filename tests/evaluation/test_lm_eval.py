"""lm-eval itself, with our model and our tasks, without a network."""

import importlib.metadata
import json
import sys

import lm_eval
import pytest
import torch
from lm_eval.api.registry import get_model
from lm_eval.config import evaluate_config
from lm_eval.tasks import TaskManager

from qkvcache import demo
from qkvcache.evaluation import __main__ as shim
from qkvcache.evaluation.long_context import TASKS, cases
from qkvcache.evaluation.model import CacheLM
from tests.evaluation.asked import TOKENIZER
from tests.processes import Program

SMALL = {"context_tokens": 300, "number": 3, "tokenizer": str(demo.MODEL_PATH)}


def manager(**metadata) -> TaskManager:
    return TaskManager(include_path=str(shim.TASKS), include_defaults=False, metadata=SMALL | metadata)


def test_the_model_is_registered_once_and_beside_their_own():
    shim.register()
    shim.register()
    assert get_model("qkvcache") is CacheLM
    assert get_model("hf").__name__ == "HFLM"


def test_the_next_release_finds_it_by_its_entry_point():
    """In what pyproject.toml says, which an installed package carries."""
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    point = importlib.metadata.EntryPoint("qkvcache", project["entry-points"]["lm_eval.models"]["qkvcache"], "lm_eval.models")
    assert point.load() is CacheLM and point.value == shim.TARGET


def test_generated_tasks_have_their_question_seen_and_unseen():
    names = {f"qkvcache_{name}{unseen}" for name in TASKS for unseen in ("", "_unseen")}
    assert names <= set(manager().all_tasks)
    for name, task in manager().load(sorted(names))["tasks"].items():
        doc = task.test_docs()[0]
        case = cases(name.removeprefix("qkvcache_").removesuffix("_unseen"), TOKENIZER, SMALL["context_tokens"], SMALL["number"])[0]
        assert doc == {"input": case.prompt, "outputs": list(case.answers)}
        marker = task.config.generation_kwargs.get("compress_before")
        if name.endswith("_unseen"):
            assert case.question.strip().startswith(marker) and case.prompt.rfind(marker) >= len(case.context)
        else:
            assert marker is None


def evaluate(tasks: list[str], tasks_of: TaskManager | None = None, **model_args) -> dict:
    shim.register()
    arguments = {"pretrained": str(demo.MODEL_PATH), "dtype": "float32"} | model_args
    return lm_eval.simple_evaluate(
        model="qkvcache",
        model_args=arguments,
        tasks=tasks,
        task_manager=tasks_of or manager(),
        device="cpu",
        batch_size=3,
        bootstrap_iters=0,
    )


def test_a_run_recalls_what_the_cache_keeps():
    tasks = ["qkvcache_needle", "qkvcache_needle_unseen"]
    kept = evaluate(tasks, cache="turboquant_4bit_nc")
    gone = evaluate(tasks, cache="fp8", policy="sliding_window", budget=70)
    for task in tasks:
        assert kept["results"][task]["recall,none"] == 1 > gone["results"][task]["recall,none"]
    named = {"kv_cache": "fp8", "kv_policy": "sliding_window", "kv_budget": 70, "kv_scoring": "cached"}
    assert named.items() <= gone["config"].items()
    assert gone["config"]["kv_ratio"] > kept["config"]["kv_ratio"] > 2


def test_rows_of_a_json_file(tmp_path):
    made = cases("needle", TOKENIZER, 300, 2)
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"input": case.prompt, "outputs": list(case.answers)}) + "\n" for case in made))
    found = evaluate(["qkvcache_local_json"], manager(path=str(file)), cache="int8")
    assert found["results"]["qkvcache_local_json"]["recall,none"] == 1
    file.write_text('{"question": "?"}\n')
    with pytest.raises(ValueError, match="no input and no outputs"):
        manager(path=str(file)).load(["qkvcache_local_json"])
    with pytest.raises(ValueError, match="pass the file"):
        manager().load(["qkvcache_local_json"])


@pytest.mark.parametrize("outputs", ["zebra", [], None, 3, [3], [""], [["zebra"]], ["zebra", None]])
@pytest.mark.parametrize("row", [0, 1])
def test_outputs_that_are_no_list_of_texts_are_refused(tmp_path, outputs, row):
    rows = [["right"], ["right"]]
    rows[row] = outputs
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"input": "The code word of Anna is", "outputs": one}) + "\n" for one in rows))
    with pytest.raises(ValueError, match=f"row {row} has outputs=.*expected a list"):
        manager(path=str(file)).load(["qkvcache_local_json"])


@pytest.mark.parametrize("value", ["x", 300.7, None, True, float("inf")])
@pytest.mark.parametrize("name", ["context_tokens", "number", "seed"])
def test_metadata_that_is_no_whole_number_is_refused(name, value):
    with pytest.raises(ValueError, match=f"--metadata has {name}={value!r}: expected a whole number"):
        manager(**{name: value}).load(["qkvcache_needle"])


def test_the_command_writes_a_result_file(tmp_path, monkeypatch, capsys):
    class Few(TaskManager):
        def __init__(self, *args, **options):
            super().__init__(*args, include_defaults=False, **options)  # they are 10,000 files

    monkeypatch.setattr("lm_eval.tasks.TaskManager", Few)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # lm-eval's default device is cuda:0 all the same
    assert evaluate_config  # which imports the patched name when it runs
    arguments = f"run --model qkvcache --model_args pretrained={demo.MODEL_PATH},cache=nvfp4,dtype=float32,residual_length=8"
    arguments += f" --tasks qkvcache_needle_unseen --batch_size 3 --output_path {tmp_path}"
    shim.main([*arguments.split(), "--metadata", json.dumps({"context_tokens": 300, "number": 3})])
    (file,) = tmp_path.rglob("results_*.json")
    found = json.loads(file.read_text())
    assert found["results"]["qkvcache_needle_unseen"]["recall,none"] == 1
    assert found["config"]["kv_cache"] == "nvfp4" and found["config"]["kv_residual_length"] == 8
    assert found["config"]["kv_bytes_per_token"] * found["config"]["kv_ratio"] == pytest.approx(5 * 2 * 2 * 128 * 4)
    assert "qkvcache_needle_unseen" in capsys.readouterr().out


@pytest.mark.slow
def test_the_module_is_a_command():
    program = Program("qkvcache.evaluation", ["ls", "tasks", "--include_path", shim.TASKS])
    assert "qkvcache_needle_unseen" in program.result()
