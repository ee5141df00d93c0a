"""`qkvcache plan` and `qkvcache recommend`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from ..options import (
    MODEL,
    AttentionBudget,
    Budget,
    JsonOption,
    OffloadPages,
    budget_of,
    bytes_of,
    dtype_of,
    examples,
    model_of,
    output,
    refusals,
    table,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ..planning import Plan


Model = Annotated[str, typer.Argument(help=MODEL)]
Context = Annotated[
    int | None, typer.Option(help="Tokens of a request, the prompt and what is generated. Default: of the longest of --requests.", min=1)
]
Requests = Annotated[
    str | None,
    typer.Option(
        metavar="MIX",
        help="How many requests of a mix run together in continuous batching: WEIGHTxPROMPT+ANSWER in tokens, with commas between them, "
        "such as 3x1000+200,1x16000+500.",
    ),
]
Batch = Annotated[int, typer.Option(help="Requests that run together.", min=1)]
GpuMemory = Annotated[str | None, typer.Option(help="Memory of one GPU: 80GB, 74.5GiB, or bytes; of several: 8x80GB.")]
WeightsMemory = Annotated[str | None, typer.Option(help="Memory of the weights, over all GPUs. Default: computed from the config.")]
TensorParallel = Annotated[
    int | None, typer.Option(help="GPUs that share the KV heads. Default: the number in --gpu-memory 8x80GB, or one.", min=1)
]
Dtype = Annotated[str | None, typer.Option(help="Dtype of the model: bfloat16, float16 or float32. Default: the config's.")]

EIGHT_GPUS = "meta-llama/Llama-3.1-70B --context 131072 --gpu-memory 8x80GB"
app = typer.Typer()


@app.command(
    epilog=examples(
        f"qkvcache plan {EIGHT_GPUS}",
        "qkvcache plan demo --context 4000 --format fp8 --policy h2o --budget 0.5",
        "qkvcache plan meta-llama/Llama-3.1-8B --requests 3x1000+200,1x16000+500 --gpu-memory 80GB",
    )
)
def plan(
    model: Model,
    context: Context = None,
    format: Annotated[
        str | None,
        typer.Option(help="One format, as `qkvcache formats` lists them, a calibration file, or 'all'. Default: those that it marks."),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Eviction policy: h2o, keydiff, sink_window and others.")] = None,
    budget: Budget = None,
    batch: Batch = 1,
    requests: Requests = None,
    gpu_memory: GpuMemory = None,
    weights_memory: WeightsMemory = None,
    tensor_parallel: TensorParallel = None,
    dtype: Dtype = None,
    num_sink_tokens: Annotated[int, typer.Option(help="First tokens that stay in the model's dtype.", min=0)] = 4,
    residual_length: Annotated[int, typer.Option(help="Last tokens that stay in the model's dtype.", min=0)] = 64,
    max_length: Annotated[int | None, typer.Option(help="Tokens for which storage is allocated at once. Default: the cache grows.")] = None,
    attention_budget: AttentionBudget = None,
    offload_pages: OffloadPages = False,
    json_output: JsonOption = False,
) -> None:
    """Show the bytes of a cache, how many requests fit beside the weights, and the longest context."""
    from .. import planning
    from ..planning.recommend import RECOMMENDED

    options = {
        "policy": _chosen(policy=policy, budget=budget_of(budget)), "context": context, "batch": batch, "requests": _mix(requests),
        **_gpus(gpu_memory, tensor_parallel), "weights_memory": bytes_of(weights_memory, "--weights-memory"),
        "dtype": dtype and dtype_of(dtype), "num_sink_tokens": num_sink_tokens,
        "residual_length": residual_length, "max_length": max_length, "offload_pages": offload_pages,
        "attention_budget": budget_of(attention_budget, "--attention-budget"),
    }  # fmt: skip
    config = _config(model)
    with refusals():
        if format not in (None, "all"):
            found = planning.plan(config, format=format, **options)  # type: ignore[arg-type]
            output([found.as_json()], json_output, found.reason, _table([found]), _parts(found))
            return
        plans = planning.plan_all(config, RECOMMENDED if format is None else None, **options)  # type: ignore[arg-type]
    output([plan.as_json() for plan in plans], json_output, *_verdict(plans), _table(plans), _below(plans[-1]))


@app.command(epilog=examples(f"qkvcache recommend {EIGHT_GPUS} --workload continue"))
def recommend(
    model: Model,
    context: Annotated[int, typer.Option(help="Tokens of a request, the prompt and what is generated.", min=1)],
    workload: Annotated[
        str, typer.Option(help="'facts' that may be asked for later, a 'question' that ends the prompt, or 'continue' a text.")
    ] = "facts",
    streaming: Annotated[bool, typer.Option("--streaming", help="A stream of unlimited length.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Several turns.")] = False,
    batch: Batch = 1,
    gpu_memory: GpuMemory = None,
    weights_memory: WeightsMemory = None,
    tensor_parallel: TensorParallel = None,
    dtype: Dtype = None,
    json_output: JsonOption = False,
) -> None:
    """Show which cache to choose, why, and its bytes."""
    from .. import planning

    options = {
        "workload": workload, "context": context, "streaming": streaming, "chat": chat, "batch": batch,
        "dtype": dtype and dtype_of(dtype), **_gpus(gpu_memory, tensor_parallel),
        "weights_memory": bytes_of(weights_memory, "--weights-memory"),
    }  # fmt: skip
    config = _config(model)
    with refusals():
        found = planning.recommend(config, **options)  # type: ignore[arg-type]
    output(found.as_json(), json_output, str(found))


def _gpus(memory: str | None, tensor_parallel: int | None) -> dict[str, Any]:
    """The options of `plan` for `80GB`, or for `8x80GB`, which names the number of GPUs too."""
    several = re.fullmatch(r"\s*(\d+)\s*x\s*(.*)", memory or "")
    count, size = (int(several[1]), several[2]) if several else (tensor_parallel or 1, memory)
    if count < 1 or tensor_parallel not in (None, count):
        raise typer.BadParameter(
            f"{memory!r} with --tensor-parallel {tensor_parallel}: one number of GPUs, from 1 on", param_hint="--gpu-memory"
        )
    return {"gpu_memory": bytes_of(size, "--gpu-memory"), "tensor_parallel": count}


def _config(model: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    from ..models import known

    path = model if Path(model).suffix == ".json" and Path(model).is_file() else model_of(model)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(
            f"{model!r} has no config that can be read: pass a config.json or its folder, a model on the Hub, {known()}. {error}",
            param_hint="MODEL",
        ) from error


def _chosen(**words: Any) -> Any:
    """What chooses the tokens that stay, by its options; None: all stay."""
    from ..rooms import option

    with refusals():
        return option("policy", {name: x for name, x in words.items() if x is not None} or None)


def _mix(text: str | None) -> list[tuple[float, int, int]] | None:
    """`3x1000+200,1x16000+500` to weights, prompts and answers."""
    if text is None:
        return None
    kinds = [re.fullmatch(r"\s*(?:([0-9]*\.?[0-9]+)\s*x\s*)?([0-9]+)\s*\+\s*([0-9]+)\s*", kind) for kind in text.split(",")]
    if not all(kinds):
        raise typer.BadParameter(f"{text!r}: expected WEIGHTxPROMPT+ANSWER such as 3x1000+200,1x16000+500", param_hint="--requests")
    return [(float(kind[1] or 1), int(kind[2]), int(kind[3])) for kind in kinds if kind]


def _table(plans: list[Plan]) -> Table:
    """A row for each plan; all have the same model, context and memory."""
    first, last = plans[0], plans[-1]
    fits = ("requests", "longest\ncontext") if first.batching is None else ("pages", "requests\nof the mix")
    headers = ("cache", "bytes a\ntoken", "MB a\nrequest", "times\nsmaller", *(fits if first.gpu_memory is not None else ()))
    rule = f", {last.policy}" if last.policy else ""
    grid = table(headers, left=("cache",), title=f"{last.model}, {last.context:,} tokens a request, {last.dtype}{rule}")
    for plan in plans:
        cells = [plan.format or plan.name, f"{plan.bytes_per_token:,.0f}", f"{plan.bytes_per_request / 1e6:,.1f}", f"{plan.ratio:.2f}"]
        if plan.batching is not None:
            cells += [f"{plan.batching.pages:,}", f"{plan.batching.requests:,}"]
        elif plan.gpu_memory is not None:
            cells += [f"{plan.requests:,}", "any" if plan.unbounded else f"{plan.longest_context:,}"]
        grid.add_row(*cells)
    return grid


def _parts(plan: Plan) -> Table:
    """The bytes of one request by role."""
    grid = Table("part", Column("MB", justify="right"), title=f"one request in {plan.name}")
    for name in ("codes", "scales", "exact", "bookkeeping"):
        grid.add_row(name, f"{getattr(plan.request, name) / 1e6:,.2f}")
    grid.add_row("all", f"{plan.bytes_per_request / 1e6:,.2f}")
    if plan.host:
        grid.add_row("on the host", f"{plan.host / 1e6:,.2f}")
    return grid


def _verdict(plans: list[Plan]) -> list[str]:
    """A line that stands before the table: which of its caches hold the requests."""
    fit = [plan.name for plan in plans if plan.fits]
    requests = f"{plans[0].batch:,} requests" if plans[0].batch > 1 else "one request"
    if plans[0].gpu_memory is None:
        return []
    of_all = "every cache" if len(fit) == len(plans) else ", ".join(fit)
    return [f"Fits: {of_all}, for {requests}." if fit else f"Does not fit: no cache holds {requests}."]


def _below(plan: Plan) -> str:
    """Notes under the table: the assumptions of its numbers."""
    from ..planning.plan import in_words

    words = list(plan.notes)
    if plan.gpu_memory is not None and plan.weights_memory is not None:
        beside = f" and {in_words(plan.activations)} of activations" if plan.activations and not plan.batching else ""
        memory = f"{plan.tensor_parallel} x {in_words(plan.gpu_memory)} less {in_words(plan.weights_memory)} of weights{beside}"
        longest = f"; the longest context is that of {f'{plan.batch} requests' if plan.batch > 1 else 'one request'}"
        words.insert(0, f"What fits into {memory}{'' if plan.batching else longest}.")
    if plan.at_most:
        words.append("Bytes are at most these: how many pages heads take that share a budget depends on the text.")
    return " ".join(words)
