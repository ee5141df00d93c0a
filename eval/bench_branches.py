"""Attention of rows that share their first tokens, as branches of a prompt do, on one GPU.

    python eval/bench_branches.py [--quick]  measure, print a table, write eval/results/branches.jsonl
    python eval/bench_branches.py --samples        samples of one prompt in continuous batching, in rows of the same file
    python eval/bench_branches.py --markdown       the table of the documentation, from the rows: needs no GPU

A decode step of one layer of the 8B shape (32/8 heads, head_dim 128), GPU time by replays of a CUDA graph over payloads in turn.
Each row has 512 quantized tokens of its own after the shared ones, and 4 + 96 exact tokens. Ratios: time of rows that have all their tokens
to themselves / time of rows that share; torch's best bf16 attention over rows of their own / the same. Floor: the bytes of rows of their
own / the bytes of the shared tokens once and of each row's own.

With `--samples`, the median time between two tokens of samples of one prompt of 32,000 tokens, on a Llama of the 8B shape with random
weights: where attention reads their common pages once for several samples, and where each reads them, before and after that.
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace
from collections.abc import Iterator
from statistics import median

import torch
from bench_batching import answer, running
from bench_kernels import KNOWN, attend_us, bf16, code_bytes, filled, payloads, sdpa_us
from gpu import random_llama, sets_of
from harness import Table, at_least, grouped, note, parser_of, run_or_show
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from qkvcache import continuous_batching
from qkvcache.batching import shares
from qkvcache.kernels import Work
from qkvcache.kernels.attend import plan
from qkvcache.storage import attention_inputs_of

FORMATS = ("turboquant_4bit_nc", "int8")
BRANCHES, SHARED = (2, 4, 8, 16), (2048, 8192, 32768)
OWN, ZONES = 512, (4, 96)
SAMPLES, PROMPT, NEW, PAGE = (8, 16), 32_000, 96, 256
QUERY_HEADS, HEADS, DIM = 32, 8, 128


def branched(name: str, branches: int, shared: int) -> list:
    """Payloads of rows that share tokens."""
    found = []
    for _ in range(sets_of(code_bytes(name, 1, HEADS, shared, DIM))):
        pages = filled(name, 1, HEADS, shared, DIM)
        pages.select([0] * branches)
        pages.append((bf16(branches, HEADS, OWN, DIM), bf16(branches, HEADS, OWN, DIM)))
        first, recent = ((bf16(branches, HEADS, n, DIM), bf16(branches, HEADS, n, DIM)) for n in ZONES)
        inputs = attention_inputs_of(first, pages, recent)
        count, tokens = pages.branches()
        assert (count, tokens) == (branches, shared)
        inputs.paged = inputs.paged.anew(work=Work(None, None, count, tokens))
        found.append(inputs)
    return found


def samples(args: Namespace) -> None:
    model, least, device = random_llama(num_hidden_layers=args.layers), shares.LEAST_SPARED, torch.cuda.get_device_name()
    for name, count in itertools.product(args.formats, SAMPLES):
        times = []
        for shares.LEAST_SPARED in (2**62, least, 2**62):
            times.append(between_tokens(model, name, count))
        row = {"format": name, "samples": count, "layers": args.layers, "prompt": PROMPT, "apart_ms": (times[0] + times[2]) / 2}
        row |= {"together_ms": times[1], "ratio": row["apart_ms"] / times[1], "device": device}
        note(args.out, "branches: samples", row, "device", "format", "samples", "layers")


def between_tokens(model: PreTrainedModel, name: str, count: int) -> float:
    """Median milliseconds between two tokens of `count` samples of one prompt, of the second time, when graphs are there."""
    config = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=(2 * PROMPT + 4 * count * NEW) // PAGE + 8 * count, max_requests_per_batch=count + 2
    )
    sampled = GenerationConfig(do_sample=True, max_new_tokens=NEW, num_return_sequences=count, eos_token_id=-1)
    with continuous_batching(model, format=name), running(model, sampled, config) as manager:
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            prompt = torch.randint(3, model.config.vocab_size, (PROMPT,), generator=generator).tolist()
            manager.add_request(prompt, record_timestamps=True)
            found = [answer(manager, time.perf_counter() + 100).timestamps[NEW // 3 :] for _ in range(count)]
    return 1e3 * median(end - begin for times in found for begin, end in itertools.pairwise(times))


@torch.no_grad()
def run(args: Namespace) -> None:
    if args.samples:
        return samples(args)
    device = torch.cuda.get_device_name()
    for name, shared, branches in itertools.product(args.formats, SHARED[-1:] if args.quick else SHARED, BRANCHES):
        query, sets = bf16(branches, QUERY_HEADS, 1, DIM), branched(name, branches, shared)
        us, once = attend_us(query, sets), plan.cascades(query, sets[0].paged, None)
        for one in sets:  # whose rows read all their tokens now
            one.paged = one.paged.anew(work=Work())
        pages_us = attend_us(query, sets)
        del sets
        own_us = attend_us(query, payloads(name, branches, HEADS, shared + OWN, DIM, ZONES))
        base, backend = sdpa_us(branches, QUERY_HEADS, HEADS, shared + OWN, DIM)
        exact = branches * HEADS * sum(ZONES) * DIM * 4
        sizes = [code_bytes(name, rows, HEADS, tokens, DIM) for rows, tokens in ((1, shared), (branches, OWN), (branches, shared + OWN))]
        row = {
            "format": name, "branches": branches, "shared": shared, "own": OWN, "us": round(us, 2), "same_pages_us": round(pages_us, 2),
            "own_us": round(own_us, 2), "sdpa_us": round(base, 1), "sdpa": backend, "ratio": round(own_us / us, 3),
            "of_sdpa": round(base / us, 3), "floor": round((sizes[2] + exact) / (sizes[0] + sizes[1] + exact), 2), "read_once": once,
            "device": device,
        }  # fmt: skip
        note(args.out, "branches", row, "device", "format", "branches", "shared")


def tables(rows: list[dict]) -> Iterator[Table]:
    batches, rows = ([row for row in rows if (row["what"] == "branches") == layer] for layer in (False, True))
    for (device,), found in grouped(rows, "device"):
        mine = {(row["format"], row["branches"], row["shared"]): row for row in found}
        lines = [
            [
                f"`{name}`", str(branches), f"{shared:,}", f"{row['us']:,.0f}{'' if row['read_once'] else '*'}",
                f"{row['ratio']:.2f}x", f"{row['of_sdpa']:.1f}x", f"{row['floor']:.1f}x",
            ]
            for (name, branches, shared), row in sorted(mine.items(), key=lambda item: (item[0][0] != "turboquant_4bit_nc", *item[0]))
        ]  # fmt: skip
        heads = ["us", "than rows of their own", "than SDPA in bf16", "what the bytes allow"]
        yield Table(["format", "rows", "shared tokens", *heads], lines, f"{device}, one layer; times as fast")
    for (device, layers), found in grouped(batches, "device", "layers"):
        lines = [
            [f"`{row['format']}`", str(row["samples"]), *(f"{row[name]:.2f}" for name in ("apart_ms", "together_ms", "ratio"))]
            for row in found
        ]
        title = f"{device}, {layers} layers: milliseconds a token of samples of one prompt of {PROMPT:,} tokens in continuous batching"
        yield Table(["format", "samples", "each reads the prompt", "once for several", "times as fast"], lines, title)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "branches")
    parser.add_argument("--formats", nargs="+", choices=list(KNOWN), default=list(FORMATS), metavar="A,B")
    parser.add_argument("--quick", action="store_true", help="32,768 shared tokens alone")
    parser.add_argument("--samples", action="store_true", help="samples of one prompt in continuous batching")
    parser.add_argument("--layers", type=at_least(1), default=32, help="of the model, with --samples")
    run_or_show(parser, parser.parse_args(arguments), run, "branches", tables)


if __name__ == "__main__":
    main()
