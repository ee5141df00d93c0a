"""The expected attention of future queries, from the mean query before RoPE (TriAttention, arXiv 2604.04921)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Arrivals, Policy, Rotation, Tokens, given


@dataclass(frozen=True, kw_only=True)
class TriAttention(Policy):
    """Retains keys that queries like the earlier ones will attend to from many distances.

    Before RoPE the queries of a head cluster around one center. For RoPE frequency `w`, query center `q` and key `k` (complex numbers, the
    key with its rotation), the score of a query at position `t` is the sum over frequencies of `Re(q e^{itw} conj(k))`, averaged over
    distances of 1, 2, 4, ... 65,536 from the newest token; added is `(mean |q| - |mean q|) |k|`, which stands for queries off the center.
    Scores of each query head are scaled to mean 0 and deviation 1 over the candidates; the largest of a KV head's group counts.

    The paper takes centers from a calibration run. Here they are those of all queries that the layer has seen, the prompt's first. Every
    eviction dequantizes the stored keys.
    """

    recent: int | float = 0.125

    needs_queries: ClassVar[bool] = True
    needs_rope: ClassVar[bool] = True
    needs_stored_keys: ClassVar[bool] = True

    def accumulate(self, statistics: dict[str, Tensor], tokens: Arrivals) -> dict[str, Tensor]:
        queries, rope = given(tokens.queries, "queries"), given(tokens.rope, "the model's rotary embedding")
        hidden = None if tokens.is_valid is None else ~tokens.is_valid[:, None, :, None]
        sums, lengths = ([statistics[name]] if statistics else [] for name in ("query_sum", "query_lengths"))
        for part, x in tokens.unrotated_queries():
            length = torch.hypot(*pairs(queries[:, :, part], rope))  # which RoPE does not change
            if hidden is not None:
                x, length = x.masked_fill_(hidden[:, :, part], 0), length.masked_fill_(hidden[:, :, part], 0)
            sums.append(x.sum(2, dtype=torch.float32))
            lengths.append(length.sum(2, dtype=torch.float32))
        return {"query_sum": functools.reduce(torch.add, sums), "query_lengths": functools.reduce(torch.add, lengths)}

    def priority(self, tokens: Tokens) -> Tensor:
        rope, keys = given(tokens.rope, "the model's rotary embedding"), given(tokens.keys, "stored keys").float()
        count = tokens.seen.clamp_min(1)
        center, length = tokens.statistics["query_sum"] / count, tokens.statistics["query_lengths"] / count
        heads, valid = keys.shape[1], tokens.valid[:, :, None]
        rotated = rotate_to(center, tokens.seen[:, 0, 0] - 1, rope).unflatten(1, (heads, -1))  # [B, H, G, D]
        spread = (length - torch.hypot(*pairs(center, rope))).unflatten(1, (heads, -1))  # [B, H, G, R/2]
        score = rotated @ keys.mT + spread @ torch.hypot(*pairs(keys, rope)).mT  # [B, H, G, T]
        number = valid.sum(-1, keepdim=True).clamp_min(1)
        score = (score - score.masked_fill(~valid, 0).sum(-1, keepdim=True) / number).masked_fill(~valid, 0)
        deviation = (score.square().sum(-1, keepdim=True) / number).sqrt()
        return (score / deviation.clamp_min(1e-12)).amax(2)


DISTANCES = 17
"""Positions after the newest token, over which the rotation of future queries is averaged: 1, 2, 4, 8 and so on."""


def pairs(x: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts of the rotated channels of `[..., D]`: `[..., R/2]` each."""
    half = len(rope.inv_freq)
    if rope.interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def rotate_to(center: Tensor, newest: Tensor, rope: Rotation) -> Tensor:
    """`center` `[B, Hq, D]` rotated to the positions `1, 2, 4, ...` after `newest` `[B]`, the mean over them; channels without RoPE as
    they are."""
    at = newest[:, None].double() + (1 << torch.arange(DISTANCES, device=newest.device))
    angles = at[..., None] * rope.frequencies(newest.device)  # [B, distances, R/2]
    cos, sin = angles.cos().mean(1)[:, None].float(), angles.sin().mean(1)[:, None].float()
    real, imaginary = pairs(center, rope)
    rotated = real * cos - imaginary * sin, real * sin + imaginary * cos
    rest = center[..., 2 * len(rope.inv_freq) :]
    both = torch.stack(rotated, dim=-1).flatten(-2) if rope.interleaved else torch.cat(rotated, dim=-1)
    return torch.cat([both, rest], dim=-1)
