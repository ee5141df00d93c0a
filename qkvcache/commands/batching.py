"""`qkvcache serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..options import MODEL, OffloadPages, budget_of, bytes_of, examples, model_of, refusals

app = typer.Typer()


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=examples(
        "qkvcache serve smollm2 --format turboquant_4bit_nc --port 8000",
        "qkvcache serve smollm2 --store sessions --store-bytes 50GB --store-time-to-live 86400",
    ),
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=MODEL)],
    format: Annotated[str, typer.Option(help="Storage format of the pages; `qkvcache formats` lists them.")] = "turboquant_4bit_nc",
    num_sink_tokens: Annotated[int, typer.Option(help="First tokens of a request that stay in the model's dtype.", min=0)] = 4,
    residual_length: Annotated[int, typer.Option(help="Last tokens of a request that stay in the model's dtype.", min=0)] = 64,
    attention_budget: Annotated[
        float | None, typer.Option(help="Quantized tokens of a request that a step reads: a number from 1 on, or a share such as 0.125.")
    ] = None,
    offload_pages: OffloadPages = False,
    metrics_interval: Annotated[float, typer.Option(help="Seconds between two lines of metrics; 0 prints none.", min=0)] = 10.0,
    store: Annotated[
        Path | None, typer.Option(help="Folder in which pages of conversations survive the server; others may share it.")
    ] = None,
    store_bytes: Annotated[str, typer.Option(help="Bytes of the folder, and a tenth of them in host memory: 50GB, 40GiB.")] = "50GB",
    store_time_to_live: Annotated[
        float | None, typer.Option(help="Seconds after their last use for which pages are kept in the folder; for ever by default.", min=1)
    ] = None,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="The same prompt has the same answer at temperature 0, whatever else was sent; slower.")
    ] = False,
    share_prefixes: Annotated[
        Literal["all", "key", "none"],
        typer.Option(help="Whose prompts share pages: those with the same API key (all, where there is none), all, or none."),
    ] = "key",
    grace_seconds: Annotated[float, typer.Option(help="Seconds that running requests have after SIGTERM or Ctrl-C.", min=0)] = 20.0,
) -> None:
    """Serve a model behind transformers' OpenAI-compatible server, with a compressed cache.

    Takes every option of `transformers serve` too: --host, --port, --device, --dtype, --cb-max-memory-percent, --cb-num-blocks,
    --enable-cors and others. Continuous batching is on; --no-continuous-batching runs requests one after the other.
    `GET /metrics` returns the metrics of the terminal's line in the text format of Prometheus.
    """
    model_of(model)  # refused here, under the argument's name
    with refusals():
        options = stock_options(context.args)
        from ..batching.server import Server

        cache = {"format": format, "num_sink_tokens": num_sink_tokens, "residual_length": residual_length}
        cache |= {"attention_budget": budget_of(attention_budget, "--attention-budget"), "offload_pages": offload_pages}
        cache |= {"reproducible": True} if reproducible else {}
        size = int(bytes_of(store_bytes, "--store-bytes") or 0)
        stored: dict[str, Any] = {"store": store, "store_bytes": size, "store_time_to_live": store_time_to_live}
        stored["share_prefixes"] = share_prefixes
        server = Server(model, cache, metrics_interval=metrics_interval, grace_seconds=grace_seconds, **stored, **options)
    server.run()


def stock_options(arguments: list[str]) -> dict[str, Any]:
    """Options of `transformers serve` by name, with continuous batching on. Raises what typer raises for wrong ones."""
    from transformers.cli.serve import Serve
    from transformers.utils.import_utils import is_serve_available

    from ..models import usable

    if not is_serve_available():
        raise ImportError("serving needs packages that are not installed: pip install 'qkvcache[serve]'")
    stock = typer.Typer(add_completion=False)
    stock.command()(Serve)
    command = typer.main.get_command(stock)
    options = command.make_context("qkvcache serve MODEL", ["--continuous-batching", *arguments]).params
    if options.pop("force_model", None) is not None:
        raise typer.BadParameter(f"one model is served, got {arguments} beside it", param_hint="MODEL")
    if options["device"] != "auto":
        usable(options["device"])
    return {name: value for name, value in options.items() if name != "non_blocking"}
