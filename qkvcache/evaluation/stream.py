"""Text that is read through a cache in chunks, however long it is."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


@torch.no_grad()
def stream(model: PreTrainedModel, cache: Cache, ids: Tensor, chunk: int) -> Iterator[Tensor]:
    """Negative log-likelihood of all tokens of `ids` `[B, T]` but the first, `[B, N]` fp32 for each chunk. The last token is not fed."""
    for step, target in zip(ids[:, :-1].split(chunk, dim=1), ids[:, 1:].split(chunk, dim=1), strict=True):
        logits = model(step, past_key_values=cache).logits
        yield torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
