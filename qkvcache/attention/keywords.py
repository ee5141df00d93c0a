"""The options of kernels from the keywords of a model's attention call."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def kernel_options(implementation: str, query: Tensor, keywords: dict[str, Any]) -> dict[str, Any]:
    """The kernel options `scaling`, `softcap` and `sinks` for queries `[B, Hq, Q, D]`."""
    scaling = keywords.get("scaling")
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if implementation == "sdpa":  # transformers 5.17 ignores both in sdpa, and decode steps must match the prefill
        return {"scaling": scaling, "softcap": None, "sinks": None}
    return {"scaling": scaling, "softcap": keywords.get("softcap"), "sinks": keywords.get("s_aux")}
