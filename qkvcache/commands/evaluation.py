"""`qkvcache bench`, `qkvcache calibrate`, `qkvcache profile-heads` and `qkvcache eval`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.table import Table

from ..options import (
    MODEL,
    AttentionBudget,
    Budget,
    Device,
    JsonOption,
    OffloadPages,
    WithFormats,
    budget_of,
    device_of,
    dtype_of,
    examples,
    model_of,
    output,
    quiet,
    refusals,
    table,
)
from ..progress import progress, track

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..evaluation.calibrate import Calibration
    from ..evict.policies import HeadProfile

Progressed = Callable[[int, int], None]
Found = TypeVar("Found", "Calibration", "HeadProfile")
TextFile = Annotated[
    Path | None, typer.Option(help="Text file that the model reads. Default: Python's language reference.", exists=True, dir_okay=False)
]
Windows = Annotated[int, typer.Option(help="Windows, evenly spaced in the text.", min=1)]
USUAL = "int8,fp8,nvfp4,turboquant_k8v4,turboquant_4bit_nc,turboquant_3bit_nc"

EVALUATED = examples(
    "qkvcache eval run --model qkvcache --model_args pretrained=smollm2,cache=turboquant_4bit_nc --tasks hellaswag,qkvcache_needle",
    "qkvcache eval run --model qkvcache --model_args pretrained=smollm2,cache=fp8,policy=h2o,budget=0.3 --tasks qkvcache_unseen",
)
app = typer.Typer()


@app.command(cls=WithFormats, epilog=examples("qkvcache bench meta-llama/Llama-3.1-8B --tokens 32000 --device cuda --preallocate"))
def bench(
    model: Annotated[str, typer.Argument(help=MODEL)] = "demo",
    formats: Annotated[str, typer.Option(help="With commas, as `qkvcache formats` lists them, or 'all'.")] = USUAL,
    policy: Annotated[str | None, typer.Option(help="Eviction policy of every cache but the dense one: h2o, keydiff and others.")] = None,
    budget: Budget = None,
    attention_budget: AttentionBudget = None,
    offload_pages: OffloadPages = False,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.", min=2)] = 2000,
    batch: Annotated[int, typer.Option(help="Prompts that run together.", min=1)] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens that are generated.", min=8)] = 32,
    preallocate: Annotated[
        bool, typer.Option("--preallocate", help="Allocate storage at once, so that a GPU runs compiled steps.")
    ] = False,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the model: bfloat16, float16 or float32.")] = "bfloat16",
    json_output: JsonOption = False,
) -> None:
    """Measure how fast a model decodes with each format, and the bytes of its cache, beside a DynamicCache."""
    import torch

    from .. import demo, models
    from ..evaluation.spec import DENSE, CacheSpec
    from ..evaluation.speed import measure
    from ..formats import REGISTRY

    path, computes_in, on, size = model_of(model), dtype_of(dtype), device_of(device), budget_of(budget)
    read = budget_of(attention_budget, "--attention-budget")
    names = [name for name in REGISTRY if name != "identity"] if formats == "all" else formats.split(",")
    longest = tokens + new_tokens if preallocate else None
    with refusals():
        reading: dict[str, Any] = {"attention_budget": read, "offload_pages": offload_pages}
        specs = [CacheSpec(cache=name, policy=policy, budget=size, max_length=longest, **reading) for name in names]
        quiet()
        network, tokenizer = models.load(path, computes_in, on)
        ids = tokenizer(demo.text(), verbose=False)["input_ids"]
        repeated = (ids * (tokens // len(ids) + 1))[:tokens]
        prompt = torch.tensor(repeated, dtype=torch.int64, device=network.device).expand(batch, -1).contiguous()
        for spec in specs:
            spec.make(network.config)
        named = {"model": model, "device": str(network.device), "dtype": dtype}
        found = measure(network, prompt, [CacheSpec(cache=DENSE), *specs], new_tokens)
        rows = [named | row for row in track(found, "decoding", 1 + len(specs))]
    for row in rows:
        row["ratio"] = rows[0]["bytes_per_token"] / row["bytes_per_token"]
        row["speedup"] = rows[0]["decode_ms"] / row["decode_ms"]
    output(rows, json_output, _table(rows))


def _table(rows: list[dict]) -> Table:
    first = rows[0]
    peak = "peak_bytes" in first  # on a GPU
    found = table(
        ["cache", "ms a step", "faster", "tokens/s", "prompt ms", "bytes/token", "smaller"] + ["MB peak"] * peak,
        left=("cache",),
        title=f"{first['model']} on {first['device']} in {first['dtype']}, {first['batch']} x {first['tokens']:,} tokens",
        caption="ms a step: median; faster, smaller: than the DynamicCache" + ("; MB peak: allocated beside the weights." if peak else "."),
    )
    for row in rows:
        cells = [
            row["cache"], f"{row['decode_ms']:.1f}", f"{row['speedup']:.2f}x", f"{row['tokens_per_second']:,.0f}",
            f"{row['prompt_ms']:,.0f}", f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.2f}x",
        ]  # fmt: skip
        found.add_row(*cells, *([f"{row['peak_bytes'] / 1e6:,.0f}"] if peak else []))
    return found


@app.command(epilog=examples("qkvcache calibrate meta-llama/Llama-3.1-8B --bits 3 --device cuda --out llama.json"))
def calibrate(
    model: Annotated[str, typer.Argument(help=MODEL)],
    out: Annotated[Path, typer.Option(help="The calibration file that is written, .json.", dir_okay=False)],
    bits: Annotated[float, typer.Option(help="Bits of a channel, the mean over keys and values of all layers.", min=2, max=4)] = 3,
    text: TextFile = None,
    context: Annotated[int, typer.Option(help="Tokens of a window that are read exactly, and stored.", min=69)] = 1024,
    windows: Windows = 4,
    read_on: Annotated[int, typer.Option(help="Tokens of a window over which the divergence is measured.", min=1)] = 128,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the model. In 16 bits, rounding covers what 4 bits cost.")] = "float32",
    json_output: JsonOption = False,
) -> None:
    """Choose bits for the keys and values of each layer of a model: about half of the divergence at the same bytes.

    Measures what 2, 3 and 4 bits cost each of them, and writes the formats of least cost to a file that every cache takes as its format.
    The model runs 6 times a layer over windows x read-on tokens: a minute for 135 million parameters on a GPU, ten on two cores.
    """
    from ..evaluation.calibrate import calibrate as measure_bits

    def windowed(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], progress: Progressed) -> Calibration:
        sizes = {"context": context, "windows": windows, "read_on": read_on}
        return measure_bits(network, ids, bits=bits, progress=progress, **sizes)

    found = _measured(windowed, model, text, out, dtype, device)
    output(found.as_json(), json_output, _choice(found))
    if not json_output:
        print(f'Written to {out}: pass format="{out}" to a cache, or --format {out} to a command.')


@app.command(epilog=examples("qkvcache profile-heads meta-llama/Llama-3.1-8B --device cuda --out llama.heads.json"))
def profile_heads(
    model: Annotated[str, typer.Argument(help=MODEL)],
    out: Annotated[Path, typer.Option(help="The profile that is written, .json.", dir_okay=False)],
    text: TextFile = None,
    context: Annotated[int, typer.Option(help="Tokens of a window.", min=16)] = 2048,
    windows: Windows = 4,
    device: Device = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the model. Default: bfloat16 on a GPU, float32 on a CPU.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Measure which heads of a model look things up in a context: budgets for each head, with which fewer facts are lost.

    The model reads each window and repeats it, once: seconds on a GPU, a minute for 135 million parameters on two cores.
    """
    from ..evaluation.profile_heads import profile_heads as measure_heads

    def windowed(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], progress: Progressed) -> HeadProfile:
        return measure_heads(network, ids, tokenizer=tokenizer, context=context, windows=windows, progress=progress)

    dtype = dtype or ("float32" if device_of(device).type == "cpu" else "bfloat16")
    found = _measured(windowed, model, text, out, dtype, device)
    output({str(share): found.shares(share) for share in SHARES}, json_output, _shares(found))
    if not json_output:
        usage = f"pass SnapKV(budget=HeadProfile.load({str(out)!r}).budget(0.25)) to a cache, or head_profile={out} to an evaluation."
        print(f"Written to {out}: {usage}")


