"""The tokens that a model needs to repeat its context (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..replace import total_order
from .base import Arrivals, Policy
from .budget import ONE, check_count
from .ranking import highest

UNREAD = 1e4
"""The score of a token that was not read twice."""


@dataclass(frozen=True, kw_only=True)
class KVzip(Policy):
    """Keeps the tokens that a model needs to repeat the context. The model is told to repeat the context and reads it a second time. The
    score of a token is the attention that it receives meanwhile: the 3-norm over queries, of the query head of the group that gives it
    most. The authors take the largest weight, which recalls as much at a tenth of the tokens and less at a quarter.

        cache = CompressedCache(model.config, policy=KVzip(budget=0.3))
        cache.compress(model, context_ids, tokenizer=tokenizer)
        model.generate(context_and_question_ids, cache=cache)

    The score depends on no question, but the model must be able to repeat its context. `compress` takes twice as long as a prefill, and
    holds the context uncompressed until the second reading ends. The context is repeated in chunks, whose tokens attend to the sinks, the
    chunk and its repetition alone, so that a token costs the same in a context of any length. With the authors they attend to the whole
    context, which recalls the same and takes longer. Tokens after the context have a higher score than all tokens of it: they evict the
    context's lowest scores first, and then the oldest tokens after the context.

    The tokens of all heads of the model are ranked together: a budget is the mean over these heads. The budget for later tokens is divided
    among the heads in proportion to the tokens of the context that each retains. While the context fits in the budget, the heads of each
    layer share its budget.

    Args:
        chunk_size: tokens that are repeated at a time.
        alpha_safeguard: share of the budget that each head is guaranteed, as `AdaKV` takes it; None: each head has its
            budget to itself, which `max_length` and budgets by head need.
        layerwise: each layer has its budget to itself. Without it, layers share theirs, if heads do (`alpha_safeguard`).
    """

    chunk_size: int = 2048
    recent: int | float = 64
    alpha_safeguard: float | None = 0.2
    layerwise: bool = False

    scores_are_weights: ClassVar[bool] = True
    second_reading: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("chunk_size", self.chunk_size, 1)
        super().__post_init__()

    def score(self, tokens: Arrivals) -> Tensor:
        keys = tokens.keys
        return torch.full(keys.shape[:3], UNREAD, dtype=torch.float32, device=keys.device)

    @property
    def shares_layers(self) -> bool:
        return self.alpha_safeguard is not None and not self.layerwise

    def observe(self, score: Tensor, attention_sums: Tensor, queries: Tensor | int) -> Tensor:
        return attention_sums.clone()


def weigh_heads(scores: list[Tensor], rest: list[Tensor], guaranteed: list[Tensor]) -> list[Tensor]:
    """The weight of each head in the budget, int64 `[B, H, 1]` for each layer: how many of its tokens are among the highest scores of all
    heads of all layers (of equal ones those of the first heads), relative to its budget, in units of `1 / ONE`. In a row whose budgets hold
    all tokens it is `ONE`.

    Args:
        scores: of each layer, fp32 `[B, H, T]`; -inf for tokens that do not compete.
        rest: the budget of each head of a layer, int64 `[B, 1, 1]`.
        guaranteed: tokens that each of these heads has in any case, int64 `[B, 1, 1]`.
    """
    total = torch.stack([of[:, 0] * x.shape[1] for of, x in zip(rest, scores, strict=True)]).sum(0)[:, None]
    position = torch.arange(scores[0].shape[-1], dtype=torch.int32, device=total.device)
    first = [highest(total_order(x, position), of) & (x > -torch.inf) for x, of in zip(scores, guaranteed, strict=True)]
    ranked = torch.cat([x.masked_fill(own, torch.inf) for x, own in zip(scores, first, strict=True)], dim=1)
    competes, flat = ranked > -torch.inf, ranked.flatten(1)[:, None]
    order = total_order(flat, -torch.arange(flat.shape[-1], dtype=torch.int32, device=flat.device))
    counts = (highest(order, total).view_as(ranked) & competes).sum(-1, keepdim=True)
    fits = competes.sum((1, 2))[:, None, None] <= total
    by_layer = counts.split([x.shape[1] for x in scores], dim=1)
    return [torch.where(fits, ONE, (count * ONE + of // 2) // of.clamp_min(1)) for count, of in zip(by_layer, rest, strict=True)]
