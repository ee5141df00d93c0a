"""What is refused when a cache is made. Each feature says itself what it does not serve; `docs/reference/limits.md` lists all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..rooms import registered


@dataclass(frozen=True)
class Refusal:
    """Options, or an option and a model, that do not go together.

    Args:
        wish: what a user wants to do, as a heading.
        what, why, instead: the refused options, the reason, and what to do instead. `{cache.max_length}` stands for this attribute
            of the cache.
        applies: whether a cache has these options. It is called before the layers are made.
        error: the class of the error.
    """

    wish: str
    what: str
    why: str
    instead: str
    applies: Callable[[Any], Any]
    error: type[Exception] = NotImplementedError

    def of(self, cache: Any) -> Exception:
        return self.error(f"{self.what}: {self.why}; {self.instead}".format(cache=cache))

    @property
    def row(self) -> tuple[str, str, str]:
        """What, why and instead, as a table shows them."""
        what, why, instead = (re.sub(r"\{([^}]*)\}", _in_words, text) for text in (self.what, self.why, self.instead))
        return what, why, instead


IN_WORDS = {"cache.fixed_by": "max_length or compile=True", "cache._config.model_type": "a model"}
"""Attributes in the texts of refusals, as a table shows them."""


def _in_words(attribute: re.Match[str]) -> str:
    return IN_WORDS.get(attribute[1], "…")


FIXED = "Compile steps: `max_length`, `compile=True`"
OFFLOAD = "Keep tokens in host memory: `offloading`, `offload_pages`"
MODELS = "Models"
NEVER_STATIC = frozenset(("cpmant", "inkling2_loop_text", "inkling2_text", "inkling_text", "prophetnet"))
"""Model types of transformers that make their own masks, whose columns are exactly the tokens seen."""
OWN = (
    Refusal(
        OFFLOAD,
        "offloading=True with {cache.fixed_by}",
        "tensors that move to the host have no fixed address",
        "leave one out",
        lambda cache: cache.offloading and cache.compile,
    ),
    Refusal(
        MODELS,
        "{cache._config.model_type} with recurrent_kv_cache_mode='last_loop'",
        "earlier loops read the dense keys and values of the last one",
        "use 'per_loop', or a DynamicCache",
        lambda cache: getattr(cache._config, "recurrent_kv_cache_mode", None) == "last_loop",
    ),
    Refusal(
        FIXED,
        "{cache.fixed_by} on {cache._config.model_type}",
        "its masks are of the tokens seen",
        "leave out {cache.fixed_by}",
        lambda cache: cache.compile and getattr(cache._config, "model_type", None) in NEVER_STATIC,
    ),
)


def refuse(cache: Any) -> None:
    """Raises the error of the first refusal that applies to the options of `cache`."""
    for refusal in all_refusals():
        if refusal.applies(cache):
            raise refusal.of(cache)


def all_refusals() -> list[Refusal]:
    return [*OWN, *registered("REFUSALS")]
