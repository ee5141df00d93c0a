"""The attention implementation `qkvcache` on plain tensors.

`full_attention` is a prefill with softcap and attention sinks, in blocks of queries. transformers' sdpa
supports neither, and its eager function allocates the scores of all queries at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autocast import without_autocast
from ..kernels import AttentionInputs, Exact, KeysOrValues, attend
from .masks import biased, lower_right, unknown

NAME = "qkvcache"
QUERY_BLOCK = 256


@without_autocast("query", "key", "value")
def full_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of queries `[B, Hq, Q, D]` over keys and values `[B, H, T, D]`; returns `[B, Q, Hq, Dv]`, as
    transformers expects. `position_bias` `[B or 1, Hq, Q, T]` is added to the scores. Raises
    NotImplementedError for dropout and for `others` that may change the result."""
    if dropout:
        raise NotImplementedError("attention dropout is for training: call model.eval(), or use another attn_implementation")
    if names := unknown(NAME, others):
        raise NotImplementedError(
            f"{type(module).__name__} calls attention with {', '.join(names)}, which attn_implementation={NAME!r} does not know: "
            "use 'sdpa' or, where the model refuses that, 'eager'"
        )
    queries, tokens = query.shape[2], key.shape[2]
    causal = attention_mask is None and queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if position_bias is not None:
        if causal:
            attention_mask = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)
        attention_mask, causal = biased(attention_mask, position_bias[..., :tokens]), False
    plain = softcap is None and s_aux is None
    over_past = causal and queries != tokens
    mask = lower_right(queries, tokens) if plain and over_past else attention_mask
    if plain and (mask is not None or not over_past):
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, is_causal=causal and mask is None, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2).contiguous(), None
    blocks = []
    for start in range(0, queries, QUERY_BLOCK):
        rows = slice(start, min(start + QUERY_BLOCK, queries))
        visible = tokens - queries + rows.stop if causal else tokens  # later keys are masked for all of these queries
        key_side, value_side = (
            KeysOrValues.of((Exact(x[:, :, :visible]),), (*x.shape[:2], visible, x.shape[3]), x.dtype, x.device) for x in (key, value)
        )
        attention_inputs = AttentionInputs(key_side, value_side)
        mask = attention_mask
        if mask is not None and mask.shape[-2] > 1:
            mask = mask[..., rows, :]
        blocks.append(attend(query[:, :, rows], attention_inputs, mask, scaling=scaling, causal=causal, softcap=softcap, sinks=s_aux))
    return torch.cat(blocks, dim=2).transpose(1, 2).contiguous(), None
