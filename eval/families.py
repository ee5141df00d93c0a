"""Which families of transformers' models work with a compressed cache, and with which features.

Rows are in eval/results/families.jsonl.

    python eval/families.py                      every family, two processes: writes the rows
    python eval/families.py --only llama,qwen3   these, and prints what they do
    python eval/families.py --check              writes nothing: exit status 1 if a cell became worse than the rows say
    python eval/families.py --markdown           the table of the documentation, from the rows

A family is a tiny model with random weights (`families_models.py`), in fp32 on a CPU. A batch of two prompts, one of
them padded, is read and goes on with given tokens; logits are compared, since greedy tokens of random weights hang on
rounding. The cell of a feature is `=` if the logits (tokens, for beams, prompt lookup, continuous batching) are those of
DynamicCache without the feature, else it says why not.
"""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from families_models import CAUSAL, EXACT, OTHERS, PROMPT, STEPS, Family, by_hand
from harness import Table, parser_of, present, read_rows, replace_rows, shows
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import qkvcache
from qkvcache import CompressedCache, H2OCache, PrefixStore, SinkCache, continuous_batching
from qkvcache.attention import install
from qkvcache.attention.compressed_kv import CompressedKV
from qkvcache.caches.memory import measured
from qkvcache.layers.compressed import CompressedLayer
from qkvcache.progress import track
from qkvcache.releases import passing

PACKAGE = str(Path(qkvcache.__file__).parent)
ROOM, BUDGET = 64, 16
DIFFER = "other tokens"
FORMATS = {"int8": "int8", "4 bits": "turboquant_4bit_nc"}
WORKS, REFUSED, THEIRS, NOTHING, ABSENT, ERROR = "=", "refused", "transformers", "nothing", "-", "ERROR"
COMPRESSED = ("codes", "dequantized")
SYMBOLS = {REFUSED: "r", THEIRS: "t", NOTHING: "0", ABSENT: "", ERROR: "**!**", "codes": "c", "dequantized": "d"}
SHOWN = {
    "identity": "same tokens",
    "int8": "int8",
    "4 bits": "4 bits",
    "padded": "padding",
    "max_length": "`max_length`",
    "turns": "turns",
    "crop": "crop",
    "lookup": "prompt lookup",
    "beams": "beams",
    "prefix": "stored prefix",
    "common prefix": "part of one",
    "route": "`qkvcache` attention",
    "eviction": "eviction",
    "batching": "batching",
    "their batching": "transformers' batching",
}
HEADERS = ["families", "layers", *SHOWN.values(), *(f"bytes, {name}" for name in FORMATS), "set by hand"]
LAYERS = {
    "DynamicLayer": "full",
    "DynamicSlidingWindowLayer": "sliding",
    "LinearAttentionLayer": "linear",
    "DynamicIndexedLayer": "indexed",
    "LinearAttentionAndFullAttentionLayer": "full with a state",
    "LinearAttentionAndSlidingWindowAttentionLayer": "sliding with a state",
}
"""Kinds of transformers' layers; all others are a family's own. A layer without a cache is not named."""
Check = Callable[["Family", Callable[..., Cache]], tuple[Tensor, Tensor]]


def identity(of: Family, cache: Callable[..., Cache]) -> tuple[Tensor, Tensor]:
    return of.generate(of.ids, cache(), of.forced), of.base


def padded(of: Family, cache: Callable[..., Cache]) -> tuple[Tensor, Tensor]:
    return of.generate(of.ids, cache(), of.forced)[1:], of.base_alone


def max_length(of: Family, cache: Callable[..., Cache]) -> tuple[Tensor, Tensor]:
    return of.generate(of.ids, cache(max_length=ROOM), of.forced), of.base


def static(of: Family, **_) -> Cache:
    return of.wrapped(StaticCache(config=of.config, max_cache_len=ROOM))


def turns(of: Family, cache: Callable[..., Cache], crop: int = 0) -> tuple[Tensor, Tensor]:
    """A second prompt that goes on after the answer, or after a part of it that is left."""
    past = cache()
    of.generate(of.ids, past, of.forced)
    past.crop(-crop) if crop else None
    answer = of.forced[: STEPS - crop].expand(2, -1)
    text = torch.cat([of.ids, answer, of.more[:, 20:24]], 1)
    return of.generate(text, past, of.forced), of.generate(text, of.dynamic(), of.forced)


