"""Text that is read through a cache in chunks, however long it is."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


@torch.no_grad()
def stream(model: PreTrainedModel, cache: Cache, ids: Tensor, chunk: int) -> Iterator[Tensor]:
    """Negative log-likelihood of the tokens of `ids` `[B, T]`, chunk by chunk: `[B, N]` fp32, together of all tokens but the first."""
    for begin in range(0, ids.shape[1] - 1, chunk):
        step, target = ids[:, begin : begin + chunk], ids[:, begin + 1 : begin + chunk + 1]
        logits = model(step, past_key_values=cache).logits[:, : target.shape[1]]
        yield torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
