"""Eviction policies, one file each. `REGISTRY` maps their names to policies with default options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...formats.base import hint
from .base import AdaKV, Arrivals, Policy, Rotation, Tokens, given
from .budget import Budget, check_count
from .custom import Custom
from .expected_attention import ExpectedAttention
from .h2o import H2O
from .head_profile import HeadProfile
from .keys import KeyDiff
from .kvzip import KVzip
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
    "expected_attention": ExpectedAttention,
    "kvzip": KVzip,
    "random": Random,
}


def resolve(policy: str | Policy) -> Policy:
    """A policy from an object or a name of `named`.

    Raises ValueError for an unknown name, TypeError for anything else.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return named(policy)
    raise TypeError(f"policy must be a name or a Policy such as policies.H2O(budget=1024), got {policy!r}")


def named(name: str, *, budget: int | float | None = None, **options) -> Policy:
    """The policy of a registry name with `budget`: tokens (int) or a share of them (float) that are retained; the length of a window
    policy. `adakv_snapkv` is `AdaKV(SnapKV())`.

    Raises ValueError for an unknown name and for sizes that do not fit, TypeError for an option that the policy does not have.
    """
    if name.startswith("adakv_"):
        return AdaKV(named(name.removeprefix("adakv_"), budget=budget, **options))
    if name not in REGISTRY:
        raise ValueError(f"policy={name!r} is unknown: {hint(name, REGISTRY)}")
    kind = REGISTRY[name]
    if budget is not None:
        options["window_length" if issubclass(kind, SinkWindow) else "budget"] = budget
    return kind(**options)


def from_words(policy: str | Policy | Mapping[str, Any]) -> Policy:
    """`resolve`, also of the words of a command: `policy`, the name, and the options of `named`. `head_profile` among them, the path of a
    `HeadProfile`, divides the budget.

    Raises as `resolve` and `named` do, and ValueError for options without a name.
    """
    if not isinstance(policy, Mapping):
        return resolve(policy)
    words = dict(policy)
    name, profile = words.pop("policy", None), words.pop("head_profile", None)
    if name is None:
        raise ValueError(
            f"{', '.join(x for x in policy if x != 'num_sink_tokens')} without a policy: add one, such as policy=h2o (--policy h2o)"
        )
    if profile is not None:
        if "budget" not in words or issubclass(REGISTRY.get(name, Policy), SinkWindow):
            raise ValueError(f"head_profile={profile!r} divides a budget: pass budget, and a policy that has one, such as snapkv")
        words["budget"] = HeadProfile.load(profile).budget(words["budget"])
    return named(name, **words)


__all__ = [
    "H2O",
    "REGISTRY",
    "TOVA",
    "AdaKV",
    "Arrivals",
    "Budget",
    "Custom",
    "ExpectedAttention",
    "HeadProfile",
    "KVzip",
    "KeyDiff",
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
    "resolve",
]