def beams(of: Family, cache: Callable[..., Cache]) -> tuple[Tensor, Tensor]:
    return of.generate(of.ids, cache(), num_beams=3), of.generate(of.ids, of.dynamic(), num_beams=3)


def lookup(of: Family, cache: Callable[..., Cache]) -> tuple[Tensor, Tensor]:
    return of.generate(of.alone, cache(), prompt_lookup_num_tokens=3), of.greedy


def prefix(of: Family, cache: Callable[..., Cache], cut: int = 0) -> tuple[Tensor, Tensor]:
    """A prompt that begins with a stored one, or with a part of it."""
    head = of.ids[:1]
    text = torch.cat([head[:, : PROMPT - cut], of.more[:1, 20:26]], 1)
    want = of.generate(text, of.dynamic(), of.forced)
    if cache == of.dynamic:
        past = cache()
        of.model(head, **passing(past))
        past.crop(-cut) if cut else None
        return of.generate(text, past, of.forced), want
    store = PrefixStore(of.model, max_bytes=2**24, format="identity", min_match_tokens=8, checkpoint_interval=8, **EXACT)
    with store.reuse(head) as past:
        of.generate(head, past, of.forced)
    with store.reuse(text) as past:
        got = of.generate(text, past, of.forced)
    return got if store.stats.tokens_reused else torch.empty(0), want


def batched(of: Family) -> Tensor:
    """The greedy tokens of continuous batching beside another request, with the model's own `generate_batch`."""
    config = GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pool = ContinuousBatchingConfig(page_size=64, num_blocks=8, max_batch_tokens=128)
    asked = [of.alone[0].tolist(), of.ids[0].tolist()]
    options = {"generation_config": config, "continuous_batching_config": pool, "progress_bar": False}
    found = of.model.generate_batch(asked, **options)
    first = found[min(found)]
    if first.error:
        raise RuntimeError(first.error)
    return torch.tensor([first.generated_tokens])


def batching(of: Family, cache: Callable[..., Cache]) -> tuple[Tensor, Tensor]:
    attention = of.model.config._attn_implementation
    try:
        if cache == of.dynamic:
            return batched(of), of.greedy
        with continuous_batching(of.model, "identity", **EXACT):
            return batched(of), of.greedy
    finally:
        of.model.set_attn_implementation(attention)


CHECKS: dict[str, Check] = {
    "identity": identity,
    "padded": padded,
    "max_length": max_length,
    "turns": turns,
    "crop": functools.partial(turns, crop=3),
    "lookup": lookup,
    "beams": beams,
    "prefix": prefix,
    "common prefix": functools.partial(prefix, cut=10),
    "batching": batching,
}
DECODERS = ("turns", "crop", "lookup", "prefix", "common prefix", "batching")
"""Checks of models without an encoder."""


