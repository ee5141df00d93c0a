"""Where the divergence of caches below four bits comes from, and what takes it off at the same bytes; rows in eval/results/keys.jsonl.

    python eval/keys.py [STUDY ...] --device cuda --minutes 6        what is named, or all of them, on SmolLM2 and three small models
    python eval/keys.py where --models demo --windows 1 --context 128 --read-on 64          a try on a CPU
    python eval/keys.py [STUDY ...] --markdown | --plot               from the rows

bits       bits of keys against bits of values, at the same bytes
where      exactness is given back to one side, to one class of tokens: how much of the KL goes away
directions coefficients of a few directions of each head beside the codes, a byte each
outliers   a few tokens of each row and head stay exact
scales     what the scale keeps, and a term for the noise of scores
halves     more bits for the channels, or directions, of more energy
layers     the same for one layer, and one layer alone is quantized
heads      the same for the keys of one head, of the layers that carry most
check      the study against real caches, token by token

What survives, bits by layer, is measured by calibrated.py.

The model reads 8 windows of 2,000 tokens exactly and then 1,024 tokens more, each of which sees those before it as a cache would hand them
back: exact in the zones (4 + 64), from their codes elsewhere, means frozen after the context (`formats.Bench`). What is measured is KL
divergence from the dense run over these tokens. A run that is interrupted goes on where it was: rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from arguments import add_model, add_views, at_least, refused, run_or_show
from formats import DEFAULT, Bench, Sides
from keys_codecs import Directions, Halves, Rounded, mean_of, moments, principal
from keys_tables import markdown, plot
from rows import read_rows
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qkvcache import CompressedCache
from qkvcache.evaluation.prefill import prefill
from qkvcache.evaluation.provenance import provenance
from qkvcache.evaluation.quality import compare, steps
from qkvcache.formats import Codec, Format, HadaQuant
from qkvcache.formats.centered import Centered
from qkvcache.formats.rotated import Rotated

RESULTS = Path(__file__).parent / "results" / "keys.jsonl"
MODELS = ("smollm2", "biased", "normed", "demo")
"""Plain keys with attention sinks; twins of the embedded model; plain keys."""
KEYS, VALUES = 0, 1
BLOCK = 512
"""Queries that are looked at together."""
SHARE = 0.01
"""Of all tokens, how many a class holds, by row and head."""
DISTORTION = {2: 0.1175, 3: 0.03455}
"""Mean squared error of Lloyd-Max levels."""
MOST_HEADS = 5
"""Layers whose heads are looked at."""
Exact = Callable[[int, int], Tensor | bool]
"""What is exact of a layer's keys (0) or values (1): all, nothing, or a mask of tokens bool `[B, H, T, 1]`."""


class Notes(NamedTuple):
    """What the exact attention of one layer shows. `queries`: second moments `[B, H, D, D]`, for the KV heads. Of tokens `[B, H, T]`:
    `far`, distance from the mean of keys of the context; `late` and `soon`, attention of queries more than a residual behind, the mean, and
    of others, the sum."""

    queries: Tensor
    far: Tensor
    late: Tensor
    soon: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor, scaling: float, context: int) -> Notes:
        grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
        return cls(moments(grouped), _distances(key, context), *_received(query, key, scaling))


def _distances(key: Tensor, context: int) -> Tensor:
    return (key - key[:, :, :context].mean(2, keepdim=True)).norm(dim=-1)


