"""`bits_by_layer`: bits for the keys and values of each layer, from one reading of a prompt.

The model reads the prompt exactly, and nothing of it is kept. In each layer the keys, or the values, are quantized with 2, 3
or 4 bits as a cache does it. The cost of these bits is the mean square error of attention's output under the prompt's own
queries, over the root mean square of the output: the error itself counts layers with large outputs, mostly the last ones,
for too much, and the error relative to the output the first ones (`eval/results/bits.jsonl`). The bits are those of least
total cost within the budget (`calibrate.choose`). `calibrate` measures the divergence itself, in `6 L + 5` runs of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.masks import kernel_options
from ..attention.padding import PlainAttention
from ..caches import CompressedCache
from ..formats import Format, FormatByLayer, HadaQuant
from ..formats.base import TINY
from ..formats.hadaquant import BITS
from ..formats.outlying import FAR, Int8Keys, outlying
from ..kernels import Pair
from ..layers.compressed import CompressedLayer
from ..releases import passing
from .calibrate import check_budget, check_zones, choose

QUERIES = 64
"""Queries under which errors are measured, evenly spaced over the second half of the prompt."""
Errors = list[list[float]]
"""The error with keys (0) and with values (1) in each of `BITS`."""


@torch.no_grad()
def bits_by_layer(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    bits: float = 2.5,
    attention_mask: Tensor | None = None,
    num_sink_tokens: int = 4,
    residual_length: int = 64,
) -> FormatByLayer:
    """Chooses the bits of keys and values of each full-attention layer by a prompt, or by its first 1,000 to 4,000 tokens.

        format = bits_by_layer(model, ids[:, :2048], bits=2.5)
        model.generate(ids, cache=CompressedCache(model.config, format=format))

    A layer whose keys have an outlying channel holds its keys in int8, beside the budget, as a cache in one format does.

    Args:
        model: a decoder. It reads the prompt once.
        ids: token ids `[B, T]`, of more tokens than stay exact; the choice is the same for all rows.
        bits: the budget in bits of a channel, as the mean over keys and values of all layers, 2 to 4. At head_dim 128, 2.5
            bits are 84 bytes of a token and head, keys and values together.
        attention_mask: `[B, T]`, 0 for padding.
        num_sink_tokens, residual_length: as CompressedCache takes them.

    Raises:
        ValueError: a budget below 2 or above 4 bits, a prompt that is too short, a model without full attention, a head_dim
            that the formats cannot hold.
        TypeError: sizes that are not numbers.
        NotImplementedError: an encoder-decoder; latents; layers that hold a recurrent state beside attention; attention
            that does not go through transformers' interface.
    """
    check_budget(bits)
    check_zones(ids.shape[1], num_sink_tokens, residual_length)
    name = model.config.model_type
    if model.config.is_encoder_decoder:
        raise NotImplementedError(f"{name} is an encoder-decoder: its cross attention is not compressed")
    zones = {"num_sink_tokens": num_sink_tokens, "residual_length": residual_length}
    cache = CompressedCache(model.config, format=HadaQuant(2, 2), **zones)  # type: ignore[arg-type]
    layers = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
    if not layers:
        raise ValueError(f"no layer of {name} has full attention: nothing can be compressed")
    for layer in layers:
        if type(layer) is not CompressedLayer:
            raise NotImplementedError(f"bits_by_layer on {name}, which has a {type(layer).__name__}: use calibrate, or one format")
        layer.__class__ = ExaminedLayer
    model(ids, attention_mask=attention_mask, **passing(cache), logits_to_keep=1)
    found = [layer.found for layer in layers if isinstance(layer, ExaminedLayer) and layer.found]
    if len(found) < len(layers):
        raise NotImplementedError(f"bits_by_layer on {name}: its attention does not go through transformers' AttentionInterface")
    costs, shapes, far = zip(*found, strict=True)
    formats: list[Format] = [HadaQuant(*chosen) for chosen in choose(costs, shapes, bits)]  # type: ignore[arg-type]
    return FormatByLayer(tuple(Int8Keys(format) if int8 else format for format, int8 in zip(formats, far, strict=True)))


class ExaminedLayer(CompressedLayer):
    """A layer that measures what bits cost in its prompt, and stores nothing."""

    found: tuple[Errors, tuple[int, int, int], bool] | None = None
    """The costs; KV heads and channels of a key and of a value; whether keys have an outlying channel."""

    def store_pending(self, attention: PlainAttention | None, is_valid: Tensor | None = None) -> None:
        new, self.pending = self.pending, None
        if new is None or attention is None:
            return
        is_valid = attention.is_valid(new[0].shape[2])
        scaling = kernel_options(attention.implementation, attention.query, attention.keywords)["scaling"]
        held = [self._held(HadaQuant(b, b), new, is_valid) for b in BITS]
        errors, energy = output_errors(attention.query, scaling, new, held, self.residual_length, is_valid)
        costs = [[error / max(energy, TINY) ** 0.5 for error in side] for side in errors]
        if far := outlying(new[0], is_valid) > FAR:
            costs[0] = [0.0] * len(BITS)
        self.found = costs, (new[0].shape[1], new[0].shape[3], new[1].shape[3]), far

    def _held(self, format: HadaQuant, new: Pair, is_valid: Tensor | None) -> Pair:
        """What a layer in `format` holds of keys and values."""
        layer = CompressedLayer(format, self.num_sink_tokens, self.residual_length)
        layer.update(*new)
        layer.commit(is_valid)
        return layer.dense()


def output_errors(
    query: Tensor, scaling: float, exact: Pair, held: Sequence[Pair], recent: int, is_valid: Tensor | None = None
) -> tuple[Errors, float]:
    """The mean square error of the output of causal attention with the keys, and with the values, of each of `held`, and the mean
    square of the output. The last `recent` tokens are exact for each query.

    Args:
        query: those of the tokens, `[B, Hq, T, D]`.
        scaling: the factor on `q . k`.
        exact: keys and values `[B, H, T, D]`; each of `held` has their shapes.
        is_valid: the tokens that are not padding, bool `[B, T]`; None: all.
    """
    key, value = (x.float() for x in exact)
    (rows, heads, tokens, dim), groups = key.shape, query.shape[1] // key.shape[1]
    at = torch.linspace(tokens // 2, tokens - 1, QUERIES, dtype=torch.float32, device=key.device).long()
    query = query[:, :, at].float().reshape(rows, heads, groups * QUERIES, dim) * scaling
    j, i = torch.arange(tokens, dtype=torch.int64, device=key.device), at.repeat(groups)[:, None]
    fresh, hidden = j > i - recent, j > i
    if is_valid is not None:
        hidden = hidden | ~is_valid[:, None, None]
    scores = query @ key.mT

    def weights(scores: Tensor) -> Tensor:
        return scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0)  # a query that sees only padding has none

    exact_weights = weights(scores)
    output = exact_weights @ value
    old_weights = exact_weights.masked_fill(fresh, 0)
    of_keys = [weights(torch.where(fresh, scores, query @ k.float().mT)) @ value - output for k, _ in held]
    of_values = [old_weights @ (v.float() - value) for _, v in held]
    return [[error.square().mean().item() for error in side] for side in (of_keys, of_values)], output.square().mean().item()
