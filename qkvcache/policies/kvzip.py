"""The tokens that a model needs to repeat its context (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Arrivals, Policy, check_count

UNREAD = 1e4
"""The score of a token that was not read twice."""


@dataclass(frozen=True, kw_only=True)
class KVzip(Policy):
    """Keeps the tokens that a model needs to repeat the context: the score of a token is the largest attention that it receives, over
    queries and the query heads of a group, while the model reads the context a second time after being told to repeat it.

        cache = CompressedCache(model.config, policy=KVzip(budget=0.3))
        cache.compress(model, context_ids, tokenizer=tokenizer)
        model.generate(context_and_question_ids, past_key_values=cache)

    It depends on no question, but the model must be able to repeat its context. The second reading makes `compress` cost two to three
    prefills (as the authors measure), with the context uncompressed meanwhile. Tokens after the context have a higher score than all tokens
    of it: they evict the context's lowest scores first, and then the oldest tokens after the context.

    The authors rank the tokens of all heads of the model together; here, the heads of a layer share their budget (`alpha_safeguard`), and a
    `HeadProfile` divides it among layers and heads.

    Args:
        normalized: a weight counts times the length of the token's value in the layer's output over the length of what attention reads at
            the query (KVzip+).
        chunk_size: tokens that are repeated at a time. Attention is normalized over the sinks, these tokens and their repetition, as the
            authors do: the cost of scores is linear in the context.
        alpha_safeguard: as of every policy; None with `first_stage_ratio`, `max_length`, or a budget by head, which exclude it.
    """

    normalized: bool = False
    chunk_size: int = 2048
    recent: int | float = 64
    alpha_safeguard: float | None = 0.2

    scores: ClassVar[bool] = True
    needs_attention_weights: ClassVar[bool] = True
    second_reading: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("chunk_size", self.chunk_size, 1)
        super().__post_init__()
        if self.normalized and (self.value_norm or self.first_stage_ratio):
            raise ValueError("normalized=True has the length of values in its scores: leave out value_norm and first_stage_ratio")

    def score(self, tokens: Arrivals) -> Tensor:
        keys = tokens.keys
        return torch.full(keys.shape[:3], UNREAD, device=keys.device)

    def observe(self, score: Tensor, attention_sums: Tensor, queries: Tensor | int) -> Tensor:
        return attention_sums.clone()
