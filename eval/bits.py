"""Measures what bits of keys and values cost, whether the first prompt tells which layers need more bits, and what a mean of
keys that turns with the position gains.
Keys and values of a prompt are stored and dequantized as a cache does it, with its exact zones and with int8 for outlying keys. The
model reads on through them, and the KL divergence from the exact run is a row's number.

bits     one choice for all layers, `keys/values`, with a residual of 64 and of 256 tokens
layers   bits by layer at the same bytes (`calibrate.choose`). The cost of bits comes from the prompt alone (`prompt`: the mean square
         error of attention's output under the prompt's own queries, over the output's root mean square; `error` and `relative`: the
         error itself, and over the mean square); from the prompt of another part of the text (`other`); or from nothing (`random`)
means    the mean of keys as today, or the mean of unrotated keys turned to each position, for keys alone and for whole caches

python eval/bits.py [bits layers means] --model smollm2 --text FILE
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from error_bars import number
from harness import Table, at_least, described, load, name_of, parser_of, present, read_rows, refused, replace_rows, shows
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qkvcache import CompressedCache
from qkvcache.attention.masks import kernel_options
from qkvcache.evaluation.calibrate import Choice, _read, choose, windows_of
from qkvcache.evaluation.quality import compare
from qkvcache.evict.rope import Rope
from qkvcache.formats import HadaQuant
from qkvcache.formats.hadaquant import BITS
from qkvcache.formats.outlying import FAR, outlying
from qkvcache.kernels import Pair
from qkvcache.layers.compressed import CompressedLayer
from qkvcache.releases import passing

UNIFORM = ((2, 2), (2, 4), (3, 2), (4, 2), (3, 3), (4, 3), (4, 4))
BUDGETS = (2.25, 2.5, 3.0, 3.5)
SINKS, RECENT = 4, 64
TRIES = 3
"""Random choices, of which the mean is a row."""


QUERIES = 64
"""Queries under which errors are measured, evenly spaced over the second half of the prompt."""


class RecordingLayer(CompressedLayer):
    """A layer that keeps the prompt and its attention as they came, and stores nothing."""

    def store_pending(self, attention, is_valid=None) -> None:
        self.given, self.pending = self.pending, None
        self.call = attention.query, kernel_options(attention.implementation, attention.query, attention.keywords)["scaling"]


def record(model: PreTrainedModel, ids: Tensor) -> tuple[DynamicCache, list[tuple[Tensor, float]]]:
    """The dense cache of `ids` `[B, T]`, and the queries `[B, Hq, T, D]` of each layer with the factor on `q k`."""
    cache, past = CompressedCache(model.config, format=HadaQuant(2, 2)), DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.__class__ = RecordingLayer
    model(ids, **passing(cache), logits_to_keep=1)
    for index, layer in enumerate(cache.layers):
        past.update(*layer.given, index)
    return past, [layer.call for layer in cache.layers]


class Prompt:
    """A text of which the model has read the first tokens exactly, and what reading on costs."""

    def __init__(self, model, ids: Tensor, context: int):
        self.model, self.rest = model, ids[:, context:]
        self.past, self.calls = record(model, ids[:, :context])
        self.pairs: list[Pair] = [(layer.keys, layer.values) for layer in self.past.layers]
        self.dense = _read(model, self.past, self.rest, {})
        self.stored = {b: self.quantized(HadaQuant(b, b), self.pairs) for b in BITS}
        self.shapes = tuple((key.shape[1], key.shape[3], value.shape[3]) for key, value in self.pairs)

    def quantized(self, format: HadaQuant, pairs: list[Pair], residual_length: int = RECENT) -> list[Pair]:
        """Returns these keys and values as a cache in `format` holds them."""
        cache = CompressedCache(self.model.config, format=format, num_sink_tokens=SINKS, residual_length=residual_length)
        for index, pair in enumerate(pairs):
            cache.update(*pair, index)
        return [layer.dense() for layer in cache.layers]

    def kl(self, pairs: list[Pair]) -> dict:
        """The row of reading on through these keys and values."""
        kls, same = compare(_read(self.model, self.past, self.rest, dict(enumerate(pairs))), self.dense)
        return {"kls": kls.double().mean(1).tolist(), "kl": kls.double().mean().item(), "same_top": same.double().mean().item()}

    def mixed(self, bits: Choice, stored: dict | None = None) -> list[Pair]:
        stored = stored or self.stored
        return [(stored[key][i][0], stored[value][i][1]) for i, (key, value) in enumerate(bits)]

    def errors(self, power: float = 0.5) -> list[list[list[float]]]:
        """The costs of bits by layer and side that the prompt shows, as `calibrate.choose` takes them."""
        found = []
        for (query, scaling), exact, *held in zip(self.calls, self.pairs, *(self.stored[b] for b in BITS), strict=True):
            errors, energy = output_errors(query, scaling, exact, held, RECENT)
            found.append([[error / energy**power for error in side] for side in errors])
        return found


def output_errors(query: Tensor, scaling: float, exact: Pair, held: Sequence[Pair], recent: int) -> tuple[list[list[float]], float]:
    """The mean square error of the output of causal attention with the keys, and with the values, of each of `held`, and the mean
    square of the output. The last `recent` tokens are exact for each query.

    Args:
        query: the queries of the tokens, `[B, Hq, T, D]`.
        scaling: the factor on `q . k`.
        exact: keys and values `[B, H, T, D]`; each of `held` has their shapes.
    """
    key, value = (x.float() for x in exact)
    (rows, heads, tokens, dim), groups = key.shape, query.shape[1] // key.shape[1]
    at = torch.linspace(tokens // 2, tokens - 1, QUERIES, dtype=torch.float32, device=key.device).long()
    query = query[:, :, at].float().reshape(rows, heads, groups * QUERIES, dim) * scaling
    j, i = torch.arange(tokens, dtype=torch.int64, device=key.device), at.repeat(groups)[:, None]
    fresh, hidden = j > i - recent, j > i
    scores = query @ key.mT

    def weights(scores: Tensor) -> Tensor:
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    exact_weights = weights(scores)
    output = exact_weights @ value
    old_weights = exact_weights.masked_fill(fresh, 0)
    of_keys = [weights(torch.where(fresh, scores, query @ k.float().mT)) @ value - output for k, _ in held]
    of_values = [old_weights @ (v.float() - value) for _, v in held]
    return [[error.square().mean().item() for error in side] for side in (of_keys, of_values)], output.square().mean().item()


def turned(rope: Rope, keys: Tensor) -> Tensor:
    """The mean of the unrotated keys `[B, H, T, D]`, turned to the position of each."""
    positions = torch.arange(keys.shape[2]).expand(len(keys), -1)
    mean = rope.rotate(keys, -positions).mean(2, keepdim=True)
    return rope.rotate(mean.expand_as(keys).contiguous(), positions)


def around(prompt: Prompt, bits: tuple[int, int]) -> Iterator[tuple[str, list[Pair]]]:
    """Keys of `bits` around either mean with exact values, and whole caches. Layers with outlying keys stay in int8 unless the mean that
    turns leaves none."""
    rope, today = Rope.of(prompt.model.config), prompt.mixed((bits,) * len(prompt.pairs))
    means = [turned(rope, key) for key, _ in prompt.pairs]
    rests = [(key - mean, value) for (key, value), mean in zip(prompt.pairs, means, strict=True)]
    stored = prompt.quantized(HadaQuant(*bits), rests)
    turning = [(key + mean, value) for (key, _), mean, (_, value) in zip(stored, means, today, strict=True)]
    for name, pairs in (("today", today), ("turning", turning)):
        yield f"{name}, keys", [(key, value) for (key, _), (_, value) in zip(pairs, prompt.pairs, strict=True)]
        yield name, pairs


def measure(args: argparse.Namespace) -> Iterator[dict]:
    model, _, ids = load(args)
    windows = windows_of(ids, 2 * args.windows, args.context + args.read_on)
    about = described(args) | {name: getattr(args, name) for name in ("context", "windows", "read_on")}
    with torch.no_grad():
        prompt = Prompt(model, windows[::2], args.context)
        layers = len(prompt.pairs)
        far = [i for i, (key, _) in enumerate(prompt.pairs) if outlying(key) > FAR]

        def row(study: str, name: str, bits: float, pairs: list[Pair], **more) -> dict:
            return about | {"study": study, "name": name, "bits": bits, "int8_keys": far} | more | prompt.kl(pairs)

        if "bits" in args.studies:
            for residual in (RECENT, 256):
                stored = {b: prompt.quantized(HadaQuant(b, b), prompt.pairs, residual) for b in BITS}
                for key, value in UNIFORM:
                    pairs = prompt.mixed(((key, value),) * layers, stored)
                    yield row("bits", f"{key}/{value}, residual {residual}", (key + value) / 2, pairs)
        if "means" in args.studies:
            for bits in ((4, 4), (3, 3), (2, 2), (4, 2)):
                for name, pairs in around(prompt, bits):
                    yield row("means", f"{bits[0]}/{bits[1]}: {name}", sum(bits) / 2, pairs)
        if "layers" in args.studies:
            other = Prompt(model, windows[1::2], args.context)
            costs = {"prompt": prompt.errors(), "other": other.errors(), "error": prompt.errors(0), "relative": prompt.errors(1)}
            for budget, (name, cost) in product(BUDGETS, costs.items()):
                chosen = choose(cost, prompt.shapes, budget)
                yield row("layers", name, budget, prompt.mixed(chosen), chosen=chosen)
            for budget in BUDGETS:
                tries = [row("layers", "random", budget, prompt.mixed(at_random(seed, layers, budget))) for seed in range(TRIES)]
                yield tries[0] | {name: sum(one[name] for one in tries) / TRIES for name in ("kl", "same_top")}


def at_random(seed: int, layers: int, bits: float) -> Choice:
    """Returns bits for each layer: 2/2, and the rest of the budget bit by bit at random layers and sides."""
    found, source = [2] * (2 * layers), random.Random(seed)
    for _ in range(round((bits - 2) * 2 * layers)):
        found[source.choice([i for i, b in enumerate(found) if b < 4])] += 1
    return tuple(zip(found[::2], found[1::2], strict=True))


def tables(rows: list[dict]) -> Iterator[Table]:
    for study in dict.fromkeys(row["study"] for row in rows):
        chosen = [row for row in rows if row["study"] == study]
        at = [(row["model"], row["text"].split(".")[0], row["context"]) for row in chosen]
        columns = list(dict.fromkeys(at))
        cells = {(row["bits"], row["name"], *column): number(row["kl"]) for row, column in zip(chosen, at, strict=True)}
        lines = [
            [f"{bits:g}", name, *(cells.get((bits, name, *column), "") for column in columns)]
            for bits, name in sorted({cell[:2] for cell in cells})
        ]
        yield Table(["bits", study, *(f"{model}, {text}, {context:,}" for model, text, context in columns)], lines)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "bits", model="smollm2")
    parser.add_argument("studies", nargs="*", default=["bits", "layers", "means"], metavar="bits | layers | means")
    parser.add_argument("--context", type=at_least(512), default=1024, help="tokens of a prompt")
    parser.add_argument("--windows", type=at_least(1), default=2, help="prompts that are measured; as many are other prompts")
    parser.add_argument("--read-on", type=at_least(1), default=64, help="tokens after it")
    args = parser.parse_args(arguments)
    if not shows(args):
        if wrong := refused(args):
            parser.error(wrong)
        for row in measure(args):
            print(row["study"], row["bits"], row["name"], f"{row['kl']:.4f}", flush=True)
            replace_rows(args.out, "bits", [row], "model", "text", "context", "study", "name", "bits")
    present(args, tables([row for row in read_rows(args.out, "bits") if shows(args) or row["model"] == name_of(args.model)]))


if __name__ == "__main__":
    main()
