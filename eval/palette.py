"""How every picture draws a cache: one color for each family of formats and for each policy, wherever it appears.

Colors are those of Okabe and Ito, which people with color blindness can tell apart, and some between them.
"""

from __future__ import annotations

FAMILIES = {
    "DynamicCache": "#000000", "StaticCache": "#666666", "stock": "#000000", "identity": "#7f7f7f", "int8": "#0072b2", "fp8": "#56b4e9",
    "int4": "#cc79a7", "nvfp4": "#009e73", "turboquant": "#e69f00", "hadaquant": "#d55e00", "calibrated": "#661100", "quanto": "#8c6d31",
    "hqq": "#bcbd22",
}  # fmt: skip
"""Formats by the beginning of their name. `stock`: transformers' own pages; `calibrated`: bits by layer; the last two are peers'."""
POLICIES = {
    "sink_window": "#44aa99", "sliding_window": "#999999", "h2o": "#332288", "tova": "#88ccee", "snapkv": "#882255", "keydiff": "#117733",
    "lagkv": "#aa4499", "knorm": "#999933", "random": "#000000", "expected_attention": "#cc6677", "compactor": "#ee7733",
    "kvzip": "#0077bb", "dropkv": "#ddcc77", "rkv": "#6699cc", "triattention": "#663333",
}  # fmt: skip
UNCENTERED = "_uncentered"
"""The end of a format's name without the mean of keys."""


def family(format: str) -> str:
    """`hadaquant` of `hadaquant_k4v4`; the name itself where it has no family."""
    return next((name for name in FAMILIES if format.lower().startswith(name.lower())), format)


def format_color(format: str) -> str:
    return FAMILIES.get(family(format), "#444444")


def policy_of(name: str) -> str:
    """`snapkv` of `SnapKV`, and of a variant such as `snapkv, recent 32`."""
    plain = name.split(",")[0].strip().lower()
    return next((policy for policy in POLICIES if policy.replace("_", "") == plain.replace("_", "")), plain)


def policy_color(policy: str) -> str:
    return POLICIES.get(policy_of(policy), "#444444")
