"""What policies cost: a prompt against one without a policy, and a decode step against one of as many tokens, on one GPU.

    python eval/bench_policies.py                       under a minute on an H100: 8 layers of the shape of Llama-3.1-8B, a prompt of 32k
    python eval/bench_policies.py --quick               two tiny layers, on any device
    python eval/bench_policies.py --markdown            the table of the documentation, from the rows

A row for each policy, appended to `--out` as soon as it is measured: `prompt_ms` against `none_prompt_ms`, the prompt without a policy,
and what the policy adds as a share of the time of flash attention alone (`added_per_attention`), or for KVzip as prefills
(`prefills`); `step_ms` against `none_step_ms`, the step of a cache of the same format
without a policy that holds as many tokens as the budget.
Weights are random: no policy's time depends on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qkvcache import CompressedCache, policies
from qkvcache.evaluation.rows import provenance, read_rows

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
        return policies.LagKV(budget=budget, lag=min(128, budget // 4), recent=min(128, budget // 4))
    if row == "snapkv_critical":
        return policies.SnapKV(budget=budget, recent=min(64, budget // 4), first_stage_ratio=0.5)
    if row == "snapkv_adakv":
        return policies.SnapKV(budget=budget, recent=min(64, budget // 4), alpha_safeguard=0.2)
    if row == "snapkv_heads":  # a third of the heads retains most, as of a real model
        parts = tuple(1.0 if head % 3 == 0 else 0.25 for head in range(heads))
        return policies.SnapKV(budget=policies.Budget(budget, heads=parts), recent=min(64, budget // 4))
    return policies.named(row, budget=budget, recent=min(64, budget // 4))


def milliseconds(device: torch.device, call: Callable[[], object], repeats: int) -> float:
    """Median time of a call, of which the first is not counted."""
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        begin = time.perf_counter()
        call()
        _wait(device)
        times.append((time.perf_counter() - begin) * 1000)
    return statistics.median(times[1:])


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
        return milliseconds(self.device, lambda: sdpa(query, key, value, is_causal=True), 3) * self.args.layers

    def cache(self, policy: policies.Policy | None) -> CompressedCache:
        return CompressedCache(self.config, format=self.args.format, policy=policy)

    def read(self, policy: policies.Policy | None, tokens: int) -> CompressedCache:
        cache = self.cache(policy)
        if policy is not None and policy.second_reading:
            cache.compress(self.model, self.ids[:, :tokens], progress=False)
        else:
            self.model(self.ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
        return cache

    def prompt(self, policy: policies.Policy | None) -> float:
        return milliseconds(self.device, lambda: self.read(policy, self.args.context), 2)

    def step(self, policy: policies.Policy | None, tokens: int) -> float:
        """The mean of as many steps as an interval of the policy has, so that what it does now and then is counted."""
        cache, count = self.read(policy, tokens), self.args.steps

        def steps() -> None:
            for i in range(count):
                self.model(self.ids[:, i : i + 1], past_key_values=cache)

        return milliseconds(self.device, steps, 2) / count


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, help="tokens of the prompt; 32768, or with --quick 512")
    parser.add_argument("--budget", type=int, help="tokens that a layer keeps; a quarter of the prompt by default")
    parser.add_argument("--layers", type=int, help="8, or with --quick 2")
    parser.add_argument("--steps", type=int, help="decode steps of a measurement, a multiple of 32 by default")
    parser.add_argument("--format", help="of all caches; None: the model's dtype")
    parser.add_argument("--policies", nargs="*", help="names of rows; all by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="no policy is begun after this time")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    if args.markdown:
        print(markdown(read_rows(args.out)))
        return
    args.context = args.context or (512 if args.quick else 32768)
    args.budget = args.budget or args.context // 4
    args.layers = args.layers or (2 if args.quick else 8)
    args.steps = args.steps or 32
    if unknown := set(args.policies or ()) - set(ROWS):
        parser.error(f"argument --policies: unknown {sorted(unknown)}, expected some of {ROWS}")
    args.policies = args.policies or ROWS
    measure(args)


@torch.inference_mode()
def measure(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    bench = Bench(args)
    format = args.format or "identity"
    args.format = format
    machine = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
    same = {"what": "policies_speed", "context": args.context, "budget": args.budget, "layers": args.layers, "format": format}
    same |= {"shape": "tiny" if args.quick else "8b", "machine": machine} | provenance()
    attention, none = bench.attention(), bench.prompt(None)
    none_step = bench.step(None, args.budget)
    same |= {"attention_ms": round(attention, 3), "none_prompt_ms": round(none, 3), "none_step_ms": round(none_step, 3)}
    for name in args.policies:
        if time.perf_counter() - begin > args.seconds:
            break
        row: dict = {"policy": name}
        try:
            policy = policy_of(name, args.budget, bench.config.num_key_value_heads)
            prompt = bench.prompt(policy)
            row |= {"prompt_ms": round(prompt, 3), "prefills": round(prompt / none, 3)}
            row |= {"added_per_attention": round((prompt - none) / attention, 3)}
            step = bench.step(policy, args.context)
            row |= {"step_ms": round(step, 3), "step_ratio": round(step / none_step, 3)}
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
    """The newest row of each policy."""
    newest = {row["policy"]: row for row in rows if "step_ms" in row and row["shape"] == "8b"}
    first = next(iter(newest.values()))
    lines = [
        f"{first['machine']}, {first['layers']} layers, a prompt of {first['context']:,} tokens, a budget of {first['budget']:,}:",
        "",
        "| policy | prompt, ms | added, of flash attention's time | prefills | step, ms | of a step without |",
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
