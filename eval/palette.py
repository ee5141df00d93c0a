"""How every picture draws a cache: one color for each family of formats and for each policy, wherever it appears.

Colors are those of Okabe and Ito, which people with color blindness can tell apart, and some between them.
"""

from __future__ import annotations

FAMILIES = {
    "DynamicCache": "#000000", "StaticCache": "#666666", "identity": "#7f7f7f", "int8": "#0072b2", "fp8": "#56b4e9", "int4": "#cc79a7",
    "nvfp4": "#009e73", "turboquant": "#e69f00", "hadaquant": "#d55e00", "quanto": "#8c6d31", "hqq": "#bcbd22",
}  # fmt: skip
"""Formats by the beginning of their name; the last two are peers'."""
POLICIES = {
    "sink_window": "#44aa99", "sliding_window": "#999999", "h2o": "#332288", "tova": "#88ccee", "snapkv": "#882255", "keydiff": "#117733",
    "lagkv": "#aa4499", "knorm": "#999933", "random": "#bbbbbb",
}  # fmt: skip
_MORE = ("#661100", "#6699cc", "#ddaa33", "#bb5566", "#004488", "#228833", "#ccbb44", "#aa3377")


def family(format: str) -> str:
    """`hadaquant` of `hadaquant_k4v4`; the name itself where it has no family."""
    return next((name for name in FAMILIES if format.lower().startswith(name.lower())), format)


def format_color(format: str) -> str:
    return FAMILIES.get(family(format)) or _other(format)


def policy_color(policy: str) -> str:
    """The same for `SnapKV` and `snapkv`."""
    return POLICIES.get(policy.lower()) or _other(policy)


def _other(name: str) -> str:
    """Of a name that is not listed: always the same."""
    return _MORE[sum(map(ord, name.lower())) % len(_MORE)]
