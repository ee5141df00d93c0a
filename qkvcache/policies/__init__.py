"""Which tokens stay. One file a policy; `REGISTRY` names them, with the options that they have by default."""

from __future__ import annotations

from ..formats.base import hint
from .base import Arrivals, Budget, Policy, Tokens, check_count
from .custom import Custom
from .h2o import H2O
from .keys import KeyDiff, Knorm
from .lagkv import LagKV
from .random import Random
from .snapkv import SnapKV
from .tova import TOVA
from .window import SinkWindow, SlidingWindow

REGISTRY: dict[str, type[Policy]] = {
    "sink_window": SinkWindow,
    "sliding_window": SlidingWindow,
    "h2o": H2O,
    "tova": TOVA,
    "snapkv": SnapKV,
    "keydiff": KeyDiff,
    "lagkv": LagKV,
    "knorm": Knorm,
    "random": Random,
}


def resolve(policy: str | Policy) -> Policy:
    """A policy from an object or a registry name.

    Raises ValueError for an unknown name, TypeError for anything else.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        if policy in REGISTRY:
            return REGISTRY[policy]()
        raise ValueError(f"policy={policy!r} is unknown: {hint(policy, REGISTRY)}")
    raise TypeError(f"policy must be a name or a Policy such as policies.H2O(budget=1024), got {policy!r}")


def named(name: str, *, budget: int | float | None = None, **options) -> Policy:
    """The policy of a registry name that keeps `budget` tokens (int) or that share of them (float); for a window, so many newest ones.

    Raises ValueError for an unknown name and for sizes that do not fit, TypeError for an option that the policy has not.
    """
    kind = type(resolve(name))
    if budget is not None:
        options["window_length" if issubclass(kind, SinkWindow) else "budget"] = budget
    return kind(**options)


__all__ = [
    "H2O",
    "REGISTRY",
    "TOVA",
    "Arrivals",
    "Budget",
    "Custom",
    "KeyDiff",
    "Knorm",
    "LagKV",
    "Policy",
    "Random",
    "SinkWindow",
    "SlidingWindow",
    "SnapKV",
    "Tokens",
    "check_count",
    "named",
    "resolve",
]
