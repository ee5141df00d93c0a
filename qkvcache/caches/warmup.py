"""`warmup`: compiles kernels before the first token."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ..kernels import on_triton
from ..layers.compressed import CompressedLayer
from ..releases import passing
from ..storage import GROUP, PAGE, RowPages
from .base import CompressedCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def warmup(model: PreTrainedModel, cache: CompressedCache, *, queries: Iterable[int] = (1,), padded: bool = True) -> None:
    """Compiles every kernel that `generate` needs, by running `model` on a few tokens with a cache like `cache`.

    `cache` is not changed. Triton caches compiled kernels on disk, so that this is fast in a second process.
    Does nothing if torch operations run instead of Triton.

    Args:
        model: the model that will generate, on its device.
        cache: a cache with the options that will be used.
        queries: numbers of tokens of a step: 1, and for assisted decoding the number that it verifies at once.
        padded: also compile for batches with padding.

    Raises ValueError for a step of less than one token.
    """
    steps = tuple(queries)
    if not all(isinstance(step, int) and step > 0 for step in steps):
        raise ValueError(f"queries={steps}: steps bring one token or more")
    if not on_triton(model.device):
        return
    prompt = cache._layer_options["num_sink_tokens"] + cache._layer_options["residual_length"] + GROUP + PAGE
    prompt += cache._maker.filling
    for rows in (2, 1) if padded else (1,):
        fresh = copy.deepcopy(cache)
        fresh.reset()
        _shrink(fresh, prompt - PAGE // 2, prompt + sum(steps) + GROUP)
        mask = torch.ones(rows, prompt, dtype=torch.long, device=model.device)
        mask[1:, 0] = 0
        ids = torch.zeros_like(mask)
        model(input_ids=ids, attention_mask=mask, **passing(fresh))
        for step in (*steps, GROUP):  # the last step quantizes several tokens
            mask = torch.cat([mask, mask.new_ones(rows, step)], dim=1)
            model(input_ids=ids[:, :step], attention_mask=mask, **passing(fresh))
        for layer in fresh.layers:  # at the end of the capacity, a single token may be quantized
            if (
                isinstance(layer, CompressedLayer)
                and layer.storage
                and layer.residual_length
                and isinstance(layer.storage.tokens, RowPages)
            ):
                keys, values = layer.storage.residual
                layer.storage.tokens.append((keys[:, :, :1], values[:, :, :1]))


def _shrink(cache: CompressedCache, tokens: int, length: int) -> None:
    """Makes the cache small, so that it is soon full; kernels depend neither on the budget nor on
    `max_length`. Also affects layers that are made later."""
    cache.layers = [cache._maker.shrink(layer, tokens, length) for layer in cache.layers]
    make = cache.layer_class_to_replicate
    if make is not None:
        cache.layer_class_to_replicate = lambda *args: cache._maker.shrink(make(*args), tokens, length)  # type: ignore[assignment]
