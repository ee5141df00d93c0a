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
        what: the options, why and what to do instead, with attributes of the cache in braces: `{cache.max_length}`.
        applies: whether a cache, of which only the options are set, asks for it.
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
        what, why, instead = (re.sub(r"\{[^}]*\}", "…", text) for text in (self.what, self.why, self.instead))
        return what, why, instead


FIXED = "Compile steps: `max_length`, `compile=True`"
OFFLOAD = "Keep tokens in host memory: `offloading`, `offload_pages`"
OWN = (
    Refusal(
        OFFLOAD,
        "offloading=True with {cache.fixed_by}",
        "tensors that move to the host have no fixed address",
        "leave one out",
        lambda cache: cache.offloading and cache.compile,
    ),
)


def refuse(cache: Any) -> None:
    """Raises the error of the first refusal that applies to the options of `cache`."""
    for refusal in all_refusals():
        if refusal.applies(cache):
            raise refusal.of(cache)


def all_refusals() -> list[Refusal]:
    return [*OWN, *registered("REFUSALS")]
