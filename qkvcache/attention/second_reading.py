"""A second reading of a context, for policies that score tokens by their use in repeating the context
(`policies/kvzip.py`).

A reading repeats one chunk of the context. Its queries attend to the row's sinks, the chunk and the reading itself, and
their softmax covers only these, so that its cost does not depend on the length of the context.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..kernels import Pair, sum_attention
from .keywords import kernel_options
from .masks import lower_right
from .padding import PlainAttention, await_attention
from .projection import OutputProjection
from .route import NAME

NORM = 3
"""The exponent of the norm, over queries, of the weights that a token receives. The authors take the largest weight,
which does not tell a token that several queries attend to from a token that one query attends to
(`eval/results/policies.jsonl`, `past.jsonl`)."""


@dataclass(frozen=True)
class Reading:
    """The tokens that a reading attends to: columns of the context, and its own tokens.

    columns: the columns of the row's sinks and of the repeated tokens, int64 `[B, S + C]`.
    is_valid: the columns, and then the reading's own tokens, that are not padding, bool `[B, S + C + R]`.
    padded: whether there is padding among them.
    """

    columns: Tensor
    is_valid: Tensor
    padded: bool
    _masks: dict[tuple[torch.device, int], Any] = field(default_factory=dict)

    def mask(self, implementation: str, query: Tensor) -> Any:
        """The mask that `implementation` takes for the last queries `[B, Hq, Q, D]` of the reading, made once for all
        layers."""
        at = query.device, query.shape[2]
        if at not in self._masks:
            self._masks[at] = self._mask(implementation, query)
        return self._masks[at]

    def _mask(self, implementation: str, query: Tensor) -> Any:
        tokens, queries = self.is_valid.shape[1], query.shape[2]
        if not self.padded and implementation == "sdpa" and (bias := lower_right(queries, tokens)) is not None:
            return bias
        if not self.padded and implementation == NAME:
            return None
        return ALL_MASK_ATTENTION_FUNCTIONS[implementation](
            batch_size=len(query), q_length=queries, kv_length=tokens, q_offset=tokens - queries,
            attention_mask=self.is_valid.to(query.device) if self.padded else None, dtype=query.dtype, device=query.device,
        )  # fmt: skip


class ReadingLayer(DynamicLayer):
    """A dense layer that observes second readings and does not store their tokens. `scores` fp32 `[B, H, T]`: the
    `NORM`-norm over the readings' queries of the attention that each context token receives, in the query head that
    gives it most.

    Args:
        sinks: number of first tokens of a row that are in each softmax and get no score.
        normalized: weights are multiplied by the norm of the value in the output over the norm of the attention's input at the query.
    """

    local: Pair | None = None
    """Keys and values that the reading attends to, `[B, H, S + C + R, D]`."""

    def __init__(self, sinks: int, normalized: bool):
        super().__init__()
        self.sinks, self.normalized = sinks, normalized
        self.scores: Tensor | None = None
        self.reading: Reading | None = None
        """None while the context is read the first time."""
        self.module: nn.Module | None = None
        self.query: Tensor | None = None
        """Queries without tokens, `[B, Hq, 0, D]`: they hold the number of query heads."""
        self.inputs: Tensor | None = None
        """Norms of the attention's input at each token of the reading, `[B, R]`, with `normalized`."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.reading is None:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
        else:
            at = self.reading.columns.to(key_states.device)[:, None, :, None].expand(-1, key_states.shape[1], -1, -1)
            stored: Pair = self.keys, self.values  # type: ignore[assignment]
            keys, values = self.local = tuple(  # type: ignore[assignment]
                torch.cat([x.gather(2, at.expand(-1, -1, -1, x.shape[3])), own], dim=2)
                for x, own in zip(stored, (key_states, value_states), strict=True)
            )
        await_attention(keys, self.receive_attention)
        return keys, values

    def get_seq_length(self) -> int:
        """The number of tokens that the next tokens attend to."""
        return super().get_seq_length() if self.reading is None else self.reading.columns.shape[1]

    @torch.no_grad()
    def receive_attention(self, attention: PlainAttention) -> PlainAttention | None:
        """Scores the context by the queries of a reading, and replaces the model's mask, which covers the whole
        context."""
        if self.module is None:
            self.module, self.query = attention.module, attention.query[:, :, :0]
        if self.reading is None:
            return None
        if attention.module is self.module:  # other layers may share its keys
            self._score(attention, self.reading)
        return attention._replace(mask=self.reading.mask(attention.implementation, attention.query))

    def _score(self, attention: PlainAttention, reading: Reading) -> None:
        query, (keys, values) = attention.query, self.local  # type: ignore[misc]
        columns, is_valid = reading.columns.to(keys.device), reading.is_valid.to(keys.device)
        heads, count = keys.shape[1], columns.shape[1]
        observed = is_valid[:, count:].float()
        if self.normalized:
            observed = observed / self.inputs.to(keys.device)  # type: ignore[union-attr]
        options = kernel_options(attention.implementation, query, attention.keywords)
        by_query_head = keys.repeat_interleave(query.shape[1] // heads, dim=1)
        known = {"scaling": options["scaling"], "softcap": options["softcap"], "power": NORM, "columns": count}
        norms = sum_attention(query, by_query_head, observed, is_valid, **known).pow_(1 / NORM).unflatten(1, (heads, -1))
        best = (norms * _factors(attention.module, query, values[:, :, :count]) if self.normalized else norms).amax(2)
        if self.scores is None:
            self.scores = torch.zeros(*self.keys.shape[:3], device=keys.device)  # type: ignore[union-attr]
        repeated = is_valid[:, :count].clone()
        repeated[:, : self.sinks] = False
        best = best.masked_fill(~repeated[:, None], 0)
        self.scores.scatter_reduce_(2, columns[:, None].expand(-1, heads, -1), best, "amax")


def _factors(module: nn.Module, query: Tensor, values: Tensor) -> Tensor:
    """Norms of `values` `[B, H, C, D]` in the output of each query head, fp32 `[B, H, G, C]`."""
    values = values.float()
    gram = OutputProjection.of(module, query.shape[1], values.shape[3]).gram.unflatten(0, (values.shape[1], -1))
    return ((values[:, :, None] @ gram) * values[:, :, None]).sum(-1).clamp_min(0).sqrt()
