"""Reading a context a second time, for policies that score its tokens by how they are needed to repeat it (`policies/kvzip.py`).

A reading attends to the whole context. Under the mask for that, sdpa copies keys for each query head and takes no fast kernel. Where the
mask is causal but for padding, the layer attends itself, as a second turn over compressed keys does (`kernels/attend_chunked.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from ..kernels import Pair, sum_attention
from ..kernels.attend_chunked import attend_chunked_exact, supports_queries
from .keywords import kernel_options, with_causality
from .masks import padding_columns, visible
from .padding import PlainAttention, await_attention
from .projection import OutputProjection
from .route import NAME


class Reading(NamedTuple):
    """What a reading repeats.

    columns: of the row's sinks and of the tokens that are repeated, int64 `[B, S + C]`.
    exists: which of these there are, bool `[B, S + C]`.
    is_valid: which of the reading's tokens are no padding, bool `[B, R]`.
    full: whether it repeats a whole chunk, so that others of as many tokens come.
    """

    columns: Tensor
    exists: Tensor
    is_valid: Tensor
    full: bool


class ReadingLayer(DynamicLayer):
    """A dense layer that observes a second reading: `scores` fp32 `[B, H, T]` are the largest attention that each token of the context
    receives from the queries of the readings so far.

    Args:
        sinks: the first tokens of a row, which take part in each softmax and get no score.
        normalized: weights are multiplied by the norm of the value in the output over the norm of the attention's input at the query.
    """

    own: Pair
    """Keys and values of the reading's tokens, `[B, H, R, D]`."""

    def __init__(self, sinks: int, normalized: bool):
        super().__init__()
        self.sinks, self.normalized = sinks, normalized
        self.scores: Tensor | None = None
        self.reading: Reading | None = None
        """None while the context is read the first time."""
        self.module: nn.Module | None = None
        self.query: Tensor | None = None
        """Without tokens: for its query heads."""
        self.inputs: Tensor | None = None
        """Norms of the attention's input at each token of the reading, `[B, R]`, with `normalized`."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.reading is not None:
            self.own = key_states, value_states
        await_attention(keys, self.receive_attention)
        return keys, values

    def truncate(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens."""
        self.keys, self.values = (x[:, :, :tokens] for x in (self.keys, self.values))  # type: ignore[index]

    @torch.no_grad()
    def receive_attention(self, attention: PlainAttention) -> Tensor | None:
        """Scores the context by the queries `[B, Hq, R, D]` of a reading, before its tokens are removed. Returns the output of attention,
        `[B, R, Hq, D]`, or None where the model's function attends, as in the first reading."""
        self.module, self.query = attention.module, attention.query[:, :, :0]
        if self.reading is None:
            return None
        self._score(attention, self.reading)
        return self._attend(attention, self.reading.full)

    def _score(self, attention: PlainAttention, reading: Reading) -> None:
        module, query = attention.module, attention.query
        own = self.own[0]
        stored: Tensor = self.keys  # type: ignore[assignment]
        columns, exists, is_valid = (x.to(stored.device) for x in reading[:3])
        heads = stored.shape[1]
        at = columns[:, None, :, None].expand(-1, heads, -1, -1)
        keys = torch.cat([stored.gather(2, at.expand(-1, -1, -1, stored.shape[3])), own], dim=2)
        observed = is_valid.float()
        if self.normalized:  # by query head: each has norms of its own
            keys = keys.repeat_interleave(query.shape[1] // heads, dim=1)
            observed = observed / self.inputs.to(keys.device)  # type: ignore[union-attr]
        options = kernel_options(attention.implementation, query, attention.keywords)
        known = {"scaling": options["scaling"], "softcap": options["softcap"], "largest": True}
        best = sum_attention(query, keys, observed, torch.cat([exists, is_valid], dim=1), **known)[..., : columns.shape[1]]
        if self.normalized:
            best = (best.unflatten(1, (heads, -1)) * self._factors(module, query, at)).amax(2)
        if self.scores is None:
            self.scores = torch.zeros(*stored.shape[:2], stored.shape[2] - own.shape[2], device=keys.device)
        repeated = exists.clone()
        repeated[:, : self.sinks] = False
        best = best.masked_fill(~repeated[:, None], 0)
        self.scores.scatter_reduce_(2, columns[:, None].expand(-1, heads, -1), best, "amax")

    def _attend(self, attention: PlainAttention, full: bool) -> Tensor | None:
        """The output of attention. `full`: of the reading."""
        implementation, module, query, mask, keywords = attention
        keys: Tensor = self.keys  # type: ignore[assignment]
        values: Tensor = self.values  # type: ignore[assignment]
        if implementation not in ("sdpa", NAME) or keywords.get("dropout") or not supports_queries(query, values.shape[3]):
            return None
        queries, tokens = query.shape[2], keys.shape[2]
        shown, causal = visible(implementation, mask, len(query), queries, tokens, query.device, with_causality(module, keywords))
        fits, hidden, left = padding_columns(mask, shown, causal, queries, tokens)
        if not fits:
            return None
        past = keys[:, :, : tokens - queries], values[:, :, : tokens - queries]
        options = kernel_options(implementation, query, keywords)
        out = attend_chunked_exact(query, past, self.own, hidden, left=left, plans=full, **options)
        return out.transpose(1, 2).contiguous()

    def _factors(self, module: nn.Module, query: Tensor, at: Tensor) -> Tensor:
        """Norms of the values of columns `at` in the output of each query head, fp32 `[B, H, G, C]`."""
        stored: Tensor = self.values  # type: ignore[assignment]
        values = stored.gather(2, at.expand(-1, -1, -1, stored.shape[3])).float()
        gram = OutputProjection.of(module, query.shape[1], values.shape[3]).gram.unflatten(0, (values.shape[1], -1))
        return ((values[:, :, None] @ gram) * values[:, :, None]).sum(-1).clamp_min(0).sqrt()
