"""`calibrate`: a choice of bits for the keys and values of each layer by their cost in this model.

The model reads windows of a text exactly. Then the keys or the values of one layer are quantized with 2, 3 or 4 bits
and dequantized (`CompressedLayer.dense`, exact zones as in a cache), all others stay exact, and the model reads on. The
cost of these bits is the KL divergence from the exact run over the tokens read on. Costs of layers and sides add up
(`eval/results/keys.jsonl`), so that the best bits under a budget of bytes are a knapsack problem, which is solved
exactly.

A calibration runs the model `6 L + 5` times over `windows * read_on` tokens, for `L` full-attention layers.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer

from .. import demo
from ..formats import FormatByLayer, HadaQuant
from ..formats.base import check_count
from ..formats.hadaquant import BITS
from ..kernels import Pair
from ..layers.compressed import CompressedLayer
from ..releases import passing
from .provenance import provenance
from .quality import compare, prefill

SIDES = ("keys", "values")
Choice = tuple[tuple[int, int], ...]
"""Bits of keys and of values of each layer."""


@dataclass(frozen=True)
class Calibration:
    """The costs of bits, and the choice under a budget.

    Args:
        costs: `costs[layer][side][bits - 2]`, the KL divergence in nats when only the keys (side 0) or values (1) of
            this layer are quantized.
        shapes: KV heads, and channels of a key and of a value, of each layer.
        bits: the chosen bits of keys and of values of each layer.
        kl: the KL divergence with all layers in the chosen bits, measured on the text of the calibration.
        kl_uniform: the KL divergence with 2, 3 and 4 bits for all layers and sides, by bits.
        about: the origin: model, sizes, date, versions.
    """

    costs: tuple[tuple[tuple[float, ...], ...], ...]
    shapes: tuple[tuple[int, int, int], ...]
    bits: Choice
    kl: float
    kl_uniform: dict[int, float]
    about: dict[str, object]

    @property
    def format(self) -> FormatByLayer:
        """The value for `format=` of a cache."""
        return FormatByLayer(tuple(HadaQuant(*bits) for bits in self.bits))  # type: ignore[arg-type]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token and head, keys and values together, as the mean over the heads of all layers."""
        sizes = [
            HadaQuant(*chosen).bytes_per_token(key_dim, heads, value_dim)  # type: ignore[arg-type]
            for (heads, key_dim, value_dim), chosen in zip(self.shapes, self.bits, strict=True)
        ]
        return sum(sizes) / sum(heads for heads, *_ in self.shapes)

    def as_json(self) -> dict:
        names = [format.name for format in self.format.formats]
        measured = {name: getattr(self, name) for name in ("bytes_per_token", "bits", "kl", "kl_uniform", "costs", "shapes")}
        return {"formats": names} | measured | self.about

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibration file, which caches take as `format=path`."""
        self.format.save(path, **{name: value for name, value in self.as_json().items() if name != "formats"})


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    text: PreTrainedTokenizerBase | Tensor | Sequence[int],
    *,
    bits: float = 3.0,
    context: int = 1024,
    windows: int = 4,
    read_on: int = 128,
    num_sink_tokens: int = 4,
    residual_length: int = 64,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Measures the cost of 2, 3 and 4 bits for the keys and values of each full-attention layer, and chooses
    the bits of each.

        calibration = calibrate(model, tokenizer, bits=3)
        calibration.save("calibrated.json")
        model.generate(**inputs, cache=CompressedCache(model.config, format="calibrated.json"))

    Args:
        model: a decoder, in float32: the rounding of a model in 16 bits exceeds the cost of 4 bits.
        text: token ids `[T]`, or the tokenizer, which then reads the language reference of Python (`demo.text`).
        bits: the budget in bits of a channel, as the mean over keys and values of all layers, 2 to 4. At head_dim 128,
            3 bits are 100 bytes of a token and head, keys and values together.
        context: tokens of each window that are read exactly and stored.
        windows: number of pieces of the text, evenly spaced.
        read_on: tokens of each window, after the context, over which the divergence is measured.
        num_sink_tokens, residual_length: as CompressedCache takes them. The choice is for caches with exact zones: without a residual,
            the layers that read the most recent tokens matter most, and one format for all layers loses less
            (`eval/results/calibrated.jsonl`).
        progress: a function that is called with the number of finished runs of the model and the number of all runs.

    Raises:
        ValueError: a budget below 2 or above 4 bits, a text that is too short, a model without full attention, a head_dim
            that the formats cannot hold.
        TypeError: a `text` of another type, a size that is not a number.
        NotImplementedError: an encoder-decoder.
    """
    if isinstance(bits, bool) or not isinstance(bits, int | float):
        raise TypeError(f"bits must be a number, got {bits!r}")
    if not 2 <= bits <= 4:
        raise ValueError(f"bits={bits}: must be 2 to 4 bits a channel")
    for name, count in (("context", context), ("windows", windows), ("read_on", read_on)):
        check_count(name, count, 1)
    check_count("num_sink_tokens", num_sink_tokens)
    check_count("residual_length", residual_length, 1)
    if context <= num_sink_tokens + residual_length:
        raise ValueError(f"context={context}: must be more than num_sink_tokens + residual_length = {num_sink_tokens + residual_length}")
    if model.config.is_encoder_decoder:
        raise NotImplementedError(f"{model.config.model_type} is an encoder-decoder: its cross attention is not compressed")
    rows = windows_of(text, windows, context + read_on).to(model.device)
    context_ids, rest = rows[:, :context], rows[:, context:]
    layers = [i for i, layer in enumerate(DynamicCache(config=model.config).layers) if type(layer) is DynamicLayer]
    if not layers:
        raise ValueError(f"no layer of {model.config.model_type} has full attention: nothing can be compressed")
    total, done = 6 * len(layers) + 5, 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    past: Cache = prefill(model, context_ids)[0]
    pairs: list[Pair] = [(past.layers[i].keys, past.layers[i].values) for i in layers]  # type: ignore[misc, union-attr]
    shapes = tuple((key.shape[1], key.shape[3], value.shape[3]) for key, value in pairs)
    for key, value in pairs:
        HadaQuant(2, 2).check(key.shape[3], value.shape[3])
    dense = _read(model, past, rest, {})
    step()

    def stored(number: int, key_bits: int, value_bits: int) -> Pair:
        layer = CompressedLayer(HadaQuant(key_bits, value_bits), num_sink_tokens, residual_length)  # type: ignore[arg-type]
        layer.update(*pairs[number])
        return layer.dense()

    def measured(replaced: dict[int, Pair]) -> float:
        kl = compare(_read(model, past, rest, replaced), dense)[0].double().mean().item()
        step()
        return kl

    costs = []
    for number, (i, (key, value)) in enumerate(zip(layers, pairs, strict=True)):
        by_bits = [stored(number, b, b) for b in BITS]
        of_keys = tuple(measured({i: (found, value)}) for found, _ in by_bits)
        of_values = tuple(measured({i: (key, found)}) for _, found in by_bits)
        costs.append((of_keys, of_values))

    def together(chosen: Choice) -> float:
        return measured({i: stored(number, *chosen[number]) for number, i in enumerate(layers)})

    chosen = choose(costs, shapes, bits)
    kl = together(chosen)
    uniform: dict[int, float] = {b: together(((b, b),) * len(layers)) for b in BITS}
    sizes = {"context": context, "windows": windows, "read_on": read_on}
    zones = {"num_sink_tokens": num_sink_tokens, "residual_length": residual_length}
    about: dict[str, object] = {"model_type": model.config.model_type, "dtype": str(model.dtype).removeprefix("torch.")}
    return Calibration(tuple(costs), shapes, chosen, kl, uniform, about | sizes | zones | provenance())


