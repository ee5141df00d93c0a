"""Bits by layer, calibrated on one text, against one format for all layers on another; rows in eval/results/calibrated.jsonl.

    python eval/calibrated.py --models smollm2 normed --device cuda --minutes 2       every cell of two models
    python eval/calibrated.py --models smollm2 --device cuda --shard 3/6 --out FILE   the third of six parts, each of its own process
    python eval/calibrated.py --models demo --windows 2 --read-on 64 --contexts 128   a try on a CPU
    python eval/calibrated.py --markdown | --plot                                     from the rows

Each model is calibrated on Python's language reference (`qkvcache.calibrate`), and measured on the sources of its library: it reads 8
windows exactly, prompts of 64, 256 or 2,000 tokens, and then 1,024 tokens more, each of which sees those before it as a cache would hand
them back (`formats.Bench`), exact zones at their defaults or off. A cell is a model, a prompt length and zones; `--shard` deals cells to
processes. Rows are written as they are measured, those with zones and of the longest prompts first, and a run that is interrupted goes on
where it was.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from arguments import add_model, add_views, at_least, described, load, refused, run_or_show
from calibrated_tables import markdown, plot
from formats import DEFAULT, OFF, Bench
from keys import Rows

from qkvcache import calibrate
from qkvcache.evaluation.calibrate import choose
from qkvcache.formats import REGISTRY, Format, FormatByLayer, HadaQuant

RESULTS = Path(__file__).parent / "results" / "calibrated.jsonl"
MODELS = ("smollm2", "biased", "normed", "demo")
CONTEXTS = (2000, 64, 256)
BUDGETS = (3.0, 2.5, 3.5, 2.25, 2.75)
"""Bits of a channel, the mean over layers and sides."""
UNIFORM = ("hadaquant_k3v3", "hadaquant_k3v2", "hadaquant_k4v3", "hadaquant_k2v2", "hadaquant_k4v4", "turboquant_4bit_nc")
Cell = tuple[str, int, tuple[int, int]]
"""A model, tokens of the prompt, and the exact zones."""


def shard(text: str) -> tuple[int, int]:
    """`3/6` to (2, 6)."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of 1 to {count} before the slash")
    return number - 1, count


def size_at_128(bits: float) -> float:
    """Bytes of a token and head, with `bits` a channel on average."""
    return 2 * (16 * bits + 2)


class Calibrated:
    """A model, and what bits cost its layers on the text of the calibration."""

    def __init__(self, args: argparse.Namespace, rows: Rows):
        self.args, self.loaded = args, load(args)
        self.stock = self.loaded[0].config._attn_implementation
        same = described(args) | {"text": "pydoc", "what": "calibration"}
        known = [row for row in rows.rows if all(row.get(name) == same[name] for name in ("what", "model", "text"))]
        if known:
            self.costs, self.shapes = known[-1]["costs"], [tuple(shape) for shape in known[-1]["shapes"]]
            return
        begin = time.perf_counter()
        found = calibrate(*self.loaded[:2])
        fields = {"label": "calibration", "seconds": time.perf_counter() - begin} | found.as_json()
        rows.append(same | {name: value for name, value in fields.items() if name not in rows.same})
        self.costs, self.shapes = found.costs, found.shapes

    def formats(self) -> Iterator[tuple[str, Format | FormatByLayer, dict]]:
        """Labels, formats, and what joins their rows: those at 3 bits first."""
        for i in range(max(len(BUDGETS), len(UNIFORM))):
            if i < len(BUDGETS):
                chosen = choose(self.costs, self.shapes, BUDGETS[i])
                by_layer = FormatByLayer(tuple(HadaQuant(*bits) for bits in chosen))
                fields = {"bits": BUDGETS[i], "chosen": chosen, "size_at_128": size_at_128(BUDGETS[i])}
                yield f"calibrated, {BUDGETS[i]:g} bits", by_layer, fields
            if i < len(UNIFORM):
                format = REGISTRY[UNIFORM[i]]
                bits = (format.key_bits + format.value_bits) / 2 if isinstance(format, HadaQuant) else None
                yield format.name, format, {"bits": bits, "size_at_128": format.bytes_per_token(128)}

    def bench(self, context: int) -> Bench:
        self.loaded[0].set_attn_implementation(self.stock)
        return Bench(argparse.Namespace(**vars(self.args) | {"context": context}), self.loaded)


def measure(bench: Bench, label: str, format: Format | FormatByLayer, fields: dict, zones: tuple[int, int]) -> dict:
    formats = format.for_layers(len(bench.past))
    size = format.bytes_per_token(bench.past[0][0].shape[3])
    codecs = [(each.key, each.value) for each in formats]
    return bench.measure(label, codecs.__getitem__, zones, size) | fields  # type: ignore[arg-type]


def run(args: argparse.Namespace) -> None:
    begin, rows = time.perf_counter(), Rows(args.out)
    number, count = args.shard
    cells: list[Cell] = [(name, context, zones) for zones in (DEFAULT, OFF) for context in args.contexts for name in args.models]
    cells = cells[number::count]
    calibrated: dict[str, Calibrated] = {}
    for name, context, zones in cells:
        one = argparse.Namespace(**vars(args) | {"model": name})
        if wrong := refused(one):
            print(f"{name} is left out: {wrong}", flush=True)
            continue
        try:
            if name not in calibrated:
                calibrated[name] = Calibrated(one, rows)
                print(f"{time.perf_counter() - begin:.0f} s: {name} is calibrated", flush=True)
            bench = calibrated[name].bench(context)
            for label, format, fields in calibrated[name].formats():
                place = bench.row | {"what": "calibrated", "label": label, "num_sink_tokens": zones[0], "residual_length": zones[1]}
                if Rows.key(place) in rows.known:
                    continue
                if time.perf_counter() - begin > 60 * args.minutes:
                    return print(f"--minutes {args.minutes:g} are over at {name}, {context} tokens", flush=True)
                row = measure(bench, label, format, fields, zones) | {"what": "calibrated", "calibrated_on": "pydoc"}
                rows.append(row)
                print(f"{time.perf_counter() - begin:.0f} s {name} {context} {zones} {label}: {row['kl']:.5f}", flush=True)
        except Exception:  # of one cell: the others go on
            traceback.print_exc()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser, RESULTS, text="stdlib")
    parser.add_argument("--models", nargs="+", default=MODELS, help="as --model, and 'biased' and 'normed', twins of the embedded one")
    parser.add_argument("--contexts", nargs="+", type=at_least(16), default=CONTEXTS, help="tokens of the prompt, read exactly")
    parser.add_argument("--windows", type=at_least(1), default=8, help="texts")
    parser.add_argument("--read-on", type=at_least(2), default=1024, help="tokens of each that are read through the format")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="N/OF", help="measure the Nth part of the cells alone")
    add_views(parser)
    args = parser.parse_args(arguments)
    run_or_show(args, run, markdown, plot)


if __name__ == "__main__":
    main()
