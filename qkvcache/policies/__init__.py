"""Eviction policies, one file each. `REGISTRY` maps their names to policies with default options."""

from __future__ import annotations

from ..formats.base import hint
from .base import Arrivals, Budget, Policy, Rotation, Tokens, check_count, given, pyramid
from .compactor import Compactor
from .custom import Custom
from .expected_attention import ExpectedAttention
from .h2o import H2O
from .head_profile import HeadProfile
from .keys import KeyDiff, Knorm
from .kvzip import KVzip
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
    "expected_attention": ExpectedAttention,
    "compactor": Compactor,
    "kvzip": KVzip,
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
    """The policy of a registry name with `budget`: tokens (int) or a share of them (float) that are retained; the length of a window
    policy.

    Raises ValueError for an unknown name and for sizes that do not fit, TypeError for an option that the policy does not have.
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
    "Compactor",
    "Custom",
    "ExpectedAttention",
    "HeadProfile",
    "KVzip",
    "KeyDiff",
    "Knorm",
    "LagKV",
    "Policy",
    "Random",
    "Rotation",
    "SinkWindow",
    "SlidingWindow",
    "SnapKV",
    "Tokens",
    "check_count",
    "given",
    "named",
    "pyramid",
    "resolve",
]
