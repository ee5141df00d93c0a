"""Reading a context a second time, for policies that score its tokens by how they are needed to repeat it (`policies/kvzip.py`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from .padding import PlainAttention, await_attention
from .projection import OutputProjection

BLOCK = 2**26
"""fp32 attention weights in memory at a time."""


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
        (batch, heads, tokens, dim), reading = stored.shape, query.shape[2]
        at = columns[:, None, :, None].expand(-1, heads, -1, -1)
        context = stored.gather(2, at.expand(-1, -1, -1, dim))
        keys = torch.cat([context, stored[:, :, tokens - reading :]], dim=2)
        visible = torch.cat([exists, is_valid], dim=1)
        factor = self._factors(module, query, at) if self.normalized else None  # [B, H, G, C]
        best = torch.zeros(batch, heads, columns.shape[1], device=keys.device)
        block = max(BLOCK // (batch * query.shape[1] * keys.shape[2]), 1)
        place = torch.arange(keys.shape[2], device=keys.device)
        for begin in range(0, reading, block):
            rows = query[:, :, begin : begin + block].unflatten(1, (heads, -1))  # [B, H, G, q, D]
            logits = (rows @ keys.mT[:, :, None]).float() * scaling
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            own = torch.arange(begin, begin + rows.shape[3], device=keys.device) + columns.shape[1]
            hidden = (place > own[:, None]) | ~visible[:, None]  # [B, q, K]
            logits = logits.masked_fill_(hidden[:, None, None], -torch.inf)
            lse = logits.logsumexp(-1, keepdim=True)
            part = is_valid[:, None, None, begin : begin + block, None]
            if factor is None:
                weights = (logits[..., : columns.shape[1]] - lse).masked_fill_(~part, -torch.inf).amax((2, 3)).exp()
            else:
                length = self.inputs[:, None, None, begin : begin + block, None].to(keys.device)  # type: ignore[index]
                weights = ((logits[..., : columns.shape[1]] - lse).exp() / length).masked_fill_(~part, 0).amax(3)
                weights = (weights * factor).amax(2)
            best = torch.maximum(best, weights)
        if self.scores is None:
            self.scores = torch.zeros(batch, heads, tokens - reading, device=keys.device)
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
