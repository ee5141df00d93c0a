"""transformers' own QuantizedCache (quanto, HQQ) on the windows of `quality.py --model smollm2`; rows in eval/results/peers.jsonl.

    python eval/peers.py                                 hours on one core: HQQ optimizes its scales in 20 rounds each time it quantizes
    python eval/peers.py --backends quanto --minutes 30  one backend; no further text is begun after these minutes
    python eval/peers.py --model demo --context 512 --passages 2 --read-on 34 --out FILE        seconds
    python eval/peers.py --markdown                      the table, from the rows of --model and --text

Needs `pip install hqq optimum-quanto`; without one of them, its rows are not measured. The model reads each context once, in fp32, then
reads on through every cache as if the tokens came one by one. KL divergence is of the next token from the dense run, in nats; bytes are
those of live tensors after the context, in 16 bit. One text is read at a time, because with `axis=0` HQQ groups values of all rows of a
batch together. Formats of this library are measured beside the peers: their rows must say what those in quality.jsonl say.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence

import torch
from error_bars import percent, standard_error, with_error
from harness import Table, at_least, described, in_time, load, name_of, parser_of, present, read_rows, refused, replace_rows, shows
from recording import record
from rich.console import Console
from rich.progress import track
from transformers import DynamicCache, PreTrainedConfig, QuantizedCache
from transformers.cache_utils import Cache
from workload import rounded, sixteen_bit

from qkvcache import CompressedCache
from qkvcache.evaluation.calibrate import windows_of
from qkvcache.evaluation.quality import Divergence, Passages, divergence, held_bytes
from qkvcache.formats import REGISTRY

PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}
GROUPINGS = {
    "default": {},
    "keys by channel": {"axis_key": -1, "axis_value": 0},
    "by token": {"axis_key": 1, "axis_value": 1},
}
"""How `QuantizedCache` groups 64 values. By default quanto takes those of one token and head, HQQ one channel of tokens that lie far apart.
`keys by channel` is KIVI's: keys of 64 tokens that follow each other. `by token` is what transformers' documentation recommends for HQQ."""
CONFIGURATIONS = [
    *(("quanto", bits, "default", residual) for bits in (4, 2) for residual in (128, 64)),
    *(("quanto", bits, "keys by channel", 128) for bits in (4, 2)),
    *(("hqq", bits, "default", residual) for bits in (4, 3, 2) for residual in (128, 64)),
    *(("hqq", bits, "by token", 128) for bits in (4, 2)),
]
"""Backend, bits, grouping and `residual_length`: 128 by default, 64 as here. HQQ does not read back what it packs by token in 3 bits."""
BASE = "turboquant_4bit_nc"
OURS = (BASE, "hadaquant_k3v3", "hadaquant_k2v2")


def version(backend: str) -> str | None:
    """Of the backend's package, if it is installed."""
    try:
        return importlib.metadata.version(PACKAGES[backend])
    except importlib.metadata.PackageNotFoundError:
        return None


def caches(config: PreTrainedConfig, formats: Sequence[str], backends: Sequence[str]) -> Iterator[tuple[dict, Callable[[], Cache]]]:
    """What names a row, and what makes its cache: ours, and those of the peers that are installed."""
    for name in formats:
        yield {"format": name, "exact": "4 + 64"}, functools.partial(CompressedCache, config, format=name)
    for backend, bits, grouping, residual in CONFIGURATIONS:
        if backend in backends and (installed := version(backend)):
            row = {"format": f"{backend}_int{bits}", "peer": "QuantizedCache", "grouping": grouping, "exact": f"0 + {residual}"}
            options = {"nbits": bits, "residual_length": residual, **GROUPINGS[grouping]}
            yield row | {PACKAGES[backend]: installed}, functools.partial(QuantizedCache, backend, config, **options)


