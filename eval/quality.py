"""Quality against bytes: a model with every format, and with what evicts tokens; rows in eval/results/quality.jsonl.

    python eval/quality.py                                        the embedded model: under five minutes on two cores
    python eval/quality.py --model MODEL --device cuda --context 8192 --formats fp8 turboquant_4bit_nc --policies keydiff
    python eval/quality.py --show | --markdown | --plot | --csv FILE      from the rows of --model

The model reads a context once, then reads on, or answers, token by token through each cache. KL divergence is of the next token from the
dense run, in nats. Recall is of code words, the question *unseen* when the context is stored and cut down, or *seen* at its end.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import typer
from arguments import at_least, fraction
from quality_pictures import csv, markdown, plot, table
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedConfig

from qkvcache import CompressedCache, demo, policies
from qkvcache.formats import REGISTRY, Identity
from qkvcache.harness.quality import CacheFactory
from qkvcache.harness.rows import read_rows, replace_rows
from qkvcache.harness.workload import Workload
from qkvcache.options import device_of, model_of
from qkvcache.planning.model import shapes

RESULTS = Path(__file__).parent / "results" / "quality.jsonl"
ZONES = {"4 + 64": {}, "none": {"exact_first": 0, "exact_recent": 0}}
EVICTED = ("turboquant_4bit_nc",)
"""What evicting caches store tokens in: what `recommend` takes most often. `eviction.py` looks at eviction alone."""
VARIANTS = ("_token", "_tensor", "_frozen", "_asymmetric", "_group", "_four_over_six", "_trellis")
"""How names end that differ from others in a scale alone, or that take a CPU a minute to store."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def policy_of(name: str, size: int) -> policies.Policy:
    """By its defaults, but for a lag that fits into small budgets."""
    if name == "lagkv":
        lag = min(128, size // 4)
        return policies.LagKV(budget=size, lag=lag, recent=lag)
    return policies.named(name, budget=size - 4 if name == "sink_window" else size)


def caches(config: PreTrainedConfig, args: argparse.Namespace) -> Iterator[tuple[dict, CacheFactory]]:
    """What names a row, and what makes its cache."""
    yield {"format": None, "policy": None, "exact": "all"}, lambda: DynamicCache(config=config)
    for format in args.formats:
        for exact, zones in ZONES.items():
            yield {"format": format, "policy": None, "exact": exact}, functools.partial(CompressedCache, config, format=format, **zones)
    for name in args.policies:
        for share in args.budgets:
            policy = policy_of(name, int(share * args.context))
            for format in args.evicted:
                row = {"format": format, "policy": name, "budget": share, "exact": "4 + 64"}
                yield row, functools.partial(CompressedCache, config, format=format, policy=policy)


def load(args: argparse.Namespace):
    if args.model == "demo":
        return demo.load(DTYPES[args.dtype], args.device)
    path = model_of(args.model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[args.dtype]).eval().to(args.device)
    return model, AutoTokenizer.from_pretrained(path)


def measure(args: argparse.Namespace) -> Iterator[dict]:
    begin = time.perf_counter()
    model, tokenizer = load(args)
    text = demo.text() if args.text is None else args.text.read_text()
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    dims = head_dims(model.config)
    args.formats = [name for name in args.formats if not any(REGISTRY[name].refuses(dim) for dim in dims)]
    chosen = [policy_of(name, int(share * args.context)) for name in args.policies for share in args.budgets]
    observes = tuple(sorted({policy.observes for policy in chosen if policy.observes}))
    sizes = {"context": args.context, "passages": args.passages, "read_on": args.read_on, "cases": args.cases}
    workload = Workload.make(model, tokenizer, ids, **sizes, observes=observes)
    every = list(caches(model.config, args))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for row, factory in progress.track(every, description="caches"):
            found = workload.measure(factory)
            yield {"model": args.model} | row | found | {"device": _device(args.device), "seconds": time.perf_counter() - begin}


def head_dims(config: PreTrainedConfig) -> set[int]:
    return {shape.head_dim for shape in shapes(config, 2)}


def _device(name: str) -> str:
    return torch.cuda.get_device_name() if name.startswith("cuda") else name


def _refused(args: argparse.Namespace) -> str | None:
    """Why nothing can be measured, if so. What only shows rows does not ask: they may be of another machine."""
    try:
        model_of(args.model)
    except typer.BadParameter:
        return f"argument --model: {args.model!r} is no folder, and no name of a model on the Hub"
    if args.text is not None and not args.text.is_file():
        return f"argument --text: {str(args.text)!r} is no file"
    try:
        device_of(args.device)
    except typer.BadParameter as error:
        return f"argument --device: {error.message}"
    for part in args.budgets:
        try:
            for name in args.policies:
                policy_of(name, int(part * args.context))
        except ValueError as error:
            return f"argument --budgets: {part} of {args.context} tokens is too little for {name}: {error}"
    return None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name, format in REGISTRY.items() if not isinstance(format, Identity)]
    parser.add_argument("--model", default="demo", help="a folder, a model on the Hub, or 'demo' for the embedded one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="bytes are told in relation to 16 bit")
    usual = [name for name in known if not name.endswith(VARIANTS)]
    parser.add_argument(
        "--formats", nargs="*", default=usual, choices=[[], "all", *known], metavar="FORMAT", help="'all': all variants too"
    )
    parser.add_argument("--policies", nargs="*", default=list(policies.REGISTRY), choices=[[], *policies.REGISTRY], metavar="POLICY")
    parser.add_argument("--budgets", nargs="*", type=fraction, default=[0.2, 0.5], help="shares of the context that policies keep")
    parser.add_argument("--evicted", nargs="*", default=EVICTED, choices=REGISTRY, metavar="FORMAT", help="formats of evicting caches")
    parser.add_argument("--context", type=at_least(100), default=2000, help="tokens; the facts to recall take 80")
    parser.add_argument("--passages", type=at_least(1), default=3, help="texts to read on")
    parser.add_argument("--read-on", type=at_least(2), default=24, help="tokens of each; the first does not count")
    parser.add_argument("--cases", type=at_least(1), default=4, help="code words to recall, with the question seen and unseen")
    parser.add_argument("--text", type=Path, help="a file in place of Python's language reference")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the rows go")
    parser.add_argument("--show", action="store_true", help="the table, from the rows")
    parser.add_argument("--markdown", action="store_true", help="the table of the README, from the rows")
    parser.add_argument("--plot", action="store_true", help="the pictures, from the rows")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="the rows as CSV")
    args = parser.parse_args(arguments)
    args.formats = known if "all" in args.formats else args.formats
    what = f"quality_{Path(args.model).name}"
    if args.show or args.markdown or args.plot or args.csv:
        rows = [row for row in read_rows(args.out) if row["what"] == what]
        if not rows:
            parser.error(f"{args.out} has no rows of {args.model}: run without --show, --markdown, --plot and --csv first")
    else:
        if wrong := _refused(args):
            parser.error(wrong)
        rows = []
        for row in measure(args):
            rows.append(row)
            replace_rows(args.out, what, rows)
        print(f"{rows[-1]['seconds']:.0f} s", file=sys.stderr)
    if args.markdown:
        print(markdown(rows))
    elif not (args.plot or args.csv):
        Console(width=140).print(table(rows))
    if args.plot:
        plot(rows, args.out.with_name(f"{what}.png"))
    if args.csv:
        csv(rows, args.csv)


if __name__ == "__main__":
    main()
