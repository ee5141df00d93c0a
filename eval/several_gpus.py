"""The harness on one GPU, on two that share every layer (tensor parallelism), that share the layers (`device_map`), and that share the
requests (`accelerate launch`): the same scores.

    python eval/several_gpus.py [--processes 2] [--device cuda] [--model MODEL]     rows in eval/results/several_gpus.jsonl

Each way runs in processes of its own, as `python`, `torchrun` or `accelerate launch` starts them; what it scores is written down and
compared: log-probabilities of choices, of a text, and answers of generated tasks, through a dense cache and through compressed ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import Table, at_least, device_name, parser_of, replace_rows, run_or_show

from qkvcache import demo

WAYS = {"one": {}, "tensor parallel": {"tp_plan": "auto"}, "device_map": {"parallelize": True}, "data parallel": {}}
LAUNCHED = {  # each ends with the option that takes the number of processes
    "tensor parallel": ["torch.distributed.run", "--standalone", "--nproc-per-node"],
    "data parallel": ["accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--mixed_precision=no", "--num_processes"],
}
CACHES = (
    {"cache": "dynamic"},
    {"cache": "identity"},
    {"cache": "fp8"},
    {"cache": "turboquant_4bit_nc"},
    {"cache": "turboquant_4bit_nc", "policy": "h2o", "budget": 400},
)


def gathered(x: object, processes: int) -> list:
    """That of each process."""
    found = [x] * processes
    if processes > 1:
        torch.distributed.all_gather_object(found, x)
    return found


def score(way: str, args: argparse.Namespace) -> list[dict]:
    """What lm-eval would ask: four choices after each of some contexts, texts, and code words to recall."""
    from lm_eval.api.instance import Instance

    from qkvcache.evaluation.long_context import cases
    from qkvcache.evaluation.model import CacheLM

    rows = []
    for options in CACHES:
        begin = time.perf_counter()
        options = options | {"batch_size": 4, "dtype": args.dtype, "device": args.device}
        if way == "device_map" and args.device.startswith("cuda"):  # a small model would fit on the first
            options |= {"max_memory_per_gpu": args.memory}
        lm = CacheLM(args.model, **options, **WAYS[way])
        made = cases("needle", lm.tokenizer, args.context, args.cases)
        words = [case.answers[0] for case in made]

        def ask(kind: str, arguments: list[tuple], lm=lm) -> list:
            asked = [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]
            parts = gathered(getattr(lm, kind)(asked[lm.rank :: lm.world_size], disable_tqdm=True), lm.world_size)
            return [parts[i % lm.world_size][i // lm.world_size] for i in range(len(asked))]

        choices = ask("loglikelihood", [(case.prompt, f" {word}") for case in made for word in words[:4]])
        texts = ask("loglikelihood_rolling", [(case.context[:1500],) for case in made[:3]])
        answers = ask("generate_until", [(case.prompt, {"until": ["."], "max_gen_toks": 8}) for case in made])
        right = sum(word in answer for word, answer in zip(words, answers, strict=True)) / len(words)
        devices = gathered({str(parameter.device) for parameter in lm.model.parameters()}, lm.world_size)
        info = lm.get_model_info()
        rows.append(
            {
                "cache": lm.spec.name, "choices": [log_prob for log_prob, _ in choices], "texts": texts, "answers": answers,
                "recall": right, "devices": sorted(set().union(*devices)),
                "ranks": info["kv_tensor_parallel"], "bytes_per_token": info["kv_bytes_per_token"], "seconds": time.perf_counter() - begin,
            }
        )  # fmt: skip
        del lm
    return rows


def start(way: str, args: argparse.Namespace, out: Path) -> list[dict]:
    """The rows of one way, from processes of its own."""
    launch = ["-m", *LAUNCHED[way], str(args.processes)] if way in LAUNCHED else []
    options = [f"--{name}={getattr(args, name)}" for name in ("model", "device", "dtype", "context", "cases", "memory")]
    seen = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]} if way == "one" else {}
    subprocess.run([sys.executable, *launch, __file__, *options, "--way", way, "--out", str(out)], check=True, env=os.environ | seen)
    return json.loads(out.read_text())


def compare(found: dict[str, list[dict]], args: argparse.Namespace) -> list[dict]:
    rows = []
    for way, of_way in found.items():
        for one, row in zip(found["one"], of_way, strict=True):
            off = {
                name: max(abs(a - b) / max(abs(b), 1) for a, b in zip(row[name], one[name], strict=True)) for name in ("choices", "texts")
            }
            same = sum(a == b for a, b in zip(row["answers"], one["answers"], strict=True)) / len(one["answers"])
            kept = {name: row[name] for name in ("cache", "recall", "devices", "bytes_per_token", "ranks", "seconds")}
            rows.append(
                {"way": way} | kept
                | {"off_choices": off["choices"], "off_texts": off["texts"], "same_answers": same, "model": Path(args.model).name}
                | {"device": device_name(args.device), "dtype": args.dtype}
            )  # fmt: skip
    return rows


def tables(rows: list[dict]) -> Iterator[Table]:
    lines = []
    for row in rows:
        off = (f"{row[f'off_{name}']:.1e}" for name in ("choices", "texts"))
        shares = (f"{row[name]:.0%}" for name in ("same_answers", "recall"))
        lines.append(
            [row["way"], row["cache"], *off, *shares, f"{row['bytes_per_token']:,.0f}", str(row["ranks"]), ", ".join(row["devices"])]
        )
    headers = ["way", "cache", "choices", "texts", "answers", "recall", "bytes/token", "ranks", "on"]
    yield Table(headers, lines, "against one device: relative difference of log-probabilities, and how many answers are the same")


def measure(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ways = [way for way in WAYS if args.device.startswith("cuda") or way != "data parallel"]  # lm-eval splits requests on GPUs alone
        found = {way: start(way, args, Path(folder) / f"{way}.json") for way in ways}
    rows = compare(found, args)
    replace_rows(args.out, f"several_{args.device.split(':')[0]}", rows)
    worst = max(max(row["off_choices"], row["off_texts"]) for row in rows if row["cache"] in ("dynamic", "identity"))
    if worst > 1e-4:
        sys.exit(f"exact caches differ by {worst:.1e}")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "several_gpus")
    parser.add_argument("--model", default=str(demo.MODEL_PATH), help="with as many KV heads as processes, or a multiple")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", help="in 16 bit, sums in another order differ visibly")
    parser.add_argument("--processes", type=at_least(1), default=2)
    parser.add_argument("--context", type=at_least(200), default=1500, help="tokens; the task has no room in fewer than 200")
    parser.add_argument("--cases", type=at_least(1), default=8)
    parser.add_argument("--memory", default="15MiB", help="of each GPU under device_map; the embedded model has 19 MiB of weights in fp32")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if not args.way:
        return run_or_show(parser, args, measure, "several", tables, gpu=False)
    rows = score(args.way, args)
    if int(os.environ.get("RANK", "0")) == 0:
        args.out.write_text(json.dumps(rows))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
