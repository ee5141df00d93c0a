"""Budgets for each head of each layer, from a profile of the model: heads that look up tokens of the context retain
much of it, the others little.

Which heads these are hardly depends on the context (DuoAttention, arXiv 2410.10819; KVzip, arXiv 2505.23416), so that a model is profiled
once (`qkvcache.profile_heads`).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .budget import Budget, check_size

TYPICAL = 0.25
"""The share of a context that a budget in tokens is assumed to be."""
LEAST_SHARE = 2.0**-20
"""The share of a layer whose heads need nothing: it retains only the tokens that the policy protects."""


@dataclass(frozen=True)
class HeadProfile:
    """A profile of a model: how much of a context each head needs to repeat it.

        profile = HeadProfile.load("llama.heads.json")
        cache = CompressedCache(model.config, policy=SnapKV(budget=profile.budget(0.25)))

    Args:
        quantiles: `quantiles[layer][head]` are scores of the tokens of a text (`KVzip`) at evenly spaced ranks, from the highest to the
            lowest, as many for each head.
        about: the origin: model, text, sizes, date, versions.
    """

    quantiles: tuple[tuple[tuple[float, ...], ...], ...]
    about: dict[str, object] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        counts = {len(head) for layer in self.quantiles for head in layer}
        if len(counts) != 1 or counts.pop() < 2:
            raise ValueError("quantiles must hold, for each layer and each of its heads, as many scores, 2 or more")

    def shares(self, share: float) -> list[list[float]]:
        """The share of a context that each head of each layer retains if all retain the tokens above one score, `share` of all tokens."""
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise TypeError(f"share must be a number, got {share!r}")
        if not 0 < share <= 1:
            raise ValueError(f"share={share!r}: must be above 0 and up to 1")
        scores = torch.tensor([head for layer in self.quantiles for head in layer], dtype=torch.float32, device="cpu")
        highest = scores.flatten().argsort(descending=True, stable=True)[: max(round(share * scores.numel()), 1)]
        above = torch.zeros_like(scores).flatten().index_fill_(0, highest, 1).view_as(scores).mean(-1).tolist()
        found = iter(above)
        return [[next(found) for _ in layer] for layer in self.quantiles]

    def budget(self, budget: int | float, *, share: float | None = None) -> tuple[Budget, ...]:
        """Return a value for `Policy.budget`: a budget for each full-attention layer, divided among its heads.

        Args:
            budget: the mean over all heads: tokens (int), or share of the tokens seen (float).
            share: the share of the context that a budget in tokens is expected to be; None: a quarter. The smaller it is,
                the more of the budget belongs to few heads.

        Raises ValueError for sizes that are not a budget, TypeError for other types.
        """
        check_size("budget", budget, 1)
        if isinstance(budget, float) and share is not None:
            raise ValueError(f"budget={budget} with share={share}: a budget that is a share is divided for this share; leave out share")
        of = budget if isinstance(budget, float) else TYPICAL if share is None else share
        found = []
        for parts in self.shares(of):
            mean = max(sum(parts) / len(parts), LEAST_SHARE)
            size = {"share": mean} if isinstance(budget, float) else {"tokens": max(round(budget * mean / of), 1)}
            found.append(Budget(**size, heads=tuple(parts) if any(parts) else (1.0,) * len(parts)))  # type: ignore[arg-type]
        return tuple(found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile as JSON."""
        Path(path).write_text(json.dumps({"quantiles": self.quantiles} | self.about) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> HeadProfile:
        """Reads a profile that `save` wrote.

        Raises FileNotFoundError without the file, ValueError for a file that is no profile.
        """
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            quantiles = tuple(tuple(tuple(map(float, head)) for head in layer) for layer in read.pop("quantiles"))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is no profile of heads: make one with `qkvcache profile-heads`") from error
        return HeadProfile(quantiles, read)
