"""Attention of a whole prompt with the log of its normaliser."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend


def prefill_with_lse(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor] | None:
    """Causal attention `[B, Hq, T, D]` and the log of its normaliser, fp32 `[B, Hq, T]`, of a prompt without padding; None where
    `scaled_dot_product_attention` would choose neither flash attention nor cuDNN, whose output this is.

    Args:
        query: `[B, Hq, T, D]`.
        key, value: `[B, H, T, D]`.
        scaling: factor on the scores.
    """
    if query.device.type != "cuda" or torch.version.hip or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    if query.shape[2] != key.shape[2]:
        return None
    grouped = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, True, scale=scaling, enable_gqa=grouped)
    aten = torch.ops.aten
    if chosen == SDPBackend.CUDNN_ATTENTION.value:  # Hopper, with torch for CUDA 13
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, True, False, scale=scaling)
        return out, lse.reshape(query.shape[:3])
    if chosen == SDPBackend.FLASH_ATTENTION.value and query.shape[3] % 8 == 0:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scaling)[:2]
    return None
