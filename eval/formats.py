"""Quality of every format at its bytes, on any model; rows in eval/results/formats.jsonl.

    python eval/formats.py [STUDY ...] [--model NAME]               what is named, or all of them, on the embedded model or on this one
    python eval/formats.py quality --model smollm2 --context 1000 --windows 4 --read-on 48          a real one: minutes on two cores
    python eval/formats.py quality --model smollm2 --device cuda --context 8064 --windows 12 --read-on 128
    python eval/formats.py --show | --markdown | --plot             tables | the png, from the rows

quality   KL divergence and perplexity of every format, exact zones off and at their defaults.
ablation  what each part of HadaQuant brings: rotated values, means, an equalizer, bits for either side; where a mean comes from.
frozen    statistics of the text itself against statistics of other prompts, which many requests share in continuous batching.
recall    of 10 facts in the context, through real caches, zones off.

The model reads 8 windows of 2,000 tokens (or others) exactly, and then 96 tokens more, each of which sees those before it as a cache would
hand them back: exact in the zones, from their codes elsewhere, means frozen after the context. All 96 are read in one pass, in which
attention chooses token by token, so that a format takes seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from arguments import TEXTS, add_model, at_least, described, in_time, load, name_of, refused
from error_bars import share_error, standard_error
from formats_tables import markdown, markdown_frozen, plot, show
from rows import read_rows, replace_rows
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qkvcache import CompressedCache
from qkvcache.evaluation.prefill import prefill
from qkvcache.evaluation.quality import Passages, RecallSet, compare, divergence, recall
from qkvcache.evaluation.recall import CODE_WORD, NUMBER
from qkvcache.formats import NVFP4, REGISTRY, Codec, Codes, Format, QuantizedValues
from qkvcache.formats.base import Buffer
from qkvcache.formats.centered import Centered
from qkvcache.formats.rotated import Rotated

RESULTS = Path(__file__).parent / "results" / "formats.jsonl"
CASES = 10
HELD = 2**32
"""Elements of decoded tokens that are held for later trials of the same codecs."""
OFF, DEFAULT = (0, 0), (4, 64)
VARIANTS = ("_token", "_tensor", "_frozen", "_asymmetric", "_group", "_e5m2")
"""How names end that differ from others in a scale or in the kind of a float alone."""
QUALITY = [name for name in REGISTRY if not name.endswith(VARIANTS) and name != "identity"]
RECALL = [
    "turboquant_4bit_nc", "hadaquant_k4v4", "turboquant_3bit_nc", "hadaquant_k3v3",
]  # fmt: skip
FROZEN = ["int8", "turboquant_4bit_nc", "hadaquant_k4v4", "hadaquant_k3v3"]
"""Formats with a mean."""
Sides = tuple[Codec | None, Codec | None]
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]


@dataclass(frozen=True)
class Trial(Codec):
    """`codec` of `(x - mean) / s`, with `s` the channels' spread to `power`, in pairs as RoPE has them; the mean over the first
    `tokens`, or the last if that is negative, or all."""

    codec: Codec
    tokens: int = 0
    power: float = 0.0

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (*self.codec.buffers(head_dim), *(Buffer(name, torch.float32, head_dim, "scales", tokens="once") for name in ("mean", "s")))

    def calibrate(self, x: Tensor, is_valid: Tensor | None = None) -> Codes:
        part = x[:, :, self.tokens :] if self.tokens < 0 else x[:, :, : self.tokens or None]
        mean = part.mean(2, keepdim=True)
        spread = (x - mean).square().mean(2, keepdim=True).unflatten(-1, (2, -1)).mean(-2).sqrt().repeat(1, 1, 1, 2)
        s = spread.clamp_min(1e-6) ** self.power
        return {"mean": mean, "s": s / s.log().mean(-1, keepdim=True).exp()}

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        return self.codec.quantize((x - statistics["mean"]) / statistics["s"], statistics)

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return QuantizedValues(self.codec.dequantize(codes, head_dim) * codes["s"] + codes["mean"])


class Bench:
    """A model that has read the windows; `codecs` of a layer and `zones` are what its attention reads the rest through."""

    def __init__(self, args: argparse.Namespace, loaded: Loaded | None = None):
        """`loaded`: what `load(args)` returns."""
        self.row = described(args) | {"windows": args.windows, "context": args.context, "read_on": args.read_on}
        self.name, self.context = name_of(args.model), args.context
        self.form = CODE_WORD if args.model == "demo" else NUMBER
        self.model, self.tokenizer, self.ids = loaded or load(args)
        apart, length = len(self.ids) // args.windows, args.context + args.read_on
        if length > apart:
            raise ValueError(f"{args.windows} windows of {length:,} tokens need a longer text than {len(self.ids):,} tokens")
        windows = torch.tensor([self.ids[i * apart : i * apart + length] for i in range(args.windows)], device=self.model.device)
        self.rest = windows[:, args.context :]
        self.codecs: Callable[[int], Sides] = lambda layer: (None, None)
        self.zones = OFF
        self.calibration: Callable[[Tensor, int, int], Tensor] = lambda past, layer, side: past
        """The keys (0) or values (1) of a layer that statistics come from, `[B or 1, H, T, D]`; of the context itself unless replaced."""
        self.encoded: dict[tuple[Codec, int, int], tuple[Codes, Tensor]] = {}
        self.windows = windows[:, : args.context]
        self.past = [(layer.keys, layer.values) for layer in prefill(self.model, self.windows)[0].layers]
        self.stock = self.model.config._attn_implementation
        ALL_ATTENTION_FUNCTIONS.register("study", self._attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register("study", sdpa_mask)
        self.model.set_attn_implementation("study")
        self.dense = self._read()

    @torch.no_grad()
    def _read(self) -> Tensor:
        cache = DynamicCache(config=self.model.config)
        for i, (key, value) in enumerate(self.past):
            cache.update(key, value, i)
        return self.model(self.rest, past_key_values=cache).logits.float().log_softmax(-1)

    def _through(self, codec: Codec | None, x: Tensor, layer: int, side: int) -> Tensor:
        """What a cache hands back of `x`, of which all but the last tokens are encoded once for all trials."""
        if codec is None:
            return x
        dim, past = x.shape[3], x[:, :, : self.context]
        if (codec, layer, side) not in self.encoded:
            if sum(decoded.numel() for _, decoded in self.encoded.values()) > HELD:
                self.encoded.clear()
            statistics = codec.calibrate(self.calibration(past, layer, side))
            parts = [codec.dequantize(codec.quantize(part, statistics) | statistics, dim) for part in past.split(500, dim=2)]
            self.encoded[codec, layer, side] = statistics, torch.cat(parts, dim=2)
        statistics, decoded = self.encoded[codec, layer, side]
        return torch.cat([decoded, codec.dequantize(codec.quantize(x[:, :, self.context :], statistics) | statistics, dim)], dim=2)

    def _attention(self, module, query: Tensor, key: Tensor, value: Tensor, mask=None, scaling: float = 1.0, **_) -> tuple[Tensor, None]:
        queries, tokens = query.shape[2], key.shape[2]
        j = torch.arange(tokens, device=query.device)
        i = j[-queries:, None]
        exact = (i - j <= self.zones[1]) | (j < self.zones[0])
        sides = [(x, self._through(codec, x, module.layer_idx, n)) for n, (codec, x) in
                 enumerate(zip(self.codecs(module.layer_idx), (key, value), strict=True))]  # fmt: skip
        grouped = query.unflatten(1, (key.shape[1], -1)) * scaling
        scores = self._scores(module.layer_idx, grouped, *sides[0])
        p = torch.where(exact, *scores).masked_fill(j > i, -1e30).softmax(-1)
        out = (p * exact) @ sides[1][0][:, :, None] + (p * ~exact) @ sides[1][1][:, :, None]
        return out.flatten(1, 2).transpose(1, 2).contiguous(), None

    def _scores(self, layer: int, queries: Tensor, keys: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, H, G, Q, T]` each, of queries `[B, H, G, Q, D]` with keys as they are and as they are handed back, `[B, H, T, D]`."""
        return queries @ keys[:, :, None].mT, queries @ decoded[:, :, None].mT

    def measure(self, label: str, codecs: Sides | Callable[[int], Sides], zones: tuple[int, int] = OFF, size: int | None = None) -> dict:
        self.codecs, self.zones = codecs if callable(codecs) else lambda layer: codecs, zones
        found, target = self._read(), self.rest[:, 1:, None]
        kls, same = (x.double().mean(1).cpu() for x in compare(found, self.dense))
        counted = self.rest.numel()
        losses, before = (-x[:, :-1].gather(-1, target).double().mean((1, 2)).cpu() for x in (found, self.dense))
        return self.row | {
            "label": label, "num_sink_tokens": zones[0], "residual_length": zones[1], "bytes": size,
            "kl": kls.mean().item(), "kl_error": standard_error(kls), "kls": kls.tolist(),
            "same_top": same.mean().item(), "same_top_error": max(standard_error(same), share_error(same.mean().item() * counted, counted)),
            "perplexity": losses.mean().exp().item(), "dense_perplexity": before.mean().exp().item(),
            "perplexity_ratio": (ratio := (losses - before).mean().exp().item()),
            "perplexity_ratio_error": ratio * standard_error(losses - before),
        }  # fmt: skip

    def format(self, format: Format, zones: tuple[int, int]) -> dict:
        return self.measure(format.name, (format.key, format.value), zones, format.bytes_per_token(self.past[0][0].shape[3]))


