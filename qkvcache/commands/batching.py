"""`qkvcache serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..options import MODEL, OffloadPages, budget_of, bytes_of, examples, model_of, refusals

app = typer.Typer()

ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar="QKVCACHE_API_KEY",
        help="A key that requests must have (Authorization: Bearer KEY), several times for several clients; in the environment they are "
        "separated by spaces, and other users of the machine do not see them.",
    ),
]
NoApiKey = Annotated[bool, typer.Option("--no-api-key", help="Serve everybody, where --host is not this machine.")]
StructuredOutputs = Annotated[
    bool, typer.Option("--structured-outputs", help="Take response_format with a JSON schema; steps of a GPU are then slower.")
]
MaxWaiting = Annotated[int, typer.Option(help="Answers that wait for their first token, of all clients; more get 429.", min=1)]
MaxWaitingPerClient = Annotated[int, typer.Option(help="Those of one API key or, without keys, of one address.", min=1)]
MaxN = Annotated[int, typer.Option(help="Answers of one request, its `n`.", min=1)]
MaxBodyBytes = Annotated[
    str | None, typer.Option(help="Bytes of a request: 8MB, 1MiB. By default 64 KiB, and 16 bytes for each position of the model.")
]
MaxConnections = Annotated[int, typer.Option(help="Open connections; for one more, the one that is idle for longest is closed.", min=1)]
ReadSeconds = Annotated[float, typer.Option(help="Seconds in which a request has to arrive, its head and then its body.", min=0.1)]
StallSeconds = Annotated[float, typer.Option(help="Seconds without the end of a step after which /health gets 503.", min=0.1)]


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=examples(
        "qkvcache serve smollm2 --format turboquant_4bit_nc --port 8000",
        "qkvcache serve smollm2 --store sessions --store-bytes 50GB --store-time-to-live 86400",
        "QKVCACHE_API_KEY=$(openssl rand -hex 32) qkvcache serve smollm2 --host 0.0.0.0",
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
    grace_seconds: Annotated[float, typer.Option(help="Seconds that running requests have after SIGTERM or Ctrl-C.", min=0)] = 20.0,
    structured_outputs: StructuredOutputs = False,
    api_key: ApiKeys = None,
    no_api_key: NoApiKey = False,
    max_waiting: MaxWaiting = 512,
    max_waiting_per_client: MaxWaitingPerClient = 128,
    max_n: MaxN = 16,
    max_body_bytes: MaxBodyBytes = None,
    max_connections: MaxConnections = 1024,
    read_seconds: ReadSeconds = 10.0,
    stall_seconds: StallSeconds = 120.0,
) -> None:
    """Serve a model behind transformers' OpenAI-compatible server, with a compressed cache.

    Takes every option of `transformers serve` too: --host, --port, --device, --dtype, --cb-max-memory-percent, --cb-num-blocks,
    --enable-cors and others. Continuous batching is on; --no-continuous-batching runs requests one after the other.
    `GET /metrics` returns the metrics of the terminal's line in the text format of Prometheus. Where --host is not this machine,
    --api-key is needed.
    """
    model_of(model)  # refused here, under the argument's name
    with refusals():
        options = stock_options(context.args)
        from ..batching.gate import Limits
        from ..batching.server import Server

        body = int(bytes_of(max_body_bytes, "--max-body-bytes") or 0) or None
        limits = Limits(max_waiting, max_waiting_per_client, max_n, body, max_connections, read_seconds, stall_seconds)
        called: dict[str, Any] = {"api_keys": api_key or (), "no_api_key": no_api_key, "limits": limits}
        called["structured_outputs"] = structured_outputs
        cache = {"format": format, "num_sink_tokens": num_sink_tokens, "residual_length": residual_length}
        cache |= {"attention_budget": budget_of(attention_budget, "--attention-budget"), "offload_pages": offload_pages}
        size = int(bytes_of(store_bytes, "--store-bytes") or 0)
        stored: dict[str, Any] = {"store": store, "store_bytes": size, "store_time_to_live": store_time_to_live}
        server = Server(model, cache, metrics_interval=metrics_interval, grace_seconds=grace_seconds, **stored, **called, **options)
    try:
        server.run()
    finally:
        if server.hung:  # Python would wait for the thread
            typer.echo("the step that runs has not ended: the process ends without it", err=True)
            os._exit(1)


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