class Reader(Bench):
    """A model that has read the windows, and what the dense run shows of its tokens. `exact` are tokens that codes do not touch."""

    def __init__(self, args: argparse.Namespace):
        self.exact: Exact = lambda layer, side: False
        self.noted: list[Notes] | None = None
        self.bases: dict[tuple[int, int, bool], Tensor] = {}
        self.noise = 0.0
        """Share of the energy of a key that its error has and that joins its scores: the exponential of a score with a normal error of
        variance v is exp(v / 2) times too large on average."""
        super().__init__(args)

    def activate(self) -> None:
        """Attention of this reader, among those of several models."""
        ALL_ATTENTION_FUNCTIONS.register("study", self._attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register("study", sdpa_mask)

    def _through(self, codec: Codec | None, x: Tensor, layer: int, side: int) -> Tensor:
        exact = self.exact(layer, side)
        if exact is True:
            return x
        decoded = super()._through(codec, x, layer, side)
        return decoded if exact is False else torch.where(exact, x, decoded)

    def _attention(self, module, query: Tensor, key: Tensor, value: Tensor, mask=None, scaling: float = 1.0, **_) -> tuple[Tensor, None]:
        if self.noted is not None:
            self.noted.append(Notes.of(query, key, scaling, self.context))
        return super()._attention(module, query, key, value, mask, scaling)

    def _scores(self, layer: int, queries: Tensor, keys: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:
        exact, found = super()._scores(layer, queries, keys, decoded)
        if self.noise:
            energy = _distances(keys, self.context)[:, :, None, None].square() / keys.shape[3]
            found = found + self.noise / 2 * queries.square().sum(-1, keepdim=True) * energy
        return exact, found

    @functools.cached_property
    def context_notes(self) -> list[Notes]:
        """Of each layer, when the context is read."""
        found: list[list[Notes]] = [[] for _ in self.past]

        def attention(module, query: Tensor, key: Tensor, *args, scaling: float = 1.0, **options):
            found[module.layer_idx].append(Notes.of(query, key, scaling, self.context))
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, *args, scaling=scaling, **options)

        ALL_ATTENTION_FUNCTIONS.register("study", attention)
        prefill(self.model, self.windows)
        self.activate()
        return [Notes(*map(torch.cat, zip(*parts, strict=True))) for parts in found]

    def basis(self, layer: int, side: int, asked: bool = False) -> Tensor:
        """Directions of keys or values `[B, H, D, D]` of the context, or of keys and queries."""
        if (layer, side, asked) not in self.bases:
            x = self.past[layer][side]
            queries = self.context_notes[layer].queries if asked else None
            self.bases[layer, side, asked] = principal(moments(x - mean_of(x)), queries)
        return self.bases[layer, side, asked]

    def with_directions(self, bits: int, keys: int, values: int, asked: bool) -> Callable[[int], Sides]:
        """`bits` and so many directions for either side."""
        made = [
            (
                Directions(bits, keys, self.basis(layer, KEYS, asked)),
                Directions(bits, values, self.basis(layer, VALUES)) if values else hada(bits, bits)[1],
            )
            for layer in range(self.layers)
        ]
        return made.__getitem__

    @functools.cached_property
    def notes(self) -> list[Notes]:
        """Of each layer, when the rest is read exactly."""
        found: list[Notes] = []
        self.noted, self.noise = found, 0.0
        self.measure("", (None, None), DEFAULT)
        self.noted = None
        return found

    def best(self, scores: list[Tensor], count: int) -> list[Tensor]:
        """Of each layer the `count` tokens of highest score in each row and head, bool `[B, H, T, 1]`, of `[B, H, T]` or fewer tokens;
        none of the sinks, which are exact anyway."""
        masks = []
        for score in scores:
            score = score.clone()
            score[:, :, : DEFAULT[0]] = -torch.inf
            mask = torch.zeros(*score.shape[:2], self.context + self.rest.shape[1], dtype=torch.bool, device=score.device)
            masks.append(mask.scatter_(2, score.topk(min(count, score.shape[2]), dim=2).indices, True).unsqueeze(-1))
        return masks

    def classes(self) -> dict[str, list[Tensor]]:
        """The first tokens after the sinks, those farthest from the mean of keys, those most attended by the tokens that are read on, and
        some drawn at random, as many of each."""
        generator = torch.Generator().manual_seed(0)
        far = [notes.far for notes in self.notes]
        count = max(int(SHARE * far[0].shape[2]), 1)
        scores = {
            "first": [-torch.arange(x.shape[2], device=x.device).expand_as(x).float() for x in far],
            "far": far,
            "attended": [notes.late for notes in self.notes],
            "random": [torch.rand(x.shape, generator=generator).to(x.device) for x in far],
        }
        return {name: self.best(score, count) for name, score in scores.items()}

    def refuses(self, format: Format) -> bool:
        return any(format.refuses(key.shape[3]) for key, _ in self.past)

    @property
    def layers(self) -> int:
        return len(self.past)

    @property
    def kv_heads(self) -> int:
        return self.past[0][0].shape[1]

    @torch.no_grad()
    def through_cache(self, format: Format, zones: tuple[int, int], rows: int, tokens: int) -> Tensor:
        """Log-probabilities after each of `tokens` tokens of `rows` rows, through the cache itself: `[rows, tokens, V]`."""
        self.model.set_attn_implementation(self.stock)
        options = {"num_sink_tokens": zones[0], "residual_length": zones[1]}
        cache = CompressedCache(self.model.config, format=format, max_length=self.context + tokens, **options)
        for i, (key, value) in enumerate(self.past):
            cache.update(key[:rows], value[:rows], i)
        logits = torch.cat(list(steps(self.model, cache, self.rest[:rows, :tokens], 1)), dim=1)
        self.model.set_attn_implementation("study")
        return logits.float().log_softmax(-1)


def _received(query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention that tokens get `[B, H, T]`: the mean of the queries that are more than a residual behind them, and the sum of others."""
    queries, tokens = query.shape[2], key.shape[2]
    j = torch.arange(tokens, device=query.device)
    late, soon = (key.new_zeros(*key.shape[:3]) for _ in range(2))
    grouped = query.unflatten(1, (key.shape[1], -1)) * scaling
    for start in range(0, queries, BLOCK):
        part = grouped[:, :, :, start : start + BLOCK]
        i = torch.arange(start, start + part.shape[3], device=query.device)[:, None] + tokens - queries
        p = (part @ key[:, :, None].mT).masked_fill(j > i, -torch.inf).softmax(-1).sum(2)
        late += (p * (i - j > DEFAULT[1])).sum(2)
        soon += (p * (i - j <= DEFAULT[1])).sum(2)
    return late / (tokens - DEFAULT[1] - 1 - j.clamp_min(tokens - queries - DEFAULT[1] - 1)).clamp_min(1), soon


@dataclass(frozen=True)
class Trial:
    """One measurement: `codecs` of layers, `exact` tokens. `fields` join the row."""

    label: str
    codecs: Sides | Callable[[int], Sides]
    exact: Exact = lambda layer, side: False
    fields: dict = field(default_factory=dict)
    size: float | None = None
    noise: float = 0.0

    def measure(self, reader: Reader, zones: tuple[int, int]) -> dict:
        reader.exact, reader.noise = self.exact, self.noise
        return reader.measure(self.label, self.codecs, zones) | self.fields | {"bytes": self.size}


def hada(key: int, value: int) -> Sides:
    return Centered.of(Rotated(key)), Centered.of(Rotated(value))


def size_of(*bits: float) -> float:
    """Bytes of a token and head at 128 channels."""
    return sum(16 * b + 2 for b in bits)


def bits(reader: Reader) -> Iterator[Trial]:
    for key, value in ((3, 3), (4, 2), (2, 2), (3, 2), (4, 3), (4, 4), (2, 3), (2, 4), (3, 4)):
        yield Trial(f"{key}/{value}", hada(key, value), fields={"bits": [key, value]}, size=size_of(key, value))


def where(reader: Reader) -> Iterator[Trial]:
    classes = reader.classes()
    union = [torch.stack(layer).any(0) for layer in zip(*(classes[name] for name in ("first", "far", "attended")), strict=True)]
    both, sides = (KEYS, VALUES), {"keys": (KEYS,), "values": (VALUES,)}
    for b in (2, 3, 4):
        trial = partial(Trial, codecs=hada(b, b))

        def give(what: str, name: str, masks: list[Tensor] | None, of: tuple[int, ...] = both, b: int = b, trial=trial) -> Trial:
            def exact(layer: int, side: int) -> Tensor | bool:
                return side in of and (True if masks is None else masks[layer])

            return trial(f"{b} bits, exact: {name}, {what}", exact=exact, fields={"bits": b, "class": name, "side": what})

        yield trial(f"{b} bits", fields={"bits": b, "class": "none", "side": "both"})
        for what, of in sides.items():
            yield give(what, "all", None, of)
        for name, masks in classes.items():
            yield give("both", name, masks)
            yield give("keys", name, masks, (KEYS,))
        yield give("both", "three", union)
        yield give("both", "rest", [~mask for mask in union])
        yield give("keys", "rest", [~mask for mask in union], (KEYS,))


def directions(reader: Reader) -> Iterator[Trial]:
    """Beside codes, coefficients of a few directions of each head, a byte each."""
    for b in (2, 3, 4):
        yield Trial(f"{b}/{b}", hada(b, b), fields={"bits": [b, b]}, size=size_of(b, b))
        for k, v in ((4, 0), (2, 0), (3, 1), (2, 2), (4, 4), (8, 0)) if b < 4 else ((4, 0), (2, 2)):
            for asked in (True, False):
                fields = {"bits": [b, b], "directions": [k, v], "queries": asked}
                label = f"{b}/{b}, {k} + {v} directions" + ", of queries too" * asked
                yield Trial(label, reader.with_directions(b, k, v, asked), fields=fields, size=size_of(b, b) + k + v)


def outliers(reader: Reader) -> Iterator[Trial]:
    """A few tokens of each row and head stay exact: `count` of them, keys and values, or keys alone."""
    context, rest = reader.context_notes, reader.notes
    soon = [after.soon + torch.nn.functional.pad(before.soon, (0, after.soon.shape[2] - before.soon.shape[2])) for before, after in
            zip(context, rest, strict=True)]  # fmt: skip
    kinds = {
        "attended in the context": [notes.late for notes in context],
        "attended in the residual": soon,
        "attended later": [notes.late for notes in rest],
        "far": [notes.far for notes in rest],
        "far in the context": [notes.far for notes in context],
    }
    tokens = reader.context + reader.rest.shape[1]
    for b in (2, 3):
        plain = hada(b, b)
        for kind, scores in kinds.items():
            for count in (16, 4, 64):
                masks = reader.best(scores, count)
                for what, sides in (("both", (KEYS, VALUES)), ("keys", (KEYS,))):
                    more = count * 256 * len(sides) / tokens
                    fields = {"bits": [b, b], "kind": kind, "count": count, "side": what, "more_at_32k": count * 256 * len(sides) / 32768}
                    exact = partial(_some, sides, masks)
                    yield Trial(f"{b}/{b}, {count} exact: {kind}, {what}", plain, exact, fields, size_of(b, b) + more)
        masks = reader.best(kinds["attended in the context"], 16)
        for k, v in ((4, 0), (3, 1), (2, 2)):
            codecs = reader.with_directions(b, k, v, True)
            fields = {"bits": [b, b], "kind": "attended in the context", "count": 16, "side": "both", "directions": [k, v]}
            label = f"{b}/{b}, 16 exact: attended in the context, both, {k} + {v} directions, of queries too"
            exact = partial(_some, (KEYS, VALUES), masks)
            yield Trial(label, codecs, exact, fields, size_of(b, b) + k + v + 16 * 512 / tokens)


def _some(sides: tuple[int, ...], masks: list[Tensor], layer: int, side: int) -> Tensor | bool:
    return side in sides and masks[layer]


def scales(reader: Reader) -> Iterator[Trial]:
    """The factor of scales, and what the noise of scores adds to their exponentials."""
    for b in (2, 3):
        error = DISTORTION[b]
        fits = {"least squares": (1 - error) ** 0.5, "length": 1.0, "unbiased": (1 - error) ** -0.5}
        for name, factor in fits.items():
            for noise in (0.0, -error, error):
                codecs = Rounded(b, factor), Rounded(b)
                label = f"{b}/{b}, {name}, noise {noise:+g}"
                yield Trial(label, codecs, fields={"bits": [b, b], "scale": name}, size=size_of(b, b), noise=noise)
        yield Trial(f"{b}/{b}, values by least squares", (Rounded(b), Rounded(b, fits["least squares"])), size=size_of(b, b))


def halves(reader: Reader) -> Iterator[Trial]:
    for b in (2, 3):
        value = hada(b, b)[1]
        orders = {
            "channels": lambda layer: {},
            "channels by queries too": lambda layer: {"queries": reader.context_notes[layer].queries},
            "channels by queries too, weights ^ 1/8": lambda layer: {"queries": reader.context_notes[layer].queries, "power": 1 / 8},
            "channels by queries too, weights ^ 1/16": lambda layer: {"queries": reader.context_notes[layer].queries, "power": 1 / 16},
            "directions": lambda layer: {"basis": reader.basis(layer, KEYS)},
            "directions of queries too": lambda layer: {"basis": reader.basis(layer, KEYS, True)},
        }
        for name, options in orders.items():
            for upper, lower in ((b + 1, b - 1), (b, b)) + (((4, 0),) if b == 2 else ()):
                codecs = [(Halves(upper, lower, **options(layer)), value) for layer in range(reader.layers)]
                fields = {"bits": [b, b], "halves": [upper, lower], "order": name}
                yield Trial(f"{b}/{b}, halves {upper} and {lower}: {name}", codecs.__getitem__, fields=fields, size=size_of(b, b) + 2)


def layers(reader: Reader) -> Iterator[Trial]:
    for b in (3, 2, 4):
        yield Trial(f"{b} bits", hada(b, b), fields={"bits": b})
        for i in range(reader.layers):
            fields = {"bits": b, "layer": i}
            if b < 4:
                yield Trial(f"{b} bits, exact: layer {i}", hada(b, b), lambda layer, side, i=i: layer == i, fields)
            for side, name in ((KEYS, "keys"), (VALUES, "values")):
                alone = partial(_all_but, i, side)
                yield Trial(f"{b} bits, alone: {name} of layer {i}", hada(b, b), alone, fields | {"alone": name})


def _all_but(wanted: int, of: int, layer: int, side: int) -> bool:
    return (layer, side) != (wanted, of)


def heads(reader: Reader) -> Iterator[Trial]:
    rows = [row for row in reader.rows("layers") if "layer" in row and "alone" not in row and row["bits"] == 3]
    chosen = [row["layer"] for row in sorted(rows, key=lambda row: row["kl"])[:MOST_HEADS]]
    which = torch.eye(reader.kv_heads, dtype=torch.bool, device=reader.rest.device)[:, None, :, None, None]
    for b in (3, 2):
        for i in chosen:
            for h in range(reader.kv_heads):

                def exact(layer: int, side: int, i=i, h=h) -> Tensor | bool:
                    return layer == i and side == KEYS and which[h]

                fields = {"bits": b, "layer": i, "head": h}
                yield Trial(f"{b} bits, exact: keys of head {h} of layer {i}", hada(b, b), exact, fields)


def check(reader: Reader) -> Iterator[Trial]:
    for b in (3, 2):
        yield Real(f"{b}/{b}, the cache itself", hada(b, b), fields={"bits": [b, b]})


class Real(Trial):
    """The study and the real cache, on the first rows and tokens."""

    def measure(self, reader: Reader, zones: tuple[int, int]) -> dict:
        b = self.fields["bits"][0]
        rows, tokens = min(2, reader.rest.shape[0]), min(192, reader.rest.shape[1])
        dense = reader.dense[:rows, :tokens]
        reader.codecs, reader.zones, reader.exact = lambda layer: self.codecs, zones, self.exact
        found = reader._read()[:rows, :tokens]
        real = reader.through_cache(HadaQuant(b, b), zones, rows, tokens)
        kls = [compare(x, dense)[0].double().mean(1).tolist() for x in (found, real)]
        between = compare(found, real)[0].double().mean().item()
        fields = {"kls": kls[0], "kls_of_cache": kls[1], "kl": sum(kls[0]) / rows, "kl_of_cache": sum(kls[1]) / rows, "kl_between": between}
        return reader.row | {"label": self.label, "num_sink_tokens": zones[0], "residual_length": zones[1]} | fields | {"tokens": tokens}


STUDIES: dict[str, Callable[[Reader], Iterator[Trial]]] = {
    "bits": bits, "where": where, "directions": directions, "outliers": outliers, "layers": layers,
    "scales": scales, "halves": halves, "heads": heads, "check": check,
}  # fmt: skip


class Rows:
    """Those of a file, to which more are appended as they come. A row is known by its study, label and sizes."""

    def __init__(self, path: Path):
        self.path, self.rows = path, read_rows(path)
        self.known = {self.key(row) for row in self.rows}
        self.same = provenance()

    @staticmethod
    def key(row: dict) -> tuple:
        sizes = ("what", "model", "label", "text", "windows", "context", "read_on", "num_sink_tokens", "residual_length")
        return tuple(row[name] for name in sizes)

    def append(self, row: dict) -> None:
        row = row | self.same
        self.rows.append(row)
        self.known.add(self.key(row))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def run(args: argparse.Namespace) -> None:
    begin, rows, readers, zones = time.perf_counter(), Rows(args.out), {}, tuple(args.zones)
    for study in args.studies or STUDIES:
        for name in args.models:
            if name not in readers:
                one = argparse.Namespace(**vars(args) | {"model": name})
                if wrong := refused(one):
                    print(f"{name} is left out: {wrong}", flush=True)
                    continue
                readers[name] = Reader(one)
                print(f"{time.perf_counter() - begin:.0f} s: {name} has read", flush=True)
            reader = readers[name]
            reader.activate()
            place = {"what": f"keys_{study}"}
            reader.rows = partial(_rows_of, rows, reader)
            try:
                for trial in STUDIES[study](reader):
                    sizes = {"label": trial.label, "num_sink_tokens": zones[0], "residual_length": zones[1]}
                    if Rows.key(reader.row | place | sizes) in rows.known:
                        continue
                    if time.perf_counter() - begin > 60 * args.minutes:
                        return print(f"--minutes {args.minutes:g} are over at {study} of {name}", flush=True)
                    row = trial.measure(reader, zones)
                    rows.append(row | place)
                    print(f"{time.perf_counter() - begin:.0f} s {name} {study} {trial.label}: {row['kl']:.5f}", flush=True)
            except Exception:  # of one study on one model: the others go on
                traceback.print_exc()
            reader.encoded.clear()


def _rows_of(rows: Rows, reader: Reader, study: str) -> list[dict]:
    """Of `study` on the reader's model and windows."""
    same = reader.row | {"what": f"keys_{study}"}
    return [row for row in rows.rows if all(row[name] == same[name] for name in ("what", "model", "text", "windows", "context", "read_on"))]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", choices=[[], *STUDIES], metavar="STUDY", help=" ".join(STUDIES))
    add_model(parser, RESULTS)
    parser.add_argument("--models", nargs="+", default=MODELS, help="as --model, and 'biased' and 'normed', twins of the embedded one")
    parser.add_argument("--context", type=at_least(16), default=2000, help="tokens that are read exactly")
    parser.add_argument("--windows", type=at_least(1), default=8, help="texts")
    parser.add_argument("--read-on", type=at_least(2), default=1024, help="tokens of each that are read through the format")
    parser.add_argument("--zones", nargs=2, type=at_least(0), default=DEFAULT, metavar=("SINKS", "RESIDUAL"), help="exact tokens")
    add_views(parser)
    args = parser.parse_args(arguments)
    studies = args.studies or STUDIES
    run_or_show(args, run, lambda rows: markdown([row for row in rows if row["what"].removeprefix("keys_") in studies]), plot)


if __name__ == "__main__":
    main()
