"""Keys that are not combinations of other keys, and keys that their neighbourhood attends to (Compactor, arXiv 2507.08143)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import sum_attention
from .base import Arrivals, Policy, given
from .budget import check_count

ROWS = 2**15
"""Chunks times query heads that attend at once: a GPU takes at most 65,535 in one dimension of a grid."""
PART = 512
"""Tokens of a part of the Gram matrix: a product of long matrices of few columns would take few of a GPU's processors."""
RIDGE = 1e-5
"""Added to the Gram matrix of the sketch, times its mean diagonal: with fewer tokens than columns the matrix is singular."""


@dataclass(frozen=True, kw_only=True)
class Compactor(Policy):
    """Keeps tokens by `r z(leverage) + z(attention in chunks |v|)`, `z` being standardized over the tokens of a step.

    The leverage of a token is `x (X^T X)^-1 x` of the centred keys before RoPE, of which `X` are `sketch_dimension`
    random combinations of channels. Attention is that of the queries of a chunk of `chunk_size` tokens to all keys of
    the chunk, causal or not, summed over queries and over the query heads of a group. Chunks begin at multiples of
    `chunk_size` in the row. Sinks are left out of all sums.

    A token is scored once, in its own step. Sums are over the tokens of a step: a prompt in chunks is scored chunk by
    chunk. In steps with fewer than `2 sketch_dimension` tokens of a row, such as decode steps, tokens have their
    leverage among those of the last larger step, and no attention; before the first larger step, their scores are 0.

    Args:
        blending: `r`; None: the share of the tokens seen that the budget does not hold, as in the paper.
        chunk_size: tokens that attend to each other.
        sketch_dimension: columns of the random sketch.
        seed: of the sketch.
    """

    blending: float | None = None
    chunk_size: int = 256
    sketch_dimension: int = 48
    seed: int = 0
    recent: int | float = 64

    has_scores: ClassVar[bool] = True
    needs_queries: ClassVar[bool] = True
    needs_rope: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("chunk_size", self.chunk_size, 2)
        check_count("sketch_dimension", self.sketch_dimension, 1, of="columns")
        if self.blending is not None and not self.blending >= 0:
            raise ValueError(f"blending={self.blending!r}: must be 0 or more, or None")
        super().__post_init__()

    def arrive(self, statistics: dict[str, Tensor], tokens: Arrivals) -> tuple[dict[str, Tensor], Tensor]:
        keys, positions, seen = tokens.keys, given(tokens.positions, "positions"), given(tokens.seen, "counts of tokens")
        batch, heads, count, dim = keys.shape
        if not statistics:
            random = _sketch(dim, self.sketch_dimension, self.seed, keys.device)
            zeros = torch.zeros(batch, heads, 1, device=keys.device)
            statistics = {
                "random": random.repeat(batch, 1, 1),
                "center": zeros.repeat(1, 1, self.sketch_dimension),
                "whitening": zeros[..., None].repeat(1, 1, *2 * (self.sketch_dimension,)),
            }
            statistics |= {"mean": zeros, "deviation": zeros + 1}
        center, whitening, mean, deviation = (statistics[name] for name in ("center", "whitening", "mean", "deviation"))
        x = tokens.unrotated_keys.float() @ statistics["random"][:, None]  # [B, H, T, S]
        attention: Tensor | None = None
        if many := count >= 2 * self.sketch_dimension and not tokens.single:
            counted = positions >= self.num_sink_tokens
            own, n = counted[:, None], counted.sum(-1).clamp_min(1)[:, None, None].float()
            fresh = (counted.sum(-1) >= 2 * self.sketch_dimension)[:, None, None]
            center = torch.where(fresh, (x * own[..., None]).sum(2) / n, center)
        x = x - center[:, :, None]
        if many:
            parts = torch.nn.functional.pad(x * own[..., None], (0, 0, 0, -count % PART)).unflatten(2, (-1, PART))
            gram = (parts.mT @ parts).sum(2)
            ridge = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-20) * RIDGE
            identity = torch.eye(self.sketch_dimension, device=keys.device)
            factor, _ = torch.linalg.cholesky_ex(gram + ridge[..., None, None] * identity)
            # The inverse of the factor `L` of `L L^T`: the leverage is the squared length of `L^-1 x`.
            whitening = torch.where(fresh[..., None], torch.linalg.solve_triangular(factor, identity, upper=False), whitening)
        leverage = torch.linalg.vector_norm(x @ whitening.mT, dim=-1).square()
        if many:
            new_mean, new_deviation = _moments(leverage, own, n)
            mean, deviation = torch.where(fresh, new_mean, mean), torch.where(fresh, new_deviation, deviation)
            received = self._attention(tokens, counted) * torch.linalg.vector_norm(tokens.values, dim=-1, dtype=torch.float32)
            center_of, spread = _moments(received, own, n)
            attention = ((received - center_of) / spread).masked_fill(~fresh, 0)
        score = (leverage - mean) / deviation * self._blending(tokens, seen)
        score = score if attention is None else score + attention
        return statistics | {"center": center, "whitening": whitening, "mean": mean, "deviation": deviation}, score

    def _blending(self, tokens: Arrivals, seen: Tensor) -> Tensor | float:
        if self.blending is not None:
            return self.blending
        size: int | Tensor = given(tokens.size, "its budget")  # type: ignore[assignment]
        return (1 - size / seen.clamp_min(1).float()).clamp_min(0)

    def _attention(self, tokens: Arrivals, counted: Tensor) -> Tensor:
        """The attention that each token receives within its chunk, fp32 `[B, H, T]`."""
        if tokens.begin is not None:
            return self._in_views(tokens, tokens.begin)
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
        hidden = ((place < 0) | (place >= n) | ~counted.gather(1, index)).unflatten(1, (-1, size))  # [B, C, N]
        block, received = self._block(queries), list[Tensor]()
        for at, out in zip(index[:, None, :, None].split(block * size, dim=2), hidden.split(block, dim=1), strict=True):
            k, q = (x.gather(2, at.expand(-1, x.shape[1], -1, dim)).unflatten(2, (-1, size)) for x in (keys, queries))
            received.append(_received(q, k, tokens.scaling, out))
        back = torch.empty_like(order).scatter_(1, order, torch.arange(count, device=device).expand(batch, -1)) + first
        return torch.cat(received, dim=2).flatten(2).gather(2, back[:, None].expand(-1, heads, -1))

    def _in_views(self, tokens: Arrivals, begin: int) -> Tensor:
        """`_attention` without padding, of tokens from position `begin` on: nothing is hidden, and most chunks are views."""
        keys, queries, size = tokens.keys, given(tokens.queries, "queries"), self.chunk_size
        count, block = keys.shape[2], self._block(queries) * size
        at = min(max(self.num_sink_tokens - begin, 0), count)
        received = [torch.zeros(*keys.shape[:2], at, device=keys.device)]
        while at < count:
            before = (begin + at) % size  # positions of the chunk that are not among these tokens, or of sinks
            whole = 0 if before else min((count - at) // size * size, block)
            length = whole or min(size - before, count - at)
            k, q = (x[:, :, at : at + length].unflatten(2, (-1, min(size, length))) for x in (keys, queries))
            received.append(_received(q, k, tokens.scaling).flatten(2))
            at += length
        return torch.cat(received, dim=2)

    def _block(self, queries: Tensor) -> int:
        """Chunks that attend at once."""
        return max(ROWS // (queries.shape[0] * queries.shape[1]), 1)


def _received(queries: Tensor, keys: Tensor, scaling: float | None, hidden: Tensor | None = None) -> Tensor:
    """The attention that each token of a chunk receives, the mean over the query heads of a group, fp32 `[B, H, C, N]`: queries
    `[B, Hq, C, N, D]`, keys `[B, H, C, N, D]`; `hidden`, bool `[B, C, N]`, are left out."""
    batch, heads, chunks, size, dim = keys.shape
    q, k = (x.transpose(1, 2).flatten(0, 1) for x in (queries, keys))  # a row for each chunk
    visible = None if hidden is None else ~hidden.flatten(0, 1)
    observed = torch.ones(batch * chunks, size, device=keys.device) if visible is None else visible.float()
    sums = sum_attention(q, k, observed, visible, scaling=dim**-0.5 if scaling is None else scaling, causal=False)
    return sums.unflatten(0, (batch, chunks)).transpose(1, 2) * (heads / queries.shape[1])


def _moments(x: Tensor, own: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, `[B, H, 1]` each, of the `n` values of `x` `[B, H, T]` where `own`."""
    mean = (x * own).sum(-1, keepdim=True) / n
    return mean, (((x - mean) * own).square().sum(-1, keepdim=True) / n).sqrt().clamp_min(1e-6)


@functools.lru_cache(maxsize=16)
def _sketch(dim: int, columns: int, seed: int, device: torch.device) -> Tensor:
    """Random numbers `[dim, columns]`, the same on every device; copying them there for each layer would make the host wait for it."""
    with torch.inference_mode(False):
        return torch.randn(dim, columns, generator=torch.Generator().manual_seed(seed), device="cpu").to(device) * columns**-0.5