def is_refusal(error: Exception) -> bool:
    """Whether this library says what it does not do."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, NotImplementedError | ValueError | TypeError) and last.startswith(PACKAGE)


def difference(got: Tensor, want: Tensor) -> str | None:
    """How they differ, None if they do not."""
    if not got.numel():
        return NOTHING
    if not got.is_floating_point():
        return None if torch.equal(got, want) else DIFFER
    nan = 0 if torch.equal(got.isnan(), want.isnan()) else torch.inf
    worst = (got - want).abs().nan_to_num(nan).max() / want.abs().nan_to_num().max()
    return None if worst <= 1e-3 else f"{DIFFER}: logits by {worst:.1g} of the largest"


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def attempt(check: Callable[[], tuple[Tensor, Tensor]]) -> str | None:
    """Return the message of what is wrong, or None."""
    try:
        return difference(*check())
    except TimeoutError:
        raise
    except Exception as error:
        said = described(error)
        return f"{REFUSED}: {said}" if is_refusal(error) else said


def cell(of: Family, check: Check) -> tuple[str, str | None]:
    """The cell of a check, and what was said."""
    ours = attempt(lambda: check(of, of.cache))
    if ours is None:
        return WORKS, None
    theirs = attempt(lambda: check(of, functools.partial(static, of) if check is max_length else of.dynamic))
    if theirs is not None and (theirs.startswith(DIFFER) or not ours.startswith(DIFFER)):
        return THEIRS, theirs
    return next((kind for kind in (NOTHING, REFUSED) if ours.startswith(kind)), ERROR), ours


@contextmanager
def dequantized() -> Iterator[list[int]]:
    """The tokens of each layer that is dequantized as a whole."""
    found: list[int] = []
    dense = CompressedKV.dense

    def counted(self: CompressedKV) -> Tensor:
        found.append(self.side.shape[2])
        return dense(self)

    with mock.patch.object(CompressedKV, "dense", counted):
        yield found


def compressed(of: Family, format: str) -> tuple[str, str | None, float]:
    """How a format is attended to, what was said, and the bytes of self-attention's cache over DynamicCache's."""
    cache, dynamic = of.cache(format=format), of.dynamic()
    with dequantized() as tokens:
        wrong = attempt(lambda: (of.generate(of.ids, of.cache(format=format), of.forced).isfinite(), of.base.isfinite()))
    if wrong is not None:
        return REFUSED if wrong.startswith(REFUSED) else ERROR, wrong, 0.0
    own, dense = (x.self_attention_cache if of.encodes else x for x in (cache, dynamic))
    if any(isinstance(layer, CompressedLayer) for layer in own.layers):
        how = "dequantized" if len(set(tokens)) > 1 else "codes"  # at more steps than the prompt's
    else:
        how = NOTHING
    wrong = attempt(lambda: (of.generate(of.long, cache, of.forced), of.generate(of.long, dynamic, of.forced)))
    both = wrong is None or wrong.startswith(DIFFER)
    return how, None, own.nbytes / measured(dense.layers).total if both else 0.0


def evicting(of: Family, padding: bool) -> tuple[str, str | None]:
    """Rows that evict are the same beside a padded one and alone."""
    layers = CompressedCache(of.model.config, format="identity").layers
    if not any(isinstance(layer, CompressedLayer) for layer in layers):
        return NOTHING, None
    for kind in (functools.partial(H2OCache, budget=BUDGET), functools.partial(SinkCache, window_length=BUDGET - 4)):

        def rows(kind=kind) -> tuple[Tensor, Tensor]:
            alone = of.generate(of.alone, of.wrapped(kind(of.model.config)), of.forced)
            return of.generate(of.ids, of.wrapped(kind(of.model.config)), of.forced)[1:] if padding else alone, alone

        if (wrong := attempt(rows)) is not None:
            refused = "H2O" if kind.func is SinkCache else REFUSED
            return refused if wrong.startswith(REFUSED) else ERROR, wrong
    return WORKS, None


def routed(of: Family, name: str) -> tuple[str, str | None]:
    """With `attn_implementation="qkvcache"` logits are those of the model's own, with DynamicCache and with compressed layers."""

    def logits(cache: str) -> tuple[Tensor, Tensor]:
        install()
        other = Family(name, "qkvcache")
        return other.generate(of.ids, getattr(other, cache)(), of.forced), of.base

    wrong = attempt(lambda: logits("dynamic")) or attempt(lambda: logits("cache"))
    return WORKS if wrong is None else REFUSED if wrong.startswith(REFUSED) else ERROR, wrong


def cells(name: str) -> dict[str, Any]:
    """The cells of a family and, in `said`, why they are not `=`; `absent`: why transformers does not run it."""
    row: dict[str, Any] = {"family": name, "said": {}}
    try:
        row["by hand"] = by_hand(name)
        of = Family(name)
        if again := difference(of.generate(of.ids, of.dynamic(), of.forced), of.base):
            return row | {"absent": f"DynamicCache does not repeat itself: {again}"}
        layers = DynamicCache(config=of.config).layers
    except TimeoutError:
        raise
    except Exception as error:
        return row | {"absent": described(error)}
    row |= {"attention": of.model.config._attn_implementation, "layers": [type(layer).__name__ for layer in layers]}

    def put(feature: str, what: str, said: str | None = None) -> None:
        row[feature] = what
        row["said"] |= {feature: said} if said else {}

    for feature, check in CHECKS.items():
        put(feature, *((ABSENT,) if of.encodes and feature in DECODERS else cell(of, check)))
    for feature, format in FORMATS.items():
        how, said, row[f"bytes, {feature}"] = compressed(of, format)
        put(feature, how, said)
    put("route", *routed(of, name))
    put("eviction", *evicting(of, row["padded"] == WORKS))
    theirs = None if of.encodes else attempt(lambda: batching(of, of.dynamic))
    put("their batching", ABSENT if of.encodes else THEIRS if theirs else WORKS, theirs)
    return row


