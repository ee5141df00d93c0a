"""Attention of a whole prompt, where the normaliser is wanted too."""

from __future__ import annotations

import torch
from torch import Tensor


def prefill_with_lse(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor] | None:
    """Causal attention `[B, Hq, T, D]` and the log of its normaliser, fp32 `[B, Hq, T]`, by torch's flash attention; None where that does
    not apply. There is no mask: prompts with padding are not for it.
    """
    dim = query.shape[3]
    if query.device.type != "cuda" or torch.version.hip or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    if (
        query.shape[2] != key.shape[2]
        or value.shape[3] != dim
        or dim > 256
        or dim % 8
        or torch.cuda.get_device_capability(query.device) < (8, 0)
    ):
        return None
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    # Fewer KV heads than query heads are fine: the kernel takes any number that divides.
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scaling)[:2]
