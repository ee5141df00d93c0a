"""The expected attention of future queries that are distributed like those of the prompt (arXiv 2510.00636)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels import matmul_fp32, quadratic_form
from .base import Arrivals, Policy, Rotation, given
from .budget import check_count

BLOCK = 2**25
"""Elements of queries that are rotated back at a time: those of a whole prompt would take as much memory as the queries."""


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Policy):
    """Keeps the tokens to which later queries are expected to attend, weighted by the norms of their values. Later queries are taken to
    have the mean and covariance of the prompt's queries, at the next `n_future_positions` positions. Needs no attention weights and no
    question.

    The score is `(softmax over tokens of (k mu scaling + k S k scaling^2 / 2) + epsilon) |v|`, the mean over the query heads of a group,
    where `mu` and `S` are the mean and covariance of the queries before RoPE, rotated by the mean rotation of the next
    `n_future_positions` positions. Sinks take no part in the softmax. Here the score is also multiplied by the number of tokens of the
    softmax, so that scores of different steps are comparable.

    A token is scored once, in its own step, with the statistics of the last step in which its row had several tokens: a prompt in chunks is
    scored chunk by chunk. The token of a decode step is scored with the mean `mu`, and with the mean of the prompt's covariance terms in
    place of its own, since the covariances would take more memory than the tokens. Before the first step with several tokens of a row,
    scores are `(1 + epsilon) |v|`.

    Args:
        n_future_positions: positions after the last token, over which rotations are averaged.
        epsilon: added to each token's weight.
    """

    n_future_positions: int = 512
    epsilon: float = 0.0
    recent: int | float = 64

    scores_are_weights: ClassVar[bool] = True
    needs_queries: ClassVar[bool] = True
    needs_rope: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("n_future_positions", self.n_future_positions, 1, of="positions")
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon={self.epsilon!r}: must be 0 or more")
        super().__post_init__()

    def arrive(self, statistics: dict[str, Tensor], tokens: Arrivals) -> tuple[dict[str, Tensor], Tensor]:
        keys, queries = tokens.keys, given(tokens.queries, "queries")
        positions, seen = given(tokens.positions, "positions"), given(tokens.seen, "counts of tokens")
        rope = given(tokens.rope, "the model's rotary embedding")
        batch, heads, count, _ = keys.shape
        query_heads, dim = queries.shape[1], queries.shape[3]
        if not statistics:
            one = torch.zeros(batch, query_heads, dtype=torch.float32, device=keys.device)
            statistics = {"mean": one[..., None].repeat(1, 1, dim), "offset": one, "level": one.clone(), "tokens": one[:, 0] + 1}
        mean, offset, level, number = (statistics[name] for name in ("mean", "offset", "level", "tokens"))
        scaling = dim**-0.5 if tokens.scaling is None else tokens.scaling
        by_group = heads, query_heads // heads
        if many := count > 1 and not tokens.single:
            counted = positions >= self.num_sink_tokens
            fresh, own = (counted.sum(-1) > 1)[:, None], counted[:, None, None]  # rows that get statistics; tokens that count
            n = counted.sum(-1).clamp_min(1).float()
            average = average_rotation(rope, self.n_future_positions, dim, keys.device)  # type: ignore[arg-type]
            new_mean, covariance = moments(tokens, self.num_sink_tokens)
            mean = torch.where(fresh[..., None], new_mean @ average, mean)
            covariance = average.mT @ covariance @ average
            covariance = rope.rotate(rope.rotate(covariance, seen[:, 0, 0]).mT, seen[:, 0, 0])
            quadratic = quadratic_form(keys, covariance) * (scaling**2 / 2)
            offset = torch.where(fresh, ((quadratic * own).sum(-1) / n[:, None, None]).flatten(1), offset)
        if tokens.single:  # each after as many tokens as were seen at its step
            linear = (mean * scaling).unflatten(1, by_group)  # [B, H, G, D]
            logits = linear @ rope.rotate(keys.float(), -seen[:, 0]).mT  # [B, H, G, T]
        else:
            linear = rope.rotate(mean[:, :, None], seen[:, 0, 0])[:, :, 0].unflatten(1, by_group)
            logits = ((linear * scaling).to(keys.dtype) @ keys.mT).float()
        old = offset.unflatten(1, by_group)[..., None]
        logits = logits + (torch.where(fresh[..., None, None], quadratic, old) if many else old)
        if many:
            total = logits.masked_fill(~own, -torch.inf).logsumexp(-1).flatten(1)
            level = torch.where(fresh, total - n.log()[:, None], level)
            number = torch.where(fresh[:, 0], n, number)
        # Without statistics all logits and levels are 0, and all weights 1.
        weights = (logits - level.unflatten(1, by_group)[..., None]).exp().mean(2)
        if self.epsilon:
            weights = weights + self.epsilon * number[:, None, None]
        score = weights * torch.linalg.vector_norm(tokens.values, dim=-1, dtype=torch.float32)
        return {"mean": mean, "offset": offset, "level": level, "tokens": number}, score


def moments(tokens: Arrivals, num_sink_tokens: int) -> tuple[Tensor, Tensor]:
    """Mean `[B, Hq, D]` and covariance `[B, Hq, D, D]`, fp32, of the queries before RoPE that are neither padding nor of sinks."""
    queries, positions = given(tokens.queries, "queries"), given(tokens.positions, "positions")
    rope = given(tokens.rope, "the model's rotary embedding")
    batch, heads, count, dim = queries.shape
    total, squares = (torch.zeros(batch, heads, n, dim, dtype=torch.float32, device=queries.device) for n in (1, dim))
    first = 0 if tokens.begin is None else min(max(num_sink_tokens - tokens.begin, 0), count)
    block = max(BLOCK // (batch * heads * dim), 1)
    for begin in range(first, count, block):
        part = slice(begin, begin + block)
        x = rope.rotate(queries[:, :, part], -positions[:, part].clamp_min(0))
        if tokens.begin is None:
            x.masked_fill_((positions[:, part] < num_sink_tokens)[:, None, :, None], 0)
        total += x.sum(2, keepdim=True, dtype=torch.float32)
        squares += matmul_fp32(x.mT, x)
    n = (positions >= num_sink_tokens).sum(-1).clamp_min(1).float()[:, None, None, None]
    mean = total / n
    return mean[:, :, 0], squares / n - mean.mT * mean


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
@torch.no_grad()
def average_rotation(rope: Rotation, horizon: int, dim: int, device: torch.device) -> Tensor:
    """The mean of the rotations by 0 to `horizon - 1` positions, fp32 `[D, D]`, which row vectors are multiplied with."""
    units = torch.eye(dim, dtype=torch.float32, device=device)[None, None]
    total = torch.zeros(dim, dim, dtype=torch.float32, device=device)
    for steps in torch.arange(horizon, device=device).split(64):
        total += rope.rotate(units.expand(len(steps), -1, -1, -1), steps)[:, 0].sum(0)
    return total / horizon