def quality(bench: Bench) -> Iterator[dict]:
    for format in map(REGISTRY.__getitem__, QUALITY):
        if any(format.refuses(key.shape[3]) for key, _ in bench.past):
            continue
        for zones in (OFF, DEFAULT):
            yield bench.format(format, zones)


def ablation(bench: Bench) -> Iterator[dict]:
    seed, bare = REGISTRY["turboquant_4bit_nc_uncentered"], {bits: Rotated(bits) for bits in (2, 3, 4)}
    center = {bits: Centered.of(codec) for bits, codec in bare.items()}
    last = len(bench.past) - 1
    steps: list[tuple[str, Sides]] = [
        ("4bit_nc", (seed.key, seed.value)),
        ("4bit_nc, key mean", (center[4], seed.value)),
        ("rotated values", (bare[4], bare[4])),
        ("rotated values, key mean", (center[4], bare[4])),
        ("rotated values, key and value mean", (center[4], center[4])),
        ("and an equalizer of keys, spread ^ 1/2", (Trial(bare[4], power=0.5), center[4])),
        ("and an equalizer of keys, spread ^ 1/4", (Trial(bare[4], power=0.25), center[4])),
        ("key mean of the first 64 tokens", (Trial(bare[4], 64), center[4])),
        ("key mean of the last 64 tokens", (Trial(bare[4], -64), center[4])),
        ("key mean of the first token", (Trial(bare[4], 1), center[4])),
        ("keys alone, 4 bits", (center[4], None)),
        ("values alone, 4 bits", (None, center[4])),
        ("keys alone, 3 bits", (center[3], None)),
        ("values alone, 3 bits", (None, center[3])),
    ]
    steps += [(f"bits {k} / {v}", (center[k], center[v])) for k, v in ((4, 3), (3, 4), (3, 3), (4, 2), (3, 2), (2, 3), (2, 2))]
    for label, codecs in steps:
        yield bench.measure(label, codecs)
    for zones in ((4, 0), (0, 16), (0, 64), (4, 128)):
        yield bench.measure(f"4 / 4, exact {zones[0]} + {zones[1]}", (center[4], center[4]), zones)
    for first, end in ((True, True), (True, False), (False, True)):
        label = "4 / 4, exact layers: " + " and ".join(name for name, on in (("first", first), ("last", end)) if on)
        exact = {n for n, on in ((0, first), (last, end)) if on}
        yield bench.measure(label, lambda layer, exact=exact: (None, None) if layer in exact else (center[4], center[4]))
    plain, found = NVFP4("amax", center=False), NVFP4("mse")
    for label, key, value in (
        ("nvfp4", plain, plain),
        ("nvfp4, key mean", NVFP4("amax"), plain),
        ("nvfp4, searched", NVFP4("mse", center=False), found),
    ):
        yield bench.measure(label, (key.key, value.value))
    yield bench.measure("nvfp4, searched, key mean", (found.key, found.value))


