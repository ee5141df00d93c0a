"""The plan of a step: what the first layer found out about its attention, for the layers after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import plan_on_codes
from .compressed_kv import AS_RETURNED, CompressedKV
from .masks import unknown


class AttentionPlan:
    """Attention of one query for each row, on the codes, under one mask and the same keywords in each layer.

    Args:
        kernels: the plan of the kernels (`kernels.plan.Plan`). others as in `route`.
    """

    def __init__(self, kernels: Any, implementation: str, module: torch.nn.Module, mask: Any, keywords: dict[str, Any]) -> None:
        self.kernels, self.mask, self.options = kernels, mask, _options(implementation, module, keywords)

    @classmethod
    def of(
        cls, implementation: str, module: torch.nn.Module, query: Tensor, key: CompressedKV, mask: Any, keywords: dict[str, Any],
        shown: Tensor | None, options: dict[str, Any],
    ) -> AttentionPlan | None:  # fmt: skip
        """The plan of a step of one token, in which `shown` and `options` are what `visible` and `kernel_options` made of `mask` and
        `keywords`; None where there is none: every layer then finds out for itself."""
        if query.shape[2] > 1 or type(key) is not CompressedKV or key.attention_inputs.running is None or torch.compiler.is_compiling():
            return None
        if unknown(implementation, keywords):  # they may differ from layer to layer
            return None
        kernels = plan_on_codes(query, key.attention_inputs, shown, **options)
        return None if kernels is None else cls(kernels, implementation, module, mask, keywords)

    def serves(
        self, implementation: str, module: torch.nn.Module, query: Tensor, key: CompressedKV, value: Any, mask: Any,
        keywords: dict[str, Any],
    ) -> bool:  # fmt: skip
        """Whether another layer's attention is like the first layer's."""
        inputs = key.attention_inputs
        return (
            mask is self.mask
            and not torch._C._is_any_autocast_enabled()
            and type(value) is CompressedKV
            and value.attention_inputs is inputs
            and key.form is AS_RETURNED is value.form
            and key.is_keys
            and not value.is_keys
            and keywords.get("position_bias") is None
            and _options(implementation, module, keywords) == self.options
            and self.kernels.fits(query, inputs.paged)
        )

    def attend(self, query: Tensor, key: CompressedKV, keywords: dict[str, Any]) -> Tensor:
        """The output `[B, 1, Hq, Dv]`."""
        sinks = keywords.get("s_aux") if self.kernels.has_sinks else None
        inputs = key.attention_inputs.paged
        out, lse, arguments = self.kernels.run(query, inputs, sinks)
        if key.observer is not None:
            key.observer.observe(query, self.kernels, lse, arguments)
        return out.transpose(1, 2)


_CAUSAL = {"is_causal"}


def _options(implementation: str, module: torch.nn.Module, keywords: dict[str, Any]) -> tuple:
    """The keywords on which attention depends, but for tensors."""
    get = keywords.get
    return (
        implementation, get("scaling"), get("softcap"), get("sliding_window"), get("dropout"), get("s_aux") is None,
        get("is_causal", getattr(module, "is_causal", True)), keywords.keys() - _CAUSAL,
    )  # fmt: skip
