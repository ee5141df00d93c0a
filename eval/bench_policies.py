"""What policies cost: a prompt against one without a policy, and a decode step against one of as many tokens, on one GPU.

    python eval/bench_policies.py                       some two minutes on an H100: 8 layers of the shape of Llama-3.1-8B, a prompt of 32k
    python eval/bench_policies.py --tiny                two tiny layers, on any device
    python eval/bench_policies.py --markdown            the table of the documentation, from the rows

A row for each policy, `prompt_ms` against `none_prompt_ms`, a prompt without a policy, read
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
import sys
from collections.abc import Callable, Iterator

import torch
from gpu import device, let_go, milliseconds, random_llama
from harness import Table, device_name, in_time, outcome, parser_of, replace_rows, run_or_show

from qkvcache import CompressedCache, policies
from qkvcache.policies.budget import MOST_INTERVAL

ROWS = [
    *(name for name, kind in policies.REGISTRY.items() if not issubclass(kind, policies.SinkWindow)),
    "snapkv_adakv",
    "snapkv_heads",
]
"""Policies by the name of their row."""


def policy_of(row: str, budget: int, heads: int) -> policies.Policy:
    if row == "snapkv_adakv":
        return policies.AdaKV(policies.SnapKV(budget=budget, recent=min(64, budget // 4)))
    if row == "snapkv_heads":  # a third of the heads retains most, as of a real model
        parts = tuple(1.0 if head % 3 == 0 else 0.25 for head in range(heads))
        return policies.SnapKV(budget=policies.Budget(budget, heads=parts), recent=min(64, budget // 4))
    return policies.named(row, budget=budget, recent=min(64, budget // 4))


def in_turn(calls: list[Callable[[], object]], repeats: int = 3) -> list[float]:
    """Median milliseconds of each call by the clock. They are called in turn, so that the clocks of a GPU that warms up are the same for
    all; the first time is not counted."""
    rounds = [[milliseconds(call) for call in calls] for _ in range(repeats + 1)]
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


def kernels(call: Callable[[], object]) -> tuple[float, int]:
    """Time of all kernels of a call and their number; the second call counts. Without a GPU, time by the clock and 0."""
    call()
    if not torch.cuda.is_available():
        return milliseconds(call), 0
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in found) / 1000, len(found)


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.model = args, random_llama(args.tiny, num_hidden_layers=args.layers, vocab_size=1000)
        self.config = self.model.config
        self.ids = torch.randint(1, 1000, (1, args.context), device=self.model.device)

    def attention(self) -> float:
        """Causal attention alone over the prompt, of all layers."""
        shape = 1, self.config.num_attention_heads, self.args.context, self.config.head_dim
        query, key, value = (torch.randn(shape, device=self.model.device, dtype=self.model.dtype) for _ in range(3))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return in_turn([lambda: sdpa(query, key, value, is_causal=True)])[0] * self.args.layers

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
        return in_turn([lambda: self.read(None, self.args.context), lambda: self.read(policy, self.args.context)])

    def step(self, policy: policies.Policy | None, tokens: int) -> tuple[float, float]:
        """Time and kernels: the mean of as many steps as an interval of the policy has, so that what it does now and then is counted."""
        cache, count = self.read(policy, tokens), self.args.steps

        def steps() -> None:
            for i in range(count):
                self.model(self.ids[:, i : i + 1], past_key_values=cache)

        time, number = kernels(steps)
        return time / count, number / count

    def row(self, name: str, attention: float, none_step: float) -> dict:
        policy = policy_of(name, self.args.budget, self.config.num_key_value_heads)
        none, prompt = self.prompts(policy)
        step, number = self.step(policy, self.args.context)
        return {
            "none_prompt_ms": round(none, 3), "prompt_ms": round(prompt, 3), "prefills": round(prompt / none, 3),
            "added_per_attention": round((prompt - none) / attention, 3), "step_ms": round(step, 4),
            "step_ratio": round(step / none_step, 3), "step_kernels": round(number / self.args.layers, 1),
        }  # fmt: skip


@torch.inference_mode()
def measure(args: argparse.Namespace) -> None:
    bench = Bench(args)
    attention, (none_step, none_kernels) = bench.attention(), bench.step(None, args.budget)
    same = {"context": args.context, "budget": args.budget, "layers": args.layers, "format": args.format}
    same |= {"shape": "tiny" if args.tiny else "8b", "machine": device_name(device()), "attention_ms": round(attention, 3)}
    same |= {"step_time": "kernels" if torch.cuda.is_available() else "clock", "none_step_ms": round(none_step, 4)}
    same |= {"none_step_kernels": round(none_kernels / args.layers, 1)}
    for name in in_time(args.policies, args.minutes):
        row = {"policy": name} | outcome(lambda name=name: bench.row(name, attention, none_step))
        print(json.dumps(row), file=sys.stderr, flush=True)
        replace_rows(args.out, "policies_speed", [same | row], "policy", "machine", "shape", "budget")
        let_go()


def tables(rows: list[dict]) -> Iterator[Table]:
    """The newest row of each policy, a table for each machine."""
    rows = [row for row in rows if "step_ms" in row]
    shape = "8b" if any(row["shape"] == "8b" for row in rows) else "tiny"
    for machine in sorted({row["machine"] for row in rows}):
        newest = {row["policy"]: row for row in rows if (row["machine"], row["shape"]) == (machine, shape)}
        first = next(iter(newest.values()))
        unit = "kernels, ms" if all(row.get("step_time") == "kernels" for row in newest.values()) else "ms"
        lines = [["none", f"{first['none_prompt_ms']:.0f}", "", "1.00", f"{first['none_step_ms']:.1f}", "1.00"]]
        for policy, row in sorted(newest.items(), key=lambda item: item[1]["prompt_ms"] / item[1]["none_prompt_ms"]):
            added = "" if policy == "kvzip" else f"{row['added_per_attention']:.0%}"
            step = [f"{row['step_ms']:.1f}", f"{row['step_ratio']:.2f}"]
            lines.append([policy, f"{row['prompt_ms']:.0f}", added, f"{row['prefills']:.2f}", *step])
        headers = ["policy", "prompt, ms", "added, of flash attention's time", "prefills", f"step, {unit}", "of a step without"]
        title = f"{machine}, {first['layers']} layers, a prompt of {first['context']:,} tokens, a budget of {first['budget']:,}:"
        yield Table(headers, lines, title)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "policies_speed", minutes=5)
    parser.add_argument("--context", type=int, help="tokens of the prompt; 32768, or with --tiny 512")
    parser.add_argument("--budget", type=int, help="tokens that a layer keeps; a quarter of the prompt by default")
    parser.add_argument("--layers", type=int, help="8, or with --tiny 2")
    parser.add_argument("--steps", type=int, default=MOST_INTERVAL, help="decode steps of a measurement: the longest interval of a policy")
    parser.add_argument("--format", default="identity", help="of all caches")
    parser.add_argument("--policies", nargs="*", choices=ROWS, default=ROWS, metavar="POLICY", help=" ".join(ROWS))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    args.context = args.context or (512 if args.tiny else 32768)
    args.budget = args.budget or args.context // 4
    args.layers = args.layers or (2 if args.tiny else 8)
    run_or_show(parser, args, measure, "policies_speed", tables)


if __name__ == "__main__":
    main()