def recalls(bench: Bench) -> Iterator[dict]:
    bench.model.set_attn_implementation(bench.stock)
    options = {"form": bench.form}
    cases = {
        seen: RecallSet.make(bench.model, bench.tokenizer, bench.ids, bench.context, CASES, seen=seen, **options) for seen in (False, True)
    }
    passages = Passages.read(bench.model, torch.cat([bench.windows[:1], bench.rest[:1]], dim=1), bench.context)
    for format in [None, *map(REGISTRY.get, RECALL)]:

        def factory(format=format):
            if format is None:
                return DynamicCache(config=bench.model.config)
            return CompressedCache(bench.model.config, format=format, num_sink_tokens=0, residual_length=0)

        found = {
            f"recall_{'seen' if seen else 'unseen'}": recall(bench.model, bench.tokenizer, held, factory) for seen, held in cases.items()
        }
        row = bench.row | {"label": "dense" if format is None else format.name, "cases": CASES} | found
        yield row | ({} if format is None else {"kl_token_by_token": divergence(bench.model, passages, factory).kl})


def frozen(bench: Bench) -> Iterator[dict]:
    """A mean that is frozen for all requests: from the text itself, from one prompt of the same kind, from its first tokens, and from a
    prompt of another kind."""
    stock, other = bench.model.config._attn_implementation, "stdlib" if bench.row["text"] != "stdlib" else "pydoc"
    bench.model.set_attn_implementation(bench.stock)
    ids = bench.tokenizer(TEXTS[other](), add_special_tokens=False, verbose=False)["input_ids"][: bench.context]
    foreign = prefill(bench.model, torch.tensor([ids], device=bench.model.device))[0].layers
    bench.model.set_attn_implementation(stock)
    sources: dict[str, Callable[[Tensor, int, int], Tensor]] = {
        "its own context": lambda past, layer, side: past,
        "another prompt of the text": lambda past, layer, side: past.roll(1, 0),
        "64 tokens of another prompt": lambda past, layer, side: past.roll(1, 0)[:, :, :64],
        f"a prompt of {other}": lambda past, layer, side: (foreign[layer].keys, foreign[layer].values)[side],
    }
    for name in FROZEN:
        format = REGISTRY[name]
        for source, tokens in sources.items():
            bench.encoded.clear()
            bench.calibration = tokens
            for zones in (OFF, DEFAULT):
                row = bench.measure(f"{name}, mean of {source}", (format.key, format.value), zones)
                yield row | {"format": name, "source": source}
    bench.encoded.clear()
    bench.calibration = sources["its own context"]


