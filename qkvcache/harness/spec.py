"""A cache in plain words, as command lines, lm-eval's model arguments and result files name it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import DynamicCache, PreTrainedConfig

from .. import formats, policies
from ..caches import CompressedCache
from ..policies import check_count

DENSE = "dynamic"


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What makes a cache for any model.

    Args:
        cache: a format (`qkvcache formats` lists them), or "dynamic" for transformers' own DynamicCache.
        policy: what evicts tokens, by its name (`qkvcache.policies.REGISTRY`); "identity" as the format keeps them in the model's dtype.
        budget: what the policy keeps: tokens (int) or a share of the tokens seen (float).
        recent, sinks: as the policy takes them; None for its own default.
        exact_first, exact_recent, max_length: as CompressedCache takes them.

    Raises:
        ValueError: an unknown name, sizes that do not fit each other, options that a DynamicCache has not.
        TypeError: a size that is no number.
    """

    cache: str = DENSE
    policy: str | None = None
    budget: int | float | None = None
    recent: int | float | None = None
    sinks: int | None = None
    exact_first: int = 4
    exact_recent: int = 64
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cache, str):
            raise TypeError(f"cache={self.cache!r}: expected {DENSE!r} or the name of a format such as 'turboquant_4bit_nc'")
        of_policy = {name: value for name in ("budget", "recent", "sinks") if (value := getattr(self, name)) is not None}
        if self.policy is None and of_policy:
            raise ValueError(f"{', '.join(of_policy)} without a policy: add one, such as policy=h2o")
        if self.dense and (self.policy or self.max_length):
            raise ValueError(f"cache={DENSE!r} takes no policy and no max_length: pass a format, or cache='identity' for the model's dtype")
        check_count("exact_first", self.exact_first)
        check_count("exact_recent", self.exact_recent)
        if self.dense and (self.exact_first, self.exact_recent) != (4, 64):
            raise ValueError(f"cache={DENSE!r} is exact everywhere: leave exact_first and exact_recent out, or pass a format")
        if not self.dense:
            formats.resolve(self.cache)
        if self.policy is not None:
            policies.named(self.policy, **of_policy)

    @property
    def dense(self) -> bool:
        return self.cache == DENSE

    @property
    def options(self) -> dict:
        """Those that say something about this cache."""
        of_cache = {"cache": self.cache, "policy": self.policy, "budget": self.budget, "recent": self.recent, "sinks": self.sinks}
        return of_cache | ({} if self.dense else {"exact_first": self.exact_first, "exact_recent": self.exact_recent})

    @property
    def name(self) -> str:
        if self.policy is None:
            return self.cache
        budget = "" if self.budget is None else f" {self.budget:.0%}" if self.budget < 1 else f" {self.budget:,}"
        return f"{self.cache} + {self.policy}{budget}"

    def make(self, config: PreTrainedConfig) -> DynamicCache:
        """A new cache for a model of this config. Raises ValueError for heads that the format cannot hold."""
        if self.dense:
            return DynamicCache(config=config)
        of_policy = {name: value for name in ("budget", "recent", "sinks") if (value := getattr(self, name)) is not None}
        policy = None if self.policy is None else policies.named(self.policy, **of_policy)
        zones = {"exact_first": self.exact_first, "exact_recent": self.exact_recent, "max_length": self.max_length}
        return CompressedCache(config, format=self.cache, policy=policy, **zones)  # type: ignore[arg-type]