SHARES = (0.5, 0.25, 0.1)
"""Budgets for which a profile's parts are shown."""


def _shares(found: HeadProfile) -> Table:
    grid = table(("layer", *(f"budget {share:.0%}" for share in SHARES)), title="what each KV head retains of a context, %")
    for number, layers in enumerate(zip(*map(found.shares, SHARES), strict=True)):
        grid.add_row(str(number), *(" ".join(f"{100 * part:3.0f}" for part in layer) for layer in layers))
    return grid


def _measured(measure: Callable[..., Found], model: str, text: Path | None, out: Path, dtype: str, device: str | None) -> Found:
    """The result of `measure(model, tokenizer, ids, progress=)` on a text file, or on Python's language reference, saved in `out`."""
    from .. import demo, models

    if out.suffix != ".json":
        raise typer.BadParameter(f"{str(out)!r}: the name of the file must end with .json", param_hint="--out")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"{str(out.parent)!r} is no folder", param_hint="--out")
    path, computes_in, on = model_of(model), dtype_of(dtype), device_of(device)
    quiet()
    with refusals(), progress("measuring") as steps:
        network, tokenizer = models.load(path, computes_in, on)
        ids = demo.text_ids(tokenizer, None if text is None else text.read_text(encoding="utf-8"))
        found = measure(network, tokenizer, ids, progress=steps)
        found = replace(found, about={"model": model, "text": "pydoc" if text is None else text.name} | found.about)
        found.save(out)
    return found


def _choice(found: Calibration) -> Table:
    uniform = ", ".join(f"{bits} bits everywhere {kl:.5f}" for bits, kl in found.kl_uniform.items())
    grid = table(
        ("layer", "bits of keys", "KL", "bits of values", "KL"),
        title=f"{found.bytes_per_token:.4g} bytes a token and head, KL {found.kl:.5f} ({uniform})",
        caption="KL: divergence from the exact run, nats, on this text; in a row, of these bits of one layer's keys or values alone",
    )
    for number, (bits, costs) in enumerate(zip(found.bits, found.costs, strict=True)):
        cells = [cell for b, cost in zip(bits, costs, strict=True) for cell in (str(b), f"{cost[b - 2]:.5f}")]
        grid.add_row(str(number), *cells)
    return grid


@app.command(
    "eval",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
    epilog=EVALUATED,
)
def evaluate(context: typer.Context) -> None:
    """Run lm-eval with every score computed through a cache; the arguments are lm-eval's."""
    from ..evaluation.__main__ import main

    with refusals():  # `python -m qkvcache.evaluation` shows where an error comes from
        if {"-h", "--help"} & {*context.args}:
            print(f"{_arguments()}\n\n{EVALUATED}\n")
        main(context.args)


def _arguments() -> str:
    """The docstring of `evaluation.model.CacheLM`, read from its file: importing it takes seconds."""
    tree = ast.parse((Path(__file__).parents[1] / "evaluation" / "model.py").read_text(encoding="utf-8"))
    return next(ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CacheLM")
