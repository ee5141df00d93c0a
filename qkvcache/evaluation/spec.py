"""`CacheSpec`: a cache in the names of command lines, lm-eval's model arguments and result files."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from transformers import DynamicCache, PreTrainedConfig

from .. import formats
from ..caches import CompressedCache
from ..formats.base import check_count
from ..rooms import option

DENSE = "dynamic"
WORDS = ("policy", "budget", "recent", "head_profile")
"""Options that say which tokens stay."""
OF_ANY = ("residual_length", "max_length", "attention_budget", "offload_pages")
"""Options that CompressedCache takes under the same names."""


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The options of a cache for any model.

    Args:
        cache: a format (`qkvcache formats` lists them), the path of a calibration file (`qkvcache calibrate`), or "dynamic" for
            transformers' own DynamicCache.
        policy: the name of an eviction policy (`qkvcache.policies.named`), such as `snapkv` or `adakv_snapkv`. With
            `cache="identity"` tokens stay in the model's dtype.
        budget: the tokens that stay (int), or their share of the tokens seen (float).
        recent: how many of these are the last ones; None: the default of what chooses them.
        head_profile: the path of a profile of the model (`qkvcache profile-heads`), which divides the budget among heads.
        num_sink_tokens: first tokens that stay, in the model's dtype; None: 4, and the default of what chooses tokens.
        residual_length, max_length, attention_budget, offload_pages: as CompressedCache takes them.

    Raises:
        ValueError: an unknown name, sizes that contradict each other, options that a DynamicCache does not have.
        TypeError: a size that is not a number.
    """

    cache: str = DENSE
    policy: str | None = None
    budget: int | float | None = None
    recent: int | float | None = None
    head_profile: str | None = None
    num_sink_tokens: int | None = None
    residual_length: int = 64
    max_length: int | None = None
    attention_budget: int | float | Literal["auto"] | None = None
    offload_pages: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.cache, str):
            raise TypeError(f"cache={self.cache!r}: expected {DENSE!r} or the name of a format such as 'turboquant_4bit_nc'")
        given = [field.name for field in fields(self)[1:] if getattr(self, field.name) != field.default]
        self._chosen()
        if self.dense and given:
            raise ValueError(f"cache={DENSE!r} takes no {' and no '.join(given)}: pass a format, or cache='identity' for the model's dtype")
        check_count("num_sink_tokens", self._exact)
        check_count("residual_length", self.residual_length)
        option("attention_budget", self.attention_budget)
        if not self.dense:
            formats.resolve(self.cache)

    def _chosen(self) -> Any:
        """What chooses the tokens that stay; None: all stay."""
        words = {name: x for name in (*WORDS, "num_sink_tokens") if (x := getattr(self, name)) is not None}
        return option("policy", words if words.keys() & {*WORDS} else None)

    @property
    def _exact(self) -> int:
        return 4 if self.num_sink_tokens is None else self.num_sink_tokens

    @property
    def dense(self) -> bool:
        return self.cache == DENSE

    @property
    def name(self) -> str:
        words = self.policy, "" if self.budget is None else _amount(self.budget), "by head" if self.head_profile else ""
        if chosen := " ".join(filter(None, words)):
            return f"{self.cache} + {chosen}"
        where = ", pages on the host" * self.offload_pages
        return self.cache if self.attention_budget is None else f"{self.cache} reading {_amount(self.attention_budget)}{where}"

    def make(self, config: PreTrainedConfig) -> DynamicCache:
        """A new cache for a model of this config. Raises ValueError for heads that the format does not support."""
        if self.dense:
            return DynamicCache(config=config)
        zones = {"num_sink_tokens": self._exact, **{name: getattr(self, name) for name in OF_ANY}}
        return CompressedCache(config, format=self.cache, policy=self._chosen(), **zones)  # type: ignore[arg-type]


def _amount(budget: float | str) -> str:
    """A share in percent, a number of tokens, or a word."""
    return budget if isinstance(budget, str) else f"{budget:.0%}" if budget < 1 else f"{budget:,}"
