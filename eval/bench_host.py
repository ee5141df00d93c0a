"""Host time of a step of one token, a layer of a growing cache: `update` and the attention after it, without launches and the GPU.

    python eval/bench_host.py [--formats int8 turboquant_4bit_nc] [--steps 200] [--rounds 20]

Kernels of Triton do nothing here, so that no GPU is needed: what is left is what Python and torch take to store a token, to prepare the
arguments of launches and to allocate outputs. Tokens leave the residual and are quantized as often as in a text. Printed, and written to
eval/results/host.jsonl: microseconds of the fastest of `--rounds`, both together and `update` alone.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter is chosen when kernels are defined

import torch
from rich.console import Console
from rich.table import Table
from rows import replace_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from triton.runtime.jit import JITFunction

from qkvcache import CompressedCache

RESULTS = Path(__file__).parent / "results" / "host.jsonl"
SHAPE = LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=64
)
"""The attention of Llama 3.1 8B; nothing else of the model is computed while it is timed."""


@torch.inference_mode()
def measure(format: str, steps: int, rounds: int) -> dict[str, float]:
    """Microseconds of a step, with a prompt of 1,024 tokens before."""
    model = AutoModelForCausalLM.from_config(SHAPE, dtype=torch.bfloat16).eval()
    cache = CompressedCache(model.config, format=format)
    model(torch.zeros(1, 1024, dtype=torch.long), past_key_values=cache)
    module, attend = model.model.layers[0].self_attn, ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
    query, key, value = (torch.zeros(1, heads, 1, SHAPE.head_dim, dtype=torch.bfloat16) for heads in (32, 8, 8))

    def update() -> tuple[Tensor, Tensor]:
        return cache.update(key, value, 0)

    def step() -> None:
        attend(module, query, *update(), None, dropout=0.0, scaling=module.scaling)

    return {"step_us": fastest(step, steps, rounds), "update_us": fastest(update, steps, rounds)}


def fastest(fn: Callable[[], object], steps: int, rounds: int) -> float:
    """Microseconds of a call, the mean of `steps` in the fastest of `rounds`."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(steps):
            fn()
        found.append((time.perf_counter() - begin) / steps * 1e6)
    return round(min(found), 1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["int8", "turboquant_4bit_nc"], metavar="FORMAT")
    parser.add_argument("--steps", type=int, default=200, help="of a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    os.environ["QKVCACHE_KERNELS"] = "triton"
    JITFunction.run = lambda *args, **kwargs: None
    torch.set_num_threads(1)
    table = Table("format", "a layer's step, us", "of it, update", title="host time without launches")
    for format in args.formats:
        row = measure(format, args.steps, args.rounds)
        replace_rows(args.out, f"host: {format}", [{"format": format} | row])
        table.add_row(format, *map(str, row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
