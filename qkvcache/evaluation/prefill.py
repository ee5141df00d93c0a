"""A prompt that is read once for many caches."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer

from ..caches import CompressedCache

SCORES = 2**30
"""The most attention scores of one forward pass, since torch allocates all of them in fp32 for grouped heads."""


class Prefilled(DynamicCache):
    """The dense cache of a prompt, from which other caches are filled."""

    @property
    def copies(self) -> bool:
        """Whether every layer has full attention, so that its keys and values can be copied into another cache."""
        return all(type(layer) is DynamicLayer for layer in self.layers)

    @torch.no_grad()
    def fill(self, cache: Cache, model: PreTrainedModel, ids: Tensor, tokenizer: PreTrainedTokenizerBase | None = None) -> Cache:
        """Fills `cache` as a prefill of `ids` `[B, T]` without padding does, and returns it. The model reads `ids`
        again for caches that evict, and if some layers do not have full attention. With `tokenizer`, policies that read
        the context twice ask for its repetition (`CompressedCache.compress`)."""
        policy = cache.policy if isinstance(cache, CompressedCache) else None
        if policy and policy.second_reading:
            cache.compress(model, ids, tokenizer=tokenizer, progress=False)  # type: ignore[attr-defined]
        elif policy or not self.copies:
            model(ids, past_key_values=cache, logits_to_keep=1)
        else:
            for index, layer in enumerate(self.layers):
                cache.update(layer.keys, layer.values, index)  # type: ignore[arg-type, union-attr]
        return cache


def in_groups(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, ...]:
    """Groups of rows of `ids` `[B, T]` that are read together."""
    scores = model.config.get_text_config(decoder=True).num_attention_heads * ids.shape[1] ** 2
    return ids.split(max(SCORES // scores, 1))


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor) -> tuple[Prefilled, Tensor]:
    """The dense cache of `ids` `[B, T]`, and the logits after the last token `[B, V]`. If every layer has full attention, rows are read in
    groups of at most `SCORES` scores."""
    cache = Prefilled(config=model.config)
    groups = in_groups(model, ids) if cache.copies else (ids,)
    parts = [cache] if len(groups) == 1 else [Prefilled(config=model.config) for _ in groups]
    logits = [model(rows, past_key_values=part, logits_to_keep=1).logits[:, -1] for rows, part in zip(groups, parts, strict=True)]
    if len(parts) > 1:
        for index, layers in enumerate(zip(*(part.layers for part in parts), strict=True)):
            cache.update(torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]), index)
    return cache, torch.cat(logits)
