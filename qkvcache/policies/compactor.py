"""Keys that are not combinations of other keys, and keys that their neighbourhood attends to (Compactor, arXiv 2507.08143)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Arrivals, Policy, check_count, given

BLOCK = 2**25
"""fp32 scores of attention within chunks in memory at a time."""
RIDGE = 1e-5
"""Added to the Gram matrix of the sketch, times its mean diagonal: with fewer tokens than columns the matrix is singular."""


@dataclass(frozen=True, kw_only=True)
class Compactor(Policy):
    """Keeps tokens by `r z(leverage) + z(attention in chunks |v|)`, `z` being standardized over the tokens of a step.

    The leverage of a token is `x (X^T X)^-1 x` of the centred keys before RoPE, of which `X` are `sketch` random combinations of channels.
    Attention is that of the queries of a chunk of `chunk_size` tokens to all keys of the chunk, causal or not, summed over queries and over
    the query heads of a group. Chunks begin at multiples of `chunk_size` in the row. Sinks are left out of all sums.

    A token is scored once, in its own step. Sums are over the tokens of a step: a prompt in chunks is scored chunk by chunk. In steps with
    fewer than `2 sketch` tokens of a row, such as decode steps, tokens have their leverage among those of the last larger step, and no
    attention; before the first larger step, their scores are 0.

    Args:
        blending: `r`; None: the share of the tokens seen that the budget does not hold, as in the paper.
        chunk_size: tokens that attend to each other.
        sketch: columns of the random sketch.
        seed: of the sketch.
    """

    blending: float | None = None
    chunk_size: int = 256
    sketch: int = 48
    seed: int = 0
    recent: int | float = 64

    scores: ClassVar[bool] = True
    needs_queries: ClassVar[bool] = True
    needs_rope: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("chunk_size", self.chunk_size, 2)
        check_count("sketch", self.sketch, 1, of="columns")
        if self.blending is not None and not self.blending >= 0:
            raise ValueError(f"blending={self.blending!r}: must be 0 or more, or None")
        super().__post_init__()

    def arrive(self, statistics: dict[str, Tensor], tokens: Arrivals) -> tuple[dict[str, Tensor], Tensor]:
        keys, positions, seen = tokens.keys, given(tokens.positions, "positions"), given(tokens.seen, "counts of tokens")
        batch, heads, count, dim = keys.shape
        if not statistics:
            generator = torch.Generator().manual_seed(self.seed)  # the same sketch on every device
            random = torch.randn(dim, self.sketch, generator=generator, device="cpu").to(keys.device) * self.sketch**-0.5
            zeros = torch.zeros(batch, heads, 1, device=keys.device)
            statistics = {
                "random": random.repeat(batch, 1, 1),
                "center": zeros.repeat(1, 1, self.sketch),
                "inverse": zeros[..., None].repeat(1, 1, *2 * (self.sketch,)),
            }
            statistics |= {"mean": zeros, "deviation": zeros + 1}
        center, inverse, mean, deviation = (statistics[name] for name in ("center", "inverse", "mean", "deviation"))
        x = tokens.unrotated_keys.float() @ statistics["random"][:, None]  # [B, H, T, S]
        attention: Tensor | None = None
        counted = positions >= self.num_sink_tokens
        if count >= 2 * self.sketch:
            own, n = counted[:, None], counted.sum(-1).clamp_min(1)[:, None, None].float()
            fresh = (counted.sum(-1) >= 2 * self.sketch)[:, None, None]
            center = torch.where(fresh, (x * own[..., None]).sum(2) / n, center)
            centred = (x - center[:, :, None]) * own[..., None]
            gram = centred.mT @ centred
            ridge = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-20) * RIDGE
            factor, _ = torch.linalg.cholesky_ex(gram + torch.diag_embed(ridge[..., None].expand(-1, -1, self.sketch)))
            inverse = torch.where(fresh[..., None], torch.cholesky_inverse(factor), inverse)
        centred = x - center[:, :, None]
        leverage = ((centred @ inverse) * centred).sum(-1)
        if count >= 2 * self.sketch:
            new_mean, new_deviation = _moments(leverage, own, n)
            mean, deviation = torch.where(fresh, new_mean, mean), torch.where(fresh, new_deviation, deviation)
            received = self._attention(tokens, counted) * torch.linalg.vector_norm(tokens.values, dim=-1, dtype=torch.float32)
            center_of, spread = _moments(received, own, n)
            attention = ((received - center_of) / spread).masked_fill(~fresh, 0)
        score = (leverage - mean) / deviation * self._blending(tokens, seen)
        score = score if attention is None else score + attention
        return statistics | {"center": center, "inverse": inverse, "mean": mean, "deviation": deviation}, score

    def _blending(self, tokens: Arrivals, seen: Tensor) -> Tensor | float:
        if self.blending is not None:
            return self.blending
        size: int | Tensor = given(tokens.size, "its budget")  # type: ignore[assignment]
        return (1 - size / seen.clamp_min(1).float()).clamp_min(0)

    def _attention(self, tokens: Arrivals, counted: Tensor) -> Tensor:
        """The attention that each token receives within its chunk, fp32 `[B, H, T]`."""
        keys, queries, positions = tokens.keys, given(tokens.queries, "queries"), given(tokens.positions, "positions")
        batch, heads, count, dim = keys.shape
        size, device = self.chunk_size, keys.device
        # A grid of whole chunks: each cell is a position of the row, and holds the index of its token.
        order = (positions < 0).int().argsort(dim=-1, stable=True)  # tokens without padding, in order
        n = (positions >= 0).sum(-1, keepdim=True)
        first = positions.gather(1, order[:, :1]).clamp_min(0) % size
        chunks = (count + size - 2) // size + 1
        place = torch.arange(chunks * size, device=device) - first
        index = order.gather(1, place.clamp(0, count - 1))
        counted_cells = (place >= 0) & (place < n) & counted.gather(1, index)
        scaling = dim**-0.5 if tokens.scaling is None else tokens.scaling
        received = torch.empty(batch, heads, chunks, size, device=device)
        block = max(BLOCK // (batch * queries.shape[1] * size * size), 1)
        for begin in range(0, chunks, block):
            part = slice(begin * size, (begin + block) * size)
            at, visible = index[:, None, part, None], counted_cells[:, part].unflatten(1, (-1, size))  # [B, C, N]
            k, q = (x.gather(2, at.expand(-1, x.shape[1], -1, dim)).unflatten(2, (-1, size)) for x in (keys, queries))
            logits = (q.unflatten(1, (heads, -1)) @ k.mT[:, :, None]).float() * scaling  # [B, H, G, C, N, N]
            logits = logits.masked_fill(~visible[:, None, None, :, None], torch.finfo(torch.float32).min)
            weights = logits.softmax(-1) * visible[:, None, None, :, :, None]
            received[:, :, begin : begin + block] = weights.sum(-2).mean(2)
        back = torch.empty_like(order).scatter_(1, order, torch.arange(count, device=device).expand(batch, -1)) + first
        return received.flatten(2).gather(2, back[:, None].expand(-1, heads, -1))


def _moments(x: Tensor, own: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, `[B, H, 1]` each, of the `n` values of `x` `[B, H, T]` where `own`."""
    mean = (x * own).sum(-1, keepdim=True) / n
    return mean, (((x - mean) * own).square().sum(-1, keepdim=True) / n).sqrt().clamp_min(1e-6)
