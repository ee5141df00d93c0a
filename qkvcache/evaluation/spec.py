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
        recent: as the policy takes it; None for its own default.
        num_sink_tokens: first tokens that stay in the model's dtype and that the policy keeps; None: 4, and the policy's own default.
        residual_length, max_length: as CompressedCache takes them.

    Raises:
        ValueError: an unknown name, sizes that do not fit each other, options that a DynamicCache has not.
        TypeError: a size that is no number.
    """

    cache: str = DENSE
    policy: str | None = None
    budget: int | float | None = None
    recent: int | float | None = None
    num_sink_tokens: int | None = None
    residual_length: int = 64
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cache, str):
            raise TypeError(f"cache={self.cache!r}: expected {DENSE!r} or the name of a format such as 'turboquant_4bit_nc'")
        given = [name for name in ("budget", "recent") if getattr(self, name) is not None]
        if self.policy is None and given:
            raise ValueError(f"{', '.join(given)} without a policy: add one, such as policy=h2o")
        if self.dense and (self.policy or self.max_length):
            raise ValueError(f"cache={DENSE!r} takes no policy and no max_length: pass a format, or cache='identity' for the model's dtype")
        if self.num_sink_tokens is not None:
            check_count("num_sink_tokens", self.num_sink_tokens)
        check_count("residual_length", self.residual_length)
        if self.dense and (self.num_sink_tokens, self.residual_length) != (None, 64):
            raise ValueError(f"cache={DENSE!r} is exact everywhere: leave num_sink_tokens and residual_length out, or pass a format")
        if not self.dense:
            formats.resolve(self.cache)
        if self.policy is not None:
            policies.named(self.policy, **self._of_policy)

    @property
    def _of_policy(self) -> dict:
        return {name: value for name in ("budget", "recent", "num_sink_tokens") if (value := getattr(self, name)) is not None}

    @property
    def _exact(self) -> int:
        return 4 if self.num_sink_tokens is None else self.num_sink_tokens

    @property
    def dense(self) -> bool:
        return self.cache == DENSE

    @property
    def options(self) -> dict:
        """Those that say something about this cache."""
        of_cache = {"cache": self.cache, "policy": self.policy, "budget": self.budget, "recent": self.recent}
        return of_cache | ({} if self.dense else {"num_sink_tokens": self._exact, "residual_length": self.residual_length})

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
        policy = None if self.policy is None else policies.named(self.policy, **self._of_policy)
        zones = {"num_sink_tokens": self._exact, "residual_length": self.residual_length, "max_length": self.max_length}
        return CompressedCache(config, format=self.cache, policy=policy, **zones)  # type: ignore[arg-type]