STUDIES: dict[str, Callable[[Bench], Iterator[dict]]] = {
    "quality": quality, "ablation": ablation, "frozen": frozen, "recall": recalls
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", choices=[[], *STUDIES], metavar="STUDY", help=" ".join(STUDIES))
    add_model(parser, RESULTS)
    parser.add_argument("--context", type=at_least(100), default=2000, help="tokens that are read exactly")
    parser.add_argument("--windows", type=at_least(1), default=8, help="texts")
    parser.add_argument("--read-on", type=at_least(2), default=96, help="tokens of each that are read through the format")
    parser.add_argument("--show", action="store_true", help="the tables, from the rows")
    parser.add_argument("--markdown", action="store_true", help="the table of --model's quality, or of frozen statistics, from the rows")
    parser.add_argument("--plot", action="store_true", help="the picture, from the rows")
    args = parser.parse_args(arguments)
    if args.plot:
        plot(read_rows(args.out), args.out.with_suffix(".png"))
    elif args.markdown:
        rows = read_rows(args.out)
        return print(markdown_frozen(rows) if args.studies == ["frozen"] else markdown(rows, name_of(args.model)))
    elif not args.show:
        if wrong := refused(args):
            parser.error(wrong)
        begin = time.perf_counter()
        bench = Bench(args)
        for study in args.studies or STUDIES:
            rows = []
            for row in in_time(STUDIES[study](bench), args.minutes, begin):
                numbers = {k: round(row[k], 5) for k in ("kl", "kl_error", "recall_unseen", "recall_seen") if k in row}
                print(time.strftime("%H:%M:%S"), bench.name, row["label"], numbers, flush=True)
                rows.append(row)
                replace_rows(args.out, f"formats_{study}_{bench.name}", rows)
    show(read_rows(args.out))


if __name__ == "__main__":
    main()