def measure(name: str, seconds: int = 600) -> dict[str, Any]:
    """`cells` in a process of its own."""

    def late(*_) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    gc.freeze()  # continuous batching collects garbage again and again
    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        return cells(name)
    except TimeoutError as error:
        return {"family": name, "said": {}, "absent": str(error)}
    finally:
        signal.alarm(0)


def worse(row: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """The cells that worked before, and do not now."""
    worked = [name for name in SHOWN if before.get(name) in (WORKS, *COMPRESSED)]
    return [f"{row['family']}, {name}: {row.get(name)}" for name in worked if row.get(name) != before[name]]


def claim(rows: list[dict[str, Any]]) -> str:
    """The claim about the families that transformers runs with a DynamicCache."""
    runs = [row for row in rows if "absent" not in row]
    same = [row for row in runs if row["identity"] == WORKS]
    (causal, works), (others, others_work) = (
        [sum((row["family"] in CAUSAL) == of for row in some) for some in (runs, same)] for of in (True, False)
    )
    compressed = sum(row["family"] in CAUSAL and row["int8"] in COMPRESSED for row in same)
    return (
        f"{works} of the {causal} families of causal language models run, {compressed} compressed; "
        f"so do {others_work} of {others} vision, speech and encoder-decoder models"
    )


def table(rows: list[dict[str, Any]]) -> Table:
    """Families whose cells are alike share a line."""
    lines: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    rows = sorted(rows, key=lambda row: row["family"].lower())
    for row in rows:
        if "absent" not in row:
            kinds = sorted({LAYERS.get(kind, "own") for kind in row["layers"] if kind != "DummyLayer"})
            cells = (SYMBOLS.get(row[name], row[name]) for name in SHOWN)
            lines.setdefault((" + ".join(kinds), *cells), []).append(row)
    found = []
    for cells, alike in sorted(lines.items(), key=lambda line: -len(line[1])):
        sizes = (between([row[f"bytes, {name}"] for row in alike]) for name in FORMATS)
        changed = "; ".join(f"{row['family']}: {', '.join(row['by hand'])}" for row in alike if row["by hand"])
        found.append([", ".join(row["family"] for row in alike), *cells, *sizes, changed])
    missing = ", ".join(row["family"] for row in rows if "absent" in row)
    end = f"Not built or not run with a DynamicCache by transformers itself: {missing}." if missing else ""
    return Table(HEADERS, found, caption=end, rule=("---", "---", ":-:"))


def between(sizes: list[float]) -> str:
    """Empty for what is refused."""
    low, high = (f"{size:.2f}".lstrip("0") for size in (min(sizes), max(sizes)))
    return "" if not max(sizes) else low if low == high else f"{low} to {high}"


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "families")
    parser.add_argument("--only", nargs="+", choices=[*CAUSAL, *OTHERS], default=[*CAUSAL, *OTHERS], metavar="FAMILY")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a cell became worse")
    args = parser.parse_args(arguments)
    if shows(args):
        return present(args, [table(read_rows(args.out))])
    before, rows, found = {row["family"]: row for row in read_rows(args.out)}, [], []
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        done = as_completed([pool.submit(measure, name) for name in args.only])
        for future in track(done, "families", len(args.only)):
            rows.append(row := future.result())
            if args.check:
                found += worse(row, before.get(row["family"], {}))
            else:
                replace_rows(args.out, "families", [row], "family")
    if len(rows) < 10:
        print(table(rows).markdown(), *(f"{row['family']}, {name}: {x}" for row in rows for name, x in row["said"].items()), sep="\n")
    if found:
        sys.exit("\n".join(["worse than the rows say:", *found]))


if __name__ == "__main__":
    main()
