"""Reading a context a second time, for policies that score its tokens by how they are needed to repeat it (`policies/kvzip.py`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from ..kernels import sum_attention
from .padding import PlainAttention, await_attention
from .projection import OutputProjection


class ReadingLayer(DynamicLayer):
    """A dense layer that observes a second reading: `scores` fp32 `[B, H, T]` are the largest attention that each token of the context
    receives from the queries of the readings so far.

    Args:
        sinks: the first tokens of a row, which take part in each softmax and get no score.
        normalized: weights are multiplied by the norm of the value in the output over the norm of the attention's input at the query.
    """

    def __init__(self, sinks: int, normalized: bool):
        super().__init__()
        self.sinks, self.normalized = sinks, normalized
        self.scores: Tensor | None = None
        self.chunk: tuple[Tensor, Tensor, Tensor] | None = None
        """Of a reading: columns of the row's sinks and of the tokens that are repeated, int64 `[B, S + C]`, which of these exist, bool
        `[B, S + C]`, and which tokens of the reading are no padding, bool `[B, R]`. None while the context is read the first time."""
        self.module: nn.Module | None = None
        self.query: Tensor | None = None
        """Without tokens: for its query heads."""
        self.inputs: Tensor | None = None
        """Norms of the attention's input at each token of the reading, `[B, R]`, with `normalized`."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        await_attention(keys, self.receive_attention)
        return keys, values

    def truncate(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens."""
        self.keys, self.values = (x[:, :, :tokens] for x in (self.keys, self.values))  # type: ignore[index]

    @torch.no_grad()
    def receive_attention(self, attention: PlainAttention) -> None:
        """Scores the context by the queries `[B, Hq, R, D]` of a reading, before its tokens are removed."""
        _, module, query, _, scaling, softcap = attention
        self.module, self.query = module, query[:, :, :0]
        if self.chunk is None:
            return
        stored: Tensor = self.keys  # type: ignore[assignment]
        columns, exists, is_valid = (x.to(stored.device) for x in self.chunk)
        heads, tokens, reading = stored.shape[1], stored.shape[2], query.shape[2]
        at = columns[:, None, :, None].expand(-1, heads, -1, -1)
        context = stored.gather(2, at.expand(-1, -1, -1, stored.shape[3]))
        keys = torch.cat([context, stored[:, :, tokens - reading :]], dim=2)
        observed = is_valid.float()
        if self.normalized:  # by query head: each has norms of its own
            keys = keys.repeat_interleave(query.shape[1] // heads, dim=1)
            observed = observed / self.inputs.to(keys.device)  # type: ignore[union-attr]
        visible = torch.cat([exists, is_valid], dim=1)
        best = sum_attention(query, keys, observed, visible, scaling=scaling, softcap=softcap, largest=True)[..., : columns.shape[1]]
        if self.normalized:
            best = (best.unflatten(1, (heads, -1)) * self._factors(module, query, at)).amax(2)
        if self.scores is None:
            self.scores = torch.zeros(*stored.shape[:2], tokens - reading, device=keys.device)
        repeated = exists.clone()
        repeated[:, : self.sinks] = False
        best = best.masked_fill(~repeated[:, None], 0)
        self.scores.scatter_reduce_(2, columns[:, None].expand(-1, heads, -1), best, "amax")

    def _factors(self, module: nn.Module, query: Tensor, at: Tensor) -> Tensor:
        """Norms of the values of columns `at` in the output of each query head, fp32 `[B, H, G, C]`."""
        stored: Tensor = self.values  # type: ignore[assignment]
        values = stored.gather(2, at.expand(-1, -1, -1, stored.shape[3])).float()
        gram = OutputProjection.of(module, query.shape[1], values.shape[3]).gram.unflatten(0, (values.shape[1], -1))
        return ((values[:, :, None] @ gram) * values[:, :, None]).sum(-1).clamp_min(0).sqrt()