def choose(costs: Sequence[Sequence[Sequence[float]]], shapes: Sequence[tuple[int, int, int]], bits: float) -> Choice:
    """The bits of least total cost within the budget. `costs` and `shapes`: see `Calibration`; the budget: see
    `calibrate`."""
    items = [
        (heads * dim // 8, cost) for (heads, *dims), layer in zip(shapes, costs, strict=True) for dim, cost in zip(dims, layer, strict=True)
    ]
    unit = math.gcd(*(size for size, _ in items))  # bytes of one more bit
    room = int((bits - 2) * sum(size for size, _ in items) / unit + 1e-6)
    # least[n]: cost of the items so far in n units above 2 bits, and their bits
    least: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for size, cost in items:
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (so_far, chosen) in least.items():
            for b, more in zip(BITS, cost, strict=True):
                now = used + (b - 2) * size // unit
                if now <= room and (now not in found or so_far + more < found[now][0]):
                    found[now] = so_far + more, (*chosen, b)
        least = found
    _, flat = min(least.values())
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def windows_of(text: PreTrainedTokenizerBase | Tensor | Sequence[int], windows: int, length: int) -> Tensor:
    """`[windows, length]` token ids, evenly spaced."""
    if isinstance(text, PreTrainedTokenizerBase):
        text = demo.text_ids(text)
    try:
        ids = torch.as_tensor(text, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"text must be token ids [T] or a tokenizer, got {type(text).__name__}") from error
    if ids.dim() != 1 or ids.is_floating_point():
        raise TypeError(f"text must be token ids [T], got {ids.dtype} of shape {list(ids.shape)}")
    apart = len(ids) // windows
    if length > apart:
        raise ValueError(f"{windows} windows of {length:,} tokens need a longer text than {len(ids):,} tokens")
    return torch.stack([ids[i * apart : i * apart + length] for i in range(windows)]).long()


def _read(model: PreTrainedModel, past: Cache, rest: Tensor, replaced: dict[int, Pair]) -> Tensor:
    """Log-probabilities `[B, N, V]` after each token of `rest` `[B, N]`, with keys and values of some layers of `past` replaced."""
    cache = copy.deepcopy(past)
    for i, (key, value) in replaced.items():
        cache.layers[i].keys, cache.layers[i].values = key, value  # type: ignore[union-attr]
    return model(rest, **passing(cache)).logits.float().log_softmax(-1)
