"""Host time of a step of one token, a layer of a growing cache: `update` and the attention after it, without the driver and the GPU.

    python eval/bench_host.py [--formats int8,turboquant_4bit_nc] [--steps 20] [--rounds 300]

Compiled kernels do nothing here, so that no GPU is needed: what is left is what Python and torch take to store a token, to prepare the
arguments of launches, to find the kernels and to allocate outputs. Tokens leave the residual and are quantized as often as in a text. Rows
have microseconds of the fastest of `--rounds`, of both together and of `update` alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter is chosen when kernels are defined

import torch
from gpu import milliseconds, random_llama
from harness import Table, parser_of, replace_rows, run_or_show
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from qkvcache import CompressedCache
from qkvcache.kernels.host import dispatch, launch
from qkvcache.releases import passing

SHAPE = {"num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
"""The attention of Llama 3.1 8B; nothing else of the model is computed while it is timed."""


@torch.inference_mode()
def timed(format: str, steps: int, rounds: int) -> dict[str, float]:
    """Microseconds of a step, with a prompt of 1,024 tokens before."""
    model = random_llama(tiny=True, on="cpu", **SHAPE)
    cache = CompressedCache(model.config, format=format)
    model(torch.zeros(1, 1024, dtype=torch.long), **passing(cache))
    module, attend = model.model.layers[0].self_attn, ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
    query, key, value = (torch.zeros(1, heads, 1, SHAPE["head_dim"], dtype=torch.bfloat16) for heads in (32, 8, 8))

    def update() -> tuple[Tensor, Tensor]:
        return cache.update(key, value, 0)

    def step() -> None:
        attend(module, query, *update(), None, dropout=0.0, scaling=module.scaling)

    return {"step_us": fastest(step, steps, rounds), "update_us": fastest(update, steps, rounds)}


def fastest(call: Callable[[], object], steps: int, rounds: int) -> float:
    """Microseconds of a call, the mean of `steps` in the fastest of `rounds`."""

    def several() -> None:
        for _ in range(steps):
            call()

    return round(min(milliseconds(several) for _ in range(rounds)) / steps * 1e3, 1)


def measure(args: argparse.Namespace) -> None:
    os.environ["QKVCACHE_KERNELS"] = "triton"
    dispatch._INTERPRETED = True  # compiled kernels do nothing on any device
    driver.set_active(SimpleNamespace(get_current_device=lambda: -1, get_current_stream=lambda device: 0))  # -1: that of tensors on a CPU
    launch._callable = lambda kernel: True
    compiled = SimpleNamespace(run=lambda *args: None, function=None, packed_metadata=None)
    JITFunction.run = lambda *args, **kwargs: compiled
    torch.set_num_threads(1)
    for format in args.formats:
        replace_rows(args.out, f"host: {format}", [{"format": format} | timed(format, args.steps, args.rounds)])


def tables(rows: list[dict]) -> Iterator[Table]:
    lines = ([row["format"], str(row["step_us"]), str(row["update_us"])] for row in rows)
    yield Table(["format", "a layer's step, us", "of it, update"], lines, "host time without the driver")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "host")
    parser.add_argument("--formats", nargs="+", default=["int8", "turboquant_4bit_nc"], metavar="A,B")
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=300)
    run_or_show(parser, parser.parse_args(arguments), measure, "host", tables, gpu=False)


if __name__ == "__main__":
    main()
