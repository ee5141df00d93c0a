"""`qkvcache plan` and `qkvcache recommend`."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer
from rich.console import Console
from transformers import AutoConfig, PreTrainedConfig

from .. import policies
from ..models import known
from ..options import budget_of, dtype_of, model_of
from . import plan as plan_one
from . import plan_all, show
from . import recommend as ask

UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

Model = Annotated[str, typer.Argument(help="'demo', 'smollm2', a model's folder, a .gguf file, or its name on the Hub.")]
Context = Annotated[int, typer.Option(help="Tokens of a request, the prompt and what is generated.", min=1)]
Batch = Annotated[int, typer.Option(help="Requests that run together.", min=1)]
GpuMemory = Annotated[str | None, typer.Option(help="Of one GPU, for weights and caches: 80GB, 74.5GiB, or bytes.")]
WeightsMemory = Annotated[str | None, typer.Option(help="Of the weights, over all GPUs; counted from the config if left out.")]
TensorParallel = Annotated[int, typer.Option(help="GPUs that share the KV heads.", min=1)]
Dtype = Annotated[str | None, typer.Option(help="What the model computes in: bfloat16, float16 or float32. Default: as the config says.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")]


def plan(
    model: Model,
    context: Context,
    format: Annotated[str | None, typer.Option(help="One format, as `qkvcache formats` lists them. Default: a row for each.")] = None,
    policy: Annotated[str | None, typer.Option(help="What evicts tokens: h2o, keydiff, sink_window and others.")] = None,
    budget: Annotated[float | None, typer.Option(help="Tokens that the policy keeps: a number from 1 on, or a share such as 0.5.")] = None,
    batch: Batch = 1,
    gpu_memory: GpuMemory = None,
    weights_memory: WeightsMemory = None,
    tensor_parallel: TensorParallel = 1,
    dtype: Dtype = None,
    num_sink_tokens: Annotated[int, typer.Option(help="First tokens that stay in the model's dtype.", min=0)] = 4,
    residual_length: Annotated[int, typer.Option(help="Last tokens that stay in the model's dtype.", min=0)] = 64,
    max_length: Annotated[int | None, typer.Option(help="Tokens that storage is taken for at once. Default: the cache grows.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Say what a cache will take, how many requests fit beside the weights, and how long they may be.

    qkvcache plan meta-llama/Llama-3.1-70B --context 131072 --gpu-memory 80GB --tensor-parallel 8
    """
    options = {
        "policy": _policy(policy, budget), "context": context, "batch": batch, "gpu_memory": _bytes("--gpu-memory", gpu_memory),
        "weights_memory": _bytes("--weights-memory", weights_memory), "tensor_parallel": tensor_parallel,
        "dtype": dtype and dtype_of(dtype), "num_sink_tokens": num_sink_tokens, "residual_length": residual_length,
        "max_length": max_length,
    }  # fmt: skip
    config = _config(model)
    try:
        plans = [plan_one(config, format=format, **options)] if format else plan_all(config, **options)  # type: ignore[arg-type]
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from error
    if json_output:
        print(json.dumps([found.as_json() for found in plans], indent=1))
        return
    console = Console()
    console.print(show.table(plans))
    if format:
        console.print(show.parts(plans[0]))
        console.print(plans[0].reason)


def recommend(
    model: Model,
    context: Context,
    workload: Annotated[
        str, typer.Option(help="'facts' that may be asked for later, a 'question' that ends the prompt, or 'continue' a text.")
    ] = "facts",
    streaming: Annotated[bool, typer.Option("--streaming", help="Tokens come without end.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Several turns.")] = False,
    batch: Batch = 1,
    gpu_memory: GpuMemory = None,
    weights_memory: WeightsMemory = None,
    tensor_parallel: TensorParallel = 1,
    dtype: Dtype = None,
    json_output: JsonOption = False,
) -> None:
    """Say which cache to take, why, what it takes, and the nearest flags of vLLM and SGLang.

    qkvcache recommend meta-llama/Llama-3.1-70B --context 131072 --workload continue --gpu-memory 80GB --tensor-parallel 8
    """
    options = {
        "workload": workload, "context": context, "streaming": streaming, "chat": chat, "batch": batch, "dtype": dtype and dtype_of(dtype),
        "gpu_memory": _bytes("--gpu-memory", gpu_memory), "weights_memory": _bytes("--weights-memory", weights_memory),
        "tensor_parallel": tensor_parallel,
    }  # fmt: skip
    config = _config(model)
    try:
        found = ask(config, **options)  # type: ignore[arg-type]
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from error
    if json_output:
        print(json.dumps(found.as_json(), indent=1))
    else:
        show.show(found, Console())


def register(app: typer.Typer) -> None:
    """Adds both commands to the command line."""
    app.command()(plan)
    app.command()(recommend)


def _config(model: str) -> PreTrainedConfig:
    path = model_of(model)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(
            f"{model!r} has no config that can be read: pass a folder with a config.json, a model on the Hub, {known()}. {error}",
            param_hint="MODEL",
        ) from error


def _policy(name: str | None, budget: float | None) -> policies.Policy | None:
    if name is None:
        if budget is not None:
            raise typer.BadParameter(f"{budget:g} without a policy: add --policy, such as --policy h2o", param_hint="--budget")
        return None
    try:
        return policies.named(name, budget=budget_of(budget))
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error), param_hint="--policy, --budget") from error


def _bytes(name: str, text: str | None) -> float | None:
    """`80GB` to bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]i?b)?\s*", text, re.IGNORECASE)
    if not match:
        raise typer.BadParameter(f"{text!r}: expected a size such as 80GB, 74.5GiB or 80e9", param_hint=name)
    return float(match[1]) * UNITS[(match[2] or "").upper()]