def measure(args: argparse.Namespace) -> Iterator[list[dict]]:
    """All rows, after each text: those of the texts so far."""
    model, _, ids = load(args)
    windows = windows_of(ids, args.passages, args.context + args.read_on).to(model.device)
    every = list(caches(model.config, args.formats, args.backends))
    found: list[list[Divergence]] = [[] for _ in every]
    sizes: list[float] = []
    for i in in_time(range(args.passages), args.minutes):
        passages = Passages.read(model, windows[i : i + 1], args.context)
        if i == 0:
            row = sixteen_bit(record(model, passages.context)[0], model)
            makers = [functools.partial(DynamicCache, config=model.config), *(make for _, make in every)]
            sizes = [held_bytes(row.fill(make(), model, passages.context)) / args.context for make in makers]
        for (_, make), of in zip(track(every, f"text {i + 1}", console=Console(stderr=True), transient=True), found, strict=True):
            of.append(divergence(model, passages, make))
        yield [
            described(args)
            | named
            | measured(size, sizes[0], of)
            | {"context": args.context, "read_on": [i + 1, args.read_on], "dtype": str(model.dtype)}
            for (named, _), size, of in zip(every, sizes[1:], found, strict=True)
        ]


def measured(size: float, dense: float, of: list[Divergence]) -> dict:
    """Bytes a token and the divergence of a cache, as in the rows of `quality.py`."""
    kls, same, changes = (torch.cat([getattr(one, name) for one in of]) for name in ("kls", "same_tops", "loss_changes"))
    perplexity = changes.mean().exp().item()
    return {
        "bytes_per_token": size, "ratio": dense / size, "kl": kls.mean().item(), "kl_error": standard_error(kls),
        "same_top": same.mean().item(), "same_top_error": standard_error(same),
        "perplexity_ratio": perplexity, "perplexity_ratio_error": perplexity * standard_error(changes),
        "kls": rounded(kls), "loss_changes": rounded(changes),
    }  # fmt: skip


def name_of_cache(row: dict) -> str:
    if "peer" not in row:
        return f"`{row['format']}`"
    backend, bits = row["format"].split("_int")
    return f'`QuantizedCache("{backend}", nbits={bits})`' + ("" if row["grouping"] == "default" else f", {row['grouping']}")


def times(kls: list[float], base: list[float]) -> str:
    """The ratio of the means over the texts that both have read."""
    both = list(zip(kls, base, strict=False))
    ratio = sum(kl for kl, _ in both) / sum(kl for _, kl in both)
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


def tables(rows: list[dict]) -> Iterator[Table]:
    """The peers and ours, the largest first."""
    base = next((row["kls"] for row in rows if row["format"] == BASE), None)
    headers = ("cache", "exact", "bytes/token", "smaller", "texts", "KL", f"times `{BASE}`'s", "same top token", "perplexity x")
    lines = [
        (
            name_of_cache(row), row["exact"], f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.2f}x", str(len(row["kls"])),
            with_error(row["kl"], row["kl_error"]), times(row["kls"], base) if base else "",
            percent(row["same_top"], row["same_top_error"]), with_error(row["perplexity_ratio"], row["perplexity_ratio_error"]),
        ) for row in sorted(rows, key=lambda row: (row["ratio"], row["kl"]))
    ]  # fmt: skip
    yield Table(headers, lines, rule=(" --- ",))


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "peers", model="smollm2")
    parser.add_argument("--formats", nargs="*", default=OURS, choices=[[], *REGISTRY], metavar="FORMAT", help="ours, beside the peers")
    known = list(PACKAGES)
    parser.add_argument("--backends", nargs="*", default=known, choices=[[], *known], metavar="BACKEND", help="of QuantizedCache")
    parser.add_argument("--context", type=at_least(100), default=8064, help="tokens of the texts to read on")
    parser.add_argument("--passages", type=at_least(1), default=12, help="texts to read on")
    parser.add_argument("--read-on", type=at_least(2), default=128, help="tokens of each; the first does not count")
    args = parser.parse_args(arguments)
    what = f"peers_{name_of(args.model)}"
    if not shows(args):
        if wrong := refused(args):
            parser.error(wrong)
        for rows in measure(args):
            replace_rows(args.out, what, rows, "format", "exact", "grouping", "text")
    rows = [row for row in read_rows(args.out, what) if row["text"] == args.text.name]
    if not rows or args.plot:
        parser.error("there is no picture" if rows else f"{args.out} has no rows of {args.model} on {args.text.name}: measure first")
    present(args, tables(rows))


if __name__ == "__main__":
    main()
