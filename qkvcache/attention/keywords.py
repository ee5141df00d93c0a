"""What the keywords of a model's attention call mean to kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def kernel_options(implementation: str, query: Tensor, keywords: dict[str, Any]) -> dict[str, Any]:
    """`scaling`, `softcap` and `sinks` of attention of `query` `[B, Hq, Q, D]`."""
    scaling = keywords.get("scaling")
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if implementation == "sdpa":  # transformers 5.17 ignores both in sdpa; a decode must not differ from its prefill
        return {"scaling": scaling, "softcap": None, "sinks": None}
    return {"scaling": scaling, "softcap": keywords.get("softcap"), "sinks": keywords.get("s_aux")}
