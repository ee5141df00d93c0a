"""What policies cost: a prompt against one without a policy, and a decode step against one of as many tokens, on one GPU.

    python eval/bench_policies.py                       some two minutes on an H200: 8 layers of the shape of Llama-3.1-8B, a prompt of 32k
    python eval/bench_policies.py --plan                what that would measure
    python eval/bench_policies.py --quick               two tiny layers, on any device
    python eval/bench_policies.py --markdown            the table of the documentation, from the rows

A row for each policy, appended to `--out` as soon as it is measured: `prompt_ms` against `none_prompt_ms`, a prompt without a policy, read
in turn with it, and what the policy adds as a share of the time of causal attention alone (`added_per_attention`), or for KVzip as prefills
(`prefills`); `step_ms` against `none_step_ms`, the step of a cache of the same format without a policy that holds as many tokens as the
budget. Prompts are timed by the clock. Of steps, on a GPU, the times of the kernels are added (`step_time`): they do not depend on how fast
the host launches them. `step_kernels` counts them, for a step and layer.
Weights are random: no policy's time depends on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rows import read_rows
from transformers import LlamaConfig, LlamaForCausalLM

from qkvcache import CompressedCache, policies
from qkvcache.evaluation.provenance import provenance
from qkvcache.policies.base import MOST_INTERVAL

RESULTS = Path(__file__).parent / "results" / "policies_speed.jsonl"
SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}


ROWS = [
    *(name for name, kind in policies.REGISTRY.items() if not issubclass(kind, policies.SinkWindow)),
    "snapkv_critical",
    "snapkv_adakv",
    "snapkv_heads",
]
"""Policies by the name of their row."""


def policy_of(row: str, budget: int, heads: int) -> policies.Policy:
    if row == "lagkv":
        return policies.LagKV(budget=budget, lag_size=min(128, budget // 4), recent=min(128, budget // 4))
    if row == "snapkv_critical":
        return policies.SnapKV(budget=budget, recent=min(64, budget // 4), first_stage_ratio=0.5)
    if row == "snapkv_adakv":
        return policies.SnapKV(budget=budget, recent=min(64, budget // 4), alpha_safeguard=0.2)
    if row == "snapkv_heads":  # a third of the heads retains most, as of a real model
        parts = tuple(1.0 if head % 3 == 0 else 0.25 for head in range(heads))
        return policies.SnapKV(budget=policies.Budget(budget, heads=parts), recent=min(64, budget // 4))
    return policies.named(row, budget=budget, recent=min(64, budget // 4))


def milliseconds(device: torch.device, calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median time of each call by the clock. They are called in turn, so that the clocks of a GPU that warms up are the same for all; the
    first time is not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, found in zip(calls, times, strict=True):
            _wait(device)
            begin = time.perf_counter()
            call()
            _wait(device)
            found.append((time.perf_counter() - begin) * 1000)
    return [statistics.median(found[1:]) for found in times]


def kernels(device: torch.device, call: Callable[[], object]) -> tuple[float, int]:
    """Time of all kernels of a call and their number; the second call counts. Without a GPU, time by the clock and 0."""
    if device.type != "cuda":
        return milliseconds(device, [call], 1)[0], 0
    call()
    _wait(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        _wait(device)
    found = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in found) / 1000, len(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        shape, dtype = SHAPES["tiny" if args.quick else "8b"], torch.float32 if args.quick else torch.bfloat16
        self.config = LlamaConfig(
            **shape, num_hidden_layers=args.layers, vocab_size=1000, max_position_embeddings=2 * args.context, bos_token_id=None,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model = LlamaForCausalLM(self.config).to(dtype).eval()
        self.ids = torch.randint(1, 1000, (1, args.context), device=self.device)
        self.args, self.dtype, self.shape = args, dtype, shape

    def attention(self) -> float:
        """Causal attention alone over the prompt, of all layers."""
        query, key, value = (
            torch.randn(1, self.shape[f"num_{name}_heads"], self.args.context, self.shape["head_dim"], device=self.device, dtype=self.dtype)
            for name in ("attention", "key_value", "key_value")
        )
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return milliseconds(self.device, [lambda: sdpa(query, key, value, is_causal=True)], 3)[0] * self.args.layers

    def cache(self, policy: policies.Policy | None) -> CompressedCache:
        return CompressedCache(self.config, format=self.args.format, policy=policy)

    def read(self, policy: policies.Policy | None, tokens: int) -> CompressedCache:
        cache = self.cache(policy)
        if policy is not None and policy.second_reading:
            cache.compress(self.model, self.ids[:, :tokens], progress=False)
        else:
            self.model(self.ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
        return cache

    def prompts(self, policy: policies.Policy) -> list[float]:
        """Of a prompt without a policy, and with one."""
        return milliseconds(self.device, [lambda: self.read(None, self.args.context), lambda: self.read(policy, self.args.context)], 3)

    def step(self, policy: policies.Policy | None, tokens: int) -> tuple[float, float]:
        """Time and kernels: the mean of as many steps as an interval of the policy has, so that what it does now and then is counted."""
        cache, count = self.read(policy, tokens), self.args.steps

        def steps() -> None:
            for i in range(count):
                self.model(self.ids[:, i : i + 1], past_key_values=cache)

        time, number = kernels(self.device, steps)
        return time / count, number / count


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, help="tokens of the prompt; 32768, or with --quick 512")
    parser.add_argument("--budget", type=int, help="tokens that a layer keeps; a quarter of the prompt by default")
    parser.add_argument("--layers", type=int, help="8, or with --quick 2")
    parser.add_argument("--steps", type=int, help="decode steps of a measurement, as many as the longest interval of a policy by default")
    parser.add_argument("--format", help="of all caches; None: the model's dtype")
    parser.add_argument("--policies", nargs="*", help="names of rows; all by default")
    parser.add_argument("--seconds", type=float, default=300.0, help="no policy is begun after this time")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plan", action="store_true", help="print what would be measured, and nothing else")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    if args.markdown:
        print(markdown(read_rows(args.out)))
        return
    args.context = args.context or (512 if args.quick else 32768)
    args.budget = args.budget or args.context // 4
    args.layers = args.layers or (2 if args.quick else 8)
    args.steps = args.steps or MOST_INTERVAL
    if unknown := set(args.policies or ()) - set(ROWS):
        parser.error(f"argument --policies: unknown {sorted(unknown)}, expected some of {ROWS}")
    args.policies = args.policies or ROWS
    args.format = args.format or "identity"
    print(
        f"{args.layers} layers, {'tiny' if args.quick else '8b'}, {args.format}: prompts of {args.context:,} tokens, in turn 4 without a "
        f"policy and 4 with each, cut to {args.budget:,}; {2 * args.steps} steps with each; {len(args.policies)} policies "
        f"({', '.join(args.policies)}), none begun after {args.seconds:g} s; rows to {args.out}",
        flush=True,
    )
    if not args.plan:
        measure(args)


@torch.inference_mode()
def measure(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    bench = Bench(args)
    machine = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
    same = {"what": "policies_speed", "context": args.context, "budget": args.budget, "layers": args.layers, "format": args.format}
    same |= {"shape": "tiny" if args.quick else "8b", "machine": machine} | provenance()
    attention, (none_step, none_kernels) = bench.attention(), bench.step(None, args.budget)
    same |= {"attention_ms": round(attention, 3), "step_time": "kernels" if bench.device.type == "cuda" else "clock"}
    same |= {"none_step_ms": round(none_step, 4), "none_step_kernels": round(none_kernels / args.layers, 1)}
    for name in args.policies:
        if time.perf_counter() - begin > args.seconds:
            break
        row: dict = {"policy": name}
        try:
            policy = policy_of(name, args.budget, bench.config.num_key_value_heads)
            none, prompt = bench.prompts(policy)
            row |= {"none_prompt_ms": round(none, 3), "prompt_ms": round(prompt, 3), "prefills": round(prompt / none, 3)}
            row |= {"added_per_attention": round((prompt - none) / attention, 3)}
            step, number = bench.step(policy, args.context)
            row |= {"step_ms": round(step, 4), "step_ratio": round(step / none_step, 3), "step_kernels": round(number / args.layers, 1)}
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
        row["seconds"] = round(time.perf_counter() - begin, 1)
        print(json.dumps(row), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as out:
            out.write(json.dumps(same | row) + "\n")


def markdown(rows: list[dict]) -> str:
    """A table for each machine."""
    rows = [row for row in rows if "step_ms" in row and row["shape"] == "8b"]
    machines = sorted({row["machine"] for row in rows})
    return "\n\n".join(table([row for row in rows if row["machine"] == machine]) for machine in machines)


def table(rows: list[dict]) -> str:
    """The newest row of each policy on one machine."""
    newest = {row["policy"]: row for row in rows}
    first = next(iter(newest.values()))
    unit = "kernels, ms" if all(row.get("step_time") == "kernels" for row in newest.values()) else "ms"
    lines = [
        f"{first['machine']}, {first['layers']} layers, a prompt of {first['context']:,} tokens, a budget of {first['budget']:,}:",
        "",
        f"| policy | prompt, ms | added, of flash attention's time | prefills | step, {unit} | of a step without |",
        "|---|---:|---:|---:|---:|---:|",
        f"| none | {first['none_prompt_ms']:.0f} | | 1.00 | {first['none_step_ms']:.1f} | 1.00 |",
    ]
    for policy in sorted(newest, key=lambda name: newest[name]["prompt_ms"] / newest[name]["none_prompt_ms"]):
        row = newest[policy]
        added = "" if policy == "kvzip" else f"{row['added_per_attention']:.0%}"
        lines.append(
            f"| {policy} | {row['prompt_ms']:.0f} | {added} | {row['prefills']:.2f} | {row['step_ms']:.1f} | {row['step_ratio']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
